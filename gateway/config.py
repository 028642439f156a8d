"""How a gateway runs; every value comes from a flag of `moe-lens gateway` or its variable."""

from dataclasses import dataclass, field
from pathlib import Path

from gateway.pacing import EngineConfig
from gateway.validation import PromptLimits
from protos.serving import ClientTls, ServingConfig


@dataclass(frozen=True)
class GatewayConfig:
    """Addresses, the model, and what bounds the work."""

    serving: ServingConfig
    model: Path
    gpu_worker: str
    planner: str
    peer_tls: ClientTls | None = None  # towards planner and GPU worker, where they are on TCP
    served_model: str = ""  # the name clients use; empty: the directory's
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: PromptLimits = field(default_factory=PromptLimits)
    max_waiting_requests: int = 4096
    metrics_listen: str | None = None  # host:port of the Prometheus endpoint
    step_log: Path | None = None  # a line of JSON for each executed step
    batch_dir: Path | None = None  # where submitted batches are kept
    otel: bool = False  # spans of OpenTelemetry, as the OTEL_ variables say

    def __post_init__(self) -> None:
        if self.max_waiting_requests < 1:
            raise ValueError(f"max_waiting_requests is {self.max_waiting_requests}; expected 1+")
