"""Stage 2 with every pass as long as its load takes on this machine, in closed form.

Requests are started q at a time, as in Stage 2; a pass then holds what the sequences that are alive
ask of each resource, and takes as long as the iteration's cost terms say.
"""

from dataclasses import dataclass

from planner.case import Case
from planner.costs import IterationTime, StepLoad
from planner.report import SteadyReport
from planner.stage1 import generated_share
from planner.stage2 import kv_prompts_per_step

#: A transfer slowed by more than this factor is charged to the attention that slows it.
_SLOWED = 1.25


def steady(case: Case) -> SteadyReport:
    """q = min(M / sum of ceil((p+j)/b)·b, n_real / (p+g), K), over K/q + g passes of which the
    first and last g (or K/q, where that is less) ramp up and drain."""
    work = case.workload
    p, g = work.prompt_tokens, work.generated_tokens
    kv_q = kv_prompts_per_step(round(p), round(g), case.kv_capacity_tokens, case.block_tokens)
    q = min(kv_q, case.step_tokens / (p + g), work.n_requests)
    batch = _Batch(case, q)
    full = batch.pass_time(batch.most_alive_passes, prefill=True)
    total_s = batch.total_s()
    rate = work.total_tokens / total_s
    return SteadyReport(
        tokens_per_s=rate,
        generated_tokens_per_s=generated_share(rate, p, g),
        limit=_limit(full, case.stream_s, kv_bound=q == kv_q),
        pass_s=full.total_s,
        prompts_per_step=q,
        step_tokens=q * (p + batch.most_alive_passes),
        seconds_by_resource={
            "link": full.h2d_s,
            "link_d2h": full.d2h_s,
            "device": full.device_s,
            "attention": full.attention_s,
            "host_memory": full.host_memory_s,
            "head": full.head_s,
            "overhead": full.overhead_s,
        },
        total_s=total_s,
    )


@dataclass(frozen=True)
class _Batch:
    """K requests of a case started q at a time."""

    case: Case
    prompts_per_step: float

    @property
    def start_passes(self) -> float:
        """K/q: passes that start requests."""
        return self.case.workload.n_requests / self.prompts_per_step

    @property
    def most_alive_passes(self) -> float:
        """Groups of q sequences that decode at the same time, at the most."""
        return min(self.case.workload.generated_tokens, self.start_passes)

    def total_s(self) -> float:
        """Ramp, plateau and drain. In the ramp the groups alive grow from none to the most there
        are, in the drain they fall; a batch of fewer than g groups has its plateau after the last
        has been started."""
        generated = self.case.workload.generated_tokens
        most = self.most_alive_passes
        all_started = self.start_passes <= generated
        plateau_passes = abs(self.start_passes - generated)
        plateau_s = self.pass_time(most, prefill=not all_started).total_s
        ramp_s, drain_s = (self._mean_ramp_s(prefill) for prefill in (True, False))
        return most * (ramp_s + drain_s) + plateau_passes * plateau_s

    def _mean_ramp_s(self, prefill: bool) -> float:
        """Simpson's rule over the groups alive."""
        most = self.most_alive_passes
        none, half, full = (
            self.pass_time(alive, prefill).total_s for alive in (0.0, most / 2, most)
        )
        return (none + 4 * half + full) / 6

    def pass_time(self, alive_passes: float, prefill: bool) -> IterationTime:
        """A pass in which `alive_passes` groups decode, each one token further than the next."""
        p, q = self.case.workload.prompt_tokens, self.prompts_per_step
        decodes = q * alive_passes
        started = q if prefill else 0.0
        load = StepLoad(
            tokens=started * p + decodes,
            sampled_tokens=started + decodes,
            sequences=started + decodes,
            decode_sequences=decodes,
            decode_kv_tokens=decodes * (p + (alive_passes + 1) / 2),
            prefill_own_pairs=started * p * (p + 1) / 2,
        )
        return self.case.costs.iteration(load)


def limiting_resource(time: IterationTime, stream_s: float) -> str:
    """The resource that an iteration waits for. A transfer that CPU attention slows down well
    beyond `stream_s`, what it would take alone, is the attention's doing."""
    if time.limit == "link" and 0 < _SLOWED * stream_s < time.h2d_s:
        return "attention"
    return time.limit


def _limit(full: IterationTime, stream_s: float, kv_bound: bool) -> str:
    """What more of would raise the rate. A pass that waits for its weights would take more tokens
    in the same time: the KV keeps them out, or n_real does, which is the device's limit."""
    slowest = limiting_resource(full, stream_s)
    if slowest not in ("link", "link_d2h"):
        return slowest
    return "kv_capacity" if kv_bound else "gpu"
