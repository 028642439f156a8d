"""What a client sees: events, options, and a clear refusal for everything that is wrong."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.common_pb2 import SamplingParams

from gateway.pacing import EngineConfig
from gateway.tokenizer import Tokenizer
from gateway.validation import PromptLimits
from protos.errors import Failure, decode_failure
from tests.gateway.conftest import House, MakeHouse
from tests.gateway.fakes import VOCABULARY, FakeWorker, continuation

CODE = grpc.StatusCode


def request(**fields: object) -> messages.GenerateRequest:
    """A good request, changed by `fields`."""
    fields.setdefault("token_ids", messages.TokenIds(ids=[5, 6, 7]))
    fields.setdefault("max_tokens", 4)
    return messages.GenerateRequest(**fields)  # type: ignore[arg-type]


def sampling(**fields: object) -> messages.GenerateRequest:
    return request(sampling=SamplingParams(**fields))  # type: ignore[arg-type]


def text(value: str, **fields: object) -> messages.GenerateRequest:
    return messages.GenerateRequest(text=value, max_tokens=4, **fields)  # type: ignore[arg-type]


NAN = float("nan")
BAD: list[tuple[messages.GenerateRequest, grpc.StatusCode, str]] = [
    (messages.GenerateRequest(max_tokens=3), CODE.INVALID_ARGUMENT, "prompt"),
    (text(""), CODE.INVALID_ARGUMENT, "text"),
    (request(token_ids=messages.TokenIds()), CODE.INVALID_ARGUMENT, "token_ids"),
    (
        request(token_ids=messages.TokenIds(ids=[5, VOCABULARY])),
        CODE.INVALID_ARGUMENT,
        "token_ids.ids",
    ),
    (
        request(token_ids=messages.TokenIds(ids=[2**32 - 1])),
        CODE.INVALID_ARGUMENT,
        "token_ids.ids",
    ),
    (request(token_ids=messages.TokenIds(ids=[5] * 2048)), CODE.INVALID_ARGUMENT, "token_ids"),
    (request(max_tokens=0), CODE.INVALID_ARGUMENT, "max_tokens"),
    (request(max_tokens=2046), CODE.INVALID_ARGUMENT, "max_tokens"),
    (request(max_tokens=2**32 - 1), CODE.INVALID_ARGUMENT, "max_tokens"),
    (request(model="gpt-5"), CODE.NOT_FOUND, "model"),
    (request(n=0), CODE.INVALID_ARGUMENT, "n"),
    (request(n=65), CODE.INVALID_ARGUMENT, "n"),
    (request(priority=9), CODE.INVALID_ARGUMENT, "priority"),
    (request(request_id="x" * 300), CODE.INVALID_ARGUMENT, "request_id"),
    (request(stop=["a"] * 17), CODE.INVALID_ARGUMENT, "stop"),
    (request(stop=[""]), CODE.INVALID_ARGUMENT, "stop"),
    (request(stop=["x" * 2000]), CODE.INVALID_ARGUMENT, "stop"),
    (text("word " * 200_000), CODE.INVALID_ARGUMENT, "text"),
    (text("a" * 2_000_000), CODE.RESOURCE_EXHAUSTED, "text"),
    (sampling(temperature=NAN), CODE.INVALID_ARGUMENT, "sampling.temperature"),
    (sampling(temperature=-0.1), CODE.INVALID_ARGUMENT, "sampling.temperature"),
    (sampling(temperature=float("inf")), CODE.INVALID_ARGUMENT, "sampling.temperature"),
    (sampling(top_p=0.0), CODE.INVALID_ARGUMENT, "sampling.top_p"),
    (sampling(top_p=1.01), CODE.INVALID_ARGUMENT, "sampling.top_p"),
    (sampling(top_p=NAN), CODE.INVALID_ARGUMENT, "sampling.top_p"),
    (sampling(min_p=-1.0), CODE.INVALID_ARGUMENT, "sampling.min_p"),
    (sampling(min_p=NAN), CODE.INVALID_ARGUMENT, "sampling.min_p"),
    (sampling(frequency_penalty=2.5), CODE.INVALID_ARGUMENT, "sampling.frequency_penalty"),
    (sampling(presence_penalty=NAN), CODE.INVALID_ARGUMENT, "sampling.presence_penalty"),
    (sampling(repetition_penalty=0.0), CODE.INVALID_ARGUMENT, "sampling.repetition_penalty"),
    (sampling(repetition_penalty=NAN), CODE.INVALID_ARGUMENT, "sampling.repetition_penalty"),
    (sampling(logprobs=65), CODE.INVALID_ARGUMENT, "sampling.logprobs"),
    (sampling(prompt_logprobs=1000), CODE.INVALID_ARGUMENT, "sampling.prompt_logprobs"),
    (sampling(stop_token_ids=[VOCABULARY]), CODE.INVALID_ARGUMENT, "sampling.stop_token_ids"),
    (sampling(stop_token_ids=[5] * 257), CODE.INVALID_ARGUMENT, "sampling.stop_token_ids"),
    (sampling(logit_bias={VOCABULARY: 1.0}), CODE.INVALID_ARGUMENT, "sampling.logit_bias"),
    (sampling(logit_bias={5: NAN}), CODE.INVALID_ARGUMENT, "sampling.logit_bias"),
    (sampling(logit_bias={5: 101.0}), CODE.INVALID_ARGUMENT, "sampling.logit_bias"),
    (sampling(min_tokens=5), CODE.INVALID_ARGUMENT, "sampling.min_tokens"),
    (messages.GenerateRequest(chat=messages.Chat()), CODE.INVALID_ARGUMENT, "chat"),
    (
        messages.GenerateRequest(
            chat=messages.Chat(
                messages=[messages.ChatMessage(role="user", content="x")],
                template_arguments_json="[1]",
            )
        ),
        CODE.INVALID_ARGUMENT,
        "chat.template_arguments_json",
    ),
    (
        messages.GenerateRequest(
            chat=messages.Chat(
                messages=[messages.ChatMessage(role="user", content="x")],
                template_arguments_json="[" * 100_000,
            )
        ),
        CODE.INVALID_ARGUMENT,
        "chat.template_arguments_json",
    ),
]


async def failure_of(call: Awaitable[object]) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return decode_failure(caught.value)


def run(house: MakeHouse, main: Callable[[House], Awaitable[None]], **settings: object) -> None:
    """Run `main` in a house and look afterwards that nothing is left."""

    async def inside() -> None:
        async with house(**settings) as h:
            await main(h)
            await asyncio.sleep(0.05)
            h.check_all_free()

    asyncio.run(inside())


def test_bad_requests_are_refused_by_field_while_good_ones_run(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        good = [[10 + i, 20 + i] for i in range(8)]
        running = [asyncio.ensure_future(h.tokens(prompt, 200)) for prompt in good]
        for bad, code, field in BAD:
            failure = await failure_of(h.collect(bad))
            assert (failure.code, failure.field) == (code, field), failure
            assert failure.message.startswith(f"{field}: ")
        for prompt, tokens in zip(good, running, strict=True):
            assert await tokens == continuation(prompt, 200)

    limits = PromptLimits(max_text_bytes=1_500_000)
    run(house, main, worker=FakeWorker(step_s=0.002), limits=limits)


def test_events_come_in_order_and_add_up(house: MakeHouse, demo_model: object) -> None:
    async def main(h: House) -> None:
        answer = await h.collect(text("Who's there?", sampling=SamplingParams(seed=9)))
        kinds = [event.WhichOneof("event") for event in answer.events]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) == {"tokens"}
        (started,) = answer.of("started")
        tokenizer = Tokenizer.from_directory(demo_model)  # type: ignore[arg-type]
        prompt = tokenizer.encode("Who's there?")
        assert (started.prompt_tokens, started.seed) == (len(prompt), 9)
        assert answer.token_ids() == continuation(prompt, 4, seed=9)
        assert answer.text() == tokenizer.decode(answer.token_ids())
        finished = answer.finished()
        assert finished.reason == messages.FINISH_REASON_LENGTH
        assert (finished.prompt_tokens, finished.generated_tokens) == (len(prompt), 4)
        assert 0 <= finished.queue_s <= finished.first_token_s <= finished.total_s

    run(house, main)


def test_several_outputs_have_seeds_of_their_own(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        answer = await h.collect(request(n=5, sampling=SamplingParams(seed=2**64 - 2)))
        for index in range(5):
            seed = (2**64 - 2 + index) % 2**64
            assert answer.token_ids(index) == continuation([5, 6, 7], 4, seed=seed)
            assert answer.finished(index).generated_tokens == 4

    run(house, main)


def test_echo_and_logprobs_are_reported(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        answer = await h.collect(request(echo=True, sampling=SamplingParams(seed=1, logprobs=0)))
        (prompt,) = answer.of("prompt")
        assert list(prompt.token_ids) == [5, 6, 7]
        assert prompt.text
        entries = [entry for tokens in answer.of("tokens") for entry in tokens.logprobs]
        assert [entry.token_id for entry in entries] == answer.token_ids()

    run(house, main)


def test_stop_tokens_end_the_output_and_say_so(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        tokens = continuation([5, 6, 7], 10, seed=1)
        ending = SamplingParams(seed=1, stop_token_ids=[tokens[3]])
        answer = await h.collect(request(max_tokens=10, sampling=ending))
        assert answer.token_ids() == tokens[:4]
        assert answer.finished().reason == messages.FINISH_REASON_STOP
        assert answer.finished().stop_token_id == tokens[3]
        kept = await h.collect(request(max_tokens=10, sampling=ending, include_stop=True))
        assert kept.text().startswith(answer.text())
        assert len(kept.text()) > len(answer.text())
        ending.min_tokens = 5
        longer = await h.collect(request(max_tokens=10, sampling=ending))
        assert longer.token_ids() == tokens

    run(house, main)


def test_stop_strings_that_straddle_tokens_end_the_output(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        whole = await h.collect(request(max_tokens=40, sampling=SamplingParams(seed=3)))
        middle = len(whole.text()) // 2
        stop = whole.text()[middle : middle + 7]  # a token of the demo is shorter
        cut = await h.collect(
            request(max_tokens=40, sampling=SamplingParams(seed=3), stop=["never!!", stop])
        )
        assert cut.text() == whole.text()[: whole.text().index(stop)]
        assert cut.finished().stop == stop
        assert cut.finished().reason == messages.FINISH_REASON_STOP
        assert cut.finished().generated_tokens == len(cut.token_ids()) < 40
        kept = await h.collect(
            request(max_tokens=40, sampling=SamplingParams(seed=3), stop=[stop], include_stop=True)
        )
        assert kept.text() == cut.text() + stop

    run(house, main)


def test_end_of_sequence_stops_unless_ignored(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        eos = min(h.gateway.model.tokenizer.special.eos_ids)
        answer = await h.collect(request(sampling=SamplingParams(ignore_eos=True)))
        assert len(answer.token_ids()) == 4
        sent = h.gateway.model.validator
        assert sent is not None
        assert eos in sent.check(request()).sampling.stop_token_ids
        assert (
            eos
            not in sent.check(
                request(sampling=SamplingParams(ignore_eos=True))
            ).sampling.stop_token_ids
        )

    run(house, main)


def test_duplicate_id_is_refused_and_the_first_goes_on(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        first = asyncio.ensure_future(
            h.collect(request(request_id="a", max_tokens=300, sampling=SamplingParams(seed=1)))
        )
        await asyncio.sleep(0.1)
        failure = await failure_of(h.collect(request(request_id="a")))
        assert (failure.code, failure.field) == (CODE.ALREADY_EXISTS, "request_id")
        assert (await first).token_ids() == continuation([5, 6, 7], 300, seed=1)
        again = await h.collect(request(request_id="a", sampling=SamplingParams(seed=1)))
        assert again.token_ids() == continuation([5, 6, 7], 4, seed=1)

    run(house, main, worker=FakeWorker(step_s=0.002))


def test_abort_ends_the_stream_and_frees_everything(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        running = asyncio.ensure_future(h.collect(request(request_id="a", max_tokens=2000, n=3)))
        await asyncio.sleep(0.1)
        assert (await h.stub.Abort(messages.AbortRequest(request_id="a"))).found
        assert h.gateway.engine.scheduler.pool.used_blocks == 0
        assert (await failure_of(running)).code == CODE.CANCELLED
        assert not (await h.stub.Abort(messages.AbortRequest(request_id="a"))).found

    run(house, main, worker=FakeWorker(step_s=0.002))


def test_deadline_stops_the_work(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        failure = await failure_of(h.collect(request(max_tokens=2000), timeout=0.3))
        assert failure.code == CODE.DEADLINE_EXCEEDED
        await asyncio.sleep(0.1)
        steps = h.worker.steps
        await asyncio.sleep(0.1)
        assert h.worker.steps == steps

    run(house, main, worker=FakeWorker(step_s=0.002))


def test_full_queue_is_refused_with_a_time_to_retry(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        running = [asyncio.ensure_future(h.tokens([5, i], 400)) for i in range(6)]
        await asyncio.sleep(0.2)
        failure = await failure_of(h.collect(request()))
        assert failure.code == CODE.RESOURCE_EXHAUSTED
        assert failure.retry_after_s is not None
        assert failure.retry_after_s >= 1.0
        await asyncio.gather(*running)
        assert len((await h.collect(request())).token_ids()) == 4

    worker = FakeWorker(step_s=0.002, max_sequences=2)
    run(house, main, worker=worker, max_waiting_requests=4)


def test_interactive_requests_are_served_before_batch_ones(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        order: list[str] = []

        async def go(name: str, priority: int) -> None:
            await h.collect(request(max_tokens=60, priority=priority))  # type: ignore[arg-type]
            order.append(name)

        batch = [asyncio.ensure_future(go("batch", messages.PRIORITY_BATCH)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.gather(*batch, go("interactive", messages.PRIORITY_INTERACTIVE))
        assert order.index("interactive") <= 1

    run(house, main, worker=FakeWorker(step_s=0.002, max_sequences=1))


def test_requests_that_cannot_ever_fit_are_refused(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        failure = await failure_of(h.collect(request(max_tokens=200)))
        assert (failure.code, failure.field) == (CODE.INVALID_ARGUMENT, "max_tokens")

    run(house, main, worker=FakeWorker(kv_blocks=8))


def test_tokenize_and_detokenize_are_inverse(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        answer = await h.stub.Tokenize(messages.TokenizeRequest(text="O Romeo, Romeo!"))
        assert len(answer.tokens) == len(answer.token_ids) > 2
        back = await h.stub.Detokenize(messages.DetokenizeRequest(token_ids=answer.token_ids))
        assert back.text == "O Romeo, Romeo!"
        chat = messages.Chat(messages=[messages.ChatMessage(role="user", content="Hello")])
        templated = await h.stub.Tokenize(messages.TokenizeRequest(chat=chat))
        assert len(templated.token_ids) > 3
        failure = await failure_of(
            h.stub.Detokenize(messages.DetokenizeRequest(token_ids=[VOCABULARY]))
        )
        assert (failure.code, failure.field) == (CODE.INVALID_ARGUMENT, "token_ids")

    run(house, main)


def test_chat_is_rendered_with_the_models_own_template(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        chat = messages.Chat(messages=[messages.ChatMessage(role="user", content="Hello")])
        ids = list((await h.stub.Tokenize(messages.TokenizeRequest(chat=chat))).token_ids)
        answer = await h.collect(
            messages.GenerateRequest(chat=chat, max_tokens=4, sampling=SamplingParams(seed=1))
        )
        assert answer.token_ids() == continuation(ids, 4, seed=1)

    run(house, main)


def test_model_and_load_are_described(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        model = await h.stub.GetModel(messages.GetModelRequest())
        assert (model.family, model.vocab_size, model.kv_capacity_tokens) == (
            "mixtral",
            VOCABULARY,
            512 * 16,
        )
        assert 0 < model.active_parameters < model.total_parameters
        failure = await failure_of(h.stub.GetModel(messages.GetModelRequest(model="other")))
        assert failure.code == CODE.NOT_FOUND
        await h.tokens([5, 6, 7], 10)
        load = await h.stub.GetLoad(messages.GetLoadRequest())
        assert (load.prompt_tokens, load.generated_tokens) == (3, 10)
        assert load.tokens_per_s > 0
        assert load.ready

    run(house, main)


def test_slow_reader_gets_everything_and_holds_no_cache(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        call = h.stub.Generate(request(max_tokens=1500, sampling=SamplingParams(seed=1)))
        await asyncio.wait_for(call.initial_metadata(), 5)
        await asyncio.wait_for(h.gateway.engine.until_idle(), 20)
        assert h.gateway.engine.scheduler.pool.used_blocks == 0
        tokens: list[int] = []
        async for event in call:
            tokens += event.tokens.token_ids
        assert tokens == continuation([5, 6, 7], 1500, seed=1)

    run(house, main)


def test_metrics_carry_the_names_that_dashboards_know(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        await h.tokens([5, 6, 7], 10)
        await failure_of(h.collect(request(max_tokens=0)))
        value = h.gateway.metrics.registry.get_sample_value
        assert value("moe_lens_prompt_tokens_total") == 3
        assert value("moe_lens_generation_tokens_total") == 10
        assert value("moe_lens_request_success_total", {"finished_reason": "length"}) == 1
        assert value("moe_lens_request_failure_total", {"code": "INVALID_ARGUMENT"}) == 1
        assert value("moe_lens_time_to_first_token_seconds_count") == 1
        assert value("moe_lens_inter_token_latency_seconds_count") == 9
        assert value("moe_lens_kv_cache_usage_perc") == 0
        assert value("moe_lens_num_requests_running") == 0

    run(house, main, engine=EngineConfig(plan_ahead_steps=1))
