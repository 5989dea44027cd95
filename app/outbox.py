"""What waits for one socket: bounded, and sent one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

MAX_FRAMES = 256
"""Frames that may wait before the streams pause."""
MAX_BYTES = 128 * 1024
"""As many bytes of them. What the socket itself may hold comes on top: 64 KiB in uvicorn."""
MAX_UNSENT_REPLIES = 1024
"""Error and pong frames that may wait besides, for a client that floods us and does not read."""
MAX_REPLY_BYTES = 64 * 1024


class Outbox:
    """The frames of one connection on their way out, in order.

    Whoever has more to say than there is room for asks to be called when there is room
    again, and is called in turn.

    Args:
        send: hands one message to the socket, and waits as long as that takes nothing.
    """

    def __init__(
        self, send: Callable[[str | bytes], Awaitable[None]], clock: Callable[[], float]
    ) -> None:
        self._send = send
        self._clock = clock
        self._frames: deque[str | bytes] = deque()
        self._num_bytes = 0
        self._has_frames = asyncio.Event()
        self._has_moved = asyncio.Event()
        self._waiting: deque[Callable[[], None]] = deque()
        self._sending_since: float | None = None

    @property
    def has_room(self) -> bool:
        """Whether a stream may send its next chunk."""
        return len(self._frames) < MAX_FRAMES and self._num_bytes < MAX_BYTES

    @property
    def is_flooded(self) -> bool:
        """Whether there are so many frames that nothing more should be read from this client."""
        return (
            len(self._frames) >= MAX_FRAMES + MAX_UNSENT_REPLIES
            or self._num_bytes >= MAX_BYTES + MAX_REPLY_BYTES
        )

    def put(self, data: str | bytes) -> None:
        """Takes a frame, whether there is room or not."""
        self._frames.append(data)
        self._num_bytes += _size_of(data)
        self._has_frames.set()

    def when_room(self, call: Callable[[], None]) -> None:
        """Calls it, once, when there is room for a good deal again."""
        self._waiting.append(call)
        # Where there is room already it is only another's turn.
        self._has_frames.set()

    async def until_room(self) -> None:
        """Returns when the flood has gone down."""
        while self.is_flooded:
            self._has_moved.clear()
            await self._has_moved.wait()

    def stuck_s(self, now_s: float) -> float:
        """For how long the peer has taken nothing of what waits; 0 when nothing waits."""
        return 0.0 if self._sending_since is None else now_s - self._sending_since

    async def run(self) -> None:
        """Sends what comes, for ever."""
        while True:
            while not (self._frames or self._waiting):
                self._has_frames.clear()
                await self._has_frames.wait()
            if self._waiting and self._has_half:
                self._call_waiting()
                # A socket that takes everything never makes us wait, and others want their turn.
                await asyncio.sleep(0)
            if self._frames:
                await self._send_next()

    async def flush(self) -> None:
        """Sends what is left."""
        while self._frames:
            await self._send_next()

    @property
    def _has_half(self) -> bool:
        return len(self._frames) <= MAX_FRAMES // 2 and self._num_bytes <= MAX_BYTES // 2

    async def _send_next(self) -> None:
        data = self._frames.popleft()
        self._sending_since = self._clock()
        await self._send(data)
        self._sending_since = None
        self._num_bytes -= _size_of(data)
        self._has_moved.set()

    def _call_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            if not self.has_room:
                return
            self._waiting.popleft()()


def _size_of(data: str | bytes) -> int:
    """At most so many bytes go over the wire."""
    return len(data) if isinstance(data, bytes) or data.isascii() else 4 * len(data)
