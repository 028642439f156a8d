"""Random tiny checkpoints of transformers, and an engine whose attention runs in this process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moelens.v1 import common_pb2, gpu_worker_pb2

from gpu_worker import residency, weights
from gpu_worker.activations import SlotTensors
from gpu_worker.checkpoint import Checkpoint
from gpu_worker.config import choose_kv_dtype
from gpu_worker.cpu_ops import CpuOps
from gpu_worker.device import CpuDevice, Device
from gpu_worker.engine import Engine, Schedule
from gpu_worker.families import DecoderConfig, family_of
from gpu_worker.link import EmulatedLink
from gpu_worker.model import Decoder
from gpu_worker.mover import Mover
from gpu_worker.ops import Ops
from gpu_worker.port import ATTEND_EARLIER_ONLY
from gpu_worker.runtime import activations_of
from gpu_worker.session import Session, SessionLimits
from gpu_worker.streaming import StageWeights, WeightsInPlace
from gpu_worker.timing import Timeline
from native import attention

BLOCK_TOKENS = 16
SPLIT_TOKENS = 512

# Tiny models gain nothing from torch's threads, and those spin.
torch.set_num_threads(1)

TINY = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
}


def save_checkpoint(directory: Path, dtype: torch.dtype, shard: str = "1GB", **config: Any) -> Path:
    """A random Mixtral of transformers, seed 0, saved as it saves it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**{**TINY, **config})).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


@pytest.fixture(scope="session")
def checkpoint_fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("fp32"), torch.float32)


@pytest.fixture(scope="session")
def checkpoint_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded and with a head size that is not hidden size / heads."""
    return save_checkpoint(
        tmp_path_factory.mktemp("bf16"), torch.bfloat16, shard="60KB", head_dim=32
    )


@dataclass(frozen=True)
class LocalJob:
    elapsed_s: float = 0.0
    longest_s: float = 0.0
    kv_read_bytes: int = 0


class LocalPort:
    """The channel's device side with the attention computed at once, by the library's kernels."""

    def __init__(self, limits: SessionLimits, config: DecoderConfig, kv_dtype: str) -> None:
        self.shape = attention.AttentionShape(
            config.n_q_heads, config.n_kv_heads, config.head_dim, kv_dtype
        )
        self.scale = config.head_dim**-0.5
        self.arenas = [
            attention.new_arena(self.shape, limits.kv_blocks, fill=0x7F)
            for _ in range(config.n_layers)
        ]
        self.tables = np.full((limits.max_sequences, limits.kv_blocks), -1, dtype=np.int32)
        self.items: list[Any] = [None, None]

        def array(heads: int, dtype: Any) -> list[Any]:
            return [
                np.zeros((limits.max_step_tokens, heads, config.head_dim), dtype) for _ in range(2)
            ]

        dtype = self.shape.activation_dtype
        self._q, self._out = array(config.n_q_heads, dtype), array(config.n_q_heads, dtype)
        self._k, self._v = array(config.n_kv_heads, dtype), array(config.n_kv_heads, dtype)
        lse_shape = (limits.max_step_tokens, config.n_q_heads)
        self._lse = [np.zeros(lse_shape, np.float32) for _ in range(2)]

    def q(self, slot: int) -> Any:
        return self._q[slot]

    def k(self, slot: int) -> Any:
        return self._k[slot]

    def v(self, slot: int) -> Any:
        return self._v[slot]

    def out(self, slot: int) -> Any:
        return self._out[slot]

    def lse(self, slot: int) -> Any:
        return self._lse[slot]

    def set_blocks(self, row: int, first_index: int, blocks: list[int]) -> None:
        self.tables[row, first_index : first_index + len(blocks)] = blocks

    def prepare(self, slot: int, items: Any) -> None:
        self.items[slot] = items

    def post(self, slot: int, layer: int) -> None:
        arena = self.arenas[layer]
        for item in self.items[slot]:
            rows = slice(int(item["slot_offset"]), int(item["slot_offset"] + item["n_tokens"]))
            start, table = int(item["start_position"]), self.tables[item["row"]]
            attention.store(
                self.shape, arena, table, start, self._k[slot][rows], self._v[slot][rows]
            )
            end = start if item["flags"] == ATTEND_EARLIER_ONLY else start + int(item["n_tokens"])
            self._attend(slot, arena, table, rows, start, end)

    def _attend(self, slot: int, arena: Any, table: Any, rows: slice, start: int, end: int) -> None:
        q = self._q[slot][rows]
        parts = [
            attention.attend(
                self.shape, arena, table, q, start, (a, min(a + SPLIT_TOKENS, end)), self.scale
            )
            for a in range(0, max(end, 1), SPLIT_TOKENS)
        ]
        n, heads, dim = q.shape
        out, lse = attention.merge(
            np.stack([out.reshape(n * heads, dim) for out, _ in parts]),
            np.stack([lse.reshape(n * heads) for _, lse in parts]),
            "fp32" if self.shape.kv_dtype == "fp32" else "bf16",
        )
        self._out[slot][rows] = out.reshape(n, heads, dim)
        self._lse[slot][rows] = lse.reshape(n, heads)

    def wait(self, slot: int, timeout_s: float) -> LocalJob:
        return LocalJob()

    def process_spans(self, slot: int) -> list[tuple[float, float]]:
        return [(1.0, 2.0), (0.0, 0.0)]

    def close(self) -> None:
        pass


@dataclass
class Rig:
    """An engine with a fresh session."""

    engine: Engine
    session: Session
    config: DecoderConfig
    port: LocalPort
    store: weights.HostStore
    timeline: Timeline | None


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Build an engine over a checkpoint: `make_rig(directory, dtype=…, link_bytes_per_s=…, …)`."""
    to_close: list[StageWeights] = []

    def make(
        directory: Path,
        dtype: torch.dtype | None = None,
        make_ops: Callable[[torch.dtype], Ops] = CpuOps,
        device_of: Callable[[torch.dtype], Device] | None = None,
        link_bytes_per_s: float | None = None,
        resident_bytes: int = 0,
        packet_bytes: int = 10**8,
        timeline: bool = False,
        kv_dtype: str = "auto",
        **schedule: bool,
    ) -> Rig:
        checkpoint = Checkpoint(directory)
        family = family_of(checkpoint.config)
        config = family.decoder_config(checkpoint.config)
        dtype = dtype or checkpoint.dtype()
        link = None if link_bytes_per_s is None else EmulatedLink(link_bytes_per_s)
        device = device_of(dtype) if device_of else CpuDevice(make_ops(dtype), link)
        store = weights.load(checkpoint, family, config, device.ops, weights.LoadProgress())
        spans = Timeline() if timeline else None
        stages: StageWeights = WeightsInPlace(store, device.ops)
        if device.link is not None:
            device.register(store.memory.data_ptr(), store.n_bytes)
            sizes = [block.n_bytes for block in store.stages]
            chosen = residency.choose(sizes, resident_bytes)
            stages = Mover(store, device, chosen, packet_bytes, spans)
        to_close.append(stages)
        limits = SessionLimits(config.vocab_size, config.max_context_tokens, 1024, 32, 128)
        port = LocalPort(limits, config, choose_kv_dtype(kv_dtype, dtype))
        engine = Engine(
            Decoder(config, device.ops),
            stages,
            port,
            [activations_of(SlotTensors(port, slot), device) for slot in range(2)],
            device.ops.device,
            Schedule(**schedule),
            spans,
        )
        return Rig(engine, Session(limits, port.set_blocks), config, port, store, spans)

    yield make
    for stages in to_close:
        stages.close()


