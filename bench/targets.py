"""The servers that can be asked, one adapter each: both are driven by the same load.

    ws://…/v1/infer     Seedance, `seedance.v1` in JSON frames
    http://…/generate   the baseline, one JSON object a line

An adapter does as little as it can, because it shares the machine with the server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from bench.workload import Ask

SUBPROTOCOL = Subprotocol("seedance.v1.json")


class RequestFailed(Exception):
    """The server refused, broke off, or answered something that is not an answer."""


@dataclass(frozen=True)
class Answered:
    """How an answer ended, as the server counts it."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


Event = str | Answered
"""A piece of the answer's text, or its end."""


class Connection(Protocol):
    """One client's way to a server."""

    def ask(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Pieces of text as they come, then one `Answered`.

        Raises:
            RequestFailed: there is no answer, or no end of it.
        """
        ...


class Target(Protocol):
    """A server under load. `open` may be entered many times at once."""

    url: str

    def open(self) -> AbstractAsyncContextManager[Connection]:
        """A client's connection, closed on leaving."""
        ...


def target_at(url: str) -> Target:
    """The adapter for a URL, by its scheme.

    Raises:
        ValueError: neither ws:// nor http://.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("ws", "wss"):
        return SeedanceTarget(url)
    if scheme == "http":
        return BaselineTarget(url)
    raise ValueError(f"target is {url!r}, it must begin with ws:// or http://")


class SeedanceTarget:
    """Seedance over WebSocket: one socket a client, any number of requests at once on it."""

    def __init__(self, url: str) -> None:
        self.url = url

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Connection]:
        async with connect(
            self.url, subprotocols=[SUBPROTOCOL], compression=None, max_size=None
        ) as socket:
            connection = _SeedanceConnection(socket)
            reader = asyncio.create_task(connection.read())
            try:
                yield connection
            finally:
                reader.cancel()


class _SeedanceConnection:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count()
        self._frames_of: dict[str, asyncio.Queue[dict[str, Any]]] = {}

    async def ask(self, ask: Ask) -> AsyncGenerator[Event, None]:
        id = f"r{next(self._ids)}"
        frames = self._frames_of[id] = asyncio.Queue()
        request = {
            "type": "INFER_REQ",
            "id": id,
            "messages": [{"role": "user", "content": ask.prompt}],
            "max_tokens": ask.max_tokens,
            "ignore_eos": ask.ignore_eos,
            "temperature": 0,
            # A stored answer would measure the cache instead of the engine.
            "cache": "bypass",
        }
        try:
            await self._socket.send(_encode(request))
            while True:
                frame = await frames.get()
                if frame["type"] == "INFER_CHUNK":
                    yield frame["text"]
                elif frame["type"] == "INFER_DONE":
                    yield _answered(frame["finish_reason"], frame.get("usage"), frame.get("error"))
                    return
                elif frame["type"] == "ERROR":
                    raise RequestFailed(f"{frame['code']}: {frame['message']}")
        except ConnectionClosed as exc:
            raise RequestFailed(f"connection lost: {exc}") from None
        finally:
            del self._frames_of[id]

    async def read(self) -> None:
        """Hands each frame to the request that it belongs to, until the socket ends."""
        try:
            async for data in self._socket:
                frame = msgspec.json.decode(data)
                if frame["type"] == "PING":
                    await self._socket.send(_encode({"type": "PONG", "ts": frame["ts"]}))
                elif (frames := self._frames_of.get(frame.get("id", ""))) is not None:
                    frames.put_nowait(frame)
        except ConnectionClosed:
            pass
        finally:
            lost = {"type": "ERROR", "code": "connection lost", "message": "the server closed"}
            for frames in self._frames_of.values():
                frames.put_nowait(lost)


class BaselineTarget:
    """The baseline over HTTP/1.1: a request is a connection, its answer a chunked stream."""

    def __init__(self, url: str) -> None:
        self.url = url

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Connection]:
        yield _BaselineConnection(self.url)


class _BaselineConnection:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._path = parts.path or "/"

    async def ask(self, ask: Ask) -> AsyncGenerator[Event, None]:
        body = msgspec.json.encode(
            {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "ignore_eos": ask.ignore_eos}
        )
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(head.encode() + body)
            async for line in _lines_of_reply(reader):
                item = msgspec.json.decode(line)
                if item["text"]:
                    yield item["text"]
                if "finish_reason" in item:
                    yield _answered(item["finish_reason"], item["usage"], None)
                    return
            raise RequestFailed("the answer has no end")
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as exc:
            raise RequestFailed(f"{type(exc).__name__}: {exc}") from None
        finally:
            if writer is not None:
                writer.close()


async def _lines_of_reply(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """Lines of a chunked HTTP/1.1 reply, as soon as each is complete."""
    head = await reader.readuntil(b"\r\n\r\n")
    status_line, *header_lines = head.decode("latin-1").split("\r\n")
    if status_line.split(" ")[1] != "200":
        raise RequestFailed(f"the server answered {status_line!r}")
    if not any(line.lower() == "transfer-encoding: chunked" for line in header_lines):
        raise RequestFailed("the reply is not a chunked stream")
    pending = b""
    while size := int(await reader.readline(), 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line


def _encode(frame: dict[str, Any]) -> str:
    return msgspec.json.encode(frame).decode()


def _answered(finish_reason: str, usage: dict[str, int] | None, error: Any) -> Answered:
    if finish_reason not in ("stop", "length") or usage is None:
        raise RequestFailed(f"the answer ended with {finish_reason}: {error}")
    return Answered(finish_reason, usage["prompt_tokens"], usage["completion_tokens"])
