"""Between the gateway and the GPU worker: forwards HTTP/2 frames, and damages one when told.

Damage is done to what frames the messages (a header, the room between two frames), which the
receiver can notice. Payloads are covered by nothing that could be checked: sockets flip no bits.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable

PREFACE_BYTES = 24
HEADER_BYTES = 9
Damage = Callable[[bytes, random.Random], bytes]


def flip(frame: bytes, draw: random.Random) -> bytes:
    """One bit of the frame's header."""
    data = bytearray(frame)
    data[draw.randrange(HEADER_BYTES)] ^= 1 << draw.randrange(8)
    return bytes(data)


def garbage(frame: bytes, draw: random.Random) -> bytes:
    """Noise after the frame."""
    return frame + draw.randbytes(draw.randint(HEADER_BYTES, 400))


def truncate(frame: bytes, draw: random.Random) -> bytes:
    """The frame without its end."""
    return frame[: draw.randrange(1, len(frame))]


class Cut(Exception):
    """The connection is to be closed."""


def cut(frame: bytes, draw: random.Random) -> bytes:
    """Nothing more, in both directions."""
    raise Cut


DAMAGES: dict[str, Damage] = {
    "flip": flip,
    "garbage": garbage,
    "truncate": truncate,
    "cut": cut,
}


class Proxy:
    """`async with Proxy(listen, target)`: paths of unix sockets; the target may change."""

    def __init__(self, listen: str, target: Callable[[], str]) -> None:
        self.stall_s = 0.0  # how long the next frame is held up
        self.done = asyncio.Event()  # the damage asked for was done
        self._listen = listen
        self._target = target
        self._damage: tuple[Damage, bool, random.Random] | None = None
        self._server: asyncio.Server | None = None

    def damage(self, name: str, towards_worker: bool, draw: random.Random) -> None:
        """Damage the next frame in that direction."""
        self.done.clear()
        self._damage = (DAMAGES[name], towards_worker, draw)

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_unix_server(self._serve, self._listen)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            worker_reader, worker_writer = await asyncio.open_unix_connection(self._target())
            writers.append(worker_writer)
            pumps = [
                asyncio.create_task(self._pump(reader, worker_writer, True)),
                asyncio.create_task(self._pump(worker_reader, writer, False)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the worker is away
        finally:
            for each in writers:
                each.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, towards_worker: bool
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, Cut):
            if towards_worker:
                writer.write(await reader.readexactly(PREFACE_BYTES))
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                frame = header + await reader.readexactly(int.from_bytes(header[:3], "big"))
                if self.stall_s:
                    stall_s, self.stall_s = self.stall_s, 0.0
                    await asyncio.sleep(stall_s)
                writer.write(self._damaged(frame, towards_worker))
                await writer.drain()

    def _damaged(self, frame: bytes, towards_worker: bool) -> bytes:
        if self._damage is None or self._damage[1] is not towards_worker:
            return frame
        damage, _, draw = self._damage
        self._damage = None
        self.done.set()
        return damage(frame, draw)
