from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConfigureRequest(_message.Message):
    __slots__ = ("n_layers", "n_q_heads", "n_kv_heads", "head_dim", "kv_dtype", "kv_blocks", "max_sequences", "max_context_tokens", "max_slot_tokens", "scale", "peer_timeout_s", "checksums")
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    N_Q_HEADS_FIELD_NUMBER: _ClassVar[int]
    N_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    PEER_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    kv_dtype: str
    kv_blocks: int
    max_sequences: int
    max_context_tokens: int
    max_slot_tokens: int
    scale: float
    peer_timeout_s: float
    checksums: bool
    def __init__(self, n_layers: _Optional[int] = ..., n_q_heads: _Optional[int] = ..., n_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., kv_blocks: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_slot_tokens: _Optional[int] = ..., scale: _Optional[float] = ..., peer_timeout_s: _Optional[float] = ..., checksums: _Optional[bool] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("segment_path", "epoch", "attention_processes", "instruction_set", "segment_bytes", "kv_arena_bytes", "numa_nodes", "huge_pages")
    SEGMENT_PATH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_SET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    segment_path: str
    epoch: int
    attention_processes: int
    instruction_set: str
    segment_bytes: int
    kv_arena_bytes: int
    numa_nodes: int
    huge_pages: bool
    def __init__(self, segment_path: _Optional[str] = ..., epoch: _Optional[int] = ..., attention_processes: _Optional[int] = ..., instruction_set: _Optional[str] = ..., segment_bytes: _Optional[int] = ..., kv_arena_bytes: _Optional[int] = ..., numa_nodes: _Optional[int] = ..., huge_pages: _Optional[bool] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("epoch", "processes", "jobs", "kv_read_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    KV_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    processes: _containers.RepeatedCompositeFieldContainer[AttentionProcessStats]
    jobs: int
    kv_read_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[AttentionProcessStats, _Mapping]]] = ..., jobs: _Optional[int] = ..., kv_read_bytes: _Optional[int] = ...) -> None: ...

class AttentionProcessStats(_message.Message):
    __slots__ = ("index", "pid", "cpu", "tasks", "busy_s", "alive", "heartbeat_age_s")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    index: int
    pid: int
    cpu: int
    tasks: int
    busy_s: float
    alive: bool
    heartbeat_age_s: float
    def __init__(self, index: _Optional[int] = ..., pid: _Optional[int] = ..., cpu: _Optional[int] = ..., tasks: _Optional[int] = ..., busy_s: _Optional[float] = ..., alive: _Optional[bool] = ..., heartbeat_age_s: _Optional[float] = ...) -> None: ...
