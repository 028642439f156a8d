"""Predicted beside measured, over all and step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from planner.simulate import SimulationResult

SCHEMA = "moe-lens/bench/1"
# Measured busy times of a step by the limit that they stand for.
LIMITS = {"link": "link_s", "device": "device_s", "attention": "attention_s"}
BUSY = (
    *("device_s", "attention_s", "link_s", "sampling_s", "wait_for_plan_s"),
    *("idle_link_s", "idle_attention_s", "idle_other_s", "plan_s", "apply_s"),
)


@dataclass
class Measured:
    """A run as its client saw it, and the engine's record of each step."""

    total_s: float
    prompt_tokens: int
    generated_tokens: int
    steps: Sequence[dict[str, float]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and generated tokens."""
        return (self.prompt_tokens + self.generated_tokens) / self.total_s

    @property
    def generated_tokens_per_s(self) -> float:
        """Generated tokens alone."""
        return self.generated_tokens / self.total_s

    @property
    def seconds_by_limit(self) -> dict[str, float]:
        """Wall time of the steps by whichever resource was busiest, longest first; what lies
        between the steps counts as "overhead"."""
        seconds: dict[str, float] = {}
        for step in self.steps:
            limit = max(LIMITS, key=lambda name: step[LIMITS[name]])
            seconds[limit] = seconds.get(limit, 0.0) + step["total_s"]
        rest_s = self.total_s - sum(seconds.values())
        if rest_s > 0:
            seconds["overhead"] = rest_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def busy_s(self) -> dict[str, float]:
        """Seconds of each kind over all steps; kinds overlap where the schedule lets them."""
        return {name: sum(step[name] for step in self.steps) for name in BUSY}


@dataclass(frozen=True)
class Report:
    """What `moe-lens bench` prints."""

    predicted: SimulationResult
    measured: Measured

    @property
    def accuracy(self) -> float:
        """1 less the relative error of the predicted throughput (0 … 1)."""
        measured = self.measured.tokens_per_s
        return max(0.0, 1 - abs(self.predicted.tokens_per_s - measured) / measured)

    def to_json(self, iterations: bool) -> dict[str, Any]:
        """Names with units; `iterations` adds every step, predicted and measured."""
        predicted, measured = self.predicted, self.measured
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "accuracy": self.accuracy,
            "predicted": {
                "tokens_per_s": predicted.tokens_per_s,
                "generated_tokens_per_s": predicted.generated_tokens_per_s,
                "total_s": predicted.total_s,
                "steps": len(predicted.steps),
                "preemptions": predicted.num_preemptions,
                "seconds_by_limit": predicted.seconds_by_limit,
            },
            "measured": {
                "tokens_per_s": measured.tokens_per_s,
                "generated_tokens_per_s": measured.generated_tokens_per_s,
                "total_s": measured.total_s,
                "steps": len(measured.steps),
                "preemptions": sum(int(step["preempted"]) for step in measured.steps),
                "seconds_by_limit": measured.seconds_by_limit,
                "busy_s": measured.busy_s(),
                "overhead_per_step_ms": self.overhead_per_step_ms,
            },
        }
        if iterations:
            found["predicted"]["iterations"] = [_iteration(step) for step in predicted.steps]
            found["measured"]["iterations"] = list(measured.steps)
        return found

    @property
    def overhead_per_step_ms(self) -> float | None:
        """Median of scheduling, sending and applying a step outside the worker."""
        steps = self.measured.steps
        if not steps:
            return None
        return 1e3 * median(step["plan_s"] + step["apply_s"] for step in steps)

    def text(self) -> str:
        """For people."""
        predicted, measured = self.predicted, self.measured
        rows = [
            ("", "predicted", "measured"),
            ("tokens/s", f"{predicted.tokens_per_s:,.0f}", f"{measured.tokens_per_s:,.0f}"),
            (
                "generated tokens/s",
                f"{predicted.generated_tokens_per_s:,.0f}",
                f"{measured.generated_tokens_per_s:,.0f}",
            ),
            ("seconds", f"{predicted.total_s:.2f}", f"{measured.total_s:.2f}"),
            ("iterations", f"{len(predicted.steps)}", f"{len(measured.steps)}"),
            (
                "median iteration, ms",
                f"{1e3 * median(s.duration_s for s in predicted.steps):.1f}",
                f"{1e3 * median(s['wall_s'] for s in measured.steps):.1f}",
            ),
        ]
        limits = sorted({*predicted.seconds_by_limit, *measured.seconds_by_limit})
        for limit in limits:
            one, two = (
                f"{side.seconds_by_limit.get(limit, 0.0):.2f}" for side in (predicted, measured)
            )
            rows.append((f"limited by {limit}, s", one, two))
        lines = [f"{name:26}{one:>12}{two:>12}" for name, one, two in rows]
        lines.append(f"prediction accuracy {self.accuracy:.1%}")
        return "\n".join(lines)


def _iteration(step: Any) -> dict[str, float | str]:
    return {
        "tokens": step.load.tokens,
        "decode_sequences": step.load.decode_sequences,
        "total_s": step.duration_s,
        "device_s": step.time.device_s,
        "attention_s": step.time.attention_s,
        "link_s": step.time.h2d_s,
        "head_s": step.time.head_s,
        "overhead_s": step.time.overhead_s,
        "limit": step.time.limit,
    }
