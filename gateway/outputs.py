"""What a client gets of one output: the engine's tokens as events with text."""

from collections.abc import Iterator

from moelens.v1 import gateway_pb2 as messages

from gateway.generation import Generation, News, Outcome
from gateway.tokenizer import Detokenizer, StopMatcher, Tokenizer
from gateway.validation import CheckedRequest

REASONS = {
    Outcome.STOP: messages.FINISH_REASON_STOP,
    Outcome.LENGTH: messages.FINISH_REASON_LENGTH,
}


class Output:
    """Output `index` of a request. `done` once its `finished` event was made."""

    def __init__(
        self, index: int, request: CheckedRequest, generation: Generation, tokenizer: Tokenizer
    ) -> None:
        self.index = index
        self.generation = generation
        self.done = False
        self._request = request
        self._text = Detokenizer(tokenizer, request.keep_special_tokens)
        self._stops = StopMatcher(request.stop, request.include_stop)
        self._generated_tokens = 0

    def events(self, news: News, now: float) -> Iterator[messages.GenerateResponse]:
        """The events that follow from what the engine delivered."""
        outcome = news.outcome
        tokens = self._tokens(news)
        if self._stops.matched is not None:
            outcome = Outcome.STOP
        elif outcome is not None:
            tokens.text += self._stops.push(self._text.flush()) + self._stops.flush()
        if tokens.token_ids or tokens.text:
            yield messages.GenerateResponse(tokens=tokens)
        if outcome is not None:
            self.done = True
            yield messages.GenerateResponse(finished=self._finished(outcome, now))

    @property
    def stopped_by_text(self) -> bool:
        """Whether a stop string ended it: the engine does not know that."""
        return self._stops.matched is not None

    def _tokens(self, news: News) -> messages.Tokens:
        """The new tokens up to the one that completes a stop string, and their certain text."""
        text, count = [], 0
        for token_id in news.token_ids:
            count += 1
            if token_id not in self._request.silent_stop_ids:
                text.append(self._stops.push(self._text.push(token_id)))
            if self._stops.matched is not None:
                break
        self._generated_tokens += count
        return messages.Tokens(
            index=self.index,
            text="".join(text),
            token_ids=news.token_ids[:count],
            logprobs=news.logprobs[:count],
        )

    def _finished(self, outcome: Outcome, now: float) -> messages.Finished:
        generation = self.generation
        begin = generation.submitted_at
        finished = messages.Finished(
            index=self.index,
            reason=REASONS[outcome],
            prompt_tokens=len(generation.work.prompt_ids),
            generated_tokens=self._generated_tokens,
            queue_s=(generation.started_at or now) - begin,
            first_token_s=(generation.first_token_at or now) - begin,
            total_s=now - begin,
            preemptions=generation.preemptions,
        )
        if self._stops.matched is not None:
            finished.stop = self._stops.matched
        elif outcome is Outcome.STOP:
            finished.stop_token_id = generation.generated_ids[-1]
        return finished
