"""One epoch's shared memory: its geometry, its file, who takes part in it.

native/abi.h says what lies where; offsets and sizes come from there through cffi.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from native import isa
from native.errors import InvalidArgumentError, NativeError, NotBuiltError

try:
    from native._channel import ffi, lib
except ImportError as error:
    raise NotBuiltError("_channel") from error

isa.apply(lib)

KvDtype = Literal["bf16", "fp32", "int8"]
BLOCK_TOKENS = int(lib.ML_BLOCK_TOKENS)
SPLIT_TOKENS = int(lib.ML_SPLIT_TOKENS)
SLOTS = int(lib.ML_SLOTS)
MAX_PROCESSES = int(lib.ML_MAX_PROCESSES)
MAX_NODES = int(lib.ML_MAX_NODES)
CONTROL = int(lib.ML_CONTROL)
DEVICE = int(lib.ML_DEVICE)
SEGMENT_PREFIX = "moe-lens-"
SEGMENT_SUFFIX = ".seg"
ARENA_SUFFIX = ".kv"

_KV_DTYPES: dict[str, int] = {"fp32": lib.ML_FP32, "bf16": lib.ML_BF16, "int8": lib.ML_INT8}


class ChannelError(NativeError):
    """A call on a segment failed."""


class EpochRetired(ChannelError):
    """The CPU worker has retired this segment; configure it again to get a new one."""


@dataclass(frozen=True)
class ChannelGeometry:
    """What a segment is made for. Every field is fixed for the life of the segment."""

    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    kv_dtype: KvDtype
    kv_blocks: int  # of 16 tokens; every layer has as many
    max_sequences: int  # rows of the block table
    max_context_tokens: int
    max_slot_tokens: int  # tokens that one activation slot holds
    n_processes: int  # attention processes
    scale: float  # of q.k, usually 1 / sqrt(head_dim)
    n_nodes: int = 1  # NUMA nodes over which the KV arena is spread
    checksums: bool = False  # KV blocks and activations are verified whenever they are read

    def check(self) -> None:
        """Raises InvalidArgumentError naming the field that is wrong."""
        self.layout()

    def sizes(self) -> SegmentSizes:
        """Bytes that a segment of this geometry takes; InvalidArgumentError as in `check`."""
        layout = self.layout()
        return SegmentSizes(
            segment_bytes=layout.total_bytes,
            kv_arena_bytes=layout.kv_arena_bytes,
            block_table_bytes=4 * self.max_sequences * layout.blocks_per_sequence,
            activation_bytes=SLOTS * layout.activation_bytes,
            scratch_bytes=layout.scratch_bytes * self.n_processes,
        )

    def layout(self) -> Any:
        """The `ml_layout *` of this geometry; InvalidArgumentError as in `check`."""
        geometry = self.to_c()
        reason = lib.ml_geometry_error(geometry)
        if reason != ffi.NULL:
            raise InvalidArgumentError(ffi.string(reason).decode())
        layout = ffi.new("ml_layout *")
        check_status(lib.ml_layout_of(geometry, layout))
        return layout

    def to_c(self) -> Any:
        """The `ml_geometry *` of this geometry."""
        values = asdict(self)
        if self.kv_dtype not in _KV_DTYPES:
            raise InvalidArgumentError(
                f"kv_dtype: {self.kv_dtype!r} is unknown; one of {', '.join(_KV_DTYPES)}"
            )
        if not math.isfinite(self.scale):
            raise InvalidArgumentError(f"scale: {self.scale} is not a finite number")
        for name, value in values.items():
            if name not in ("kv_dtype", "scale", "checksums") and not 0 < value < 2**31:
                raise InvalidArgumentError(f"{name}: {value} is not between 1 and 2^31 - 1")
        return ffi.new("ml_geometry *", {**values, "kv_dtype": _KV_DTYPES[self.kv_dtype]})

    @classmethod
    def _from_c(cls, geometry: Any) -> Self:
        values = {name: getattr(geometry, name) for name in cls.__dataclass_fields__}
        names = {number: name for name, number in _KV_DTYPES.items()}
        values |= {"kv_dtype": names[geometry.kv_dtype], "checksums": bool(geometry.checksums)}
        return cls(**values)


@dataclass(frozen=True)
class SegmentSizes:
    """Memory of one epoch, itemised; the segment contains block tables and activations."""

    segment_bytes: int
    kv_arena_bytes: int
    block_table_bytes: int
    activation_bytes: int
    scratch_bytes: int  # private memory of all attention processes together


@dataclass(frozen=True)
class ParticipantState:
    """What a participant says about itself."""

    heartbeat: int  # only its changes mean something
    tasks: int
    busy_s: float
    kv_read_bytes: int
    state: Literal["starting", "ready", "running", "left"]
    reason: str  # why it left
    pid: int
    cpu: int  # -1: not pinned


def participant_name(participant: int) -> str:
    """ "control process", "device" or "attention process <index>"."""
    if participant == lib.ML_CONTROL:
        return "control process"
    if participant == lib.ML_DEVICE:
        return "device"
    return f"attention process {participant - lib.ML_FIRST_PROCESS}"


def process_participant(index: int) -> int:
    """The participant number of attention process `index`."""
    return int(lib.ML_FIRST_PROCESS) + index


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    check_status(lib.ml_die_with_parent(signal_number))


def arena_path(segment_path: Path) -> Path:
    """Where the KV arena of a segment lies, while it has a name."""
    return segment_path.with_suffix(ARENA_SUFFIX)


def default_spin_s(n_processes: int) -> float:
    """How long to spin before sleeping: MOE_LENS_SPIN_US where set; otherwise longer than a wake-up
    takes where every process can have a core of its own, and next to nothing where not."""
    asked = os.environ.get("MOE_LENS_SPIN_US", "")
    if asked:
        try:
            spin_s = float(asked) / 1e6
        except ValueError:
            spin_s = -1.0
        if not 0 <= spin_s <= 1:
            raise InvalidArgumentError(f"MOE_LENS_SPIN_US: {asked!r} is not between 0 and 1000000")
        return spin_s
    return 50e-6 if len(os.sched_getaffinity(0)) > n_processes + 1 else 2e-6


@contextmanager
def is_owned(path: Path) -> Iterator[bool | None]:
    """Whether a living process owns the segment at `path`; None where that cannot be told.

    Where it is False, nobody can become its owner inside the `with`.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield {0: False, 1: True}.get(lib.ml_file_is_owned(fd))
    finally:
        os.close(fd)


