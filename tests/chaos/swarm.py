"""Clients by the dozen, each asking one question after the other, and all that came back to them.

A client that loses its connection comes back and resumes, as a good one does, and every frame
is kept with the time at which it came, so that a test can tell afterwards what a fault did.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from app.client import ConnectionLost, SeedanceClient
from protocol.errors import ServingError

SILENCE_S = 45.0
"""Without a frame for so long a stream counts as silent: longer than any fail-over may take."""
COME_BACK_S = 30.0
RETRY_EVERY_S = 0.1
SUBPROTOCOL = "seedance.v1.json"
LOST = (ConnectionClosed, InvalidHandshake, OSError, EOFError, TimeoutError)

Outcome = Literal["running", "identical", "different", "failed", "refused", "silent", "left"]
"""`refused`: not accepted within the time to come back. `left`: by the client, on purpose."""


@dataclass
class Stream:
    """One question and everything that was heard of it. Times are the client's clock, seconds.

    Attributes:
        truth: what an undisturbed answer says.
        frames: every frame of the stream, and when it came.
        closes: close codes of the connections it was cut on; 1006 where there was none.
        refusals: codes of the errors after which the question or RESUME was sent again.
    """

    prompt: str
    truth: str
    begun_s: float
    frames: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    token: str = ""
    text: str = ""
    last_seq: int = -1
    ended_s: float | None = None
    outcome: Outcome = "running"
    why: str = ""

    @property
    def has_begun(self) -> bool:
        return self.last_seq >= 0

    @property
    def accepted_after_s(self) -> float | None:
        """From sending to INFER_ACK; None while there is none."""
        acks = (at_s for at_s, frame in self.frames if frame["type"] == "INFER_ACK")
        first_s = next(acks, None)
        return None if first_s is None else first_s - self.begun_s

    def is_live_at(self, at_s: float) -> bool:
        return self.begun_s <= at_s and (self.ended_s is None or self.ended_s > at_s)

    def silence_after_s(self, at_s: float) -> float | None:
        """From a moment to the next piece of text or the end; None if it did not run then."""
        if not self.is_live_at(at_s):
            return None
        told = (
            when_s
            for when_s, frame in self.frames
            if when_s > at_s and frame["type"] in ("INFER_CHUNK", "INFER_DONE", "ERROR")
        )
        next_s = next(told, None)
        return None if next_s is None else next_s - at_s

    def take(self, frame: dict[str, Any], now_s: float) -> bool:
        """Keeps a frame; True once the stream has ended."""
        self.frames.append((now_s, frame))
        if frame["type"] == "INFER_ACK":
            self.token = frame["stream"]
        elif frame["type"] == "INFER_CHUNK":
            self._append(frame["seq"], frame["text"])
        elif frame["type"] == "INFER_DONE":
            self._judge(frame, now_s)
        elif frame["type"] == "ERROR":
            self.end("failed", f"{frame['code']}: {frame['message']}", now_s)
        return self.outcome != "running"

    def end(self, outcome: Outcome, why: str, now_s: float) -> None:
        if self.outcome == "running":
            self.outcome, self.why, self.ended_s = outcome, why, now_s

    def _append(self, seq: int, text: str) -> None:
        if seq <= self.last_seq:
            # A client would drop it by the merge rule; the server promises not to send it.
            self.why = self.why or f"seq {seq} came after {self.last_seq}"
        else:
            self.last_seq = seq
            self.text += text

    def _judge(self, done: dict[str, Any], now_s: float) -> None:
        reason = done["finish_reason"]
        if reason not in ("stop", "length"):
            self.end("failed", f"ended with {reason}: {done.get('error')}", now_s)
        elif self.why:
            self.end("different", self.why, now_s)
        elif self.text != self.truth:
            same = len(common_beginning(self.text, self.truth))
            self.end("different", f"differs at character {same} of {len(self.truth)}", now_s)
        elif not 0 <= done["usage"]["completion_tokens"] - done["seq"] <= (reason == "stop"):
            # The token that says stop is counted and has no number.
            self.end("different", f"{done['seq']} is not the number of tokens", now_s)
        else:
            self.end("identical", "", now_s)


def common_beginning(one: str, other: str) -> str:
    """What both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in pairs)


