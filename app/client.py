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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from app.client_carrier import StreamCarrier
from app.client_connection import ClientConnection
from app.client_handshake import infer_url
from app.client_stream import ClientStream
from protocol.errors import InvalidRequest
from protocol.frames import Hello, InferReq
from protocol.request import Message
from protocol.token_log import CacheOutcome, FinishReason, Timing, Usage

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

    A connection that is lost later, or that a draining server closes, is replaced without
    the streams' readers noticing more than a pause. A request that was not answered at all
    by then is sent again, so that it may run twice: it did not tell whether it had begun.

    Args:
        url: `http(s)://host[:port][/prefix]`, or the WebSocket address itself.
        binary: speak the binary form of the frames.
        open_timeout_s: bound on the handshake and on the server's first frame.
        resume: False ends the client and its streams with their connection.
        reconnect_timeout_s: how long a stream waits for another connection before it fails.
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
        open_timeout_s: float = 10.0,
        resume: bool = True,
        reconnect_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.url = infer_url(url)
        self._api_key = api_key
        self._binary = binary
        self._clock = clock
        self._names = map("r{}".format, itertools.count(1))
        self._carrier = StreamCarrier(
            self._connect,
            is_resuming=resume,
            open_timeout_s=open_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            clock=clock,
            sleep=sleep,
            random=rng,
        )

    @property
    def hello(self) -> Hello | None:
        """The greeting of the server that was connected to last."""
        return self._carrier.hello

    async def __aenter__(self) -> Self:
        await self._carrier.open()
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
        return ClientStream(request, self._carrier, self._clock)

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
        await self._carrier.close()

    async def _connect(self, timeout_s: float) -> ClientConnection:
        return await ClientConnection.open(
            self.url, self._api_key, self._carrier, binary=self._binary, timeout_s=timeout_s
        )
