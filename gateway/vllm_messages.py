"""Requests of `vllm.grpc.engine` as ours, and our events as its responses."""

from collections.abc import Sequence

from moelens.v1 import gateway_pb2 as ours
from moelens.v1.common_pb2 import SamplingParams, TokenLogprobs
from smg_grpc_proto.generated import vllm_engine_pb2 as theirs

from protos.errors import InvalidArgument

FINISH_REASONS = {ours.FINISH_REASON_STOP: "stop", ours.FINISH_REASON_LENGTH: "length"}


def translated(request: theirs.GenerateRequest) -> ours.GenerateRequest:
    """Their request as ours. InvalidArgument names what this server cannot do."""
    _check_supported(request)
    params = request.sampling_params
    message = ours.GenerateRequest(
        request_id=request.request_id,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        keep_special_tokens=not params.skip_special_tokens,
        sampling=_sampling(params),
    )
    if params.n:
        message.n = params.n
    if params.HasField("max_tokens"):
        message.max_tokens = params.max_tokens
    if request.WhichOneof("input") == "tokenized":
        message.token_ids.ids.extend(request.tokenized.input_ids)
    else:
        message.text = request.text
    return message


def _check_supported(request: theirs.GenerateRequest) -> None:
    params = request.sampling_params
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        field = f"sampling_params.{constraint}"
        raise InvalidArgument("constrained output is not supported", field=field)
    if params.HasField("truncate_prompt_tokens"):
        raise InvalidArgument("is not supported", field="sampling_params.truncate_prompt_tokens")
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        raise InvalidArgument("this server takes text only", field="mm_inputs")
    if request.HasField("kv_transfer_params") or request.kv_transfer_params_json:
        raise InvalidArgument("KV transfer is not supported", field="kv_transfer_params")
    if request.data_parallel_rank > 0:
        raise InvalidArgument("there is one rank, 0", field="data_parallel_rank")


def _sampling(params: theirs.SamplingParams) -> SamplingParams:
    """Where their fields have no presence, 0 means not given."""
    sampling = SamplingParams(
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    if params.top_p:
        sampling.top_p = params.top_p
    if params.repetition_penalty:
        sampling.repetition_penalty = params.repetition_penalty
    if params.HasField("seed"):
        sampling.seed = params.seed % 2**64
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            count = getattr(params, name)
            if count < 0:
                raise InvalidArgument(
                    "is negative; expected 0 or more", field=f"sampling_params.{name}"
                )
            setattr(sampling, name, count)
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise InvalidArgument(
                f"has the id {token_id}; expected 0 or more", field="sampling_params.logit_bias"
            )
        sampling.logit_bias[token_id] = bias
    return sampling


class Answer:
    """Turns our events into their messages."""

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        self._prompt_tokens = 0
        self._prompt: theirs.InputLogProbs | None = None
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}

    def take(self, event: ours.GenerateResponse) -> Sequence[theirs.GenerateResponse]:
        """The messages that follow from one event."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._prompt_tokens = event.started.prompt_tokens
        elif kind == "prompt":
            self._prompt = _input_logprobs(event.prompt)
        elif kind == "tokens":
            return self._tokens(event.tokens)
        elif kind == "finished":
            return [self._complete(event.finished)]
        return []

    def _tokens(self, tokens: ours.Tokens) -> Sequence[theirs.GenerateResponse]:
        ids = self._ids.setdefault(tokens.index, [])
        ids.extend(tokens.token_ids)
        self._logprobs.setdefault(tokens.index, []).extend(tokens.logprobs)
        if not self._stream or not tokens.token_ids:
            return []
        first = len(ids) == len(tokens.token_ids)
        chunk = theirs.GenerateStreamChunk(
            index=tokens.index,
            token_ids=tokens.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(ids),
            output_logprobs=_output_logprobs(tokens.logprobs),
            input_logprobs=self._prompt if first else None,
        )
        return [theirs.GenerateResponse(chunk=chunk)]

    def _complete(self, finished: ours.Finished) -> theirs.GenerateResponse:
        complete = theirs.GenerateComplete(
            index=finished.index,
            output_ids=self._ids.get(finished.index, []),
            finish_reason=FINISH_REASONS[finished.reason],
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.generated_tokens,
            output_logprobs=_output_logprobs(self._logprobs.get(finished.index, [])),
            input_logprobs=self._prompt,
        )
        if finished.WhichOneof("matched") == "stop":
            complete.matched_stop_str = finished.stop
        elif finished.WhichOneof("matched") == "stop_token_id":
            complete.matched_token_id = finished.stop_token_id
        return theirs.GenerateResponse(complete=complete)


def _output_logprobs(entries: Sequence[TokenLogprobs]) -> theirs.OutputLogProbs | None:
    if not entries:
        return None
    return theirs.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries],
    )


def _input_logprobs(report: ours.PromptReport) -> theirs.InputLogProbs | None:
    """The first prompt token has no log-probability."""
    if not report.logprobs:
        return None
    values = [theirs.InputTokenLogProb()]
    values += [theirs.InputTokenLogProb(value=entry.logprob) for entry in report.logprobs]
    return theirs.InputLogProbs(
        token_logprobs=values,
        token_ids=report.token_ids,
        top_logprobs=[theirs.TopLogProbs(), *(_top(entry) for entry in report.logprobs)],
    )


def _top(entry: TokenLogprobs) -> theirs.TopLogProbs:
    return theirs.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_token_ids)
