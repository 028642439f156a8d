"""Whose turn it is: fair shares between clients, then the earliest deadline.

Every client has an account of the tokens that it asked for (start-time fair queueing): a request's
round follows from what its client had asked for before, so that who floods the queue waits behind
his own requests and nobody else does. A client that was away starts where the others are; it saves
nothing up. Within a round the request whose deadline is nearest goes first.

The order is one number, the scheduler's `arrival`; priorities stand above it.
"""

import itertools
import time
from collections.abc import Iterator

# Tokens of one client in one round: a few requests, so that no client waits long for his turn.
ROUND_TOKENS = 8192
# A request without a deadline takes its turn as if it had this one: nobody is put off for ever.
PATIENCE_S = 600.0
_BITS = 48


class Turns:
    """Gives out places in the queue. Holds one number for each client that has a token."""

    def __init__(self) -> None:
        self._asked_tokens: dict[str, int] = {}
        self._now_tokens = 0  # where the round begins that was served last
        self._count: Iterator[int] = itertools.count()

    def place(self, client: str, tokens: int, deadline_s: float | None = None) -> int:
        """The place of a request for so many tokens; `deadline_s` by time.monotonic()."""
        start = max(self._now_tokens, self._asked_tokens.get(client, 0))
        self._asked_tokens[client] = start + tokens
        due_s = time.monotonic() + PATIENCE_S if deadline_s is None else deadline_s
        due_ms = min(max(round(due_s * 1000), 0), 2**_BITS - 1)
        turn: int = start // ROUND_TOKENS
        place: int = ((turn << _BITS | due_ms) << _BITS) | next(self._count)
        return place

    def served(self, place: int) -> None:
        """The request with this place was started; who asks from now on does not come before it."""
        self._now_tokens = max(self._now_tokens, (place >> 2 * _BITS) * ROUND_TOKENS)
