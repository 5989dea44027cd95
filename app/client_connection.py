"""One socket of a client: it hands every frame to the stream that it belongs to.

Heartbeats are answered by the reader, whatever the streams' readers do.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, Self

from websockets.asyncio.client import ClientConnection as Socket
from websockets.exceptions import ConnectionClosed

from app.client_handshake import open_socket
from app.client_stream import ClientStream, ConnectionLost
from protocol.codec import decode_server, encode
from protocol.errors import InvalidFrame, InvalidRequest
from protocol.frames import (
    Drain,
    ErrorFrame,
    Frame,
    Hello,
    InferAck,
    InferChunk,
    InferDone,
    Ping,
    Pong,
    ServerFrame,
)

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Who is told what becomes of a connection."""

    def on_drain(self, connection: ClientConnection) -> None:
        """The server takes no more requests here."""
        ...

    def on_refusal(
        self, connection: ClientConnection, stream: ClientStream, refusal: ErrorFrame
    ) -> bool:
        """Whether the stream is to hear nothing of a refusal, because it will be tried again."""
        ...

    def on_end(self, connection: ClientConnection) -> None:
        """It is lost: `lost` says why, and `streams` has what was on it."""
        ...


class ClientConnection:
    """A socket that was greeted; `open` makes one.

    Attributes:
        streams: those that are on it now, by id.
        lost: why it ended; None while it is open.
    """

    def __init__(self, socket: Socket, listener: Listener, *, binary: bool) -> None:
        self.hello: Hello | None = None
        self.streams: dict[str, ClientStream] = {}
        self.lost: ConnectionLost | None = None
        self.is_draining = False
        self._socket = socket
        self._listener = listener
        self._binary = binary
        self._greeted = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls, url: str, api_key: str | None, listener: Listener, *, binary: bool, timeout_s: float
    ) -> Self:
        """Connects, and waits for the server's first frame.

        Raises:
            ServingError: the server refused.
            ConnectionLost: no server answered.
        """
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                socket = await open_socket(url, api_key, binary=binary)
                connection = cls(socket, listener, binary=binary)
                await connection._greeted.wait()
        except BaseException as exc:
            if connection is not None:
                await connection.close()
            if not isinstance(exc, TimeoutError):
                raise
            raise ConnectionLost(f"{url} did not answer within {timeout_s:g} s") from exc
        if connection.lost is not None:
            await connection.close()
            raise connection.lost
        return connection

    async def send(self, frame: Frame) -> None:
        """Sends a frame.

        Raises:
            InvalidRequest: it cannot be written.
            ConnectionLost: the connection has ended.
        """
        if self.lost is not None:
            raise self.lost
        try:
            data = encode(frame, binary=self._binary)
        except (TypeError, ValueError) as exc:
            raise InvalidRequest(f"the request cannot be written as JSON: {exc}") from exc
        try:
            await self._socket.send(data)
        except ConnectionClosed as exc:
            raise self.lost or ConnectionLost(f"connection lost: {exc}") from exc

    async def close(self) -> None:
        """Closes the socket; returns when nothing of the connection is left."""
        await self._socket.close()
        await self._reader

    async def _read(self) -> None:
        socket = self._socket
        lost = None
        try:
            async for data in socket:
                try:
                    frame = decode_server(data)
                except InvalidFrame as error:
                    if error.param == "type":
                        logger.debug("a newer server's frame, skipped: %s", error)
                        continue
                    # Going on could leave a hole in some reply.
                    lost = ConnectionLost(f"the server sent an unreadable frame: {error}", 1002)
                    await socket.close(1002)
                    break
                await self._take(frame)
        except (ConnectionClosed, ConnectionLost) as exc:
            logger.debug("reader ended: %s", exc)
        except Exception as exc:
            logger.exception("the client's reader failed")
            lost = ConnectionLost(f"the client failed: {exc!r}", 1002)
        code, reason = socket.close_code, socket.close_reason
        why = f"connection closed with code {code}" if code else "connection lost"
        self.lost = lost or ConnectionLost(f"{why}: {reason}" if reason else why, code)
        self._greeted.set()
        self._listener.on_end(self)

    async def _take(self, frame: ServerFrame) -> None:
        if isinstance(frame, Ping):
            await self.send(Pong(ts=frame.ts))
        elif isinstance(frame, Hello):
            self.hello = frame
            self._greeted.set()
        elif isinstance(frame, Drain):
            self._listener.on_drain(self)
        elif isinstance(frame, ErrorFrame) and frame.id is None:
            logger.warning("server reports %s: %s", frame.code, frame.message)
            # It is about a frame that could not be read, so about a request with no answer yet.
            for stream in [*self.streams.values()]:
                if not stream.is_answered:
                    stream.receive(frame)
        elif isinstance(frame, InferAck | InferChunk | InferDone | ErrorFrame):
            live = self.streams.get(frame.id or "")
            # Frames of a stream that was left may still be on their way: they go nowhere.
            if live is None:
                return
            if not isinstance(frame, ErrorFrame) or not self._listener.on_refusal(
                self, live, frame
            ):
                live.receive(frame)
