"""This system beside those that keep prefill and decode apart, on the same machine."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from planner.baselines import BaselineEstimate
from planner.case import Case
from planner.estimate import Detail, estimate
from planner.published import predict

SCHEMA = "moe-lens/compare/1"
#: Padding makes no difference where all prompts are equal; the second is left out then.
BASELINES = ("moe-lightning", "moe-lightning-padded", "flexgen")


@dataclass(frozen=True)
class ComparedSystem:
    """One system. `claimed` is what its own model promises at peak rates, None for ours and where
    it finds no policy that fits; `ratio` is our expected rate over its."""

    system: str
    generated_tokens_per_s: float | None
    claimed_generated_tokens_per_s: float | None
    limit: str
    ratio: float | None
    policy: dict[str, Any] | None


def compare(case: Case, detail: Detail = Detail.SCALED) -> list[ComparedSystem]:
    """Ours first (the simulation), then the baselines. They manage host memory themselves, so
    they get what the case uses of it, no more."""
    found = estimate(case, detail)
    ours = found.simulation or found.stage2 or found.stage1
    rows = [
        ComparedSystem("moe-lens", ours.generated_tokens_per_s, None, ours.limit, 1.0, policy=None)
    ]
    rows.extend(_baselines(case, found.memory.host.used_bytes, ours.generated_tokens_per_s))
    return rows


def to_json(rows: list[ComparedSystem]) -> dict[str, Any]:
    return {"schema": SCHEMA, "systems": [asdict(row) for row in rows]}


def _baselines(case: Case, host_bytes: float, ours: float) -> Iterator[ComparedSystem]:
    machine = case.hardware.with_values("assumed", "as ours", host_memory_bytes=host_bytes)
    uniform = case.workload.max_prompt_tokens is None and not case.workload.trace
    for system in BASELINES[:1] + BASELINES[2:] if uniform else BASELINES:
        expected = predict(system, case.model, machine, case.workload, claimed=False)
        claimed = predict(system, case.model, machine, case.workload, claimed=True)
        yield _row(system, expected, claimed, ours)


def _row(
    system: str, expected: BaselineEstimate | None, claimed: BaselineEstimate | None, ours: float
) -> ComparedSystem:
    promised = None if claimed is None else claimed.generated_tokens_per_s
    if expected is None:
        why = "no policy fits into this memory"
        return ComparedSystem(system, None, promised, why, None, policy=None)
    rate = expected.generated_tokens_per_s
    return ComparedSystem(
        system, rate, promised, expected.decode_limit, ours / rate, asdict(expected.policy)
    )
