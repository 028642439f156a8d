"""The public service: checks a request, has it admitted, streams what the engine delivers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.common_pb2 import SamplingParams, TokenLogprobs
from moelens.v1.gateway_pb2_grpc import GatewayServicer

from gateway.admission import Admission
from gateway.batch.calls import BatchCalls
from gateway.batch.jobs import BatchJobs
from gateway.engine import Engine
from gateway.forecast import Forecast
from gateway.generation import Generation, Work
from gateway.metrics import Metrics
from gateway.model import ServedModel
from gateway.outputs import Output
from gateway.tracing import NoTracing, RequestTrace, Tracing, texts
from gateway.validation import CheckedRequest, Validator
from protos.calls import Context, caller
from protos.errors import AlreadyExists, Cancelled, ServiceError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger("gateway")

# Requests larger than this are tokenized in a thread, so that the others' streams go on.
SLOW_REQUEST_BYTES = 16_384
INTERACTIVE, BATCH = 1, 0


class Gateway(BatchCalls, GatewayServicer):
    """moelens.v1.Gateway over one engine and one model."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        admission: Admission,
        forecast: Forecast,
        metrics: Metrics,
        batch_directory: Path | None = None,
    ) -> None:
        self.jobs = BatchJobs(batch_directory, OwnBackend(self, model))
        self._model = model
        self._engine = engine
        self._admission = admission
        self._forecast = forecast
        self._metrics = metrics
        self.tracing: Tracing = NoTracing()
        self._running: dict[str, list[Generation]] = {}
        self._started_at = time.monotonic()

    async def Generate(
        self, request: messages.GenerateRequest, context: "Context | None"
    ) -> AsyncIterator[messages.GenerateResponse]:
        """See gateway.proto."""
        metadata = texts(context.invocation_metadata()) if context is not None else ()
        try:
            with self.tracing.request(request, self._model.name, metadata) as trace:
                checked = await self._checked(request)
                trace.checked(checked)
                with self._registered(checked.request_id):
                    async for event in self._generate(checked, trace):
                        trace.sent(event)
                        yield event
        except ServiceError as error:
            self._metrics.failure.labels(code=error.code.name).inc()
            raise

    async def Tokenize(
        self, request: messages.TokenizeRequest, context: Context
    ) -> messages.TokenizeResponse:
        """See gateway.proto."""
        validator = self._validator
        validator.check_model(request.model)
        ids = await _off_the_loop(request.ByteSize(), validator.prompt_ids, request)
        tokens = [self._model.tokenizer.token(token_id) for token_id in ids]
        return messages.TokenizeResponse(token_ids=ids, tokens=tokens)

    async def Detokenize(
        self, request: messages.DetokenizeRequest, context: Context
    ) -> messages.DetokenizeResponse:
        """See gateway.proto."""
        self._validator.check_model(request.model)
        self._validator.check_ids("token_ids", request.token_ids)
        text = await _off_the_loop(
            request.ByteSize(),
            self._model.tokenizer.decode,
            request.token_ids,
            request.keep_special_tokens,
        )
        return messages.DetokenizeResponse(text=text)

    async def Abort(
        self, request: messages.AbortRequest, context: Context
    ) -> messages.AbortResponse:
        """See gateway.proto."""
        generations = self._running.get(request.request_id)
        for generation in generations or ():
            self._engine.cancel(generation)
            generation.fail(Cancelled("the request was aborted", reason="ABORTED_BY_CALLER"))
        return messages.AbortResponse(found=generations is not None)

    async def GetModel(
        self, request: messages.GetModelRequest, context: Context
    ) -> messages.GetModelResponse:
        """See gateway.proto."""
        self._validator.check_model(request.model)
        return self._model.description()

    async def GetLoad(
        self, request: messages.GetLoadRequest, context: Context
    ) -> messages.GetLoadResponse:
        """See gateway.proto."""
        scheduler, metrics = self._engine.scheduler, self._metrics
        tokens_per_s, generated_per_s = metrics.throughput.rates(time.monotonic())
        plan = self._admission.plan
        return messages.GetLoadResponse(
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_used_tokens=scheduler.pool.used_blocks * scheduler.pool.block_tokens,
            kv_capacity_tokens=scheduler.pool.capacity_tokens,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=metrics.prompt_tokens,
            generated_tokens=metrics.generated_tokens,
            tokens_per_s=tokens_per_s,
            generated_tokens_per_s=generated_per_s,
            predicted_tokens_per_s=plan.tokens_per_s,
            predicted_generated_tokens_per_s=plan.generated_tokens_per_s,
            limit=plan.limit,
            queue_wait_s=self._admission.wait_s(self._engine.load()),
            ready=not self._engine.broken,
            recoveries=self._engine.recoveries,
            uptime_s=time.monotonic() - self._started_at,
        )

    @property
    def _validator(self) -> Validator:
        if self._model.validator is None:
            raise Unavailable("the model is still loading", reason="LOADING", retry_after_s=1.0)
        return self._model.validator

    async def _checked(self, request: messages.GenerateRequest) -> CheckedRequest:
        return await _off_the_loop(request.ByteSize(), self._validator.check, request)

    @contextlib.contextmanager
    def _registered(self, request_id: str) -> Iterator[None]:
        """Hold the request's id while it runs."""
        if request_id in self._running:
            raise AlreadyExists(f"{request_id!r} is running", field="request_id")
        structlog.contextvars.bind_contextvars(request_id=request_id)
        self._running[request_id] = []
        try:
            yield
        finally:
            for generation in self._running.pop(request_id):
                self._engine.cancel(generation)

    async def _generate(
        self, request: CheckedRequest, trace: RequestTrace
    ) -> AsyncIterator[messages.GenerateResponse]:
        # The queue's own bound first: under overload the planner need not be asked.
        self._admission.check_room(request, self._engine.load())
        await self._admission.admit(request, self._engine.load(), trace.metadata)
        self._admission.check_room(request, self._engine.load())
        self._forecast.observe(len(request.prompt_ids), request.max_tokens)
        inbox = asyncio.Event()
        generations = self._running[request.request_id]
        for index in range(request.outputs):
            generations.append(self._engine.submit(_work(request, index), inbox))
        outputs = [
            Output(index, request, generation, self._model.tokenizer)
            for index, generation in enumerate(generations)
        ]
        yield self._started(request)
        if request.echo and not request.sampling.HasField("prompt_logprobs"):
            yield self._prompt_report(request, [])
        while not all(output.done for output in outputs):
            await inbox.wait()
            inbox.clear()
            for output in outputs:
                if not output.done:
                    for event in self._events(request, output):
                        yield event
        log.info("request done", prompt_tokens=len(request.prompt_ids), outputs=len(outputs))

    def _events(
        self, request: CheckedRequest, output: Output
    ) -> Iterator[messages.GenerateResponse]:
        generation = output.generation
        news = generation.collect()
        if news.prompt_logprobs is not None and output.index == 0:
            yield self._prompt_report(request, news.prompt_logprobs)
        now = time.monotonic()
        yield from output.events(news, now)
        if output.stopped_by_text and news.outcome is None:
            self._engine.cancel(generation)
            self._metrics.finished(generation, "stop", now)

    def _started(self, request: CheckedRequest) -> messages.GenerateResponse:
        started = messages.Started(
            request_id=request.request_id,
            model=self._model.name,
            prompt_tokens=len(request.prompt_ids),
            seed=request.seed,
        )
        return messages.GenerateResponse(started=started)

    def _prompt_report(
        self, request: CheckedRequest, logprobs: list[TokenLogprobs]
    ) -> messages.GenerateResponse:
        text = self._model.tokenizer.decode(request.prompt_ids, request.keep_special_tokens)
        report = messages.PromptReport(text=text, token_ids=request.prompt_ids, logprobs=logprobs)
        return messages.GenerateResponse(prompt=report)


