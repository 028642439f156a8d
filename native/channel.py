"""The shared-memory channel between the GPU worker (the device) and the attention processes.

The CPU worker makes a `Segment`; the GPU worker opens a `DevicePort` on it and is the single writer
of its block tables, items and jobs:

    with DevicePort(path) as port:
        port.set_blocks(row, 0, blocks)
        port.prepare(slot, items)                  # once per step and group
        for layer in range(n_layers):
            port.q(slot)[:n] = ...; port.k(slot)[:n] = ...; port.v(slot)[:n] = ...
            port.post(slot, layer)
            times = port.wait(slot, timeout_s=5)   # now port.out(slot)[:n], port.lse(slot)[:n]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from native._channel import ffi, lib
from native.errors import InvalidArgumentError
from native.segment import (
    BLOCK_TOKENS,
    SLOTS,
    SPLIT_TOKENS,
    ChannelError,
    ChannelGeometry,
    EpochRetired,
    Segment,
    check_status,
    default_spin_s,
    participant_name,
    status_text,
)

__all__ = [
    "ATTEND_EARLIER_ONLY", "BLOCK_TOKENS", "ITEM_DTYPE", "SLOTS", "SPLIT_TOKENS", "STORE_ONLY",
    "Cancelled", "ChannelError", "ChannelGeometry", "DevicePort", "EpochRetired", "JobFailed",
    "JobTimes", "PeerDied", "PeerHung", "Segment", "WaitTimeout",
]  # fmt: skip

STORE_ONLY = int(lib.ML_STORE_ONLY)
ATTEND_EARLIER_ONLY = int(lib.ML_ATTEND_EARLIER_ONLY)

_ITEM_FIELDS = ("row", "start_position", "n_tokens", "slot_offset", "flags")
# A wait in C is cut into pieces of this length, so that Python sees its signals in between.
_WAIT_SLICE_S = 0.25

ITEM_DTYPE = np.dtype(
    {
        "names": list(_ITEM_FIELDS),
        "formats": [np.uint32] * len(_ITEM_FIELDS),
        "offsets": [ffi.offsetof("ml_item", field) for field in _ITEM_FIELDS],
        "itemsize": ffi.sizeof("ml_item"),
    }
)
"""One item of a job: tokens [start_position, start_position + n_tokens) of the sequence in `row` of
the block table, lying in rows slot_offset, slot_offset + 1, ... of the slot's q, k, v, out and lse.
`flags`: 0, STORE_ONLY (no attention), ATTEND_EARLIER_ONLY (over positions before start_position
only), the latter for a device that computes the chunk's own part itself."""


class PeerDied(ChannelError):
    """`peer` ("control process", "attention process 3", ...) has died; the epoch is lost."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"{peer} died")
        self.peer = peer


class PeerHung(ChannelError):
    """`peer` lives, but its heartbeat has stood still for longer than the peer timeout."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"{peer} hangs: its heartbeat stands still")
        self.peer = peer


class Cancelled(ChannelError):
    """The wait was ended by `DevicePort.cancel`."""


class WaitTimeout(ChannelError, TimeoutError):
    """The job has not ended within the timeout; it may be waited for again."""


NO_ITEM = 2**32 - 1  # a failure that is about no item in particular


class JobFailed(ChannelError):
    """The attention processes refused a job whose words do not fit the segment, or memory is not
    what was written (checksums). `item` is the index of the item in question, where one is."""

    def __init__(self, text: str, item: int) -> None:
        super().__init__(text if item == NO_ITEM else f"item {item}: {text}")
        self.item = item


@dataclass(frozen=True)
class JobTimes:
    """What one job cost."""

    elapsed_s: float  # from post until the device saw its end
    busy_s: float  # attention processes together
    longest_s: float  # busiest attention process
    kv_read_bytes: int  # KV that the kernels went through
    tasks: int


