"""The variables that our processes and compose.yaml read: MOE_LENS_ and a name of this list."""

import difflib
from collections.abc import Iterable

PREFIX = "MOE_LENS_"
NAMES = frozenset(
    {
        "ATTENTION_PROCESSES",
        "BASE_IMAGE",
        "BATCH_DIR",
        "CHECKSUMS",
        "CPU_WORKER",
        "CPU_WORKER_LISTEN",
        "DEVICE",
        "DTYPE",
        "EMULATE_DEVICE_MEMORY",
        "EMULATE_LINK_GB_PER_S",
        "GATEWAY_LISTEN",
        "GATEWAY_PORT",
        "GPU_WORKER",
        "GPU_WORKER_LISTEN",
        "GRACE_S",
        "GRAFANA_IMAGE",
        "GRAFANA_PORT",
        "HARDWARE",
        "HUGE_PAGES",
        "IMAGE",
        "ISA",
        "KV",
        "KV_DTYPE",
        "LIFELINE_FD",
        "LISTEN",
        "LOCAL_LISTEN",
        "LOG_LEVEL",
        "MAX_CALLS_PER_TOKEN",
        "MAX_MESSAGE_BYTES",
        "MAX_PROMPT_BYTES",
        "MAX_SEQUENCES",
        "MAX_STEP_TOKENS",
        "MAX_WAITING_REQUESTS",
        "MEASURE",
        "MEMLOCK",
        "METRICS_LISTEN",
        "MODEL",
        "OTEL",
        "PACKET",
        "PEER_CA",
        "PEER_CERTIFICATE",
        "PEER_KEY",
        "PEER_TIMEOUT_S",
        "PIN",
        "PLANNER",
        "PLANNER_LISTEN",
        "PLANNER_PORT",
        "PLAN_AHEAD_STEPS",
        "PREFILL_CHUNK_TOKENS",
        "PROMETHEUS_IMAGE",
        "RESIDENT",
        "SCHEDULE",
        "SERVED_MODEL",
        "SERVER",
        "SHM_DIR",
        "SHM_SIZE",
        "SPIN_US",
        "STEP_LOG",
        "STEP_TIMEOUT_S",
        "THREADS",
        "TLS_CA",
        "TLS_CERTIFICATE",
        "TLS_CLIENT_CA",
        "TLS_KEY",
        "TOKENS",
        "TOKEN_FILE",
        "WORKER_SHM_SIZE",
    }
)


def check_environment(variables: Iterable[str]) -> None:
    """Raise ValueError for a MOE_LENS_ variable that nobody reads, naming the nearest."""
    for variable in sorted(variables):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            raise ValueError(f"unknown variable {variable}{hint}")
