"""The other end of a token bus, as a test plays it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from deployments import wire
from protocol.token_log import Terminal, TokenDelta


def part(stream: str, *seqs: int, terminal: Terminal | None = None) -> wire.Part:
    """One token a number, whose text is the number."""
    return wire.Part(stream, tuple(TokenDelta(seq, f"{seq} ", (seq,)) for seq in seqs), terminal)


class FakeMessages:
    """One bus call; the test is the replica."""

    def __init__(self, positions: dict[str, int]) -> None:
        self.positions = positions
        self.cancels = 0
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    def say(self, *parts: wire.Part, load: wire.Load | None = None) -> None:
        self._queue.put_nowait(wire.encode(wire.BusMessage(parts, load or wire.Load())))

    def say_raw(self, raw: bytes) -> None:
        self._queue.put_nowait(raw)

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    def end(self) -> None:
        self._queue.put_nowait(None)

    def cancel(self) -> None:
        self.cancels += 1

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
