"""A WebSocket protocol of uvicorn's that reads a little of each client at a time.

A frame costs us as much however little it holds, and 64 KiB of what came may be ten thousand of
them: uvicorn takes them at once, and everybody else waits. Here a client has its turn for a
moment, and the event loop goes round before it has the next.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame

TURN_S = 0.002
"""What one client's turn takes, but for its last part."""
PART_BYTES = 1024
MAX_TINY_FRAGMENTS = 1024
TINY_BYTES = 64
"""A message of more fragments than that is refused when they are smaller than this on average."""
MAX_UNTAKEN_BYTES = 1024 * 1024
"""Nothing more is read of a client that has left so much: its pings are answered unasked."""


class FairReading(WebSocketsSansIOProtocol):
    """Reads in turns, refuses messages in very many tiny fragments and bounds what waits to be taken."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._unread = bytearray()
        self._is_paused = False
        self._turn: asyncio.Handle | None = None
        self._fragmented_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._turn is None:
            self._take_turn()

    async def receive(self) -> Any:
        message = await super().receive()
        self._go_on()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        # After a close uvicorn reads on by itself, for the client's answer.
        self._go_on()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._turn is not None:
            self._turn.cancel()
        self._unread.clear()
        super().connection_lost(exc)

    def handle_text(self, event: Frame) -> None:
        self._fragmented_bytes = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._fragmented_bytes = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        self._fragmented_bytes += len(event.data)
        num_fragments = len(self.frames) + 1
        # The last one has what is left, which may be nothing.
        is_tiny = self._fragmented_bytes < TINY_BYTES * (num_fragments - 1)
        if num_fragments > MAX_TINY_FRAGMENTS and is_tiny:
            self.frames = []
            reason = (
                f"a message is in over {MAX_TINY_FRAGMENTS} fragments of under {TINY_BYTES} bytes"
            )
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, reason)
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def _take_turn(self) -> None:
        self._turn = None
        until_s = time.perf_counter() + TURN_S
        while self._unread and not self.transport.is_closing():
            part = bytes(self._unread[:PART_BYTES])
            del self._unread[:PART_BYTES]
            super().data_received(part)
            if self._has_to_wait or time.perf_counter() >= until_s:
                break
        if self.transport.is_closing():
            self._unread.clear()
        self._go_on()

    @property
    def _has_to_wait(self) -> bool:
        """Whether what came has to be taken first, or what was sent."""
        return self.read_paused or self.transport.get_write_buffer_size() > MAX_UNTAKEN_BYTES

    def _go_on(self) -> None:
        """Pauses the transport while there is anything unread, and asks for the next turn."""
        if not self._unread:
            if self._is_paused and not self._has_to_wait:
                self._is_paused = False
                self.transport.resume_reading()
            return
        # Again each time: uvicorn resumes it by itself when the last message was taken.
        self._is_paused = True
        self.transport.pause_reading()
        if self._turn is None and not self._has_to_wait:
            self._turn = self.loop.call_soon(self._take_turn)
