"""A client made of the published .proto files and grpcio alone; run in an environment of its own.

Usage: plain_client.py ADDRESS STUBS. Prints one line of JSON for each flow that it completed.
"""

import json
import sys
import threading
import time

import grpc

address, stubs = sys.argv[1:3]
sys.path.insert(0, stubs)

from google.rpc import error_details_pb2, status_pb2  # noqa: E402
from moelens.v1 import gateway_pb2 as pb  # noqa: E402
from moelens.v1.gateway_pb2_grpc import GatewayStub  # noqa: E402

channel = grpc.insecure_channel(address)
gateway = GatewayStub(channel)


def report(flow: str, **facts: object) -> None:
    print(json.dumps({"flow": flow, **facts}), flush=True)


def details(error: grpc.RpcError) -> list[object]:
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    found = []
    for detail in status_pb2.Status.FromString(packed).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo):
            message = kind()
            if detail.Unpack(message):
                found.append(message)
    return found


def request(**fields: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(text="ROMEO:", max_tokens=24, **fields)
    message.sampling.temperature = 0
    message.sampling.ignore_eos = True
    return message


def unary() -> None:
    model = gateway.GetModel(pb.GetModelRequest())
    ids = gateway.Tokenize(pb.TokenizeRequest(text="ROMEO:")).token_ids
    text = gateway.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text
    load = gateway.GetLoad(pb.GetLoadRequest())
    report("unary", model=model.model, text=text, ready=load.ready)


def streaming() -> None:
    events = list(gateway.Generate(request()))
    kinds = [event.WhichOneof("event") for event in events]
    ids = [i for event in events for i in event.tokens.token_ids]
    report("streaming", first=kinds[0], last=kinds[-1], pieces=len(kinds) - 2, tokens=len(ids))


def cancel() -> None:
    message = request(request_id="to-cancel")
    message.max_tokens = 400
    call = gateway.Generate(message)
    next(call)
    call.cancel()
    try:
        list(call)
    except grpc.RpcError as error:
        report("cancel", code=error.code().name, free_after_s=until_free())


def abort() -> None:
    message = request(request_id="to-abort")
    message.max_tokens = 400
    call = gateway.Generate(message)
    next(call)
    found = gateway.Abort(pb.AbortRequest(request_id="to-abort")).found
    again = gateway.Abort(pb.AbortRequest(request_id="unknown")).found
    try:
        list(call)
    except grpc.RpcError as error:
        report("abort", code=error.code().name, found=found, again=again)


def deadline() -> None:
    message = request()
    message.max_tokens = 400
    try:
        list(gateway.Generate(message, timeout=0.05))
    except grpc.RpcError as error:
        report("deadline", code=error.code().name, free_after_s=until_free())


def until_free() -> float:
    """Seconds until no KV is held."""
    start = time.monotonic()
    while gateway.GetLoad(pb.GetLoadRequest()).kv_used_tokens:
        time.sleep(0.005)
    return time.monotonic() - start


def error_detail() -> None:
    message = request()
    message.sampling.top_p = 3.0
    try:
        list(gateway.Generate(message))
    except grpc.RpcError as error:
        bad, info = {}, {}
        for detail in details(error):
            if isinstance(detail, error_details_pb2.BadRequest):
                bad = {"field": detail.field_violations[0].field}
            elif isinstance(detail, error_details_pb2.ErrorInfo):
                info = {"reason": detail.reason}
        report("error_detail", code=error.code().name, **bad, **info)


def batch() -> None:
    rows = [
        {"custom_id": f"r{i}", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 4}}
        for i in range(8)
    ]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in [*rows, {"custom_id": "bad"}])
    pieces = [pb.SubmitBatchRequest(jsonl=data[at : at + 100]) for at in range(0, len(data), 100)]
    batch_id = gateway.SubmitBatch(iter(pieces)).progress.batch_id
    records, last = [], None
    for event in gateway.WatchBatch(pb.WatchBatchRequest(batch_id=batch_id, records=True)):
        if event.WhichOneof("event") == "record_json":
            records.append(json.loads(event.record_json))
        else:
            last = event.progress
    assert last is not None
    answered = sorted(record["custom_id"] for record in records if record["response"])
    state = gateway.GetBatch(pb.GetBatchRequest(batch_id=batch_id)).progress.state
    report("batch", answered=answered, failed=last.failed_rows, state=pb.BatchState.Name(state))


def cancel_batch() -> None:
    row = {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 900}}
    rows = b"".join(json.dumps({**row, "custom_id": f"r{i}"}).encode() + b"\n" for i in range(64))
    submitted = gateway.SubmitBatch(iter([pb.SubmitBatchRequest(batch_id="mine", jsonl=rows)]))
    progress = gateway.CancelBatch(pb.CancelBatchRequest(batch_id="mine")).progress
    report(
        "cancel_batch",
        submitted=submitted.progress.batch_id,
        state=pb.BatchState.Name(progress.state),
        free_after_s=until_free(),
    )


watchdog = threading.Timer(100, lambda: sys.exit("the flows hang"))
watchdog.daemon = True
watchdog.start()
for flow in (unary, streaming, cancel, abort, deadline, error_detail, batch, cancel_batch):
    flow()
