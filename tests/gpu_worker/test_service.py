"""The worker process with a real CPU worker: plans over gRPC, attention in other processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from moelens.v1 import common_pb2, gpu_worker_pb2
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub

from protos.errors import decode_failure

CPU_WORKER = "from cpu_worker.cli import app; app()"
GPU_WORKER = "from gpu_worker.cli import app; app()"


def python(code: str, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **options)


@dataclass
class Workers:
    directory: Path
    cpu_worker: "subprocess.Popen[bytes]"
    stub: GpuWorkerStub

    def start_cpu_worker(self) -> None:
        self.cpu_worker = start_cpu_worker(self.directory)


def start_cpu_worker(directory: Path) -> "subprocess.Popen[bytes]":
    socket, shm = f"unix:{directory}/cpu.sock", directory / "shm"
    shm.mkdir(exist_ok=True)
    return python(
        CPU_WORKER, "--listen", socket, "--shm-dir", str(shm), "--attention-processes", "2"
    )


def stop(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()
    try:
        return process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture
def gpu_worker_options() -> list[str]:
    return []


@pytest.fixture
def workers(
    tmp_path: Path, checkpoint_fp32: Path, gpu_worker_options: list[str]
) -> Iterator[Workers]:
    cpu_worker = start_cpu_worker(tmp_path)
    gpu_worker = python(
        GPU_WORKER,
        *("--listen", f"unix:{tmp_path}/gpu.sock"),
        *("--cpu-worker", f"unix:{tmp_path}/cpu.sock"),
        *("--model", str(checkpoint_fp32), "--kv", "2MB", "--max-step-tokens", "256"),
        *("--max-sequences", "16", "--threads", "1"),
        *gpu_worker_options,
    )
    with grpc.insecure_channel(f"unix:{tmp_path}/gpu.sock") as channel:
        made = Workers(tmp_path, cpu_worker, GpuWorkerStub(channel))
        try:
            yield made
        finally:
            gpu_status = stop(gpu_worker)
            with contextlib.suppress(ProcessLookupError):
                stop(made.cpu_worker)
    assert gpu_status == 0
    assert not list((tmp_path / "shm").iterdir())


def wait_for_info(stub: GpuWorkerStub, timeout_s: float = 60.0) -> Any:
    """GetInfo once the worker is ready; the answers before that are UNAVAILABLE."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return stub.GetInfo(gpu_worker_pb2.GetInfoRequest(), wait_for_ready=True, timeout=60)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() < deadline
        time.sleep(0.05)


def request(step_id: int, *chunks: tuple[int, int, int, bool, list[int]], **fields: Any) -> Any:
    plan = gpu_worker_pb2.StepPlan(step_id=step_id, **fields)
    for sequence_id, start, count, samples, blocks in chunks:
        plan.chunk_sequence_ids.append(sequence_id)
        plan.chunk_start_positions.append(start)
        plan.chunk_token_counts.append(count)
        plan.chunk_samples.append(samples)
        plan.chunk_new_block_counts.append(len(blocks))
        plan.new_blocks.extend(blocks)
    return gpu_worker_pb2.ExecuteRequest(plan=plan)


def start(sequence_id: int, tokens: list[int], **sampling: Any) -> Any:
    params = common_pb2.SamplingParams(**{"seed": 1, "temperature": 0.0, **sampling})
    return gpu_worker_pb2.SequenceStart(
        sequence_id=sequence_id, token_ids=tokens, prompt_tokens=len(tokens), sampling=params
    )


PROMPT = [5, 6, 7]


def generation(n: int, first: int = 1) -> Iterator[Any]:
    """All plans at once, each sent before the result of the one before it is read."""
    yield request(first, (7, 0, 3, True, [2]), starts=[start(7, PROMPT, logprobs=1)])
    for i in range(n - 1):
        yield request(first + 1 + i, (7, 3 + i, 1, True, []))


def reference(checkpoint: Path, n: int) -> list[int]:
    import torch
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(checkpoint)
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=n, do_sample=False)
    return [int(i) for i in out[0][len(PROMPT) :]]


EMULATED_LINK = ["--emulate-link-gb-per-s", "0.2", "--resident", "200kB"]


