"""One socket of a client: it hands every frame to the stream that it belongs to.

Heartbeats are answered by its reader, whatever the streams' readers do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection as Socket
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from protocol import frames
from protocol.codec import decode_server, encode
from protocol.errors import InvalidFrame, InvalidRequest, Overloaded, RateLimited, Unauthorized

if TYPE_CHECKING:
    from app.client_stream import ClientStream

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 1024 * 1024


class ConnectionLost(ConnectionError):
    """The connection could not be made, or ended; `code` is the close code when there was one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class ClientConnection:
    """A socket that was greeted; `open` makes one.

    Attributes:
        streams: those that are on it now, by id.
        lost: why it ended; None while it is open.
    """

    def __init__(self, socket: Socket, *, binary: bool) -> None:
        self.hello: frames.Hello | None = None
        self.streams: dict[str, ClientStream] = {}
        self.lost: ConnectionLost | None = None
        self.is_draining = False
        self._socket = socket
        self._binary = binary
        self._greeted = asyncio.Event()
        self._ping_numbers = itertools.count()
        self._pongs: dict[float | None, asyncio.Event] = {}
        self._closing: asyncio.Task[None] | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, api_key: str | None, *, binary: bool, timeout_s: float) -> Self:
        """Connects to an `infer_url`, and waits for the server's first frame.

        Raises:
            Unauthorized, RateLimited, Overloaded: the server refused, and says so.
            ConnectionLost: no `seedance.v1` server answered there.
        """
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = cls(await _open_socket(url, api_key, binary), binary=binary)
                await connection._greeted.wait()
        except BaseException as exc:
            if connection is not None:
                await connection.close()
            if not isinstance(exc, TimeoutError):
                raise
            raise ConnectionLost(f"{url} did not answer within {timeout_s:g} s") from exc
        if connection.hello is None and connection.lost is not None:
            raise connection.lost
        return connection

    @property
    def is_usable(self) -> bool:
        """Whether it takes new requests."""
        return self.lost is None and not self.is_draining

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left to be closed."""
        return self._reader.done()

    async def send(self, frame: frames.Frame) -> None:
        """Sends a frame; on a connection that has ended it goes nowhere.

        Raises:
            InvalidRequest: it cannot be written.
        """
        try:
            data = encode(frame, binary=self._binary)
        except (TypeError, ValueError) as exc:
            raise InvalidRequest(f"the request cannot be written as JSON: {exc}") from exc
        try:
            await self._socket.send(data)
        except ConnectionClosed as exc:
            logger.debug("not sent: %s", exc)

    async def ping(self) -> None:
        """Returns when the server has answered all that was sent before, or the connection ended."""
        number = next(self._ping_numbers)
        answered = self._pongs[number] = asyncio.Event()
        await self.send(frames.Ping(ts=number))
        if self.lost is None:
            await answered.wait()

    def leave(self, stream: ClientStream) -> None:
        """Nothing more is to come here for this stream."""
        self.streams.pop(stream.id, None)
        self._close_if_deserted()

    async def close(self) -> None:
        """Closes the socket; returns when nothing of the connection is left."""
        await self._socket.close()
        await self._reader

    def _close_if_deserted(self) -> None:
        """Leaves a draining server once nothing is left to come of it."""
        if self.is_draining and not self.streams and self.lost is None:
            self.lost = ConnectionLost("the server is going away", 1001)
            self._closing = asyncio.create_task(self._socket.close())

    async def _read(self) -> None:
        problem = None
        try:
            await self._listen()
        except ConnectionClosed as exc:
            logger.debug("reader ended: %s", exc)
        except TimeoutError:
            problem = ConnectionLost("nothing was heard of the server for two heartbeats", 4408)
            self._socket.transport.abort()
        except InvalidFrame as error:
            # Going on could leave a hole in some reply.
            problem = ConnectionLost(f"the server sent an unreadable frame: {error}", 1002)
            await self._socket.close(1002)
        except Exception as exc:
            logger.exception("the client's reader failed")
            problem = ConnectionLost(f"the client failed: {exc!r}", 1002)
        code, reason = self._socket.close_code, self._socket.close_reason
        why = f"connection closed with code {code}" if code else "connection lost"
        self.lost = (
            self.lost or problem or ConnectionLost(": ".join(filter(None, (why, reason))), code)
        )
        self._greeted.set()
        for answered in self._pongs.values():
            answered.set()
        for stream in self.streams.values():
            stream.lose(self.lost, self.hello.resume_window_s if self.hello else 0.0)

    async def _listen(self) -> None:
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(None) as silence:
            async for data in self._socket:
                try:
                    await self._take(decode_server(data))
                except InvalidFrame as error:
                    if error.param != "type":
                        raise
                    logger.debug("a newer server's frame, skipped: %s", error)
                if self.hello is not None:
                    silence.reschedule(now() + 2 * self.hello.heartbeat_s)

    async def _take(self, frame: frames.ServerFrame) -> None:
        match frame:
            case frames.Ping():
                await self.send(frames.Pong(ts=frame.ts))
            case frames.Pong():
                self._pongs.pop(frame.ts, asyncio.Event()).set()
            case frames.Hello():
                self.hello = frame
                self._greeted.set()
            case frames.Drain():
                self.is_draining = True
                self._close_if_deserted()
            case frames.ErrorFrame(id=None):
                # It is about a frame that could not be read: each stream knows if that was its own.
                logger.warning("server reports %s: %s", frame.code, frame.message)
                for stream in self.streams.values():
                    stream.receive(frame, is_draining=self.is_draining)
            case _:
                # Frames of a stream that was left may still be on their way: they go nowhere.
                live = self.streams.get(frame.id or "")
                if live is not None:
                    live.receive(frame, is_draining=self.is_draining)


def infer_url(url: str) -> str:
    """The WebSocket address of a server, from that address itself or from its HTTP address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/")
    if not path.endswith("/v1/infer"):
        path = path.removesuffix("/v1") + "/v1/infer"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


async def _open_socket(url: str, api_key: str | None, binary: bool) -> Socket:
    try:
        return await connect(
            url,
            additional_headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            subprotocols=[Subprotocol(f"seedance.v1.{'bin' if binary else 'json'}")],
            compression=None,
            max_size=MAX_FRAME_BYTES,
            ping_interval=None,  # The server's heartbeat is watched instead.
            open_timeout=None,
            close_timeout=2.0,
            # A proxy named in the environment cannot reach this machine's own loopback.
            proxy=None if urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1") else True,
        )
    except InvalidStatus as exc:
        raise _refusal(exc) from exc
    except (OSError, InvalidHandshake, InvalidURI) as exc:
        raise ConnectionLost(f"cannot connect to {url}: {exc}") from exc


def _refusal(exc: InvalidStatus) -> Exception:
    """What a refused handshake means, in the server's own words where it gave some."""
    status, headers = exc.response.status_code, exc.response.headers
    message = f"the server refused the connection with HTTP status {status}"
    try:
        message = json.loads(exc.response.body or b"")["error"]["message"]
    except (ValueError, TypeError, LookupError):
        logger.debug("a refusal without an error body")
    kinds = {401: Unauthorized, 403: Unauthorized, 429: RateLimited, 503: Overloaded}
    if status not in kinds:
        return ConnectionLost(message)
    retry_after = headers.get("Retry-After", "")
    return kinds[status](
        message, retry_after_s=float(retry_after) if retry_after.isdecimal() else None
    )
