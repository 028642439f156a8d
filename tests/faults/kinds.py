"""The kinds of fault. Each is a coroutine that does the harm, drawn from a seeded generator.

It returns once nothing more is done to the system; what is left to recover is the system's task.
"""

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from moelens.v1 import cpu_worker_pb2, gpu_worker_pb2
from moelens.v1.cpu_worker_pb2_grpc import CpuWorkerStub

from protos.transport import channel
from tests.faults.proxy import DAMAGES, Proxy
from tests.faults.rig import ATTENTION, SERVICES, Rig, filled

ROLES = (*SERVICES, ATTENTION)
LONGEST_DELAY_S = 1.5
WITHOUT_MEMORY_S = 1.0
MEMORY_LEFT_BYTES = 1 << 20
CLOCK_JUMPS_S = (-86_400, -3600, -60, 60, 3600, 86_400)
INTRUDER_TIMEOUT_S = 5.0


@dataclass
class Scene:
    """What a fault may touch."""

    rig: Rig
    proxy: Proxy
    draw: random.Random
    # Processes that the system has to end and replace.
    doomed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """A kind of fault; `ends_gateway`: interactive streams may end with UNAVAILABLE."""

    name: str
    strike: Callable[[Scene], Awaitable[None]]
    ends_gateway: bool = False


def _pick(scene: Scene, role: str) -> int:
    pids = scene.rig.pids(role)
    assert pids, f"no {role} process is there to be struck"
    return scene.draw.choice(pids)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill(role: str) -> Callable[[Scene], Awaitable[None]]:
    async def strike(scene: Scene) -> None:
        _send(_pick(scene, role), signal.SIGKILL)

    return strike


def _hang(role: str) -> Callable[[Scene], Awaitable[None]]:
    """Stopped for ever: somebody has to notice and end it."""

    async def strike(scene: Scene) -> None:
        pid = _pick(scene, role)
        _send(pid, signal.SIGSTOP)
        scene.doomed.append(pid)

    return strike


def _delay(role: str) -> Callable[[Scene], Awaitable[None]]:
    async def strike(scene: Scene) -> None:
        pid = _pick(scene, role)
        _send(pid, signal.SIGSTOP)
        await asyncio.sleep(scene.draw.uniform(0.01, LONGEST_DELAY_S))
        _send(pid, signal.SIGCONT)

    return strike


def _short_of_memory(role: str) -> Callable[[Scene], Awaitable[None]]:
    """The address space may not grow for a while (rlimit)."""

    async def strike(scene: Scene) -> None:
        pid = _pick(scene, role)
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            limits = resource.prlimit(pid, resource.RLIMIT_AS)
            size_bytes = _address_space_bytes(pid)
            resource.prlimit(pid, resource.RLIMIT_AS, (size_bytes + MEMORY_LEFT_BYTES, limits[1]))
            await asyncio.sleep(WITHOUT_MEMORY_S)
            resource.prlimit(pid, resource.RLIMIT_AS, limits)

    return strike


def _address_space_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


async def _full_shm(scene: Scene) -> None:
    """No shared memory is left when a new epoch needs it; later there is."""
    with filled(scene.rig.shm_dir) if scene.rig.owns_shm else contextlib.nullcontext():
        _send(_pick(scene, ATTENTION), signal.SIGKILL)
        await asyncio.sleep(scene.draw.uniform(0.3, 2.0))


def _damaged(name: str) -> Callable[[Scene], Awaitable[None]]:
    """A control message between gateway and GPU worker arrives damaged, or not at all."""

    async def strike(scene: Scene) -> None:
        scene.proxy.damage(name, scene.draw.random() < 0.5, scene.draw)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(scene.proxy.done.wait(), 5.0)

    return strike


async def _stalled_messages(scene: Scene) -> None:
    scene.proxy.stall_s = scene.draw.uniform(0.1, LONGEST_DELAY_S)
    await asyncio.sleep(scene.proxy.stall_s)


async def _intruding_session(scene: Scene) -> None:
    """Somebody else opens a session, with a plan or with noise, and so ends the gateway's."""
    plan = gpu_worker_pb2.StepPlan(step_id=scene.draw.getrandbits(20))
    plan.starts.add(sequence_id=7, token_ids=[1, 2, 3], prompt_tokens=1)
    plan.chunk_sequence_ids.append(scene.draw.choice([7, 8]))
    noise = [gpu_worker_pb2.ExecuteRequest(plan=plan).SerializeToString(), scene.draw.randbytes(99)]
    async with channel(f"unix:{scene.rig.socket('gpu-worker')}") as peer:
        call = peer.stream_stream("/moelens.v1.GpuWorker/Execute")
        await _suffer(call(_once(scene.draw.choice(noise)), timeout=INTRUDER_TIMEOUT_S))


async def _foreign_configure(scene: Scene) -> None:
    """Somebody else asks the CPU worker for an epoch; the one in use ends."""
    request = cpu_worker_pb2.ConfigureRequest(
        n_layers=1,
        n_q_heads=4,
        n_kv_heads=scene.draw.choice([1, 3]),
        head_dim=16,
        kv_dtype="bf16",
        kv_blocks=4,
        max_sequences=2,
        max_context_tokens=64,
        max_slot_tokens=16,
        scale=0.25,
    )
    async with channel(f"unix:{scene.rig.socket('cpu-worker')}") as peer:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await CpuWorkerStub(peer).Configure(request, timeout=INTRUDER_TIMEOUT_S)


async def _noise_on_a_socket(scene: Scene) -> None:
    """Bytes that are no HTTP/2."""
    role = scene.draw.choice(SERVICES)
    _, writer = await asyncio.open_unix_connection(scene.rig.socket(role))
    writer.write(scene.draw.randbytes(scene.draw.randint(1, 5000)))
    with contextlib.suppress(OSError):
        await writer.drain()
    writer.close()


async def _clock_jump(scene: Scene) -> None:
    """The wall clock jumps, and some time later back again."""
    scene.rig.set_clock(scene.draw.choice(CLOCK_JUMPS_S))
    await asyncio.sleep(scene.draw.uniform(0.2, 2.0))
    scene.rig.set_clock(0)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
    await asyncio.sleep(0.2)


async def _suffer(call: "grpc.aio.StreamStreamCall") -> None:  # type: ignore[type-arg]
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


def _kinds() -> Iterator[Kind]:
    for role in ROLES:
        is_gateway = role == "gateway"
        yield Kind(f"kill {role}", _kill(role), is_gateway)
        yield Kind(f"hang {role}", _hang(role), is_gateway)
        yield Kind(f"delay {role}", _delay(role))
    for role in ("gpu-worker", "cpu-worker", "planner"):
        yield Kind(f"memory limit {role}", _short_of_memory(role))
    for name in DAMAGES:
        yield Kind(f"message {name}", _damaged(name))
    yield Kind("message stall", _stalled_messages)
    yield Kind("intruding session", _intruding_session)
    yield Kind("foreign configure", _foreign_configure)
    yield Kind("noise on a socket", _noise_on_a_socket)
    yield Kind("full shm", _full_shm)
    yield Kind("clock jump", _clock_jump)


KINDS = {kind.name: kind for kind in _kinds()}