class DevicePort:
    """The GPU worker's side of one segment, whose only device it is. For one thread at a time;
    `cancel` may be called from any. A context manager.

    Views that it returns lie in the segment: do not use them after `close`.
    """

    def __init__(
        self, path: Path | str, peer_timeout_s: float = 5.0, spin_s: float | None = None
    ) -> None:
        """Open the segment at `path`.

        `peer_timeout_s`: how long a heartbeat may stand still before its process counts as hung.
        `spin_s`: how long a wait spins before it sleeps; None: MOE_LENS_SPIN_US, else short
        where attention processes and this one share cores.
        Raises OSError (no such file: the epoch is over), ChannelError (not a segment, not live, or
        it has a device already).
        """
        self._segment = Segment.open(path)
        try:
            spin = default_spin_s(self._segment.geometry.n_processes) if spin_s is None else spin_s
            handle = ffi.new("ml_port **")
            status = lib.ml_port_open(
                self._segment.handle, _nanoseconds(peer_timeout_s), _nanoseconds(spin), handle
            )
            if status == lib.ML_SLOT_BUSY:
                raise ChannelError(f"the segment {path} has a device already")
            check_status(status, self._segment.path)
        except BaseException:
            self._segment.close()
            raise
        self._port = handle[0]
        self._result = ffi.new("ml_job_result *")
        self._views = [_activation_views(self._segment, slot) for slot in range(SLOTS)]

    @property
    def geometry(self) -> ChannelGeometry:
        """What the segment was made for."""
        return self._segment.geometry

    @property
    def epoch(self) -> int:
        """The segment's epoch."""
        return self._segment.epoch

    @property
    def activations(self) -> tuple[int, int]:
        """Address (page aligned) and bytes of both slots' q, k, v, out and lse: what a device that
        copies from and to them should register as pinned memory."""
        layout = lib.ml_segment_layout(self._segment.handle)
        address = int(ffi.cast("uintptr_t", lib.ml_segment_base(self._segment.handle)))
        return address + layout.activations, SLOTS * layout.activation_bytes

    def q(self, slot: int) -> npt.NDArray[Any]:
        """(max_slot_tokens, n_q_heads, head_dim), float32 with FP32 KV, else BF16 as uint16."""
        return self._views[slot]["q"]

    def k(self, slot: int) -> npt.NDArray[Any]:
        """(max_slot_tokens, n_kv_heads, head_dim), typed as q."""
        return self._views[slot]["k"]

    def v(self, slot: int) -> npt.NDArray[Any]:
        """(max_slot_tokens, n_kv_heads, head_dim), typed as q."""
        return self._views[slot]["v"]

    def out(self, slot: int) -> npt.NDArray[Any]:
        """(max_slot_tokens, n_q_heads, head_dim), typed as q; valid after `wait`."""
        return self._views[slot]["out"]

    def lse(self, slot: int) -> npt.NDArray[np.float32]:
        """(max_slot_tokens, n_q_heads): natural log of the sum of exp(scale * q.k); -inf where a
        row has no position to attend to (out is 0 then). Valid after `wait`."""
        return self._views[slot]["lse"]

    def set_blocks(
        self, row: int, first_index: int, blocks: Sequence[int] | npt.NDArray[Any]
    ) -> None:
        """Write block ids into entries first_index, first_index + 1, ... of a sequence's row.

        Entry i covers positions [16 i, 16 i + 16). No job that names the row may be running, unless
        the entries are beyond what it uses. Raises InvalidArgumentError; nothing is changed then.
        """
        ids = np.ascontiguousarray(blocks, dtype=np.int32)
        self._check_argument(
            lib.ml_port_set_blocks(
                self._open_port(), row, first_index, ffi.from_buffer("int32_t[]", ids), len(ids)
            ),
            f"blocks of row {row}",
        )

    def clear_row(self, row: int) -> None:
        """Forget a row's blocks: a job that names it before `set_blocks` is refused, not wrong."""
        self._check_argument(lib.ml_port_clear_row(self._open_port(), row), f"row {row}")

    def prepare(self, slot: int, items: npt.NDArray[Any]) -> None:
        """Cut `items` (ITEM_DTYPE) into work for `post`, once per step and group.

        A row may be named once. Two slots may name the same row only where the later one's job is
        posted after the earlier one's was waited for. Raises InvalidArgumentError naming
        the item and what is wrong with it, ChannelError while the slot's job runs.
        """
        contiguous = np.ascontiguousarray(items, dtype=ITEM_DTYPE)
        status = lib.ml_port_prepare(
            self._open_port(),
            slot,
            ffi.cast("ml_item *", contiguous.ctypes.data),
            len(contiguous),
            self._result,
        )
        self._check_argument(status, f"items[{self._result.item}]")

    def post(self, slot: int, layer: int) -> None:
        """Publish the slot's job for one layer; q, k and v of its items are written.

        Raises ChannelError where the slot is not prepared or its job still runs.
        """
        self._check_argument(lib.ml_port_post(self._open_port(), slot, layer), f"layer {layer}")

    def wait(self, slot: int, timeout_s: float) -> JobTimes:
        """Wait (without the GIL) until the slot's job has ended; out and lse are valid then.

        Raises PeerDied (within about 0.6 s) and PeerHung (after the peer timeout), EpochRetired,
        Cancelled, WaitTimeout, JobFailed.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            status = lib.ml_port_wait(
                self._open_port(), slot, _nanoseconds(min(left_s, _WAIT_SLICE_S)), self._result
            )
            if status != lib.ML_TIMED_OUT or left_s <= _WAIT_SLICE_S:
                return self._outcome(status, slot, timeout_s)

    def check_peers(self) -> None:
        """Look once, without waiting, whether all peers are there: PeerDied, PeerHung,
        EpochRetired. Call it every second or so while no job runs: silence is judged over the time
        between calls, and an attention process's death is reported once the control process has
        named it, or 0.5 s after it was first seen."""
        peer = ffi.new("uint32_t *")
        status = lib.ml_port_check_peers(self._open_port(), peer)
        self._raise_for_peer(status, peer[0])
        check_status(status, self._segment.path)

    def cancel(self) -> None:
        """End present and all later waits with Cancelled. Callable from any thread."""
        if self._port is not None:
            lib.ml_port_cancel(self._port)

    def close(self) -> None:
        """Leave the segment; the CPU worker frees the epoch's memory when it notices."""
        port, self._port = self._port, None
        if port is not None:
            lib.ml_port_close(port)
        self._views = []
        self._segment.close()

    def process_spans(self, slot: int) -> list[tuple[float, float]]:
        """When each attention process began and ended its part of the slot's job, which has ended:
        seconds of time.monotonic; (0, 0) where it had no part."""
        if not 0 <= slot < lib.ML_SLOTS:
            raise InvalidArgumentError(f"slot: must be below {lib.ML_SLOTS}; found {slot}")
        spans = ffi.new("ml_process_span[]", self._segment.geometry.n_processes)
        lib.ml_port_process_spans(self._open_port(), slot, spans)
        return [(span.begin_ns / 1e9, span.end_ns / 1e9) for span in spans]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_port(self) -> Any:
        if self._port is None:
            raise ChannelError(f"{self._segment.path} is closed")
        return self._port

    def _outcome(self, status: int, slot: int, timeout_s: float) -> JobTimes:
        result = self._result
        self._raise_for_peer(status, result.peer)
        if status == lib.ML_CANCELLED:
            raise Cancelled(f"slot {slot}: the wait was cancelled")
        if status == lib.ML_TIMED_OUT:
            raise WaitTimeout(f"slot {slot}: the job has not ended after {timeout_s:g} s")
        check_status(status, self._segment.path)
        if result.error != lib.ML_OK:
            raise JobFailed(status_text(result.error), result.item)
        return JobTimes(
            elapsed_s=result.elapsed_ns / 1e9,
            busy_s=result.busy_ns / 1e9,
            longest_s=result.longest_ns / 1e9,
            kv_read_bytes=result.kv_read_bytes,
            tasks=result.tasks,
        )

    def _raise_for_peer(self, status: int, peer: int) -> None:
        if status == lib.ML_PEER_DIED:
            raise PeerDied(participant_name(peer))
        if status == lib.ML_PEER_HUNG:
            raise PeerHung(participant_name(peer))

    def _check_argument(self, status: int, what: str) -> None:
        if status in (lib.ML_SLOT_BUSY, lib.ML_NOT_PREPARED, lib.ML_EPOCH_RETIRED):
            check_status(status)
        elif status != lib.ML_OK:
            raise InvalidArgumentError(f"{what}: {status_text(status)}")


