"""Where the bytes go: host memory and GPU memory of one case, item by item."""

import math
from dataclasses import dataclass

from planner.hardware import HardwareSpec
from planner.spec import ModelSpec

#: Interpreters, pinned staging, page tables and what the operating system needs; assumed.
HOST_OVERHEAD_BYTES = 4e9
#: CUDA context, library workspaces and allocator slack; assumed.
GPU_OVERHEAD_BYTES = 1e9
#: The tokens of a step are computed in two groups, alpha and beta.
_GROUPS = 2
_ACTIVATION_BYTES = 2
_STATISTIC_BYTES = 4


@dataclass(frozen=True)
class MemoryItem:
    """One use of memory and what it is for."""

    name: str
    size_bytes: float
    note: str = ""


@dataclass(frozen=True)
class MemoryBudget:
    """The uses of one memory. `available_bytes` is None where the machine does not say."""

    items: tuple[MemoryItem, ...]
    available_bytes: float | None

    @property
    def used_bytes(self) -> float:
        return math.fsum(item.size_bytes for item in self.items)

    @property
    def free_bytes(self) -> float | None:
        """What is left; negative where the uses do not fit."""
        return None if self.available_bytes is None else self.available_bytes - self.used_bytes

    @property
    def fits(self) -> bool | None:
        free = self.free_bytes
        return None if free is None else free >= 0


def host_memory(
    model: ModelSpec, hardware: HardwareSpec, kv_bytes: float, step_tokens: int
) -> MemoryBudget:
    """Host memory of a run: one copy of the weights, the KV pool, activation slots, the rest."""
    items = (
        MemoryItem("weights", model.weights_bytes, "one pinned copy, exact size"),
        MemoryItem("kv cache", kv_bytes, "shared memory"),
        MemoryItem("activation slots", slot_bytes(model, step_tokens), "shared memory"),
        MemoryItem("processes and system", HOST_OVERHEAD_BYTES, "assumed"),
    )
    return MemoryBudget(items, hardware.value("host_memory_bytes"))


def gpu_memory(
    model: ModelSpec, hardware: HardwareSpec, step_tokens: int, resident_bytes: float = 0.0
) -> MemoryBudget:
    """Memory of all GPUs together; `resident_bytes` of layers are kept there."""
    items = (
        MemoryItem("weight buffer", 2 * model.largest_layer_bytes, "two layers"),
        MemoryItem("embedding and head", model.resident_bytes),
        MemoryItem("activations", activation_bytes(model, step_tokens), f"{step_tokens} tokens"),
        MemoryItem("context and workspaces", GPU_OVERHEAD_BYTES * hardware.gpu_count, "assumed"),
        MemoryItem("resident layers", resident_bytes),
    )
    return MemoryBudget(items, hardware.combined().value("gpu_memory_bytes"))


def slot_bytes(model: ModelSpec, step_tokens: int) -> float:
    """Activations exchanged with the CPU for all tokens of a step: query, key and value there,
    output and log-sum-exp (FP32) back."""
    elements = model.attention_input_elements + model.attention_output_elements
    return step_tokens * (elements * _ACTIVATION_BYTES + model.n_q_heads * _STATISTIC_BYTES)


def activation_bytes(model: ModelSpec, step_tokens: int) -> float:
    """What a layer keeps on the GPU: residual, normed input and attention output of every token,
    and for one group the projections and the experts' inner activations."""
    whole = 3 * model.hidden_size
    projections = model.attention_input_elements + model.attention_output_elements
    inner = 2 * model.experts_per_token * model.expert_hidden_size + model.hidden_size
    group = max(projections, inner)
    return step_tokens * _ACTIVATION_BYTES * (whole + group / _GROUPS)


def step_tokens_that_fit(model: ModelSpec, hardware: HardwareSpec, resident_bytes: float) -> int:
    """Tokens whose activations fit beside the rest of GPU memory; a very large number where the
    machine does not say how much it has, below 1 where the rest alone does not fit."""
    free_bytes = gpu_memory(model, hardware, 0, resident_bytes).free_bytes
    if free_bytes is None:
        return 2**31
    return math.floor(free_bytes / activation_bytes(model, 1))


def default_kv_bytes(model: ModelSpec, hardware: HardwareSpec, step_tokens: int) -> float | None:
    """The KV pool that fills host memory; None where the machine does not say how much it has,
    negative where not even the weights fit."""
    return host_memory(model, hardware, 0.0, step_tokens).free_bytes


def spare_gpu_bytes(model: ModelSpec, hardware: HardwareSpec, step_tokens: int) -> float | None:
    """GPU memory that resident layers could take."""
    return gpu_memory(model, hardware, step_tokens).free_bytes


def resident_layers(model: ModelSpec, budget_bytes: float) -> tuple[int, int]:
    """(layers, their bytes) that fit into `budget_bytes`, whole layers from the last one on."""
    count = size = 0
    for layer_bytes in reversed(model.layer_weights_bytes):
        if size + layer_bytes > budget_bytes:
            break
        count, size = count + 1, size + layer_bytes
    return count, size
