"""An asyncio client for `seedance.v1`: one socket, any number of streams at once.

    async with SeedanceClient("http://127.0.0.1:8000") as client:
        async for delta in client.stream("What is the capital of France?"):
            print(delta.text, end="", flush=True)

One task reads the socket and hands every frame to the stream it belongs to;
heartbeats are answered there, whatever the streams' readers do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from app.client_handshake import infer_url, open_socket
from app.client_stream import ClientStream, ConnectionLost
from protocol.codec import decode_server, encode
from protocol.errors import InvalidFrame, InvalidRequest
from protocol.frames import (
    ErrorFrame,
    Frame,
    Hello,
    InferAck,
    InferChunk,
    InferDone,
    InferReq,
    Ping,
    Pong,
    ServerFrame,
)
from protocol.request import Message
from protocol.token_log import CacheOutcome, FinishReason, Timing, Usage

logger = logging.getLogger(__name__)

Messages = Sequence[Message | Mapping[str, Any]]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    cache: CacheOutcome
    timing: Timing


class SeedanceClient:
    """A connection to one server; enter it to connect.

    Args:
        url: `http(s)://host[:port][/prefix]`, or the WebSocket address itself.
        binary: speak the binary form of the frames.
        open_timeout_s: bound on the handshake and on the server's first frame.
        clock: seconds that never go back; all measured times come from it.

    Raises on entering:
        ServingError: the server refused (`Unauthorized`, `RateLimited`, `Overloaded`, …).
        ConnectionLost: no server answered.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        binary: bool = False,
        open_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = infer_url(url)
        self.hello: Hello | None = None
        self._api_key = api_key
        self._binary = binary
        self._open_timeout_s = open_timeout_s
        self._clock = clock
        self._names = map("r{}".format, itertools.count(1))
        self._streams: dict[str, ClientStream] = {}
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._greeted = asyncio.Event()
        self._lost: ConnectionLost | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._open_timeout_s):
                self._socket = await open_socket(self.url, self._api_key, binary=self._binary)
                self._reader = asyncio.create_task(self._read(self._socket))
                await self._greeted.wait()
        except BaseException as exc:
            await self.close()
            if not isinstance(exc, TimeoutError):
                raise
            message = f"{self.url} did not answer within {self._open_timeout_s:g} s"
            raise ConnectionLost(message) from exc
        if self._lost is not None:
            await self.close()
            raise self._lost
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def stream(self, messages: str | Messages | None = None, /, **params: Any) -> ClientStream:
        """An answer to come; the request is sent when it is entered or iterated.

        Args:
            messages: the chat so far, or one user message as a string. Left out when
                `prompt=` gives text to continue without the chat template.
            params: the other fields of `InferReq`: `model`, `max_tokens`, `temperature`,
                `stop`, `seed`, `cache`, `timeout_s`, …; None means the server's default.

        Raises:
            TypeError: there is no such field.
            InvalidRequest: a number is not finite, which JSON cannot carry.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if messages is not None:
            params["messages"] = list(messages)
        for name, value in params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(f"{name} must be a finite number, got {value}", param=name)
        request = InferReq(id=next(self._names), **params)
        return ClientStream(request, send=self._send, live=self._streams, clock=self._clock)

    async def complete(
        self, messages: str | Messages | None = None, /, **params: Any
    ) -> Completion:
        """The whole answer at once; arguments and errors as of `stream`."""
        stream = self.stream(messages, **params)
        text = "".join([delta.text async for delta in stream])
        assert stream.done is not None
        return Completion(
            text=text,
            finish_reason=stream.done.finish_reason,
            usage=stream.done.usage,
            cache=stream.done.cache,
            timing=stream.done.timing,
        )

    async def close(self) -> None:
        """Ends the connection and every stream that is still open on it."""
        self._lose(ConnectionLost("the client was closed"))
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await self._reader

    async def _read(self, socket: ClientConnection) -> None:
        try:
            async for data in socket:
                try:
                    frame = decode_server(data)
                except InvalidFrame as error:
                    if error.param == "type":
                        logger.debug("a newer server's frame, skipped: %s", error)
                        continue
                    # Going on could leave a hole in some reply.
                    self._lose(ConnectionLost(f"the server sent an unreadable frame: {error}"))
                    await socket.close(1002)
                    return
                if isinstance(frame, Ping):
                    await self._send(Pong(ts=frame.ts))
                else:
                    self._dispatch(frame)
        except (ConnectionClosed, ConnectionLost) as exc:
            logger.debug("reader ended: %s", exc)
        code, reason = socket.close_code, socket.close_reason
        why = f"connection closed with code {code}" if code else "connection lost"
        self._lose(ConnectionLost(f"{why}: {reason}" if reason else why, code))

    def _dispatch(self, frame: ServerFrame) -> None:
        if isinstance(frame, Hello):
            self.hello = frame
            self._greeted.set()
        elif isinstance(frame, ErrorFrame) and frame.id is None:
            logger.warning("server reports %s: %s", frame.code, frame.message)
            # It is about a frame that could not be read, so about a request with no answer yet.
            for stream in [*self._streams.values()]:
                if not stream.is_answered:
                    stream.receive(frame)
        elif isinstance(frame, InferAck | InferChunk | InferDone | ErrorFrame):
            live = self._streams.get(frame.id or "")
            # Frames of a stream that was left may still be on their way: they go nowhere.
            if live is not None:
                live.receive(frame)

    async def _send(self, frame: Frame) -> None:
        if self._lost is not None or self._socket is None:
            raise self._lost or ConnectionLost("not connected: enter the client with `async with`")
        try:
            data = encode(frame, binary=self._binary)
        except (TypeError, ValueError) as exc:
            raise InvalidRequest(f"the request cannot be written as JSON: {exc}") from exc
        try:
            await self._socket.send(data)
        except ConnectionClosed as exc:
            raise self._lost or ConnectionLost(f"connection lost: {exc}") from exc

    def _lose(self, lost: ConnectionLost) -> None:
        self._lost = self._lost or lost
        self._greeted.set()
        for stream in [*self._streams.values()]:
            stream.end(ConnectionLost(str(self._lost), self._lost.code))