class OwnBackend:
    """Generates for the batches that this server keeps."""

    def __init__(self, gateway: Gateway, model: ServedModel) -> None:
        self._gateway = gateway
        self._model = model

    def generate(
        self, request: messages.GenerateRequest
    ) -> AsyncIterator[messages.GenerateResponse]:
        """Events of one request."""
        return self._gateway.Generate(request, None)

    async def token_text(self, token_id: int) -> str:
        """Text of a single token."""
        return self._model.tokenizer.decode([token_id], keep_special_tokens=True)


def _work(request: CheckedRequest, index: int) -> Work:
    """Output `index` draws with a seed of its own; prompt logprobs are the first one's business."""
    sampling = SamplingParams()
    sampling.CopyFrom(request.sampling)
    sampling.seed = (request.seed + index) % 2**64
    if index:
        sampling.ClearField("prompt_logprobs")
    by = caller.get()
    return Work(
        request.request_id,
        request.prompt_ids,
        request.max_tokens,
        sampling,
        BATCH if request.batch else INTERACTIVE,
        client=by.name,
        # A batch outlives the call that submitted it.
        deadline_s=None if request.batch else by.deadline_s,
    )


async def _off_the_loop(
    size_bytes: int, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
) -> T:
    """Call directly, or in a thread when the request is large enough to take its time."""
    if size_bytes <= SLOW_REQUEST_BYTES:
        return function(*arguments, **keywords)
    return await asyncio.to_thread(function, *arguments, **keywords)
