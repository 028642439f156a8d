"""Metrics as Prometheus sees them."""

import asyncio
import urllib.request

import pytest
from moelens.v1.gpu_worker_pb2 import StepTimes

from gateway.admission import Plan
from gateway.metrics import Metrics, Throughput, metrics_server
from planner.blocks import BlockPool
from planner.request import Sequence, SequenceId
from planner.scheduler import Scheduler, SchedulerLimits
from tests.gateway.conftest import House, MakeHouse
from tests.servers import free_port


def scheduled(scheduler: Scheduler, prompt_tokens: int = 20):  # type: ignore[no-untyped-def]
    scheduler.add(Sequence(SequenceId(1), prompt_tokens, 5))
    step = scheduler.schedule()
    assert step is not None
    return step


def test_endpoint_shows_states_at_the_moment_of_asking() -> None:
    metrics, plan = Metrics(), Plan()
    scheduler = Scheduler(BlockPool(10), SchedulerLimits(64))
    metrics.watch(lambda: scheduler, lambda: plan)
    port = free_port()

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines
                if not line.startswith("#")}  # fmt: skip

    with metrics_server(metrics, f"127.0.0.1:{port}"):
        assert scrape()["moe_lens_num_requests_running"] == 0
        step = scheduled(scheduler)
        metrics.step_done(step, StepTimes(total_s=0.5, idle_link_s=0.2), 0.5, scheduler)
        seen = scrape()
        assert seen["moe_lens_num_requests_running"] == 1
        assert seen["moe_lens_kv_cache_usage_perc"] == 0.2
        assert seen["moe_lens_prompt_tokens_total"] == 20
        assert seen['moe_lens_device_idle_seconds_total{cause="link"}'] == 0.2
        assert seen['moe_lens_actual_tokens_per_second{kind="all"}'] == 42  # 20 + 1 in 0.5 s
        unknown = seen['moe_lens_predicted_tokens_per_second{kind="all"}']
        assert unknown != unknown  # NaN: not predicted is not zero
        plan = Plan(tokens_per_s=7.0)
        assert scrape()['moe_lens_predicted_tokens_per_second{kind="all"}'] == 7
        scheduler.cancel(SequenceId(1))
        assert scrape()["moe_lens_kv_cache_usage_perc"] == 0


def test_wrong_or_taken_addresses_are_named() -> None:
    with pytest.raises(ValueError, match="nonsense"), metrics_server(Metrics(), "nonsense"):
        pass
    with pytest.raises(ValueError, match="unix"), metrics_server(Metrics(), "unix:/tmp/x"):
        pass
    address = f"127.0.0.1:{free_port()}"
    with (
        metrics_server(Metrics(), address),
        pytest.raises(OSError, match="in use"),
        metrics_server(Metrics(), address),
    ):
        pass


def test_throughput_counts_time_at_work_only() -> None:
    throughput = Throughput()
    throughput.add(0.5, tokens=100, generated=10, now=1.0)
    throughput.add(0.5, tokens=20, generated=20, now=9.0)
    assert throughput.rates(9.0) == (120.0, 30.0)
    assert throughput.rates(15.0) == (40.0, 40.0)  # the first left the window
    assert throughput.rates(60.0) == (0.0, 0.0)


def test_a_clients_departure_is_visible_within_a_step(house: MakeHouse) -> None:
    from moelens.v1 import gateway_pb2 as messages

    async def main() -> None:
        async with house() as h:
            await _leave_and_look(h, messages)

    async def _leave_and_look(h: House, messages) -> None:  # type: ignore[no-untyped-def]
        value = h.gateway.metrics.registry.get_sample_value
        request = messages.GenerateRequest(token_ids=messages.TokenIds(ids=[5] * 100))
        call = h.stub.Generate(request)
        await call.read()
        await call.read()
        assert value("moe_lens_num_requests_running") == 1
        h.worker.may_step.clear()
        call.cancel()
        await asyncio.sleep(0.1)
        assert value("moe_lens_num_requests_running") == 0
        assert value("moe_lens_kv_cache_usage_perc") == 0
        h.worker.may_step.set()

    asyncio.run(main())