@dataclass(frozen=True)
class Question:
    """What a client asks next, and the answer it must get.

    Args:
        prompt: tells it from others; sent unless `fields` have `messages`.
    """

    prompt: str
    truth: str
    fields: dict[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        """The fields of its INFER_REQ."""
        return self.fields if "messages" in self.fields else {"prompt": self.prompt, **self.fields}


async def until(is_so: Callable[[], bool], within_s: float) -> None:
    """Waits for something while the clients go on.

    Raises:
        TimeoutError: it took longer than `within_s`.
    """
    async with asyncio.timeout(within_s):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.02)


class Swarm:
    """Clients that ask for as long as the context lasts.

    Args:
        ask: makes the next question from its number.
        resumes: whether a client comes back for its stream; else a lost stream is `failed`.
        through_client: whether `app.client` resumes, instead of the plain one below.
        clock: of all times.
    """

    def __init__(
        self,
        ws_url: str,
        clients: int,
        ask: Callable[[int], Question],
        *,
        key: str,
        resumes: bool = True,
        through_client: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ws_url = ws_url
        self.streams: list[Stream] = []
        self.bare_closes = 0
        self.drains = 0
        self._clients = clients
        self._ask = ask
        self._key = key
        self._resumes = resumes
        self._through_client = through_client
        self._clock = clock
        self._numbers = itertools.count()
        self._is_asking = True
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: set[ClientConnection] = set()

    async def __aenter__(self) -> Swarm:
        live = self._live_through_client if self._through_client else self._live
        self._tasks = [asyncio.create_task(live()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_running(self) -> int:
        return sum(stream.outcome == "running" for stream in self.streams)

    async def all_streaming(self, timeout_s: float = 60.0) -> None:
        """Waits until every client is in the middle of an answer.

        Raises:
            TimeoutError: one is not.
        """
        await until(self._is_all_streaming, timeout_s)

    async def finish(self) -> None:
        """Lets every stream end and asks no more."""
        self._is_asking = False
        await asyncio.gather(*self._tasks)

    def ask_no_more(self) -> None:
        """Lets every stream end."""
        self._is_asking = False

    async def until_cut(self, timeout_s: float = 10.0) -> None:
        """Waits until a stream has lost its connection, and no other follows for a moment.

        Raises:
            TimeoutError: none has.
        """
        await until(lambda: any(each.outcome == "failed" for each in self.streams), timeout_s)
        await asyncio.sleep(5 * RETRY_EVERY_S)

    async def leave(self) -> None:
        """All clients go, each from the middle of its answer, which it gives up."""
        self._is_asking = False
        for stream in self.streams:
            if stream.outcome in ("running", "failed"):
                stream.outcome, stream.ended_s = "left", self._clock()
        for socket in self._sockets:
            with contextlib.suppress(ConnectionClosed):
                await socket.send(json.dumps({"type": "CANCEL", "id": "r"}))
        await asyncio.gather(*self._tasks)

    def _is_all_streaming(self) -> bool:
        self._check()
        running = [stream for stream in self.streams if stream.outcome == "running"]
        return len(running) == self._clients and all(stream.has_begun for stream in running)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise AssertionError(f"a client died: {task.exception()!r}")

    def _begin(self) -> tuple[Stream, Question]:
        question = self._ask(next(self._numbers))
        stream = Stream(question.prompt, question.truth, self._clock())
        self.streams.append(stream)
        return stream, question

    async def _live(self) -> None:
        """One client's life: a connection for as long as it holds, streams one by one."""
        stream: Stream | None = None
        question: Question | None = None
        while self._is_asking or stream is not None:
            try:
                async with self._connected() as socket:
                    while self._is_asking or stream is not None:
                        if stream is None or question is None:
                            stream, question = self._begin()
                        is_draining = await self._converse(socket, stream, question)
                        if stream.outcome != "running":
                            stream = question = None
                        if is_draining:
                            break
            except LOST as error:
                self._note_loss(stream, error)
                if stream is not None and stream.outcome != "running":
                    stream = question = None
                await asyncio.sleep(RETRY_EVERY_S)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[ClientConnection]:
        async with connect(
            self.ws_url,
            additional_headers={"authorization": f"Bearer {self._key}"},
            subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
            compression=None,
            open_timeout=5,
            close_timeout=1,
            proxy=None,
        ) as socket:
            self._sockets.add(socket)
            try:
                yield socket
            finally:
                self._sockets.discard(socket)

    def _note_loss(self, stream: Stream | None, error: Exception) -> None:
        now_s = self._clock()
        code = None
        if isinstance(error, ConnectionClosed):
            code = error.rcvd.code if error.rcvd is not None else 1006
            self.bare_closes += code == 1006
        if stream is None:
            return
        if code is not None:
            stream.closes.append(code)
        heard_s = stream.frames[-1][0] if stream.frames else stream.begun_s
        if stream.frames and not self._resumes:
            stream.end("failed", f"connection lost: {error!r}", now_s)
        elif now_s - heard_s > COME_BACK_S:
            outcome: Outcome = "silent" if stream.frames else "refused"
            stream.end(outcome, f"no way back: {error!r}", now_s)

    async def _converse(self, socket: ClientConnection, stream: Stream, question: Question) -> bool:
        """Asks, or resumes, and listens until the end; True when the server is going away.

        Raises:
            ConnectionClosed: in mid-stream.
        """
        opening = (
            {"type": "RESUME", "id": "r", "stream": stream.token, "last_seq": stream.last_seq}
            if stream.token
            else {"type": "INFER_REQ", "id": "r", **question.request}
        )
        await socket.send(json.dumps(opening))
        is_draining = False
        while True:
            frame = await self._receive(socket, stream)
            if frame is None:
                return is_draining
            if frame["type"] == "DRAIN":
                self.drains += 1
                is_draining = True
            elif frame["type"] == "PING":
                await socket.send(json.dumps({"type": "PONG", "ts": frame.get("ts")}))
            elif frame.get("id") == "r":
                if frame["type"] == "ERROR" and self._may_retry(stream, frame):
                    stream.refusals.append(frame["code"])
                    await asyncio.sleep(frame.get("retry_after_s") or RETRY_EVERY_S)
                    if is_draining:
                        return True
                    await socket.send(json.dumps(opening))
                elif stream.take(frame, self._clock()):
                    return is_draining

    def _may_retry(self, stream: Stream, error: dict[str, Any]) -> bool:
        waited_s = self._clock() - (stream.frames[-1][0] if stream.frames else stream.begun_s)
        return bool(error.get("retryable")) and waited_s < COME_BACK_S

    async def _receive(self, socket: ClientConnection, stream: Stream) -> dict[str, Any] | None:
        """The next frame; None when the server has been silent for too long."""
        try:
            async with asyncio.timeout(SILENCE_S):
                frame: dict[str, Any] = json.loads(await socket.recv())
                return frame
        except TimeoutError:
            stream.end("silent", f"no frame for {SILENCE_S:g} s", self._clock())
            return None

    async def _live_through_client(self) -> None:
        """One client's life, with Seedance's own client, which resumes by itself."""
        async with SeedanceClient(self.ws_url, self._key, resume=True) as client:
            while self._is_asking:
                stream, question = self._begin()
                live = client.stream(**question.request)
                try:
                    async with asyncio.timeout(2 * SILENCE_S):
                        async for delta in live:
                            frame = {"type": "INFER_CHUNK", "seq": delta.seq, "text": delta.text}
                            stream.take(frame, self._clock())
                except TimeoutError:
                    stream.end("silent", "no end came", self._clock())
                except (ServingError, ConnectionLost) as error:
                    stream.end("failed", repr(error), self._clock())
                else:
                    assert live.done is not None
                    usage = {"completion_tokens": live.done.usage.completion_tokens}
                    reason = live.done.finish_reason
                    done = {"seq": live.done.seq, "finish_reason": reason, "usage": usage}
                    stream.take({"type": "INFER_DONE"} | done, self._clock())
