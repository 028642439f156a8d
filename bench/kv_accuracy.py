"""What an INT8 KV cache costs in accuracy and gains in capacity, through the gateway.

    python bench/kv_accuracy.py --model demo/model --text FILE [--last-share S] [--json FILE]

The same services twice, with `--kv-dtype auto` and `int8` and a KV pool of the same bytes. The last
--last-share of the text (a tenth: what the demo model was not trained on), cut into windows, gives
the loss and, position by position, whether both caches make the same token the most likely one.
The first tokens of each window are then continued greedily with both.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moelens.client import AsyncClient
from tokenizers import Tokenizer

from gateway.launcher import Stack, StackConfig

FLAGS = ("--kv=64MiB", "--max-sequences=64")
WINDOW_TOKENS, PROMPT_TOKENS, CONTINUED_TOKENS = 512, 64, 128


@dataclass(frozen=True)
class Outcome:
    """Of one kind of cache."""

    kv_bytes_per_token: int
    kv_capacity_tokens: int
    logprobs: list[float]  # of every token of the windows but each one's first
    likeliest: list[int]  # at the same positions
    continued: list[list[int]]  # greedily, of each window


async def run(model: Path, kv_dtype: str, text: str) -> Outcome:
    """Loss of the windows and their greedy continuations."""
    flags = (*FLAGS, f"--kv-dtype={kv_dtype}")
    config = StackConfig(model, options={"gpu-worker": flags}, show_logs=False)
    async with Stack(config) as stack, AsyncClient(stack.address) as client:
        served = await client.model()
        ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
        starts = range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS)
        windows = [ids[start : start + WINDOW_TOKENS] for start in starts]
        scored = await asyncio.gather(
            *(client.generate(w, max_tokens=1, echo=True, prompt_logprobs=1) for w in windows)
        )
        continued = await asyncio.gather(
            *(
                client.generate(
                    window[:PROMPT_TOKENS],
                    max_tokens=CONTINUED_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                )
                for window in windows
            )
        )
    entries = [
        e for (completion,) in scored if completion.prompt for e in completion.prompt.logprobs
    ]
    return Outcome(
        served.kv_bytes_per_token,
        served.kv_capacity_tokens,
        [entry.logprob for entry in entries],
        [entry.top_token_ids[0] for entry in entries],
        [completion.token_ids for (completion,) in continued],
    )


def compare(plain: Outcome, int8: Outcome) -> dict[str, Any]:
    """The figures of the report."""
    same = [a == b for a, b in zip(plain.likeliest, int8.likeliest, strict=True)]
    agreeing = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        for a, b in zip(plain.continued, int8.continued, strict=True)
    ]
    drift = (abs(a - b) for a, b in zip(plain.logprobs, int8.logprobs, strict=True))
    return {
        "positions": len(same),
        "loss_nats_per_token": -fmean(plain.logprobs),
        "loss_int8_nats_per_token": -fmean(int8.logprobs),
        "mean_logprob_difference_nats": fmean(drift),
        "same_likeliest_token_share": fmean(same),
        "continuations": len(agreeing),
        "same_continuation_share": fmean(n == CONTINUED_TOKENS for n in agreeing),
        "mean_tokens_before_the_first_difference": fmean(agreeing),
        "kv_bytes_per_token": plain.kv_bytes_per_token,
        "kv_bytes_per_token_int8": int8.kv_bytes_per_token,
        "kv_capacity_ratio": int8.kv_capacity_tokens / plain.kv_capacity_tokens,
    }


def main() -> None:
    """Both runs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--last-share", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = options.text.read_text()
    text = text[round(len(text) * (1 - options.last_share)) :]
    plain, int8 = (asyncio.run(run(options.model, kind, text)) for kind in ("auto", "int8"))
    found = compare(plain, int8)
    for name, value in found.items():
        print(f"{name:42} {value:12.6g}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
