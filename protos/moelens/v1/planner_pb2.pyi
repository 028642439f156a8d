from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SimulationDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SIMULATION_DETAIL_UNSPECIFIED: _ClassVar[SimulationDetail]
    SIMULATION_DETAIL_SCALED: _ClassVar[SimulationDetail]
    SIMULATION_DETAIL_FULL: _ClassVar[SimulationDetail]
    SIMULATION_DETAIL_NONE: _ClassVar[SimulationDetail]

class SizingFigure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SIZING_FIGURE_UNSPECIFIED: _ClassVar[SizingFigure]
    SIZING_FIGURE_STEADY: _ClassVar[SizingFigure]
    SIZING_FIGURE_STAGE2: _ClassVar[SizingFigure]
    SIZING_FIGURE_SIMULATION: _ClassVar[SizingFigure]
SIMULATION_DETAIL_UNSPECIFIED: SimulationDetail
SIMULATION_DETAIL_SCALED: SimulationDetail
SIMULATION_DETAIL_FULL: SimulationDetail
SIMULATION_DETAIL_NONE: SimulationDetail
SIZING_FIGURE_UNSPECIFIED: SizingFigure
SIZING_FIGURE_STEADY: SizingFigure
SIZING_FIGURE_STAGE2: SizingFigure
SIZING_FIGURE_SIMULATION: SizingFigure

class Case(_message.Message):
    __slots__ = ("model_name", "model_config_json", "hardware_name", "hardware_json", "workload_name", "uniform", "trace", "kv_bytes", "block_tokens", "resident_bytes", "weight_format", "kv_format", "requests", "resident_auto")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_NAME_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_JSON_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_NAME_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_AUTO_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    model_config_json: str
    hardware_name: str
    hardware_json: str
    workload_name: str
    uniform: UniformWorkload
    trace: TraceWorkload
    kv_bytes: int
    block_tokens: int
    resident_bytes: int
    weight_format: str
    kv_format: str
    requests: int
    resident_auto: bool
    def __init__(self, model_name: _Optional[str] = ..., model_config_json: _Optional[str] = ..., hardware_name: _Optional[str] = ..., hardware_json: _Optional[str] = ..., workload_name: _Optional[str] = ..., uniform: _Optional[_Union[UniformWorkload, _Mapping]] = ..., trace: _Optional[_Union[TraceWorkload, _Mapping]] = ..., kv_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., weight_format: _Optional[str] = ..., kv_format: _Optional[str] = ..., requests: _Optional[int] = ..., resident_auto: _Optional[bool] = ...) -> None: ...

class UniformWorkload(_message.Message):
    __slots__ = ("prompt_tokens", "generated_tokens", "requests")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    generated_tokens: int
    requests: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., requests: _Optional[int] = ...) -> None: ...

