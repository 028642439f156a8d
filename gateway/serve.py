"""`moe-lens gateway`: serve the public API."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from protos.options import PeerSecurity, ServingSecurity, with_options

app = typer.Typer(add_completion=False)


@app.command("gateway")
@with_options(ServingSecurity, PeerSecurity)
def gateway(
    security: ServingSecurity,
    peers: PeerSecurity,
    listen: Annotated[
        str, typer.Option(help="unix:/path or host:port", envvar="MOE_LENS_GATEWAY_LISTEN")
    ],
    planner: Annotated[
        str, typer.Option(help="Address of the planner.", envvar="MOE_LENS_PLANNER")
    ],
    gpu_worker: Annotated[
        str, typer.Option(help="Address of the GPU worker.", envvar="MOE_LENS_GPU_WORKER")
    ],
    model: Annotated[
        Path, typer.Option(help="The checkpoint's directory.", envvar="MOE_LENS_MODEL")
    ],
    served_model: Annotated[
        str,
        typer.Option(
            help="Name that clients use; by default the directory's.",
            envvar="MOE_LENS_SERVED_MODEL",
            show_default=False,
        ),
    ] = "",
    max_step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one step; by default what suits the worker.",
            envvar="MOE_LENS_MAX_STEP_TOKENS",
        ),
    ] = None,
    prefill_chunk_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens of one request in one step; by default what a step holds.",
            envvar="MOE_LENS_PREFILL_CHUNK_TOKENS",
        ),
    ] = None,
    plan_ahead_steps: Annotated[
        int,
        typer.Option(
            help="Steps planned and not yet answered.", envvar="MOE_LENS_PLAN_AHEAD_STEPS"
        ),
    ] = 2,
    step_timeout_s: Annotated[
        float,
        typer.Option(
            help="A worker silent for so long during a step counts as dead.",
            envvar="MOE_LENS_STEP_TIMEOUT_S",
        ),
    ] = 120.0,
    max_waiting_requests: Annotated[
        int, typer.Option(help="Length of the queue.", envvar="MOE_LENS_MAX_WAITING_REQUESTS")
    ] = 4096,
    max_prompt_bytes: Annotated[
        int,
        typer.Option(help="Longest text of a prompt.", envvar="MOE_LENS_MAX_PROMPT_BYTES"),
    ] = 8 * 2**20,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            help="host:port for Prometheus; by default none.", envvar="MOE_LENS_METRICS_LISTEN"
        ),
    ] = None,
    local_listen: Annotated[
        str | None,
        typer.Option(
            help="unix:/path without TLS beside --listen, for health checks on this machine.",
            envvar="MOE_LENS_LOCAL_LISTEN",
        ),
    ] = None,
    batch_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where submitted batches are kept; by default none are taken.",
            envvar="MOE_LENS_BATCH_DIR",
        ),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option(
            help="For running requests after the first signal.", envvar="MOE_LENS_GRACE_S"
        ),
    ] = 10.0,
) -> None:
    """Serve the public API; needs a planner and a GPU worker."""
    from gateway.config import GatewayConfig
    from gateway.engine import EngineConfig
    from gateway.server import serve_gateway
    from gateway.validation import PromptLimits
    from protos.serving import run

    try:
        config = GatewayConfig(
            serving=security.config("gateway", listen, grace_s, local_listen),
            peer_tls=peers.tls(),
            model=model,
            gpu_worker=gpu_worker,
            planner=planner,
            served_model=served_model,
            engine=EngineConfig(
                plan_ahead_steps=plan_ahead_steps,
                prefill_chunk_tokens=prefill_chunk_tokens,
                max_step_tokens=max_step_tokens,
                step_timeout_s=step_timeout_s,
            ),
            limits=PromptLimits(max_prompt_bytes),
            max_waiting_requests=max_waiting_requests,
            metrics_listen=metrics_listen,
            batch_dir=batch_dir,
        )
        status = run(serve_gateway(config))
    except (OSError, ValueError) as error:
        print(f"moe-lens gateway: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    raise typer.Exit(status)