def status_text(status: int) -> str:
    return str(ffi.string(lib.ml_status_text(status)).decode())


def check_status(status: int, path: Path | None = None) -> None:
    """Turn an ml_status of a call that concerns no peer and no item into an exception."""
    if status == lib.ML_OK:
        return
    if status == lib.ML_SYSTEM_ERROR:
        raise OSError(ffi.errno, os.strerror(ffi.errno), str(path) if path else None)
    if status == lib.ML_EPOCH_RETIRED:
        raise EpochRetired(status_text(status))
    raise ChannelError(f"{path}: {status_text(status)}" if path else status_text(status))


class Segment:
    """One epoch's shared memory, mapped. A context manager; leaving it unmaps."""

    def __init__(self, handle: Any, path: Path) -> None:
        self._handle = handle
        self.path = path
        self.geometry = ChannelGeometry._from_c(lib.ml_segment_geometry(handle))
        self.epoch = int(lib.ml_segment_epoch(handle))

    @classmethod
    def create(cls, directory: Path, geometry: ChannelGeometry, epoch: int) -> Self:
        """Make a segment in `directory` (mode 0600, memory reserved) and be its control process.

        It is not live until `publish`. Raises InvalidArgumentError naming a wrong field, OSError
        (ENOSPC and the like) with nothing left behind.
        """
        geometry.check()
        while True:
            path = directory / f"{SEGMENT_PREFIX}{epoch:x}-{secrets.token_hex(4)}{SEGMENT_SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            handle = ffi.new("ml_segment **")
            status = lib.ml_segment_create(fd, geometry.to_c(), epoch, handle)
            # A cleaner may meet the file in the moment before its lock is taken, and remove
            # it: then make another.
            if status == lib.ML_SLOT_BUSY:
                os.close(fd)
                continue
            if status != lib.ML_OK:
                path.unlink(missing_ok=True)
                os.close(fd)
            check_status(status, path)
            return cls(handle[0], path)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Map the segment at `path`. Raises OSError, or ChannelError where it is not a segment."""
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        handle = ffi.new("ml_segment **")
        status = lib.ml_segment_open(fd, handle)
        if status != lib.ML_OK:
            os.close(fd)
        check_status(status, path)
        return cls(handle[0], path)

    @property
    def handle(self) -> Any:
        """The ml_segment for other calls into the extension; ChannelError once closed."""
        if self._handle is None:
            raise ChannelError(f"{self.path} is closed")
        return self._handle

    @property
    def life(self) -> Literal["building", "live", "retired"]:
        """Where the epoch stands."""
        return ("building", "live", "retired")[lib.ml_segment_life(self.handle)]

    @property
    def jobs(self) -> int:
        """How many jobs the device has posted."""
        return int(lib.ml_segment_jobs(self.handle))

    def publish(self) -> None:
        """Control process: the segment is complete; the device may come."""
        lib.ml_segment_publish(self.handle)

    def retire(self, died: int | None = None, hung: int | None = None) -> None:
        """Control process: end the epoch. All who wait in it wake and leave.

        `died` or `hung` is the participant for whose sake, which the device is told.
        """
        cause = lib.ML_EPOCH_RETIRED
        if died is not None or hung is not None:
            cause = lib.ML_PEER_DIED if died is not None else lib.ML_PEER_HUNG
        culprit = next((who for who in (died, hung) if who is not None), CONTROL)
        lib.ml_segment_retire(self.handle, cause, culprit)

    def unlink(self) -> None:
        """Remove the file's name; who has it mapped keeps it."""
        self.path.unlink(missing_ok=True)

    def participate(self, participant: int) -> None:
        """Hold the participant's lock until closed or dead; ChannelError where it is taken."""
        status = lib.ml_participate(self.handle, participant)
        if status == lib.ML_SLOT_BUSY:
            raise ChannelError(f"{participant_name(participant)} of {self.path} exists already")
        check_status(status, self.path)

    def alive(self, participant: int) -> bool:
        """Whether somebody else holds the participant's lock."""
        return bool(lib.ml_participant_alive(self.handle, participant) == 1)

    def beat(self, participant: int) -> None:
        """Show that `participant`, which is the caller, is not hung."""
        lib.ml_participant_beat(self.handle, participant)

    def state(self, participant: int) -> ParticipantState:
        """What `participant` says about itself."""
        view = ffi.new("ml_participant_view *")
        lib.ml_participant_read(self.handle, participant, view)
        states = ("starting", "ready", "running", "left")
        return ParticipantState(
            heartbeat=view.heartbeat,
            tasks=view.tasks,
            busy_s=view.busy_ns / 1e9,
            kv_read_bytes=view.kv_read_bytes,
            state=states[min(view.state, 3)],  # type: ignore[arg-type]
            reason=status_text(view.detail) if view.state == lib.ML_LEFT else "",
            pid=view.pid,
            cpu=-1 if view.cpu == 0xFFFFFFFF else view.cpu,
        )

    def close(self) -> None:
        """Unmap and drop the locks. Views into the segment must not be used any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.ml_segment_close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
