"""Choosing the next token: a pure function of logits, parameters, position and earlier tokens.

Order: logit bias, minimum length, penalties; then greedy, or temperature, min-p, top-k, top-p and
one draw. Random numbers are counter-based, keyed by (seed, position), so that whoever shares the
batch, and whether the sequence was preempted in between, changes nothing. Ties go to the lower id.
Log-probabilities are those of the model itself, before any of this.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]  # (vocabulary,)
TokenIds = NDArray[np.int64]

# So many candidates are looked at when the most likely ones that make up top-p are wanted.
TOP_P_CANDIDATES = (64, 512, 4096)
# Distances from the highest logit within which the most likely tokens are looked for first.
UPPER_PARTS = (3, 6, 12, 24)
# Tokens summed at once on the way to a draw.
RUN = 256


class NotFinite(ValueError):
    """Logits that are not finite numbers: no token can be chosen."""


@dataclass(frozen=True)
class Sampling:
    """How a sequence's tokens are chosen; see SamplingParams in common.proto."""

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    # None: no log-probabilities; n: the chosen token's and the n most likely.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    # Tokens that would end the sequence; forbidden before min_tokens.
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the most likely token is taken and nothing changes the logits before."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether bias, minimum length or penalties apply."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def choose(logits: Logits, sampling: Sampling, tokens: TokenIds, prompt_tokens: int) -> int:
    """The token that follows `tokens` (prompt and generated so far). NotFinite for bad logits."""
    if not math.isfinite(logits.max()):
        raise NotFinite("the model's logits are not finite")
    if sampling.changes_logits:
        logits = _changed(logits, sampling, tokens, prompt_tokens)
    if sampling.temperature == 0 or sampling.top_k == 1:
        return int(np.argmax(logits))
    return _draw(logits, sampling, position=len(tokens))


def token_logprob(logits: Logits, token_id: int, n_top: int) -> TokenLogprob:
    """Log-probabilities under softmax(logits). NotFinite for bad logits."""
    highest = float(logits.max())
    if not math.isfinite(highest):
        raise NotFinite("the model's logits are not finite")
    total = highest + math.log(np.exp(logits - np.float32(highest)).sum(dtype=np.float64))
    best = _most_likely(logits, min(n_top, len(logits)))
    top = tuple((int(i), float(logits[i]) - total) for i in best)
    return TokenLogprob(token_id, float(logits[token_id]) - total, top)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of this seed and position (Philox, counter-based)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _changed(logits: Logits, sampling: Sampling, tokens: TokenIds, prompt_tokens: int) -> Logits:
    """A copy with logit bias, minimum length and penalties applied."""
    logits = logits.copy()
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    generated = tokens[prompt_tokens:]
    if len(generated) < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = -np.inf
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(tokens)
        values = logits[seen]
        penalty = np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        seen, counts = np.unique(generated, return_counts=True)
        logits[seen] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        logits[seen] -= np.float32(sampling.presence_penalty)
    if not np.isfinite(logits.max()):
        raise NotFinite("no token is left that may be chosen")
    return logits


def _draw(logits: Logits, sampling: Sampling, position: int) -> int:
    scaled = logits - logits.max()
    scaled /= np.float32(sampling.temperature)
    candidates = _candidates(scaled, sampling)
    likelihood = np.exp(scaled if candidates is None else scaled[candidates])
    index = _at_share(likelihood, uniform(sampling.seed, position))
    return index if candidates is None else int(candidates[index])


def _at_share(likelihood: Logits, share: float) -> int:
    """The first index at which the running sum exceeds `share` of the total.

    Sums are FP64: first of runs, then inside the run that the share falls into.
    """
    run_sums = np.add.reduceat(likelihood, np.arange(0, len(likelihood), RUN), dtype=np.float64)
    run_ends = np.cumsum(run_sums)
    target = share * run_ends[-1]
    run = min(int(np.searchsorted(run_ends, target, side="right")), len(run_ends) - 1)
    before = run_ends[run - 1] if run else 0.0
    inside = before + np.cumsum(likelihood[run * RUN : (run + 1) * RUN], dtype=np.float64)
    index = run * RUN + int(np.searchsorted(inside, target, side="right"))
    # Rounding must not lead beyond the last token of some probability.
    return index if index < len(likelihood) else int(np.flatnonzero(likelihood)[-1])


def _candidates(scaled: Logits, sampling: Sampling) -> TokenIds | None:
    """Ids that min-p, top-k and top-p leave, in ascending order; None for all of them."""
    kept: TokenIds | None = None
    if sampling.min_p > 0:
        kept = np.flatnonzero(scaled >= math.log(sampling.min_p))
    if 0 < sampling.top_k < (len(scaled) if kept is None else len(kept)):
        values = scaled if kept is None else scaled[kept]
        best = _most_likely(values, sampling.top_k)
        kept = np.sort(best if kept is None else kept[best])
    if sampling.top_p < 1:
        values = scaled if kept is None else scaled[kept]
        best = _top_p(values, sampling.top_p)
        kept = np.sort(best if kept is None else kept[best])
    return kept


def _most_likely(values: Logits, n: int) -> TokenIds:
    """Indices of the n largest values, best first; of equal values the lower index comes first."""
    if n == 0:
        return np.empty(0, dtype=np.int64)
    if n >= len(values):
        return np.argsort(-values, kind="stable")
    kept = _upper_part(values, n)
    upper = values[kept]
    threshold = np.partition(upper, len(upper) - n)[len(upper) - n]
    above = np.flatnonzero(upper > threshold)
    level = np.flatnonzero(upper == threshold)[: n - len(above)]
    chosen: TokenIds = kept[np.sort(np.concatenate([above, level]))]
    best: TokenIds = chosen[np.argsort(-values[chosen], kind="stable")]
    return best


def _upper_part(values: Logits, n: int) -> TokenIds:
    """Ascending indices of some of the largest values, at least n: far fewer to sort than all."""
    highest = values.max()
    for below in UPPER_PARTS:
        kept = np.flatnonzero(values >= highest - np.float32(below))
        if len(kept) >= n:
            return kept
    return np.arange(len(values))


def _top_p(values: Logits, top_p: float) -> TokenIds:
    """The smallest set of most likely indices whose share of the probability reaches top_p."""
    likelihood = np.exp(values)
    needed = top_p * likelihood.sum(dtype=np.float64)
    for n in (*TOP_P_CANDIDATES, len(values)):
        best = _most_likely(values, min(n, len(values)))
        sums = np.cumsum(likelihood[best], dtype=np.float64)
        if sums[-1] >= needed:
            break
    return best[: int(np.searchsorted(sums, needed, side="left")) + 1]