class Driver:
    """Plays the gateway: keeps blocks, makes plans, collects tokens."""

    def __init__(self, rig: Any, chunk_tokens: int = 10**6) -> None:
        self.rig = rig
        self.chunk_tokens = chunk_tokens
        self.free = list(range(rig.session.limits.kv_blocks))[::-1]
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.outputs: list[Any] = []
        self.step_id = 0

    def start(
        self, plan: Any, sequence_id: int, tokens: list[int], prompt: int, **sampling: Any
    ) -> None:
        params = common_pb2.SamplingParams(**{"seed": 1, "temperature": 0.0, **sampling})
        plan.starts.add(
            sequence_id=sequence_id, token_ids=tokens, prompt_tokens=prompt, sampling=params
        )
        self.tokens[sequence_id] = list(tokens)
        self.computed[sequence_id] = 0
        self.blocks[sequence_id] = []

    def release(self, plan: Any, sequence_id: int) -> None:
        plan.released_sequence_ids.append(sequence_id)
        self.free += self.blocks.pop(sequence_id)
        del self.computed[sequence_id]

    def chunk(self, plan: Any, sequence_id: int) -> None:
        start, known = self.computed[sequence_id], len(self.tokens[sequence_id])
        count = min(self.chunk_tokens, known - start)
        needed = -(-(start + count) // BLOCK_TOKENS) - len(self.blocks[sequence_id])
        new = [self.free.pop() for _ in range(needed)]
        self.blocks[sequence_id] += new
        plan.chunk_sequence_ids.append(sequence_id)
        plan.chunk_start_positions.append(start)
        plan.chunk_token_counts.append(count)
        plan.chunk_samples.append(start + count == known)
        plan.chunk_new_block_counts.append(needed)
        plan.new_blocks.extend(new)
        self.computed[sequence_id] += count

    def run(self, plan: Any) -> Any:
        self.step_id += 1
        plan.step_id = self.step_id
        output = self.rig.engine.run(self.rig.session.apply(plan))
        for sequence, token_id in output.sampled:
            self.tokens[sequence.sequence_id].append(token_id)
        self.outputs.append(output)
        return output

    def generate(self, prompts: dict[int, list[int]], n: int, **sampling: Any) -> None:
        """All prompts at once until each has n tokens."""
        plan = gpu_worker_pb2.StepPlan()
        for sequence_id, prompt in prompts.items():
            self.start(plan, sequence_id, prompt, len(prompt), **sampling)
        while True:
            for sequence_id in prompts:
                if len(self.tokens[sequence_id]) < len(prompts[sequence_id]) + n:
                    self.chunk(plan, sequence_id)
            if not plan.chunk_sequence_ids:
                return
            self.run(plan)
            plan = gpu_worker_pb2.StepPlan()


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    """Build a driver of a rig: `make_driver(rig, chunk_tokens=…)`."""
    return Driver
