"""A `seedance.v1` server for tests of clients: it does exactly what a test's script says.

A script is a coroutine `(peer) -> None` that runs once a connection; when it
returns the connection closes normally. `answering` is a script that behaves
like the real server: it streams, remembers what it said, cancels and refuses.
"""

from __future__ import annotations

import asyncio
import http
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

Frame = dict[str, Any]
Script = Callable[["Peer"], Awaitable[None]]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "app" / "static" / "index.html"
HELLO: Frame = {
    "type": "HELLO",
    "session": "s-1",
    "limits": {},
    "heartbeat_s": 15.0,
    "resume_window_s": 30.0,
    "model": "fake-1",
}


class Peer:
    """The client, as the server sees it."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.received: list[Frame] = []
        self.received_forms: list[type] = []
        self.arrived = asyncio.Event()
        self.sent: dict[str, int] = {}
        """`seq` of the last chunk of each request, with `crediting`."""
        self.most_outstanding = 0
        """The most tokens that were ever sent beyond the last ACK, with `crediting`."""

    async def send(
        self, type: str, *, seq: int = 0, binary: bool | None = None, **fields: Any
    ) -> None:
        """Sends one frame in the negotiated form, or in the one that `binary` says."""
        if binary is None:
            binary = self.connection.subprotocol == "seedance.v1.bin"
        if binary:
            flags = (type == "INFER_DONE") | ("usage" in fields) << 1 | ("error" in fields) << 2
            header = struct.pack(">BBI", 1, flags, seq)
            await self.connection.send(header + json.dumps({"type": type, **fields}).encode())
        else:
            numbered = {"seq": seq} if type in ("INFER_CHUNK", "INFER_DONE") else {}
            await self.connection.send(json.dumps({"type": type, **numbered, **fields}))

    async def receive(self) -> Frame:
        """The next frame, whatever it is."""
        data = await self.connection.recv()
        self.received_forms.append(data.__class__)
        frame: Frame = json.loads(data[6:] if isinstance(data, bytes) else data)
        self.received.append(frame)
        self.arrived.set()
        return frame

    async def expect(self, type: str) -> Frame:
        """The next frame, which must be of this type."""
        frame = await self.receive()
        assert frame["type"] == type, frame
        return frame

    async def ack(self, id: str, **cache: Any) -> None:
        await self.send(
            "INFER_ACK", id=id, stream=f"token-{id}", cache=cache or {"outcome": "miss"}
        )

    async def chunk(self, id: str, seq: int, text: str, **fields: Any) -> None:
        await self.send("INFER_CHUNK", id=id, seq=seq, text=text, **fields)

    async def done(self, id: str, seq: int, finish_reason: str = "stop", **fields: Any) -> None:
        final = {
            "is_final": True,
            "finish_reason": finish_reason,
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": seq,
                "cached_tokens": 0,
                "total_tokens": 5 + seq,
            },
            "timing": {"queue_ms": 1.0, "ttft_ms": 2.0, "total_ms": 3.0},
            "cache": {"outcome": "miss"},
        }
        await self.send("INFER_DONE", id=id, seq=seq, **(final | fields))

    async def until(self, type: str, *, reading: bool = False) -> None:
        """Returns when a frame of this type has come; it is for the script to read it.

        Args:
            reading: read up to the next one, for scripts that wait for it themselves.
        """
        if reading:
            while not self.received or self.received[-1]["type"] != type:
                await self.receive()
        while not any(frame["type"] == type for frame in self.received):
            await self.arrived.wait()
            self.arrived.clear()

    def abort(self) -> None:
        """Cuts the connection without a close frame."""
        self.connection.transport.abort()


class FakeServer:
    """A running server: where it is, and every peer it had.

    Attributes:
        refuse_with: HTTP status that answers every handshake; None accepts them.
    """

    def __init__(self, url: str, refuse_with: int | None) -> None:
        self.url = url
        self.refuse_with = refuse_with
        self.peers: list[Peer] = []

    @property
    def http_url(self) -> str:
        return self.url.replace("ws://", "http://").removesuffix("/v1/infer")


@asynccontextmanager
async def fake_server(
    script: Script, *, api_key: str | None = None, refuse_with: int | None = None, prefix: str = ""
) -> AsyncIterator[FakeServer]:
    """Serves `script` at `/v1/infer` and the demo page at `/`, all under `prefix`.

    Args:
        api_key: the bearer token that every call but those of the page must carry.
        refuse_with: HTTP status that answers every handshake, until the test changes it.

    Raises, at the end:
        BaseExceptionGroup: an assertion of the script failed.
    """

    def answer_http(connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.removeprefix(prefix)
        if path in ("", "/"):
            return _response(200, "text/html; charset=utf-8", PAGE.read_bytes())
        if path.startswith("/static/"):
            module = ROOT / "clients" / "js" / path.removeprefix("/static/")
            return _response(200, "text/javascript", module.read_bytes())
        if api_key is not None and request.headers.get("Authorization") != f"Bearer {api_key}":
            return _refusal(401, "unauthorized", "send an API key: Authorization: Bearer KEY")
        if path == "/v1/models":
            return _response(200, "application/json", b'{"object": "list", "data": []}')
        if path != "/v1/infer":
            return _refusal(404, "invalid_request", f"no page {path}")
        if server.refuse_with is not None:
            return _refusal(server.refuse_with, "overloaded", "64 connections are open, the limit")
        return None

    async def handle(connection: ServerConnection) -> None:
        peer = Peer(connection)
        server.peers.append(peer)
        try:
            await script(peer)
        except* ConnectionClosed:
            pass  # That the client leaves is often what the test is about.
        except* AssertionError as error:
            failures.append(error)

    server = FakeServer("", refuse_with)
    failures: list[BaseExceptionGroup[AssertionError]] = []
    async with serve(
        handle,
        "127.0.0.1",
        0,
        process_request=answer_http,
        subprotocols=["seedance.v1.json", "seedance.v1.bin"],  # type: ignore[list-item]
        compression=None,
        close_timeout=1,
    ) as running:
        port = next(iter(running.sockets)).getsockname()[1]
        server.url = f"ws://127.0.0.1:{port}{prefix}/v1/infer"
        yield server
    for failure in failures:
        raise failure


def _response(status: int, content_type: str, body: bytes) -> Response:
    headers = Headers({"Content-Type": content_type, "Content-Length": str(len(body))})
    if status in (429, 503):
        headers["Retry-After"] = "5"
    headers["Connection"] = "close"
    return Response(status, http.HTTPStatus(status).phrase, headers, body)


def _refusal(status: int, code: str, message: str) -> Response:
    error = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    return _response(status, "application/json", json.dumps(error).encode())


async def answering(peer: Peer) -> None:
    """Behaves like the real server, with `REPLY` as the answer to every question.

    A question with "long" in it goes on until it is cancelled; one that begins
    with "Reworded" is a miss with a near candidate; temperatures above 2 are refused.
    """
    await peer.send(**HELLO)
    known: set[str] = set()
    running: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        try:
            while True:
                frame = await peer.receive()
                if frame["type"] == "INFER_REQ":
                    running[frame["id"]] = group.create_task(_answer(peer, frame, known))
                elif frame["type"] == "CANCEL":
                    running[frame["id"]].cancel()
        finally:
            for task in running.values():
                task.cancel()


def crediting(num_tokens: int) -> Script:
    """A script that answers everything with `0 1 2 …`, and keeps to the credit it is given."""

    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        windows: dict[str, int] = {}
        acked: dict[str, int] = {}
        while True:
            frame = await peer.receive()
            id = frame.get("id", "")
            if frame["type"] == "INFER_REQ":
                windows[id], acked[id], peer.sent[id] = frame.get("window", num_tokens), -1, -1
                await peer.ack(id)
            elif frame["type"] == "ACK":
                assert acked[id] < frame["seq"] <= peer.sent[id], frame
                acked[id] = frame["seq"]
            if frame["type"] not in ("INFER_REQ", "ACK"):
                continue
            while peer.sent[id] - acked[id] < windows[id] and peer.sent[id] < num_tokens - 1:
                peer.sent[id] += 1
                await peer.chunk(id, peer.sent[id], f"{peer.sent[id]} ")
                if peer.sent[id] == num_tokens - 1:
                    await peer.done(id, num_tokens)
            peer.most_outstanding = max(peer.most_outstanding, peer.sent[id] - acked[id])

    return script


REPLY = ("The capital", " of France", " is Paris", ".")


async def _answer(peer: Peer, request: Frame, known: set[str]) -> None:
    id = request["id"]
    temperature = request.get("temperature", 1.0)
    if not 0 <= temperature <= 2:
        message = f"temperature is {temperature}, the limit is 2"
        await peer.send(
            "ERROR",
            id=id,
            code="invalid_request",
            message=message,
            param="temperature",
            limit=2.0,
            retryable=False,
        )
        return
    messages = json.dumps(request["messages"])
    question = request["messages"][-1]["content"]
    cache: Frame = {"outcome": "miss", "reason": "nothing similar"}
    if messages in known:
        cache = {"outcome": "exact", "tier": "L2", "similarity": 1.0, "age_s": 3.2}
    elif "Reworded" in question:
        cache = {"outcome": "miss", "similarity": 0.949, "reason": "below threshold"}
    await peer.ack(id, **cache)
    seq = 0
    try:
        while True:
            for piece in REPLY:
                await peer.chunk(id, seq, piece)
                seq += 1
                if cache["outcome"] == "miss":
                    await asyncio.sleep(0.01)
            if "long" not in question:
                break
    except asyncio.CancelledError:
        await peer.done(id, seq, "cancelled", cache=cache)
        return
    known.add(messages)
    await peer.done(id, seq, cache=cache)
