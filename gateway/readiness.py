"""Ready means that a token came out: one is generated before the first client is let in."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from moelens.v1.common_pb2 import SamplingParams

from gateway.engine import Engine
from gateway.generation import Work
from protos.errors import ServiceError

PROOF = Work("readiness", (0,), 1, SamplingParams(temperature=0.0, seed=0))


class Readiness:
    """Takes the engine's word that it has a session (or has not), passes on what holds for
    clients. The proof is asked for once: a later session counts at once."""

    def __init__(self, engine: Engine, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self._engine = engine
        self._set_ready = set_ready
        self._proven = False
        self._proof: asyncio.Task[None] | None = None

    async def __call__(self, has_session: bool) -> None:
        """What `Engine.run` calls."""
        if not has_session or self._proven:
            await self._set_ready(has_session)
        elif self._proof is None or self._proof.done():
            # Beside the session, which has to go on for the token to come.
            self._proof = asyncio.create_task(self._prove())

    async def _prove(self) -> None:
        inbox = asyncio.Event()
        with contextlib.suppress(ServiceError):  # out of order: tried again with the next session
            generation = self._engine.submit(PROOF, inbox)
            while generation.collect().outcome is None:
                await inbox.wait()
                inbox.clear()
            self._proven = True
            await self._set_ready(True)