def _nanoseconds(duration_s: float) -> int:
    if not 0 <= duration_s < 1e9:
        raise InvalidArgumentError(f"{duration_s} s is not a duration between 0 and 1e9 s")
    return int(duration_s * 1e9)


def _activation_views(segment: Segment, slot: int) -> dict[str, npt.NDArray[Any]]:
    """Views of one slot's q, k, v, out and lse."""
    geometry, layout = segment.geometry, lib.ml_segment_layout(segment.handle)
    base = lib.ml_segment_base(segment.handle) + layout.activations + slot * layout.activation_bytes
    element = np.dtype(np.float32 if layout.element_bytes == 4 else np.uint16)
    q_heads = (geometry.n_q_heads, geometry.head_dim)
    kv_heads = (geometry.n_kv_heads, geometry.head_dim)

    def view(offset: int, row: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        shape = (geometry.max_slot_tokens, *row)
        count = int(np.prod(shape))
        buffer = ffi.buffer(base + offset, count * dtype.itemsize)
        return np.frombuffer(buffer, dtype, count).reshape(shape)

    return {
        "q": view(layout.q, q_heads, element),
        "k": view(layout.k, kv_heads, element),
        "v": view(layout.v, kv_heads, element),
        "out": view(layout.out, q_heads, element),
        "lse": view(layout.lse, (geometry.n_q_heads,), np.dtype(np.float32)),
    }
