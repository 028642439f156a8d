"""`moe-lens gateway`: serve the public API."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protos.options import PeerSecurity, ServingSecurity, with_options

if TYPE_CHECKING:
    from gateway.config import GatewayConfig

app = typer.Typer(add_completion=False)


def _option(text: str, variable: str, **more: Any) -> Any:
    return typer.Option(help=text, envvar=f"MOE_LENS_{variable}", **more)


@dataclass(frozen=True)
class GatewayOptions:
    """What bounds the gateway's work and where it keeps and shows it."""

    served_model: Annotated[
        str,
        _option(
            "Name that clients use; by default the directory's.",
            "SERVED_MODEL",
            show_default=False,
        ),
    ] = ""
    max_step_tokens: Annotated[
        int | None,
        _option("Tokens of one step; by default what suits the worker.", "MAX_STEP_TOKENS"),
    ] = None
    prefill_chunk_tokens: Annotated[
        int | None,
        _option(
            "Prompt tokens of one request in one step; by default what a step holds.",
            "PREFILL_CHUNK_TOKENS",
        ),
    ] = None
    plan_ahead_steps: Annotated[
        int, _option("Steps planned and not yet answered.", "PLAN_AHEAD_STEPS")
    ] = 2
    step_timeout_s: Annotated[
        float,
        _option("A worker silent for so long during a step counts as dead.", "STEP_TIMEOUT_S"),
    ] = 120.0
    max_waiting_requests: Annotated[
        int, _option("Length of the queue.", "MAX_WAITING_REQUESTS")
    ] = 4096
    max_prompt_bytes: Annotated[int, _option("Longest text of a prompt.", "MAX_PROMPT_BYTES")] = (
        8 * 2**20
    )
    metrics_listen: Annotated[
        str | None, _option("host:port for Prometheus; by default none.", "METRICS_LISTEN")
    ] = None
    local_listen: Annotated[
        str | None,
        _option(
            "unix:/path without TLS beside --listen, for health checks on this machine.",
            "LOCAL_LISTEN",
        ),
    ] = None
    batch_dir: Annotated[
        Path | None,
        _option("Where submitted batches are kept; by default none are taken.", "BATCH_DIR"),
    ] = None
    step_log: Annotated[
        Path | None, _option("A file for a line of JSON on each executed step.", "STEP_LOG")
    ] = None
    otel: Annotated[
        bool,
        _option("Spans of OpenTelemetry; the OTEL_ variables say whereto (extra otel).", "OTEL"),
    ] = False
    grace_s: Annotated[
        float, _option("For running requests after the first signal.", "GRACE_S")
    ] = 10.0


@app.command("gateway")
@with_options(GatewayOptions, ServingSecurity, PeerSecurity)
def gateway(
    options: GatewayOptions,
    security: ServingSecurity,
    peers: PeerSecurity,
    listen: Annotated[str, _option("unix:/path or host:port", "GATEWAY_LISTEN")],
    planner: Annotated[str, _option("Address of the planner.", "PLANNER")],
    gpu_worker: Annotated[str, _option("Address of the GPU worker.", "GPU_WORKER")],
    model: Annotated[Path, _option("The checkpoint's directory.", "MODEL")],
) -> None:
    """Serve the public API; needs a planner and a GPU worker."""
    from gateway.server import serve_gateway
    from protos.serving import run

    try:
        config = _config(options, security, peers, listen, planner, gpu_worker, model)
        status = run(serve_gateway(config))
    except (OSError, ValueError) as error:
        print(f"moe-lens gateway: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def _config(
    options: GatewayOptions,
    security: ServingSecurity,
    peers: PeerSecurity,
    listen: str,
    planner: str,
    gpu_worker: str,
    model: Path,
) -> "GatewayConfig":
    from gateway.config import GatewayConfig
    from gateway.pacing import EngineConfig
    from gateway.validation import PromptLimits

    return GatewayConfig(
        serving=security.config("gateway", listen, options.grace_s, options.local_listen),
        peer_tls=peers.tls(),
        model=model,
        gpu_worker=gpu_worker,
        planner=planner,
        served_model=options.served_model,
        engine=EngineConfig(
            plan_ahead_steps=options.plan_ahead_steps,
            prefill_chunk_tokens=options.prefill_chunk_tokens,
            max_step_tokens=options.max_step_tokens,
            step_timeout_s=options.step_timeout_s,
        ),
        limits=PromptLimits(options.max_prompt_bytes),
        max_waiting_requests=options.max_waiting_requests,
        metrics_listen=options.metrics_listen,
        batch_dir=options.batch_dir,
        step_log=options.step_log,
        otel=options.otel,
    )
