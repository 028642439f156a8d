"""The variables that our processes read: MOE_LENS_ and a name of this list, nothing else."""

import difflib
from collections.abc import Iterable

PREFIX = "MOE_LENS_"
NAMES = frozenset(
    {
        "ATTENTION_PROCESSES",
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
        "HARDWARE",
        "HUGE_PAGES",
        "ISA",
        "KV",
        "LIFELINE_FD",
        "LISTEN",
        "LOG_LEVEL",
        "MAX_PROMPT_BYTES",
        "MAX_SEQUENCES",
        "MAX_STEP_TOKENS",
        "MAX_WAITING_REQUESTS",
        "METRICS_LISTEN",
        "MODEL",
        "PACKET",
        "PEER_TIMEOUT_S",
        "PIN",
        "PLAN_AHEAD_STEPS",
        "PLANNER",
        "PLANNER_LISTEN",
        "PLANNER_PORT",
        "PREFILL_CHUNK_TOKENS",
        "RESIDENT",
        "SCHEDULE",
        "SERVED_MODEL",
        "SERVER",
        "SHM_DIR",
        "SPIN_US",
        "STEP_TIMEOUT_S",
        "THREADS",
        "TLS_CA",
        "TLS_CERTIFICATE",
        "TLS_CLIENT_CA",
        "TLS_KEY",
        "TOKEN",
        "TOKENS_FILE",
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
