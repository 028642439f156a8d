"""From the last layer's hidden states to tokens and log-probabilities."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker.model import Decoder
from gpu_worker.sampler import NotFinite, TokenLogprob, choose, token_logprob
from gpu_worker.session import Chunk, Sequence
from gpu_worker.timing import StepClock, StepTimes
from gpu_worker.weights import BlockWeights

# Rows whose logits exist at the same time: 512 rows of 32,000 FP32 logits are 66 MB.
LOGIT_ROWS = 512


@dataclass
class StepOutput:
    """What a step found, in plan order; sequences that failed have no token."""

    step_id: int
    sampled: list[tuple[Sequence, int]] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by sequence id
    # By sequence id: the position of the first token described, and the descriptions.
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)
    errors: list[tuple[int, str]] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)


class Head:
    """Final norm, head and sampler, over the rows that need them alone."""

    def __init__(self, decoder: Decoder, base: BlockWeights) -> None:
        self._decoder = decoder
        self._base = base

    def sample(
        self, chunks: list[tuple[Chunk, torch.Tensor]], output: StepOutput, clock: StepClock
    ) -> None:
        """Sample for the chunks that end at their sequence's last known token.

        Each chunk comes with its rows of hidden states (tokens, hidden). Tokens are appended to
        their sequences and to `output`, in this order; a sequence whose logits are not finite
        becomes an error there.
        """
        for chunk, x in chunks:
            if chunk.sequence.sampling.prompt_logprobs is not None:
                self._describe_prompt(chunk, x, output, clock)
        sampling = [(chunk.sequence, x[-1:]) for chunk, x in chunks if chunk.samples]
        for first in range(0, len(sampling), LOGIT_ROWS):
            part = sampling[first : first + LOGIT_ROWS]
            logits = self._logits(torch.cat([row for _, row in part]), clock)
            with clock.measure("sampling_s", "sampling"):
                self._choose([sequence for sequence, _ in part], logits, output)

    def _logits(self, rows: torch.Tensor, clock: StepClock) -> torch.Tensor:
        with clock.measure("device_s", "head"):
            return self._decoder.logits(self._base, rows)

    def _choose(self, sequences: list[Sequence], logits: torch.Tensor, output: StepOutput) -> None:
        best = self._decoder.argmax(logits)
        highest = logits.gather(1, best.clamp(min=0).unsqueeze(1)).flatten()
        greedy = torch.where(highest.isfinite(), best, -1).tolist()
        for i, sequence in enumerate(sequences):
            try:
                token_id = self._next_token(sequence, logits[i], greedy[i], output)
            except NotFinite as error:
                sequence.failure = str(error)
                output.errors.append((sequence.sequence_id, str(error)))
                continue
            sequence.append(token_id)
            output.sampled.append((sequence, token_id))

    @staticmethod
    def _next_token(sequence: Sequence, row: torch.Tensor, greedy: int, output: StepOutput) -> int:
        """The sequence's next token; `greedy` is the most likely one, -1 for bad logits."""
        sampling = sequence.sampling
        if greedy < 0:
            raise NotFinite("the model's logits are not finite")
        if sampling.is_plain_greedy and sampling.logprobs is None:
            return greedy
        logits: NDArray[np.float32] = row.cpu().numpy()
        token_id = choose(logits, sampling, sequence.tokens, sequence.prompt_tokens)
        if sampling.logprobs is not None:
            output.logprobs[sequence.sequence_id] = token_logprob(
                logits, token_id, sampling.logprobs
            )
        return token_id

    def _describe_prompt(
        self, chunk: Chunk, x: torch.Tensor, output: StepOutput, clock: StepClock
    ) -> None:
        """Log-probabilities of the prompt tokens that follow the chunk's tokens."""
        sequence = chunk.sequence
        n_top = sequence.sampling.prompt_logprobs or 0
        n_rows = min(chunk.start + chunk.count, sequence.prompt_tokens - 1) - chunk.start
        following = sequence.tokens[chunk.start + 1 : chunk.start + 1 + max(n_rows, 0)].tolist()
        described: list[TokenLogprob] = []
        for first in range(0, len(following), LOGIT_ROWS):
            part = following[first : first + LOGIT_ROWS]
            logits = self._logits(x[first : first + len(part)], clock).cpu().numpy()
            with clock.measure("sampling_s", "prompt log-probabilities"):
                try:
                    described += [
                        token_logprob(row, token_id, n_top)
                        for row, token_id in zip(logits, part, strict=True)
                    ]
                except NotFinite:
                    return  # sampling reports it
        if described:
            output.prompt_logprobs[sequence.sequence_id] = (chunk.start + 1, described)
