"""What the planner predicts for the work at hand, refreshed while there is work."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from moelens.v1 import planner_pb2 as messages
from moelens.v1.planner_pb2_grpc import PlannerStub

from gateway.admission import Plan
from gateway.worker import WorkerInfo
from planner.spec import ModelSpec

log = structlog.get_logger("forecast")

ESTIMATE_TIMEOUT_S = 10.0
PERIOD_S = 10.0
FIRST_PERIOD_S = 1.0  # until there is a first answer
# Lengths that are assumed until there are some to look at.
FIRST_GUESS = (128, 128)
# Weight of the newest request in the mean lengths.
NEWEST_SHARE = 0.05


@dataclass(frozen=True)
class Workload:
    """Mean lengths, and how many requests are on hand."""

    prompt_tokens: int
    generated_tokens: int
    requests: int


async def ask(
    planner: PlannerStub, info: WorkerInfo, spec: ModelSpec, workload: Workload
) -> Plan | None:
    """The planner's prediction for a workload on a worker; None when it has none to give."""
    stored = info.stored(spec)
    case = messages.Case(
        model_config_json=info.model_config_json,
        hardware_json=info.hardware_spec_json,
        uniform=messages.UniformWorkload(
            prompt_tokens=workload.prompt_tokens,
            generated_tokens=workload.generated_tokens,
            requests=max(workload.requests, 1),
        ),
        kv_bytes=int(stored.kv_bytes_per_token) * info.kv_capacity_tokens,
        block_tokens=info.block_tokens,
        weight_format=info.dtype,
        kv_format=info.kv_dtype,
    )
    if info.streams_weights:
        case.resident_bytes = int(info.resident_share * stored.streamed_bytes_per_pass)
    request = messages.EstimateRequest(case=case, simulation=messages.SIMULATION_DETAIL_SCALED)
    try:
        answer = await planner.Estimate(request, timeout=ESTIMATE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.info("no prediction", code=error.code().name, reason=error.details())
        return None
    return _plan(answer.report)


class Forecast:
    """Follows the lengths of requests and asks the planner for the throughput they allow."""

    def __init__(self, planner: PlannerStub, spec: ModelSpec) -> None:
        self._planner = planner
        self._spec = spec
        self._prompt_tokens, self._generated_tokens = (float(n) for n in FIRST_GUESS)
        self._seen = 0

    def observe(self, prompt_tokens: int, max_tokens: int) -> None:
        """A request has come."""
        share = max(NEWEST_SHARE, 1 / (self._seen + 1))
        self._seen += 1
        self._prompt_tokens += share * (prompt_tokens - self._prompt_tokens)
        self._generated_tokens += share * (max_tokens - self._generated_tokens)

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Prompt tokens, and tokens to generate at most, of a request."""
        return self._prompt_tokens, self._generated_tokens

    def workload(self, requests: int) -> Workload:
        """What is to be predicted for."""
        return Workload(
            max(round(self._prompt_tokens), 1), max(round(self._generated_tokens), 1), requests
        )

    async def run(
        self,
        worker: Callable[[], WorkerInfo | None],
        requests: Callable[[], int],
        publish: Callable[[Plan], None],
    ) -> None:
        """Ask once the worker is known, then every few seconds while there is work."""
        last: Workload | None = None
        while True:
            info = worker()
            workload = self.workload(requests())
            if info is not None and workload != last and (workload.requests or last is None):
                plan = await ask(self._planner, info, self._spec, workload)
                if plan is not None:
                    last = workload
                    publish(plan)
            await asyncio.sleep(PERIOD_S if last is not None else FIRST_PERIOD_S)


def _plan(report: messages.EstimateReport) -> Plan:
    """The simulation's figures, or Stage 2's where there is none."""
    best = report.simulation if report.HasField("simulation") else report.stage2
    return Plan(best.tokens_per_s, best.generated_tokens_per_s, best.limit)
