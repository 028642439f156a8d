"""The baselines' predictions beside what was measured and published, row by row."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from planner import catalogue
from planner.baselines import BaselineEstimate, flexgen, moe_lightning
from planner.catalogue.files import check_keys, read_table
from planner.hardware import HardwareSpec
from planner.spec import ModelSpec
from planner.workload import Workload

SCHEMA = "moe-lens/published-errors/1"
_KEYS = (
    "hardware",
    "model",
    "system",
    "prompt_tokens",
    "max_prompt_tokens",
    "generated_tokens",
    "generated_tokens_per_s",
    "source",
)
#: Far more than any policy takes at once, so that the batch is never what limits it.
_MANY_REQUESTS = 100_000


@dataclass(frozen=True)
class PublishedRow:
    """One measured throughput (generated tokens per second) and the model's two answers for it;
    None where the model finds no policy that fits."""

    hardware: str
    model: str
    system: str
    generated_tokens: int
    measured_tokens_per_s: float
    claimed_tokens_per_s: float | None
    expected_tokens_per_s: float | None

    @property
    def claimed_error(self) -> float | None:
        return self._error(self.claimed_tokens_per_s)

    @property
    def expected_error(self) -> float | None:
        return self._error(self.expected_tokens_per_s)

    def _error(self, predicted: float | None) -> float | None:
        """Predicted over measured, minus one."""
        return None if predicted is None else predicted / self.measured_tokens_per_s - 1


def published_rows() -> Iterator[PublishedRow]:
    """Every published measurement of the catalogue with its predictions."""
    for key, data in read_table("published").items():
        check_keys(data, _KEYS, (), f"published.json.{key}")
        model, hardware = catalogue.model(data["model"]), catalogue.hardware(data["hardware"])
        pairs = zip(data["generated_tokens"], data["generated_tokens_per_s"], strict=True)
        for generated, measured in pairs:
            workload = Workload(
                name=key,
                prompt_tokens=data["prompt_tokens"],
                generated_tokens=generated,
                n_requests=_MANY_REQUESTS,
                max_prompt_tokens=data["max_prompt_tokens"],
                distribution="assumed",
            )
            system = data["system"]
            yield PublishedRow(
                hardware=data["hardware"],
                model=data["model"],
                system=system,
                generated_tokens=generated,
                measured_tokens_per_s=measured,
                claimed_tokens_per_s=_rate(predict(system, model, hardware, workload, True)),
                expected_tokens_per_s=_rate(predict(system, model, hardware, workload, False)),
            )


def predict(
    system: str, model: ModelSpec, hardware: HardwareSpec, workload: Workload, claimed: bool
) -> BaselineEstimate | None:
    """The estimate of the baseline called `system`."""
    if system == "flexgen":
        return flexgen(model, hardware, workload, claimed=claimed)
    padded = system == "moe-lightning-padded"
    return moe_lightning(model, hardware, workload, claimed=claimed, padded=padded)


def mean_error(errors: Iterable[float | None]) -> float:
    """Mean of the sizes of the errors that are known."""
    return fmean(abs(error) for error in errors if error is not None)


def rows_to_json(rows: list[PublishedRow]) -> dict[str, Any]:
    """Rows with their errors, and the mean errors over all."""
    return {
        "schema": SCHEMA,
        "rows": [
            {**asdict(r), "claimed_error": r.claimed_error, "expected_error": r.expected_error}
            for r in rows
        ],
        "claimed_mean_error": mean_error(r.claimed_error for r in rows),
        "expected_mean_error": mean_error(r.expected_error for r in rows),
    }


def _rate(estimate: BaselineEstimate | None) -> float | None:
    return None if estimate is None else estimate.generated_tokens_per_s
