"""Structured fuzzing of every RPC of the four services: `python -m tests.faults.fuzz ADDRESSES`.

A message is a sound one with some fields replaced, anywhere in its tree, by edges and noise, or it
is drawn as a whole. Whatever is sent, the answer comes in time and is never INTERNAL or UNKNOWN.
"""

import argparse
import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.faults.rig import Rig

SERVICES = {
    "Gateway": ("gateway", "gateway_pb2"),
    "Planner": ("planner", "planner_pb2"),
    "GpuWorker": ("gpu-worker", "gpu_worker_pb2"),
    "CpuWorker": ("cpu-worker", "cpu_worker_pb2"),
}
# An answer may take so long; the deadline of calls that would go on for longer is far below.
HANG_BOUND_S = 20.0
STREAM_DEADLINE_S = 0.3
MOST_EVENTS = 40
FORBIDDEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
INTEGERS = (0, 1, 2, 15, 16, 17, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "To be",
    "{}",
    "[]",
    "null",
    "\0",
    "é" * 50,
    "x" * 5000,
    "../../etc/passwd",
    "NaN",
)
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


@dataclass(frozen=True)
class Rpc:
    """One method of one service, and sound messages for it."""

    role: str
    method: MethodDescriptor
    sound: tuple[Message, ...]

    @property
    def path(self) -> str:
        """As gRPC names it."""
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


def rpcs(sound: dict[str, Sequence[Message]]) -> list[Rpc]:
    """Every method; `sound` by its name."""
    found = []
    for service, (role, module) in SERVICES.items():
        descriptor = importlib.import_module(f"moelens.v1.{module}").DESCRIPTOR
        for method in descriptor.services_by_name[service].methods:
            messages = tuple(sound.get(method.name, ())) or (_message(method),)
            found.append(Rpc(role, method, messages))
    return found


def _message(method: MethodDescriptor) -> Message:
    return GetMessageClass(method.input_type)()


# -- messages ----------------------------------------------------------------------------------


def _scalar(kind: FieldDescriptor, draw: random.Random) -> Any:
    if kind.cpp_type in RANGES:
        low, high = RANGES[kind.cpp_type]
        value = draw.choice([*INTEGERS, draw.randint(low, high), draw.randint(0, 4096)])
        return min(max(value, low), high)
    if kind.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw.choice([*FLOATS, draw.uniform(-2, 2), draw.uniform(-1e6, 1e6)])
    if kind.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if kind.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw.choice([0, 1, 2, 3, 77, -1])
    if kind.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice([0, 1, 30, 3000]))
    noise = "".join(chr(draw.randrange(1, 0xD7FF)) for _ in range(draw.randrange(20)))
    return draw.choice([*TEXTS, noise])


def _set(message: Message, kind: FieldDescriptor, draw: random.Random, depth: int) -> None:
    """Another value for one field."""
    message.ClearField(kind.name)
    if draw.random() < 0.15:
        return
    if kind.message_type is not None and kind.message_type.GetOptions().map_entry:
        key, value = (kind.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.message_type is None:
            for _ in range(draw.choice([1, 1, 3])):
                getattr(message, kind.name)[_scalar(key, draw)] = _scalar(value, draw)
    elif kind.is_repeated:
        for _ in range(draw.choice([1, 2, 5, 40])):
            if kind.message_type is not None:
                _fill(getattr(message, kind.name).add(), draw, depth + 1)
            else:
                getattr(message, kind.name).append(_scalar(kind, draw))
    elif kind.message_type is not None:
        part = getattr(message, kind.name)
        part.SetInParent()
        _fill(part, draw, depth + 1)
    else:
        setattr(message, kind.name, _scalar(kind, draw))


def _fill(message: Message, draw: random.Random, depth: int = 0) -> None:
    """Some of its fields, drawn."""
    for kind in message.DESCRIPTOR.fields:
        if draw.random() < (0.6 if depth < 4 else 0.1):
            _set(message, kind, draw, depth)


def _mutate(message: Message, draw: random.Random, depth: int = 0) -> None:
    """One field somewhere in the tree."""
    kind = draw.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
    if kind is None:
        return
    is_part = kind.message_type is not None and not kind.is_repeated
    if is_part and message.HasField(kind.name) and draw.random() < 0.7:
        _mutate(getattr(message, kind.name), draw, depth + 1)
    else:
        _set(message, kind, draw, depth)


def drawn(rpc: Rpc, draw: random.Random) -> Message:
    """A message for the call."""
    message = _message(rpc.method)
    if draw.random() < 0.2:
        _fill(message, draw)
        return message
    message.CopyFrom(draw.choice(rpc.sound))
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        _mutate(message, draw)
    return message


# -- calls -------------------------------------------------------------------------------------


@dataclass
class Fuzzer:
    """Sends to the services of a rig. `problems` says what must not have happened."""

    rig: Rig
    rpcs: Sequence[Rpc]
    sent: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}

    def call(self, draw: random.Random) -> None:
        """One call of some RPC, with one message or, where a stream is taken, several."""
        rpc = draw.choice(self.rpcs)
        count = draw.randint(1, 4) if rpc.method.client_streaming else 1
        sent = [drawn(rpc, draw) for _ in range(count)]
        self.sent[rpc.path] += count
        begin_s = time.monotonic()
        code = self._code(rpc, [message.SerializeToString() for message in sent])
        took_s = time.monotonic() - begin_s
        self.codes[code.name] += 1
        if code in FORBIDDEN or took_s > HANG_BOUND_S:
            self.problems.append(f"{rpc.path}: {code.name} after {took_s:.1f} s for {sent}"[:2000])

    def _code(self, rpc: Rpc, data: list[bytes]) -> grpc.StatusCode:
        streams = rpc.method.server_streaming
        timeout_s = STREAM_DEADLINE_S if streams else HANG_BOUND_S + 5
        try:
            answer = _stub(self._channel(rpc.role), rpc)(
                iter(data) if rpc.method.client_streaming else data[0],
                timeout=timeout_s,
                wait_for_ready=True,
            )
            if streams:
                for number, _ in enumerate(answer):
                    if number == MOST_EVENTS:
                        answer.cancel()
                        break
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def _channel(self, role: str) -> grpc.Channel:
        if role not in self._channels:
            self._channels[role] = grpc.insecure_channel(f"unix:{self.rig.socket(role)}")
        return self._channels[role]


