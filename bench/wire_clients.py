"""Clients that cost next to nothing, because they share the machine with what they measure.

A WebSocket client and a reader of chunked HTTP replies, each one asyncio protocol that hands
over payloads as they come. They speak as much of RFC 6455 and RFC 9112 as a well-behaved server
needs: no compression, no fragments, no masks but the empty one.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable
from urllib.parse import urlsplit

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
KEY = base64.b64encode(bytes(16)).decode()
HEAD_END = b"\r\n\r\n"


class ConnectionFailed(Exception):
    """The server refused, left, or does not speak as expected."""


def encode_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A client's frame. Its masking key is zero, so that the payload stays as it is."""
    length = len(payload)
    if length < 126:
        header = struct.pack(">BB", 0x80 | opcode, 0x80 | length)
    elif length < 65536:
        header = struct.pack(">BBH", 0x80 | opcode, 0x80 | 126, length)
    else:
        header = struct.pack(">BBQ", 0x80 | opcode, 0x80 | 127, length)
    return header + bytes(4) + payload


def split_frames(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The whole frames at the beginning of what a server sent, as (opcode, payload); the rest.

    Raises:
        ConnectionFailed: a frame is a fragment.
    """
    frames = []
    at, end = 0, len(data)
    while end - at >= 2:
        first, length = data[at], data[at + 1]
        start = at + 2
        if length == 126:
            if end - at < 4:
                break
            length = data[at + 2] << 8 | data[at + 3]
            start = at + 4
        elif length == 127:
            if end - at < 10:
                break
            length = int.from_bytes(data[at + 2 : at + 10])
            start = at + 10
        if end - start < length:
            break
        if not first & 0x80 or first & 0x0F == CONTINUATION:
            raise ConnectionFailed("the server sent a fragment")
        at = start + length
        frames.append((first & 0x0F, data[start:at]))
    return frames, data[at:]


def split_chunks(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole chunks at the beginning of a chunked body, the last one empty; the rest."""
    chunks = []
    at = 0
    while (line_end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line_end], 16)
        start = line_end + 2
        if len(data) < start + size + 2:
            break
        chunks.append(data[start : start + size])
        at = start + size + 2
    return chunks, data[at:]


class _Client(asyncio.Protocol):
    """A connection whose first answer is an HTTP head."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending = b""
        self._has_head = False
        self._transport: asyncio.Transport | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"the server closed the connection ({exc})"
        if not self.opened.done():
            self.opened.set_exception(ConnectionFailed(why))
        if not self.lost.done():
            self.lost.set_result(why)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now_s = self._clock()
        self._pending += data
        if not self._has_head:
            head, separator, rest = self._pending.partition(HEAD_END)
            if not separator:
                return
            self._has_head, self._pending = True, rest
            self._take_head(head)
        self._take(now_s)

    def _take_head(self, head: bytes) -> None:
        status = head.split(b"\r\n", 1)[0]
        if self._accepts(head):
            self.opened.set_result(None)
        else:
            self.opened.set_exception(ConnectionFailed(f"the server answered {status!r}"))
            self.close()

    def _accepts(self, head: bytes) -> bool:
        raise NotImplementedError

    def _take(self, now_s: float) -> None:
        raise NotImplementedError


class WebSocketClient(_Client):
    """`on_message(payload, now_s)` is called for each message, in order."""

    def __init__(
        self, on_message: Callable[[bytes, float], None], clock: Callable[[], float]
    ) -> None:
        super().__init__(clock)
        self._on_message = on_message

    def send(self, payload: bytes) -> None:
        self.write(encode_frame(payload))

    def _accepts(self, head: bytes) -> bool:
        return head.startswith(b"HTTP/1.1 101")

    def _take(self, now_s: float) -> None:
        frames, self._pending = split_frames(self._pending)
        for opcode, payload in frames:
            if opcode <= BINARY:
                self._on_message(payload, now_s)
            elif opcode == PING:
                self.write(encode_frame(payload, PONG))
            elif opcode == CLOSE:
                if not self.lost.done():
                    code = int.from_bytes(payload[:2]) if payload else 1005
                    self.lost.set_result(f"closed with code {code}: {payload[2:].decode()}")
                self.close()


async def open_websocket(
    url: str,
    on_message: Callable[[bytes, float], None],
    clock: Callable[[], float],
    subprotocol: str = "seedance.v1.json",
) -> WebSocketClient:
    """A WebSocket on `ws://host:port/path`; a server may ignore the subprotocol offered.

    Raises:
        ConnectionFailed: the server does not accept.
        OSError: nothing listens there.
    """
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        lambda: WebSocketClient(on_message, clock), parts.hostname or "", parts.port or 80
    )
    client.write(
        f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Protocol: {subprotocol}\r\n\r\n".encode()
    )
    await client.opened
    return client


class HttpStream(_Client):
    """`on_chunk(text, now_s)` is called for each chunk of the one reply; b"" is its end."""

    def __init__(
        self, on_chunk: Callable[[bytes, float], None], clock: Callable[[], float]
    ) -> None:
        super().__init__(clock)
        self._on_chunk = on_chunk

    def _accepts(self, head: bytes) -> bool:
        return head.startswith(b"HTTP/1.1 200") and b"chunked" in head.lower()

    def _take(self, now_s: float) -> None:
        chunks, self._pending = split_chunks(self._pending)
        for chunk in chunks:
            self._on_chunk(chunk, now_s)
            if not chunk:
                if not self.lost.done():
                    self.lost.set_result("the reply has ended")
                self.close()


async def post_for_stream(
    url: str, body: bytes, on_chunk: Callable[[bytes, float], None], clock: Callable[[], float]
) -> HttpStream:
    """The streamed reply to a POST of JSON.

    Raises:
        OSError: nothing listens there.
    """
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        lambda: HttpStream(on_chunk, clock), parts.hostname or "", parts.port or 80
    )
    client.write(
        f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return client
