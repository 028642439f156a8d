"""`moe-lens call`: any RPC of any service, known by its reflection alone."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False)


@app.command("call")
def call(
    address: Annotated[str, typer.Argument(help="unix:/path or host:port")],
    method: Annotated[str, typer.Argument(help="list, or package.Service/Method")],
    message: Annotated[str, typer.Argument(help="The request as JSON; - reads it.")] = "{}",
    timeout_s: Annotated[float, typer.Option(help="Deadline of the call.")] = 60.0,
    token_file: Annotated[
        Path | None, typer.Option(help="File with a bearer token.", envvar="MOE_LENS_TOKEN_FILE")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM of the server's authority.", envvar="MOE_LENS_TLS_CA")
    ] = None,
) -> None:
    """Call an RPC; prints each response as JSON. Exit status 1 when it fails."""
    import grpc
    from moelens.client import Security

    token = token_file.read_text().strip() if token_file else None
    security = Security(ca=tls_ca, token=token)
    text = sys.stdin.read() if message == "-" else message
    try:
        with _channel(address, security.credentials) as channel:
            if method == "list":
                print("\n".join(sorted(_reflection(channel).get_services())))
                return
            _call(channel, method, text, timeout_s, security.metadata)
    except grpc.RpcError as error:
        _print_failure(error)
        raise typer.Exit(1) from error
    except (ValueError, KeyError) as error:
        print(f"moe-lens call: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _channel(address: str, credentials: Any) -> Any:
    import grpc

    from protos.transport import check_address

    check_address(address)
    if credentials is not None:
        return grpc.secure_channel(address, credentials)
    return grpc.insecure_channel(address)


def _reflection(channel: Any) -> Any:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    return ProtoReflectionDescriptorDatabase(channel)


def _call(
    channel: Any, method: str, text: str, timeout_s: float, metadata: tuple[tuple[str, str], ...]
) -> None:
    """Raises KeyError for an unknown method, ValueError for a request that is none."""
    from google.protobuf import json_format, message_factory
    from google.protobuf.descriptor_pool import DescriptorPool

    service_name, _, method_name = method.rpartition("/")
    service = DescriptorPool(_reflection(channel)).FindServiceByName(service_name)
    found = service.FindMethodByName(method_name)
    if found is None:
        raise ValueError(f"{service_name} has no method {method_name!r}")
    request_class = message_factory.GetMessageClass(found.input_type)
    response_class = message_factory.GetMessageClass(found.output_type)
    try:
        request = json_format.Parse(text, request_class())
    except json_format.ParseError as error:
        raise ValueError(f"the request is no {found.input_type.full_name}: {error}") from error
    kind = _kind(found)
    rpc = getattr(channel, kind)(
        f"/{service_name}/{method_name}",
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )
    argument = iter([request]) if kind.startswith("stream") else request
    answer = rpc(argument, timeout=timeout_s, metadata=metadata)
    for response in answer if kind.endswith("stream") else [answer]:
        print(json_format.MessageToJson(response, indent=None), flush=True)


def _kind(method: Any) -> str:
    """Which of the channel's four kinds of call a method is."""
    sides = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if streaming else "unary" for streaming in sides)


def _print_failure(error: Any) -> None:
    from protos.errors import decode_failure

    failure = decode_failure(error)
    facts = {
        "code": failure.code.name,
        "message": failure.message,
        "field": failure.field,
        "reason": failure.reason,
        "retry_after_s": failure.retry_after_s,
    }
    print(json.dumps({name: value for name, value in facts.items() if value}), file=sys.stderr)
