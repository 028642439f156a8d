"""The CPU worker over gRPC: what Configure gives, refuses, and leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from moelens.v1 import cpu_worker_pb2

from native.channel import ITEM_DTYPE, DevicePort, EpochRetired, PeerDied, PeerHung
from native.segment import DEVICE, Segment
from protos.errors import decode_failure
from tests.cpu_worker.conftest import Worker, request, runs, until

NOTICED_S = 2.0


def decode(port: DevicePort, n_jobs: int = 1) -> None:
    port.set_blocks(0, 0, range(64))
    port.prepare(0, np.array([(0, 1000, 1, 0, 0)], ITEM_DTYPE))
    for job in range(n_jobs):
        port.post(0, job % 2)
        port.wait(0, timeout_s=10)


def failure(worker: Worker, **changes: Any) -> Any:
    with pytest.raises(grpc.RpcError) as error:
        worker.stub.Configure(request(**changes), timeout=30)
    return decode_failure(error.value)


def test_jobs_run_and_are_counted(worker: Worker) -> None:
    response = worker.configure()
    assert response.attention_processes == 2
    assert response.instruction_set in ("scalar", "avx2", "avx512", "avx512_bf16")
    assert response.numa_nodes >= 1
    assert response.kv_arena_bytes == 2 * 256 * 16 * 2 * 2 * 32 * 4
    with DevicePort(response.segment_path) as port:
        assert port.epoch == response.epoch
        assert port.geometry.n_processes == 2
        decode(port, n_jobs=200)
        stats = worker.stats()
    assert stats.epoch == response.epoch
    assert stats.jobs == 200
    assert sum(process.tasks for process in stats.processes) >= 200
    assert stats.kv_read_bytes == 200 * 63 * 16 * 2 * 2 * 32 * 4
    assert all(process.alive for process in stats.processes)
    assert all(process.heartbeat_age_s < 1 for process in stats.processes)
    assert sum(process.busy_s for process in stats.processes) > 0


def test_attention_processes_are_pinned_unless_told_not_to(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker("--attention-processes", "1")
    worker.configure()
    assert worker.stats().processes[0].cpu >= 0
    assert worker.stop() == 0
    worker = start_worker("--attention-processes", "1", "--no-pin")
    worker.configure()
    assert worker.stats().processes[0].cpu == -1


def test_before_configure_there_are_no_stats(worker: Worker) -> None:
    with pytest.raises(grpc.RpcError) as error:
        worker.stats()
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layers", 0),
        ("n_layers", 2**32 - 1),
        ("n_q_heads", 3),
        ("n_kv_heads", 0),
        ("head_dim", 24),
        ("head_dim", 512),
        ("kv_dtype", "fp8"),
        ("kv_dtype", ""),
        ("kv_blocks", 0),
        ("kv_blocks", 2**32 - 1),
        ("max_sequences", 0),
        ("max_sequences", 2**31),
        ("max_context_tokens", 0),
        ("max_slot_tokens", 2**31 - 1),
        ("scale", 0.0),
        ("scale", float("nan")),
        ("scale", float("inf")),
        ("peer_timeout_s", -1.0),
        ("peer_timeout_s", float("nan")),
    ],
)
def test_a_wrong_field_is_named_and_the_epoch_goes_on(
    shared_worker: Worker, field: str, value: Any
) -> None:
    found = failure(shared_worker, **{field: value})
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert all(runs(pid) for pid in shared_worker.pids)


@pytest.fixture(scope="module")
def shared_worker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    started = Worker(tmp_path_factory.mktemp("worker"), "--attention-processes", "1")
    started.configure()
    yield started
    started.end()


def test_more_kv_than_memory_is_refused_itemised(worker: Worker) -> None:
    found = failure(worker, kv_blocks=2**31 - 1, n_layers=8)
    assert found.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found.retry_after_s is None
    for part in ("KV cache", "activation slots", "block tables", "RAM", "--shm-dir"):
        assert part in found.message
    assert worker.files() == []
    worker.configure()


def test_configure_again_ends_the_former_epoch(worker: Worker) -> None:
    first = worker.configure()
    first_pids = worker.pids
    with DevicePort(first.segment_path) as old_port:
        decode(old_port)
        second = worker.configure()
        assert second.epoch > first.epoch
        assert second.segment_path != first.segment_path
        until(lambda: not any(runs(pid) for pid in first_pids), within_s=NOTICED_S)
        with pytest.raises(EpochRetired):
            old_port.check_peers()
        with pytest.raises(EpochRetired):
            old_port.post(0, 0)
        with DevicePort(second.segment_path) as port:
            # A zombie of the old epoch writes where nobody reads.
            old_port.v(0)[:] = np.nan
            old_port.set_blocks(0, 0, [0] * 64)
            decode(port)
            assert not np.isnan(port.out(0)[:1]).any()


def test_names_go_once_they_have_served(worker: Worker) -> None:
    response = worker.configure()
    # The arena has no name any more when Configure returns, the segment when the device is there.
    assert [name.rpartition(".")[2] for name in worker.files()] == ["seg"]
    with DevicePort(response.segment_path):
        until(lambda: worker.files() == [], within_s=NOTICED_S)


def test_an_epoch_ends_when_its_device_leaves(worker: Worker) -> None:
    with DevicePort(worker.configure().segment_path):
        until(lambda: worker.files() == [], within_s=NOTICED_S)
    worker.assert_nothing_left()
    until(lambda: not any(process.alive for process in worker.stats().processes), within_s=2)
    worker.configure()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_attention_process_is_reported_to_the_device(worker: Worker, victim: int) -> None:
    with DevicePort(worker.configure().segment_path) as port:
        decode(port)
        os.kill(worker.pids[victim], signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(PeerDied, match=f"attention process {victim}"):
            while time.monotonic() - killed_s < 10:
                port.check_peers()
                time.sleep(0.01)
        assert time.monotonic() - killed_s < NOTICED_S
        worker.assert_nothing_left()
    worker.configure()


def test_a_hung_attention_process_ends_the_epoch(worker: Worker) -> None:
    with DevicePort(worker.configure(peer_timeout_s=0.5).segment_path) as port:
        os.kill(worker.pids[0], signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(PeerHung, match="attention process 0"):
            while time.monotonic() - stopped_s < 10:
                port.check_peers()
                time.sleep(0.01)
        assert time.monotonic() - stopped_s < 0.5 + NOTICED_S
        # It does not even run; it is killed all the same.
        worker.assert_nothing_left()
    worker.configure()


def test_a_killed_control_process_takes_all_with_it(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker()
    with DevicePort(worker.configure().segment_path) as port:
        until(lambda: worker.files() == [], within_s=NOTICED_S)
        worker.process.kill()
        killed_s = time.monotonic()
        with pytest.raises(PeerDied, match="control process"):
            while time.monotonic() - killed_s < 10:
                port.check_peers()
                time.sleep(0.01)
        assert time.monotonic() - killed_s < NOTICED_S
        worker.assert_nothing_left()


def test_what_a_killed_worker_left_is_removed_by_the_next(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker()
    worker.configure()
    worker.process.kill()
    worker.process.wait()
    until(lambda: not any(runs(pid) for pid in worker.pids), within_s=NOTICED_S)
    # No device has come, so that the segment still had its name.
    assert len(worker.files()) == 1
    successor = start_worker()
    assert successor.files() == []


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_leaves_nothing(worker: Worker, signal_number: int) -> None:
    worker.configure()
    assert worker.stop(signal_number) == 0
    worker.assert_nothing_left()
    assert not worker.socket.exists()


def test_a_stop_lets_the_device_leave_first(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--attention-processes", "1", "--grace-s", "10")
    with DevicePort(worker.configure().segment_path) as port:
        until(lambda: worker.files() == [], within_s=NOTICED_S)
        worker.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        decode(port, n_jobs=10)
    assert worker.process.wait(timeout=5) == 0
    worker.assert_nothing_left()


def test_a_caller_that_leaves_in_the_middle_leaves_nothing_half_made(worker: Worker) -> None:
    for timeout_s in (0.001, 0.05, 0.1, 0.2):
        with pytest.raises(grpc.RpcError):
            worker.stub.Configure(request(), timeout=timeout_s)
            pytest.skip("the machine is faster than the deadline")
    response = worker.configure()
    assert worker.files() == [response.segment_path.rpartition("/")[2]]
    with Segment.open(response.segment_path) as segment:
        assert segment.life == "live"
        assert not segment.alive(DEVICE)


def test_configure_calls_at_once_end_with_one_epoch(worker: Worker) -> None:
    calls = [worker.stub.Configure.future(request(), timeout=60) for _ in range(4)]
    responses: list[cpu_worker_pb2.ConfigureResponse] = [call.result() for call in calls]
    assert len({response.epoch for response in responses}) == 4
    last = max(responses, key=lambda response: response.epoch)
    assert worker.files() == [last.segment_path.rpartition("/")[2]]
    worker.pids = [process.pid for process in worker.stats().processes]
    with DevicePort(last.segment_path) as port:
        decode(port)
