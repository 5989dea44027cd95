"""Many streams at once from one server, and when each of their tokens came.

Every stream asks its next question when its last answer has ended. What a client does with a
frame is the least that tells when which token came: one client process must not be what is
measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bench.scripted_engine import AT_ONCE
from bench.wire_clients import (
    ConnectionFailed,
    HttpStream,
    WebSocketClient,
    open_websocket,
    post_for_stream,
)

Clock = Callable[[], float]
FIRST_TOKENS_WITHIN_S = 60.0


class Frame(msgspec.Struct):
    """What is read of a `seedance.v1` frame."""

    type: str
    text: str = ""
    finish_reason: str = ""
    code: str = ""
    message: str = ""
    ts: int | float | None = None


@dataclass
class Reading:
    """One answer: the reading of the clock at which each of its tokens came."""

    prompt: str
    token_at_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Streams:
    """What came of all streams so far.

    Args:
        is_paced: whether the scripted engine is to keep its interval for them.
        num_tokens: length of each answer.
    """

    clock: Clock
    is_paced: bool
    num_tokens: int
    tokens: int = 0
    readings: list[Reading] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def next_reading(self) -> Reading:
        name = f"question {next(self._numbers)}"
        reading = Reading(name if self.is_paced else AT_ONCE + name)
        self.readings.append(reading)
        return reading

    def take(self, reading: Reading, num_tokens: int, now_s: float) -> None:
        self.tokens += num_tokens
        reading.token_at_s.extend([now_s] * num_tokens)


class SeedanceStream:
    """One WebSocket that speaks `seedance.v1.json`, one request at a time on it."""

    def __init__(self, url: str, streams: Streams) -> None:
        self._url = url
        self._streams = streams
        self._reading: Reading | None = None
        self._decode = msgspec.json.Decoder(Frame).decode
        self._socket: WebSocketClient | None = None

    async def open(self) -> None:
        self._socket = await open_websocket(self._url, self._take, self._streams.clock)

    def begin(self) -> None:
        """Asks the next question."""
        assert self._socket is not None, "open() comes first"
        self._reading = self._streams.next_reading()
        request = {
            "type": "INFER_REQ",
            "id": "r",
            "prompt": self._reading.prompt,
            "max_tokens": self._streams.num_tokens,
            "temperature": 0,
            "cache": "bypass",
        }
        self._socket.send(msgspec.json.encode(request))

    def close(self) -> None:
        self._reading = None
        if self._socket is not None:
            self._socket.close()

    def _take(self, payload: bytes, now_s: float) -> None:
        frame = self._decode(payload)
        if self._reading is None or self._socket is None:
            return
        if frame.type == "INFER_CHUNK":
            self._streams.take(self._reading, len(frame.text), now_s)
        elif frame.type == "INFER_DONE":
            if frame.finish_reason != "length":
                self._streams.errors.append(f"finish reason {frame.finish_reason}")
            self.begin()
        elif frame.type == "ERROR":
            self._streams.errors.append(f"{frame.code}: {frame.message}")
        elif frame.type == "PING":
            self._socket.send(msgspec.json.encode({"type": "PONG", "ts": frame.ts}))


class DocumentedStream:
    """Requests to `POST /generate` of `bench.baseline_stream`, one after the other."""

    def __init__(self, url: str, streams: Streams) -> None:
        self._url = url
        self._streams = streams
        self._reading: Reading | None = None
        self._posts: set[asyncio.Task[None]] = set()
        self._reply: HttpStream | None = None

    async def open(self) -> None:
        """A request is a connection of its own here."""

    def begin(self) -> None:
        """Asks the next question."""
        self._reading = self._streams.next_reading()
        post = asyncio.create_task(self._post(self._reading))
        self._posts.add(post)
        post.add_done_callback(self._posts.discard)

    def close(self) -> None:
        self._reading = None
        for post in self._posts:
            post.cancel()
        if self._reply is not None:
            self._reply.close()

    async def _post(self, reading: Reading) -> None:
        question = {"prompt": reading.prompt, "max_tokens": self._streams.num_tokens}

        def take(chunk: bytes, now_s: float) -> None:
            self._streams.take(reading, len(chunk), now_s)

        try:
            self._reply = await post_for_stream(
                self._url, msgspec.json.encode(question), take, self._streams.clock
            )
            await self._reply.opened
            await self._reply.lost
        except (OSError, ConnectionFailed) as error:
            self._streams.errors.append(str(error))
            return
        if self._reading is reading:
            if len(reading.token_at_s) != self._streams.num_tokens:
                self._streams.errors.append(f"{len(reading.token_at_s)} tokens came")
            self.begin()


Stream = SeedanceStream | DocumentedStream


def stream_at(url: str, streams: Streams) -> Stream:
    """A client of the server at `ws://…` (Seedance) or `http://…` (the documented pattern)."""
    if urlsplit(url).scheme == "ws":
        return SeedanceStream(url, streams)
    return DocumentedStream(url, streams)


async def begin_all(clients: Sequence[Stream], streams: Streams, *, spread_s: float) -> None:
    """Starts every stream, spread over some time, and waits until each has its first token.

    Raises:
        ConnectionFailed: one has none in time.
    """
    for client in clients:
        client.begin()
        await asyncio.sleep(spread_s)
    first = streams.readings[: len(clients)]
    deadline_s = streams.clock() + FIRST_TOKENS_WITHIN_S
    while not all(reading.token_at_s for reading in first):
        if streams.errors:
            raise ConnectionFailed(f"a stream failed: {streams.errors[0]}")
        if streams.clock() > deadline_s:
            raise ConnectionFailed(f"a stream has no token after {FIRST_TOKENS_WITHIN_S:g} s")
        await asyncio.sleep(0.05)


def read_steps(path: Path) -> tuple[list[float], dict[str, int]]:
    """The times of the engine's paced steps, and the step that made each prompt's first token."""
    step_at_s: list[float] = []
    first_step: dict[str, int] = {}
    for line in path.read_text().splitlines():
        step = json.loads(line)
        first_step.update(dict.fromkeys(step["new"], len(step_at_s)))
        step_at_s.append(step["at_s"])
    return step_at_s, first_step


def added_latencies(
    readings: Sequence[Reading],
    step_at_s: Sequence[float],
    first_step: dict[str, int],
    *,
    since_s: float,
    until_s: float,
) -> list[float]:
    """Seconds from the step that computed a token to its arrival at the client.

    A running row gets a token in every step, so that token `k` of an answer was made `k` steps
    after its first. Engine and client read the same clock of the same machine. Only tokens
    that came between `since_s` and `until_s` count.
    """
    latencies = []
    for reading in readings:
        start = first_step.get(reading.prompt)
        if start is None:
            continue
        for index, at_s in enumerate(reading.token_at_s):
            if since_s <= at_s < until_s and start + index < len(step_at_s):
                latencies.append(at_s - step_at_s[start + index])
    return latencies