def _stub(channel: grpc.Channel, rpc: Rpc) -> Callable[..., Any]:
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    return kinds[rpc.method.client_streaming, rpc.method.server_streaming](rpc.path)


def fuzz(fuzzer: Fuzzer, calls: int, chance: int) -> None:
    """So many calls; hypothesis draws the generators, and shrinks nothing: services have state."""

    @seed(chance)
    @settings(
        max_examples=calls,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False, note_method_calls=False))
    def run(draw: random.Random) -> None:
        fuzzer.call(random.Random(draw.getrandbits(64)))

    run()


def fuzzed(rig: Rig, calls: int, chance: int) -> Fuzzer:
    """The fuzzer after so many calls; that a process died is a problem too."""
    fuzzer = Fuzzer(rig, rpcs(dict(sound_messages())))
    before = {role: rig.pids(role) for role, _ in SERVICES.values()}
    fuzz(fuzzer, calls, chance)
    after = {role: rig.pids(role) for role, _ in SERVICES.values()}
    if before != after:
        fuzzer.problems.append(f"a process died: {before} became {after}")
    return fuzzer


def sound_messages() -> Iterator[tuple[str, list[Message]]]:
    """Messages that the services take, to begin with."""
    from moelens.v1 import cpu_worker_pb2, gateway_pb2, gpu_worker_pb2, planner_pb2

    request = gateway_pb2.GenerateRequest(text="To be, or not", max_tokens=4)
    request.sampling.seed = 1
    chat = gateway_pb2.GenerateRequest(max_tokens=3)
    chat.chat.messages.add(role="user", content="Who's there?")
    ids = gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=[5, 6, 7]), max_tokens=2)
    ids.sampling.temperature = 0.7
    yield "Generate", [request, chat, ids]
    yield "Tokenize", [gateway_pb2.TokenizeRequest(text="Good morrow")]
    yield "Detokenize", [gateway_pb2.DetokenizeRequest(token_ids=[5, 6, 7])]
    row = b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 2}}'
    yield "SubmitBatch", [gateway_pb2.SubmitBatchRequest(jsonl=row + b"\n")]
    plan = gpu_worker_pb2.StepPlan(step_id=1)
    plan.starts.add(sequence_id=7, token_ids=[1, 2, 3], prompt_tokens=3).sampling.seed = 1
    plan.chunk_sequence_ids.append(7)
    plan.chunk_start_positions.append(0)
    plan.chunk_token_counts.append(3)
    plan.chunk_samples.append(True)
    plan.chunk_new_block_counts.append(1)
    plan.new_blocks.append(0)
    yield "Execute", [gpu_worker_pb2.ExecuteRequest(plan=plan)]
    geometry = cpu_worker_pb2.ConfigureRequest(
        n_layers=2,
        n_q_heads=4,
        n_kv_heads=2,
        head_dim=16,
        kv_dtype="bf16",
        kv_blocks=8,
        max_sequences=4,
        max_context_tokens=64,
        max_slot_tokens=16,
        scale=0.25,
    )
    yield "Configure", [geometry]
    yield from _planner_messages(planner_pb2)


def _planner_messages(planner_pb2: Any) -> Iterator[tuple[str, list[Message]]]:
    case = planner_pb2.Case(
        model_name="mixtral-8x7b",
        hardware_name="a40-server",
        uniform=planner_pb2.UniformWorkload(prompt_tokens=98, generated_tokens=32, requests=100),
    )
    admit = planner_pb2.AdmitRequest(
        prompt_tokens=10,
        max_tokens=10,
        kv_capacity_tokens=1000,
        block_tokens=16,
        max_waiting_requests=10,
        max_context_tokens=1000,
    )
    yield "Admit", [admit]
    for method in planner_pb2.DESCRIPTOR.services_by_name["Planner"].methods:
        message = _message(method)
        if "case" in message.DESCRIPTOR.fields_by_name:
            message.case.CopyFrom(case)  # type: ignore[attr-defined]
            yield method.name, [message]


def main() -> int:
    """The full number, over services started for it; exit status 1 when there was a problem."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe-lens-fuzz-") as name, Rig(Path(name)) as rig:
        fuzzer = fuzzed(rig, options.calls, options.seed)
    print(f"{sum(fuzzer.sent.values())} messages in {sum(fuzzer.codes.values())} calls")
    print(*(f"{count:7d}  {name}" for name, count in fuzzer.codes.most_common()), sep="\n")
    print(*(f"{count:7d}  {path}" for path, count in sorted(fuzzer.sent.items())), sep="\n")
    print(*fuzzer.problems[:20], sep="\n")
    return 1 if fuzzer.problems else 0


if __name__ == "__main__":
    sys.exit(main())
