"""An asyncio client for `seedance.v1`: any number of streams at once.

    async with SeedanceClient("http://127.0.0.1:8000") as client:
        async for delta in client.stream("What is the capital of France?"):
            print(delta.text, end="", flush=True)

When the connection is lost the client makes another and goes on with its streams.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec

from app.client_connection import ClientConnection, ConnectionLost, infer_url
from app.client_stream import FINAL_CODES, ClientStream
from protocol.errors import InvalidRequest, ServingError
from protocol.frames import Hello, InferReq
from protocol.request import Message
from protocol.token_log import CacheOutcome, FinishReason, Timing, Usage

__all__ = ["ClientStream", "Completion", "ConnectionLost", "SeedanceClient"]

Messages = Sequence[Message | Mapping[str, Any]]

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    cache: CacheOutcome
    timing: Timing


class SeedanceClient:
    """A connection to one server; enter it to connect.

    A connection that is lost later, or that a draining server closes, is replaced without
    the streams' readers noticing more than a pause. A request that was not answered at all
    by then is sent again, so that it may run twice: it did not tell whether it had begun.

    Args:
        url: `http(s)://host[:port][/prefix]`, or the WebSocket address itself.
        binary: speak the binary form of the frames.
        window: tokens that a stream may be ahead of its reader, so that one who does not read
            holds up the server and not this program's memory; None for no bound.
        open_timeout_s: bound on the handshake and on the server's first frame.
        resume: False ends the client and its streams with their connection.
        reconnect_timeout_s: how long a stream waits for another connection, or goes from one
            to the next without getting on, before it fails.
        clock: seconds that never go back; all measured times come from it.
        sleep, rng: how to pause between two tries, and chance (0 to 1) for how long.

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
        window: int | None = 256,
        open_timeout_s: float = 10.0,
        resume: bool = True,
        reconnect_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.url = infer_url(url)
        self.is_resuming = resume
        self.clock = clock
        self.streams: dict[ClientStream, list[asyncio.Task[None]]] = {}
        """Those that have to do with the server still, and the tasks that care for them."""
        self._api_key = api_key
        self._binary = binary
        self._window = window
        self._open_timeout_s = open_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._sleep = sleep
        self._rng = rng
        self._names = map("r{}".format, itertools.count(1))
        self._connections: list[ClientConnection] = []
        self._attempt: asyncio.Task[Exception | None] | None = None
        self._closed: str | None = "not connected: enter the client with `async with`"

    @property
    def hello(self) -> Hello | None:
        """The greeting of the server that was connected to last."""
        return self._connections[-1].hello if self._connections else None

    async def __aenter__(self) -> Self:
        await self._connect(self._open_timeout_s)
        self._closed = None
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def stream(
        self,
        messages: str | Messages | None = None,
        /,
        *,
        pieces: AsyncIterable[str] | None = None,
        **params: Any,
    ) -> ClientStream:
        """An answer to come; the request is sent when it is entered or iterated.

        Args:
            messages: the chat so far, or one user message as a string. Left out when
                `prompt=` gives text to continue without the chat template.
            pieces: the rest of the prompt, sent as it comes: it goes on with the last message,
                or with `prompt`, or is the one user message where there is neither.
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
        if pieces is not None:
            params["input"] = "chunked"
        for name, value in params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(f"{name} must be a finite number, got {value}", param=name)
        request = InferReq(id=next(self._names), **{"window": self._window, **params})
        return ClientStream(request, self, pieces)

    async def complete(
        self, messages: str | Messages | None = None, /, **params: Any
    ) -> Completion:
        """The whole answer at once; arguments and errors as of `stream`."""
        stream = self.stream(messages, **params)
        text = "".join([delta.text async for delta in stream])
        done = stream.done
        assert done is not None
        return Completion(
            text=text,
            finish_reason=done.finish_reason,
            usage=done.usage,
            cache=done.cache,
            timing=done.timing,
        )

    async def ping(self) -> float:
        """Seconds that an answer takes, whatever the model does.

        Raises:
            ConnectionLost: there is no connection at the moment.
        """
        began_s = self.clock()
        self._raise_if_lost()
        await self._connections[-1].ping()
        self._raise_if_lost()
        return self.clock() - began_s

    async def close(self) -> None:
        """Ends the connection and every stream that is still open on it."""
        self._closed = "the client was closed"
        tasks: list[asyncio.Task[Any]] = [] if self._attempt is None else [self._attempt]
        for stream, own in [*self.streams.items()]:
            stream.end(ConnectionLost(self._closed))
            tasks += own
        for task in tasks:
            task.cancel()
        closing = (connection.close() for connection in self._connections)
        await asyncio.gather(*tasks, *closing, return_exceptions=True)

    async def find_connection(self, stream: ClientStream) -> ClientConnection | None:
        """Where a stream can go on, when it can; None once it has no need to.

        Raises:
            ServingError, ConnectionLost: it cannot, for all that was tried.
        """
        while stream.is_wanted:
            if self._closed is not None:
                raise ConnectionLost(self._closed)
            if not self.is_resuming:
                self._raise_if_lost()
            connection = self._connections[-1]
            if not self.is_resuming or (connection.is_usable and stream.problem is None):
                return connection
            if stream.waiting_since_s is None:
                stream.waiting_since_s, stream.delays = self.clock(), backoff(self._rng)
            left_s = stream.waiting_since_s + self._reconnect_timeout_s - self.clock()
            if left_s <= 0:
                raise _as_own(stream.problem, f" within {self._reconnect_timeout_s:g} s")
            if self._attempt is None or self._attempt.done():
                self._attempt = asyncio.create_task(self._try(stream, left_s))
            attempt = self._attempt
            await asyncio.wait([attempt], timeout=left_s)
            if attempt.done():
                stream.problem = problem = attempt.result()
                # For one that is only to be stopped, one try is enough.
                if problem is not None and (stream.has_ended or not _is_passing(problem)):
                    raise _as_own(problem)
        return None

    async def _try(self, stream: ClientStream, left_s: float) -> Exception | None:
        """Connects if nobody has, after a pause if something is the matter; returns what is then."""
        pause_s = 0.0
        if stream.problem is not None:
            retry_after_s = getattr(stream.problem, "retry_after_s", None) or 0.0
            pause_s = min(max(next(stream.delays), retry_after_s), left_s)
            await self._sleep(pause_s)
        try:
            if not self._connections[-1].is_usable:
                if pause_s >= left_s:
                    return stream.problem
                await self._connect(min(self._open_timeout_s, left_s - pause_s))
        except (ServingError, ConnectionLost) as error:
            return error
        return None

    async def _connect(self, timeout_s: float) -> None:
        connection = await ClientConnection.open(
            self.url, self._api_key, binary=self._binary, timeout_s=timeout_s
        )
        self._connections = [one for one in self._connections if not one.is_gone] + [connection]

    def _raise_if_lost(self) -> None:
        lost = self._connections[-1].lost if self._closed is None else ConnectionLost(self._closed)
        if lost is not None:
            raise ConnectionLost(str(lost), lost.code)


def backoff(rng: Callable[[], float]) -> Iterator[float]:
    """Seconds to wait before each try: doubling from 50 ms up to 2 s, the later half of it by chance."""
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s * (0.5 + 0.5 * rng())
        delay_s = min(2 * delay_s, MAX_DELAY_S)


def _is_passing(problem: Exception) -> bool:
    if isinstance(problem, ServingError):
        return problem.retryable
    return isinstance(problem, ConnectionLost) and problem.code not in FINAL_CODES


def _as_own(problem: Exception | None, limit: str = "") -> Exception:
    """The reason why a stream could not go on, as an exception of its own."""
    if isinstance(problem, ServingError):
        return ServingError.from_info(problem.info)
    code = problem.code if isinstance(problem, ConnectionLost) else None
    return ConnectionLost(f"could not connect again{limit}: {problem}", code)