class TraceWorkload(_message.Message):
    __slots__ = ("prompt_tokens", "generated_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    generated_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_tokens: _Optional[_Iterable[int]] = ..., generated_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class EstimateRequest(_message.Message):
    __slots__ = ("case", "simulation")
    CASE_FIELD_NUMBER: _ClassVar[int]
    SIMULATION_FIELD_NUMBER: _ClassVar[int]
    case: Case
    simulation: SimulationDetail
    def __init__(self, case: _Optional[_Union[Case, _Mapping]] = ..., simulation: _Optional[_Union[SimulationDetail, str]] = ...) -> None: ...

class EstimateResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: EstimateReport
    def __init__(self, report: _Optional[_Union[EstimateReport, _Mapping]] = ...) -> None: ...

class EstimateReport(_message.Message):
    __slots__ = ("schema", "model", "hardware", "workload", "memory", "stage1", "host_needs", "stage2", "steady", "simulation", "residency", "notes")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STAGE1_FIELD_NUMBER: _ClassVar[int]
    HOST_NEEDS_FIELD_NUMBER: _ClassVar[int]
    STAGE2_FIELD_NUMBER: _ClassVar[int]
    STEADY_FIELD_NUMBER: _ClassVar[int]
    SIMULATION_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    schema: str
    model: ModelReport
    hardware: HardwareReport
    workload: WorkloadReport
    memory: MemoryReport
    stage1: Stage1Report
    host_needs: HostNeedsReport
    stage2: Stage2Report
    steady: SteadyReport
    simulation: SimulationReport
    residency: ResidencyReport
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, schema: _Optional[str] = ..., model: _Optional[_Union[ModelReport, _Mapping]] = ..., hardware: _Optional[_Union[HardwareReport, _Mapping]] = ..., workload: _Optional[_Union[WorkloadReport, _Mapping]] = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., stage1: _Optional[_Union[Stage1Report, _Mapping]] = ..., host_needs: _Optional[_Union[HostNeedsReport, _Mapping]] = ..., stage2: _Optional[_Union[Stage2Report, _Mapping]] = ..., steady: _Optional[_Union[SteadyReport, _Mapping]] = ..., simulation: _Optional[_Union[SimulationReport, _Mapping]] = ..., residency: _Optional[_Union[ResidencyReport, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelReport(_message.Message):
    __slots__ = ("name", "family", "n_layers", "n_experts", "experts_per_token", "weight_format", "kv_format", "total_parameters", "active_parameters", "parameters_by_kind")
    class ParametersByKindEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    N_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_BY_KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    n_layers: int
    n_experts: int
    experts_per_token: int
    weight_format: str
    kv_format: str
    total_parameters: int
    active_parameters: int
    parameters_by_kind: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., n_layers: _Optional[int] = ..., n_experts: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., weight_format: _Optional[str] = ..., kv_format: _Optional[str] = ..., total_parameters: _Optional[int] = ..., active_parameters: _Optional[int] = ..., parameters_by_kind: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Quantity(_message.Message):
    __slots__ = ("value", "provenance", "source")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    value: float
    provenance: str
    source: str
    def __init__(self, value: _Optional[float] = ..., provenance: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class HardwareReport(_message.Message):
    __slots__ = ("name", "description", "gpu", "host", "gpu_count", "quantities")
    class QuantitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Quantity
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Quantity, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUANTITIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    gpu: str
    host: str
    gpu_count: int
    quantities: _containers.MessageMap[str, Quantity]
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., gpu: _Optional[str] = ..., host: _Optional[str] = ..., gpu_count: _Optional[int] = ..., quantities: _Optional[_Mapping[str, Quantity]] = ...) -> None: ...

class WorkloadReport(_message.Message):
    __slots__ = ("name", "prompt_tokens", "generated_tokens", "max_prompt_tokens", "requests", "distribution")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    prompt_tokens: float
    generated_tokens: float
    max_prompt_tokens: int
    requests: int
    distribution: str
    def __init__(self, name: _Optional[str] = ..., prompt_tokens: _Optional[float] = ..., generated_tokens: _Optional[float] = ..., max_prompt_tokens: _Optional[int] = ..., requests: _Optional[int] = ..., distribution: _Optional[str] = ...) -> None: ...

class MemoryItem(_message.Message):
    __slots__ = ("name", "size_bytes", "note")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: float
    note: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class MemoryBudget(_message.Message):
    __slots__ = ("items", "available_bytes", "used_bytes", "free_bytes", "fits")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[MemoryItem]
    available_bytes: float
    used_bytes: float
    free_bytes: float
    fits: bool
    def __init__(self, items: _Optional[_Iterable[_Union[MemoryItem, _Mapping]]] = ..., available_bytes: _Optional[float] = ..., used_bytes: _Optional[float] = ..., free_bytes: _Optional[float] = ..., fits: _Optional[bool] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("weights_bytes", "streamed_bytes_per_pass", "kv_bytes_per_token", "kv_bytes", "kv_capacity_tokens", "block_tokens", "resident_bytes", "resident_layers", "spare_gpu_bytes", "host", "gpu")
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SPARE_GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    weights_bytes: int
    streamed_bytes_per_pass: int
    kv_bytes_per_token: int
    kv_bytes: float
    kv_capacity_tokens: int
    block_tokens: int
    resident_bytes: float
    resident_layers: int
    spare_gpu_bytes: float
    host: MemoryBudget
    gpu: MemoryBudget
    def __init__(self, weights_bytes: _Optional[int] = ..., streamed_bytes_per_pass: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_bytes: _Optional[float] = ..., kv_capacity_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., resident_bytes: _Optional[float] = ..., resident_layers: _Optional[int] = ..., spare_gpu_bytes: _Optional[float] = ..., host: _Optional[_Union[MemoryBudget, _Mapping]] = ..., gpu: _Optional[_Union[MemoryBudget, _Mapping]] = ...) -> None: ...

class Stage1Report(_message.Message):
    __slots__ = ("tokens_per_s", "generated_tokens_per_s", "limit", "kv_tokens_per_s", "gpu_tokens_per_s", "pme", "stream_s", "saturation_tokens", "gpu_utilisation_share")
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PME_FIELD_NUMBER: _ClassVar[int]
    STREAM_S_FIELD_NUMBER: _ClassVar[int]
    SATURATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILISATION_SHARE_FIELD_NUMBER: _ClassVar[int]
    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    kv_tokens_per_s: float
    gpu_tokens_per_s: float
    pme: float
    stream_s: float
    saturation_tokens: float
    gpu_utilisation_share: float
    def __init__(self, tokens_per_s: _Optional[float] = ..., generated_tokens_per_s: _Optional[float] = ..., limit: _Optional[str] = ..., kv_tokens_per_s: _Optional[float] = ..., gpu_tokens_per_s: _Optional[float] = ..., pme: _Optional[float] = ..., stream_s: _Optional[float] = ..., saturation_tokens: _Optional[float] = ..., gpu_utilisation_share: _Optional[float] = ...) -> None: ...

class HostNeedsReport(_message.Message):
    __slots__ = ("kv_read_bytes_per_s", "read_needed_bytes_per_s", "read_available_bytes_per_s", "read_enough", "cpu_needed_flops_per_s", "cpu_available_flops_per_s", "cpu_enough")
    KV_READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    READ_NEEDED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    READ_AVAILABLE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    READ_ENOUGH_FIELD_NUMBER: _ClassVar[int]
    CPU_NEEDED_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CPU_AVAILABLE_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CPU_ENOUGH_FIELD_NUMBER: _ClassVar[int]
    kv_read_bytes_per_s: float
    read_needed_bytes_per_s: float
    read_available_bytes_per_s: float
    read_enough: bool
    cpu_needed_flops_per_s: float
    cpu_available_flops_per_s: float
    cpu_enough: bool
    def __init__(self, kv_read_bytes_per_s: _Optional[float] = ..., read_needed_bytes_per_s: _Optional[float] = ..., read_available_bytes_per_s: _Optional[float] = ..., read_enough: _Optional[bool] = ..., cpu_needed_flops_per_s: _Optional[float] = ..., cpu_available_flops_per_s: _Optional[float] = ..., cpu_enough: _Optional[bool] = ...) -> None: ...

class Stage2Report(_message.Message):
    __slots__ = ("tokens_per_s", "generated_tokens_per_s", "limit", "io_tokens_per_s", "gpu_tokens_per_s", "kv_prompts_per_step", "gpu_prompts_per_step", "prompts_per_step", "steps", "steady_tokens_per_step", "total_s")
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    IO_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_PROMPTS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    GPU_PROMPTS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEADY_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    io_tokens_per_s: float
    gpu_tokens_per_s: float
    kv_prompts_per_step: float
    gpu_prompts_per_step: float
    prompts_per_step: float
    steps: float
    steady_tokens_per_step: float
    total_s: float
    def __init__(self, tokens_per_s: _Optional[float] = ..., generated_tokens_per_s: _Optional[float] = ..., limit: _Optional[str] = ..., io_tokens_per_s: _Optional[float] = ..., gpu_tokens_per_s: _Optional[float] = ..., kv_prompts_per_step: _Optional[float] = ..., gpu_prompts_per_step: _Optional[float] = ..., prompts_per_step: _Optional[float] = ..., steps: _Optional[float] = ..., steady_tokens_per_step: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class SteadyReport(_message.Message):
    __slots__ = ("tokens_per_s", "generated_tokens_per_s", "limit", "pass_s", "prompts_per_step", "step_tokens", "seconds_by_resource", "total_s")
    class SecondsByResourceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BY_RESOURCE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    pass_s: float
    prompts_per_step: float
    step_tokens: float
    seconds_by_resource: _containers.ScalarMap[str, float]
    total_s: float
    def __init__(self, tokens_per_s: _Optional[float] = ..., generated_tokens_per_s: _Optional[float] = ..., limit: _Optional[str] = ..., pass_s: _Optional[float] = ..., prompts_per_step: _Optional[float] = ..., step_tokens: _Optional[float] = ..., seconds_by_resource: _Optional[_Mapping[str, float]] = ..., total_s: _Optional[float] = ...) -> None: ...

class SimulationReport(_message.Message):
    __slots__ = ("tokens_per_s", "generated_tokens_per_s", "limit", "total_s", "steps", "preemptions", "preemption_share", "mean_kv_use_share", "mean_step_tokens", "seconds_by_limit", "share_by_limit", "requests_simulated", "scale")
    class SecondsByLimitEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ShareByLimitEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEAN_KV_USE_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEAN_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    SHARE_BY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_SIMULATED_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    total_s: float
    steps: int
    preemptions: int
    preemption_share: float
    mean_kv_use_share: float
    mean_step_tokens: float
    seconds_by_limit: _containers.ScalarMap[str, float]
    share_by_limit: _containers.ScalarMap[str, float]
    requests_simulated: int
    scale: float
    def __init__(self, tokens_per_s: _Optional[float] = ..., generated_tokens_per_s: _Optional[float] = ..., limit: _Optional[str] = ..., total_s: _Optional[float] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., preemption_share: _Optional[float] = ..., mean_kv_use_share: _Optional[float] = ..., mean_step_tokens: _Optional[float] = ..., seconds_by_limit: _Optional[_Mapping[str, float]] = ..., share_by_limit: _Optional[_Mapping[str, float]] = ..., requests_simulated: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class ResidencyReport(_message.Message):
    __slots__ = ("layers", "resident_bytes", "stage2_tokens_per_s", "gain_share")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGE2_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GAIN_SHARE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    resident_bytes: int
    stage2_tokens_per_s: float
    gain_share: float
    def __init__(self, layers: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., stage2_tokens_per_s: _Optional[float] = ..., gain_share: _Optional[float] = ...) -> None: ...

class SimulateRequest(_message.Message):
    __slots__ = ("case", "simulation")
    CASE_FIELD_NUMBER: _ClassVar[int]
    SIMULATION_FIELD_NUMBER: _ClassVar[int]
    case: Case
    simulation: SimulationDetail
    def __init__(self, case: _Optional[_Union[Case, _Mapping]] = ..., simulation: _Optional[_Union[SimulationDetail, str]] = ...) -> None: ...

class SimulateResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: SimulationProgress
    report: SimulationReport
    def __init__(self, progress: _Optional[_Union[SimulationProgress, _Mapping]] = ..., report: _Optional[_Union[SimulationReport, _Mapping]] = ...) -> None: ...

class SimulationProgress(_message.Message):
    __slots__ = ("steps", "simulated_s", "requests_finished", "requests", "tokens_per_s", "kv_use_share")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_USE_SHARE_FIELD_NUMBER: _ClassVar[int]
    steps: int
    simulated_s: float
    requests_finished: int
    requests: int
    tokens_per_s: float
    kv_use_share: float
    def __init__(self, steps: _Optional[int] = ..., simulated_s: _Optional[float] = ..., requests_finished: _Optional[int] = ..., requests: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., kv_use_share: _Optional[float] = ...) -> None: ...

class SizeRequest(_message.Message):
    __slots__ = ("case", "tokens_per_s", "generated_tokens_per_s", "within_s", "by", "no_machines")
    CASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    NO_MACHINES_FIELD_NUMBER: _ClassVar[int]
    case: Case
    tokens_per_s: float
    generated_tokens_per_s: float
    within_s: float
    by: SizingFigure
    no_machines: bool
    def __init__(self, case: _Optional[_Union[Case, _Mapping]] = ..., tokens_per_s: _Optional[float] = ..., generated_tokens_per_s: _Optional[float] = ..., within_s: _Optional[float] = ..., by: _Optional[_Union[SizingFigure, str]] = ..., no_machines: _Optional[bool] = ...) -> None: ...

class SizeResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: SizeReport
    def __init__(self, report: _Optional[_Union[SizeReport, _Mapping]] = ...) -> None: ...

class SizeReport(_message.Message):
    __slots__ = ("schema", "figure", "target_tokens_per_s", "present_tokens_per_s", "present_limit", "reached", "options", "machines", "changes")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    FIGURE_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRESENT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRESENT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MACHINES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    schema: str
    figure: str
    target_tokens_per_s: float
    present_tokens_per_s: float
    present_limit: str
    reached: bool
    options: _containers.RepeatedCompositeFieldContainer[SizeOption]
    machines: _containers.RepeatedCompositeFieldContainer[MachineOption]
    changes: _containers.RepeatedCompositeFieldContainer[ChangeGain]
    def __init__(self, schema: _Optional[str] = ..., figure: _Optional[str] = ..., target_tokens_per_s: _Optional[float] = ..., present_tokens_per_s: _Optional[float] = ..., present_limit: _Optional[str] = ..., reached: _Optional[bool] = ..., options: _Optional[_Iterable[_Union[SizeOption, _Mapping]]] = ..., machines: _Optional[_Iterable[_Union[MachineOption, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[ChangeGain, _Mapping]]] = ...) -> None: ...

class SizeOption(_message.Message):
    __slots__ = ("resource", "field", "present", "least", "tokens_per_s", "why")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    resource: str
    field: str
    present: float
    least: float
    tokens_per_s: float
    why: str
    def __init__(self, resource: _Optional[str] = ..., field: _Optional[str] = ..., present: _Optional[float] = ..., least: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class MachineOption(_message.Message):
    __slots__ = ("hardware", "gpu_count", "link_h2d_bytes_per_s", "least_host_memory_bytes", "tokens_per_s", "why")
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    LINK_H2D_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEAST_HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    hardware: str
    gpu_count: int
    link_h2d_bytes_per_s: float
    least_host_memory_bytes: float
    tokens_per_s: float
    why: str
    def __init__(self, hardware: _Optional[str] = ..., gpu_count: _Optional[int] = ..., link_h2d_bytes_per_s: _Optional[float] = ..., least_host_memory_bytes: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class ChangeGain(_message.Message):
    __slots__ = ("change", "tokens_per_s", "gain_share", "why")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GAIN_SHARE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    change: str
    tokens_per_s: float
    gain_share: float
    why: str
    def __init__(self, change: _Optional[str] = ..., tokens_per_s: _Optional[float] = ..., gain_share: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class SweepRequest(_message.Message):
    __slots__ = ("base", "axes", "simulation")
    BASE_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    SIMULATION_FIELD_NUMBER: _ClassVar[int]
    base: Case
    axes: _containers.RepeatedCompositeFieldContainer[SweepAxis]
    simulation: SimulationDetail
    def __init__(self, base: _Optional[_Union[Case, _Mapping]] = ..., axes: _Optional[_Iterable[_Union[SweepAxis, _Mapping]]] = ..., simulation: _Optional[_Union[SimulationDetail, str]] = ...) -> None: ...

class SweepAxis(_message.Message):
    __slots__ = ("input", "values")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    input: str
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, input: _Optional[str] = ..., values: _Optional[_Iterable[str]] = ...) -> None: ...

class SweepResponse(_message.Message):
    __slots__ = ("columns", "rows")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    rows: _containers.RepeatedCompositeFieldContainer[SweepRow]
    def __init__(self, columns: _Optional[_Iterable[str]] = ..., rows: _Optional[_Iterable[_Union[SweepRow, _Mapping]]] = ...) -> None: ...

class SweepRow(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelEntry]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelEntry, _Mapping]]] = ...) -> None: ...

class ModelEntry(_message.Message):
    __slots__ = ("model", "weights_bytes", "kv_bytes_per_token", "max_context_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: ModelReport
    weights_bytes: int
    kv_bytes_per_token: int
    max_context_tokens: int
    def __init__(self, model: _Optional[_Union[ModelReport, _Mapping]] = ..., weights_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...

class ListHardwareRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListHardwareResponse(_message.Message):
    __slots__ = ("machines", "gpus", "hosts")
    MACHINES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    machines: _containers.RepeatedCompositeFieldContainer[HardwareReport]
    gpus: _containers.RepeatedScalarFieldContainer[str]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, machines: _Optional[_Iterable[_Union[HardwareReport, _Mapping]]] = ..., gpus: _Optional[_Iterable[str]] = ..., hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class CalibrateRequest(_message.Message):
    __slots__ = ("hardware_name", "hardware_json", "model_name", "n_layers", "steps")
    HARDWARE_NAME_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    hardware_name: str
    hardware_json: str
    model_name: str
    n_layers: int
    steps: _containers.RepeatedCompositeFieldContainer[ObservedStep]
    def __init__(self, hardware_name: _Optional[str] = ..., hardware_json: _Optional[str] = ..., model_name: _Optional[str] = ..., n_layers: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[ObservedStep, _Mapping]]] = ...) -> None: ...

class ObservedStep(_message.Message):
    __slots__ = ("tokens", "sequences", "kv_read_bytes", "weights_streamed_bytes", "link_s", "device_s", "attention_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_S_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    sequences: int
    kv_read_bytes: int
    weights_streamed_bytes: int
    link_s: float
    device_s: float
    attention_s: float
    def __init__(self, tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., kv_read_bytes: _Optional[int] = ..., weights_streamed_bytes: _Optional[int] = ..., link_s: _Optional[float] = ..., device_s: _Optional[float] = ..., attention_s: _Optional[float] = ...) -> None: ...

class CalibrateResponse(_message.Message):
    __slots__ = ("hardware_json", "fits")
    HARDWARE_JSON_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    hardware_json: str
    fits: _containers.RepeatedCompositeFieldContainer[TermFit]
    def __init__(self, hardware_json: _Optional[str] = ..., fits: _Optional[_Iterable[_Union[TermFit, _Mapping]]] = ...) -> None: ...

class TermFit(_message.Message):
    __slots__ = ("term", "values", "steps", "mean_error_share")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TERM_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ERROR_SHARE_FIELD_NUMBER: _ClassVar[int]
    term: str
    values: _containers.ScalarMap[str, float]
    steps: int
    mean_error_share: float
    def __init__(self, term: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ..., steps: _Optional[int] = ..., mean_error_share: _Optional[float] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("prompt_tokens", "max_tokens", "kv_capacity_tokens", "block_tokens", "waiting_requests", "running_requests", "waiting_tokens", "unfinished_tokens", "max_waiting_requests", "tokens_per_s", "max_context_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    max_tokens: int
    kv_capacity_tokens: int
    block_tokens: int
    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    unfinished_tokens: int
    max_waiting_requests: int
    tokens_per_s: float
    max_context_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., unfinished_tokens: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("admitted", "reason", "retry_after_s", "expected_wait_s", "expected_s")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    reason: str
    retry_after_s: float
    expected_wait_s: float
    expected_s: float
    def __init__(self, admitted: _Optional[bool] = ..., reason: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., expected_wait_s: _Optional[float] = ..., expected_s: _Optional[float] = ...) -> None: ...
