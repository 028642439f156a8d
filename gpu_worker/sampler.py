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

# Candidates looked at first when the most likely ones that make up top-p are wanted.
TOP_P_CANDIDATES = 1024


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
    total = highest + math.log(np.exp((logits - highest).astype(np.float64)).sum())
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
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    candidates = _candidates(scaled, sampling)
    likelihood = np.exp(scaled if candidates is None else scaled[candidates])
    cumulative = np.cumsum(likelihood, dtype=np.float64)
    target = uniform(sampling.seed, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    # A product rounded up to the total must not point at a token of probability zero.
    index = min(index, int(np.flatnonzero(likelihood)[-1])) if index >= len(likelihood) else index
    return index if candidates is None else int(candidates[index])


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
    threshold = np.partition(values, len(values) - n)[len(values) - n]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: n - len(above)]
    chosen = np.sort(np.concatenate([above, level]))
    return chosen[np.argsort(-values[chosen], kind="stable")]


def _top_p(values: Logits, top_p: float) -> TokenIds:
    """The smallest set of most likely indices whose share of the probability reaches top_p."""
    likelihood = np.exp(values.astype(np.float64))
    needed = top_p * likelihood.sum()
    n = min(TOP_P_CANDIDATES, len(values))
    best = _most_likely(values, n)
    if likelihood[best].sum() < needed:
        best = _most_likely(values, len(values))
    reached = int(np.searchsorted(np.cumsum(likelihood[best]), needed, side="left"))
    return best[: reached + 1]
