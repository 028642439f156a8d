"""What is asked of the system: how many requests, of which prompt and generated lengths."""

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalogue.files import check_keys, entry, read_table
from planner.errors import InvalidInputError, reject_unknown_keys

DEFAULT_SEED = 0


class Lengths(NamedTuple):
    """Tokens of one request's prompt and of its answer."""

    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Workload:
    """A batch of requests that are all there at the start.

    `prompt_tokens` and `generated_tokens` are means. `max_prompt_tokens` above the mean asks for
    drawn prompt lengths: a discrete distribution on 1..max with weights x·exp(-λx), λ such that
    its mean is `prompt_tokens` (an assumption: papers publish mean and maximum only). `trace`
    holds the lengths themselves and wins over everything else.
    """

    name: str
    prompt_tokens: float
    generated_tokens: float
    n_requests: int
    max_prompt_tokens: int | None = None
    distribution: str = "uniform"
    source: str = ""
    seed: int = DEFAULT_SEED
    trace: tuple[Lengths, ...] = ()

    def __post_init__(self) -> None:
        _at_least_one("prompt", self.prompt_tokens)
        _at_least_one("generate", self.generated_tokens)
        _at_least_one("requests", self.n_requests)
        largest = self.max_prompt_tokens
        if largest is not None and not self.prompt_tokens < largest:
            problem = f"must be above the mean of {self.prompt_tokens:g}, is {largest}"
            raise InvalidInputError("max_prompt", problem)

    @staticmethod
    def uniform(prompt_tokens: int, generated_tokens: int, n_requests: int) -> "Workload":
        """Equal requests. Raises InvalidInputError naming prompt, generate or requests."""
        name = f"{prompt_tokens}/{generated_tokens}"
        return Workload(name, prompt_tokens, generated_tokens, n_requests)

    @staticmethod
    def from_lengths(lengths: list[Lengths], name: str = "trace") -> "Workload":
        """Requests whose lengths are known one by one, in order of arrival."""
        if not lengths:
            raise InvalidInputError("trace", "holds no request")
        return Workload(
            name=name,
            prompt_tokens=math.fsum(item.prompt_tokens for item in lengths) / len(lengths),
            generated_tokens=math.fsum(item.generated_tokens for item in lengths) / len(lengths),
            n_requests=len(lengths),
            distribution="trace",
            trace=tuple(lengths),
        )

    @staticmethod
    def from_trace(path: str | Path) -> "Workload":
        """Read JSONL with one request a line: {"prompt_tokens": 98, "generated_tokens": 32}."""
        file = Path(path)
        try:
            lines = file.read_text().splitlines()
        except OSError as error:
            raise InvalidInputError("trace", f"cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidInputError("trace", f"{file} is not text: {error.reason}") from error
        lengths = [
            _parse_line(line, f"{file}:{number}")
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        return Workload.from_lengths(lengths, name=file.stem)

    def with_requests(self, n_requests: int) -> "Workload":
        """The same lengths for another number of requests (a trace is repeated or cut)."""
        if not self.trace:
            return replace(self, n_requests=n_requests)
        _at_least_one("requests", n_requests)
        repeats = -(-n_requests // len(self.trace))
        return Workload.from_lengths(list(self.trace * repeats)[:n_requests], self.name)

    def thinned(self, n_requests: int) -> "Workload":
        """At most `n_requests` requests of the same mix: a trace gives every so many-th one."""
        count = max(1, min(n_requests, self.n_requests))
        if not self.trace:
            return replace(self, n_requests=count)
        picked = [self.trace[i * self.n_requests // count] for i in range(count)]
        return Workload.from_lengths(picked, self.name)

    def lengths(self) -> Iterator[Lengths]:
        """Every request's lengths, in order of arrival; the same at every call."""
        if self.trace:
            yield from self.trace
            return
        generated = round(self.generated_tokens)
        for prompt in self._prompts():
            yield Lengths(prompt, generated)

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence at its end."""
        if self.trace:
            return max(item.prompt_tokens + item.generated_tokens for item in self.trace)
        largest = self.max_prompt_tokens or math.ceil(self.prompt_tokens)
        return largest + math.ceil(self.generated_tokens)

    @property
    def total_tokens(self) -> float:
        """Prompt and generated tokens of all requests."""
        return self.n_requests * (self.prompt_tokens + self.generated_tokens)

    def _prompts(self) -> Iterator[int]:
        if self.max_prompt_tokens is None:
            return iter([round(self.prompt_tokens)] * self.n_requests)
        drawn = _stratified(self.prompt_tokens, self.max_prompt_tokens, self.n_requests)
        random.Random(self.seed).shuffle(drawn)
        return iter(drawn)


def workload_names() -> list[str]:
    """Names that `named` accepts."""
    return sorted(read_table("workloads"))


def named(name: str) -> Workload:
    """A workload of the catalogue; NotFoundError names the nearest otherwise."""
    data = entry("workloads", name, "workload")
    required = ("prompt_tokens", "max_prompt_tokens", "generated_tokens", "n_requests")
    check_keys(data, (*required, "distribution", "source"), (), f"workloads.json.{name}")
    return Workload(name=name, **data)


def _at_least_one(field: str, value: float) -> None:
    if not math.isfinite(value) or value < 1:
        raise InvalidInputError(field, f"must be at least 1, is {value:g}")


def _parse_line(line: str, where: str) -> Lengths:
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInputError("trace", f"{where} is not JSON: {error.msg}") from error
    if not isinstance(data, Mapping):
        raise InvalidInputError("trace", f"{where} holds no JSON object")
    reject_unknown_keys(data, Lengths._fields, where)
    return Lengths(*(_tokens(data.get(field), f"{where}.{field}") for field in Lengths._fields))


def _tokens(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(where, f"must be an integer of at least 1, is {value!r}")
    return value


def _stratified(mean: float, largest: int, count: int) -> list[int]:
    """`count` values of the distribution at evenly spaced quantiles, ascending, so that a small
    batch has the mean of a large one."""
    weights = _weights(_rate(mean, largest), largest)
    total = math.fsum(weights)
    values, index = [], 0
    cumulative = list(accumulate(weights))
    for i in range(count):
        target = total * (i + 0.5) / count
        while index < largest - 1 and cumulative[index] < target:
            index += 1
        values.append(index + 1)
    return values


def _weights(rate: float, largest: int) -> list[float]:
    """x·exp(-rate·x) for x = 1..largest, scaled so that none overflows."""
    shift = rate if rate > 0 else rate * largest
    return [x * math.exp(shift - rate * x) for x in range(1, largest + 1)]


def _mean(rate: float, largest: int) -> float:
    weights = _weights(rate, largest)
    return math.fsum(x * w for x, w in enumerate(weights, 1)) / math.fsum(weights)


def _rate(mean: float, largest: int) -> float:
    """λ whose distribution has `mean`; the mean falls as λ grows, so bisection finds it."""
    low, high = -60.0, 60.0
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(middle, largest) > mean else (low, middle)
    return (low + high) / 2