@pytest.mark.parametrize("gpu_worker_options", [[], EMULATED_LINK], ids=["in place", "streamed"])
def test_plans_sent_ahead_give_the_references_tokens(
    workers: Workers, checkpoint_fp32: Path, gpu_worker_options: list[str]
) -> None:
    info = wait_for_info(workers.stub)
    assert info.schedule == ("pipelined" if gpu_worker_options else "sequential")
    assert (info.resident_share < 1) == bool(gpu_worker_options)
    assert (info.vocab_size, info.max_context_tokens, info.block_tokens) == (199, 512, 16)
    assert (info.max_step_tokens, info.max_sequences, info.dtype) == (256, 16, "fp32")
    # 3 layers, 2 KV heads of 16, K and V, 4 bytes: 12,288 bytes for 16 tokens.
    assert info.kv_blocks == 2_000_000 // 12_288
    hardware = json.loads(info.hardware_spec_json)
    assert hardware["device_time_per_token_s"]["provenance"] == "measured"
    assert hardware["head_token_s"]["value"] >= 0
    assert (hardware["link_h2d_bytes_per_s"] is not None) == bool(gpu_worker_options)
    results = [answer.result for answer in workers.stub.Execute(generation(9))]
    assert [result.step_id for result in results] == list(range(1, 10))
    tokens = [token for result in results for token in result.token_ids]
    assert tokens == reference(checkpoint_fp32, 9)
    for result in results:
        assert list(result.sequence_ids) == [7]
        assert result.logprobs[0].token.token_id == result.token_ids[0]
        times = result.times
        assert times.device_s > 0
        assert times.attention_s > 0
        parts = times.device_s + times.sampling_s + times.idle_link_s
        parts += times.idle_attention_s + times.idle_other_s
        assert parts == pytest.approx(times.total_s, rel=1e-6)
        assert times.gemm_s > 0
        assert times.routing_s > 0
        assert times.gemm_s + times.routing_s < times.device_s


def test_a_plan_that_contradicts_the_session_ends_it_with_the_field(workers: Workers) -> None:
    wait_for_info(workers.stub)

    def plans() -> Iterator[Any]:
        yield from generation(2)
        yield request(3, (7, 9, 1, True, []))

    answers = workers.stub.Execute(plans())
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    failure = decode_failure(caught.value)
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failure.field == "plan.chunk_start_positions[0]"
    assert len(list(workers.stub.Execute(generation(2)))) == 2


def test_a_new_session_ends_the_old_one(workers: Workers) -> None:
    wait_for_info(workers.stub)
    hold = gpu_worker_pb2.ExecuteRequest(plan=gpu_worker_pb2.StepPlan(step_id=1))

    def never_ending() -> Iterator[Any]:
        yield hold
        time.sleep(30)

    old = workers.stub.Execute(never_ending())
    assert next(old).result.step_id == 1
    assert len(list(workers.stub.Execute(generation(3)))) == 3
    with pytest.raises(grpc.RpcError) as caught:
        next(old)
    assert caught.value.code() == grpc.StatusCode.ABORTED


def test_the_cpu_workers_death_ends_the_session_and_a_new_one_begins(
    workers: Workers, checkpoint_fp32: Path
) -> None:
    first = wait_for_info(workers.stub)

    def plans() -> Iterator[Any]:
        yield from generation(3)
        os.kill(workers.cpu_worker.pid, signal.SIGKILL)
        workers.cpu_worker.wait()
        began = time.monotonic()
        while time.monotonic() - began < 20:
            time.sleep(0.1)

    killed = workers.stub.Execute(plans())
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(killed)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - began < 10
    workers.start_cpu_worker()
    again = wait_for_info(workers.stub)
    assert again.kv_epoch != first.kv_epoch
    results = [answer.result for answer in workers.stub.Execute(generation(5))]
    tokens = [token for result in results for token in result.token_ids]
    assert tokens == reference(checkpoint_fp32, 5)


def test_a_broken_checkpoint_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    process = python(
        GPU_WORKER,
        *("--listen", f"unix:{tmp_path}/gpu.sock", "--cpu-worker", f"unix:{tmp_path}/cpu.sock"),
        *("--model", str(tmp_path / "nothing")),
        stderr=subprocess.PIPE,
    )
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "nothing" in stderr.decode()
    assert "no such directory" in stderr.decode()
    assert not (tmp_path / "gpu.sock").exists()


def test_a_kv_cache_beyond_memory_is_refused_itemised(
    tmp_path: Path, checkpoint_fp32: Path
) -> None:
    process = python(
        GPU_WORKER,
        *("--listen", f"unix:{tmp_path}/gpu.sock", "--cpu-worker", f"unix:{tmp_path}/cpu.sock"),
        *("--model", str(checkpoint_fp32), "--kv", "100TB"),
        stderr=subprocess.PIPE,
    )
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "KV cache" in stderr.decode()
    assert "needed" in stderr.decode()
    assert "available" in stderr.decode()
