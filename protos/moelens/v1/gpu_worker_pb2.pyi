from moelens.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("model_name", "model_config_json", "dtype", "device", "vocab_size", "max_context_tokens", "block_tokens", "kv_blocks", "max_step_tokens", "max_sequences", "hardware_spec_json", "schedule", "preferred_step_tokens", "kv_epoch", "resident_share", "kv_dtype")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_SHARE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    model_config_json: str
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    block_tokens: int
    kv_blocks: int
    max_step_tokens: int
    max_sequences: int
    hardware_spec_json: str
    schedule: str
    preferred_step_tokens: int
    kv_epoch: int
    resident_share: float
    kv_dtype: str
    def __init__(self, model_name: _Optional[str] = ..., model_config_json: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., hardware_spec_json: _Optional[str] = ..., schedule: _Optional[str] = ..., preferred_step_tokens: _Optional[int] = ..., kv_epoch: _Optional[int] = ..., resident_share: _Optional[float] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("loaded_bytes", "total_bytes", "bytes_per_s", "seconds_left")
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    loaded_bytes: int
    total_bytes: int
    bytes_per_s: float
    seconds_left: float
    def __init__(self, loaded_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., seconds_left: _Optional[float] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: StepPlan
    def __init__(self, plan: _Optional[_Union[StepPlan, _Mapping]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "prompt_tokens", "sampling")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "released_sequence_ids", "starts", "chunk_sequence_ids", "chunk_start_positions", "chunk_token_counts", "chunk_samples", "chunk_new_block_counts", "new_blocks", "timeout_s")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_NEW_BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    released_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    chunk_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    chunk_start_positions: _containers.RepeatedScalarFieldContainer[int]
    chunk_token_counts: _containers.RepeatedScalarFieldContainer[int]
    chunk_samples: _containers.RepeatedScalarFieldContainer[bool]
    chunk_new_block_counts: _containers.RepeatedScalarFieldContainer[int]
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    def __init__(self, step_id: _Optional[int] = ..., released_sequence_ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., chunk_sequence_ids: _Optional[_Iterable[int]] = ..., chunk_start_positions: _Optional[_Iterable[int]] = ..., chunk_token_counts: _Optional[_Iterable[int]] = ..., chunk_samples: _Optional[_Iterable[bool]] = ..., chunk_new_block_counts: _Optional[_Iterable[int]] = ..., new_blocks: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: StepResult
    def __init__(self, result: _Optional[_Union[StepResult, _Mapping]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "sequence_ids", "token_ids", "logprobs", "times", "errors")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    times: StepTimes
    errors: _containers.RepeatedCompositeFieldContainer[SequenceError]
    def __init__(self, step_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., times: _Optional[_Union[StepTimes, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[SequenceError, _Mapping]]] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("sequence_id", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("sequence_id", "token", "prompt_start_position", "prompt")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_START_POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token: _common_pb2.TokenLogprobs
    prompt_start_position: int
    prompt: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, sequence_id: _Optional[int] = ..., token: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., prompt_start_position: _Optional[int] = ..., prompt: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("total_s", "device_s", "attention_s", "link_s", "sampling_s", "idle_link_s", "idle_attention_s", "idle_other_s", "wait_for_plan_s", "kv_read_bytes", "weights_streamed_bytes", "gemm_s", "routing_s")
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_S_FIELD_NUMBER: _ClassVar[int]
    LINK_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_LINK_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_ATTENTION_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_OTHER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_PLAN_S_FIELD_NUMBER: _ClassVar[int]
    KV_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GEMM_S_FIELD_NUMBER: _ClassVar[int]
    ROUTING_S_FIELD_NUMBER: _ClassVar[int]
    total_s: float
    device_s: float
    attention_s: float
    link_s: float
    sampling_s: float
    idle_link_s: float
    idle_attention_s: float
    idle_other_s: float
    wait_for_plan_s: float
    kv_read_bytes: int
    weights_streamed_bytes: int
    gemm_s: float
    routing_s: float
    def __init__(self, total_s: _Optional[float] = ..., device_s: _Optional[float] = ..., attention_s: _Optional[float] = ..., link_s: _Optional[float] = ..., sampling_s: _Optional[float] = ..., idle_link_s: _Optional[float] = ..., idle_attention_s: _Optional[float] = ..., idle_other_s: _Optional[float] = ..., wait_for_plan_s: _Optional[float] = ..., kv_read_bytes: _Optional[int] = ..., weights_streamed_bytes: _Optional[int] = ..., gemm_s: _Optional[float] = ..., routing_s: _Optional[float] = ...) -> None: ...
