"""One answer as a client reads it: an async iterator that knows how to stop the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Self

from protocol.errors import BadState, ServingError
from protocol.frames import Cancel, ErrorFrame, Frame, InferAck, InferChunk, InferDone, InferReq
from protocol.token_log import CacheOutcome, TokenDelta


class ConnectionLost(ConnectionError):
    """The connection could not be made, or ended; `code` is the close code when there was one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class ClientStream:
    """An answer that is streamed, made by `SeedanceClient.stream`.

    Iterate it once, alone or inside `async with`. Either way the request is
    sent at the start, and leaving early cancels it on the server. After the
    last delta `done` holds the finish reason, usage, timing and cache outcome;
    a reply cancelled with `cancel` ends normally with finish reason `cancelled`.

    Raises, while it starts or is iterated:
        ServingError: the server refused the request or failed during it.
        ConnectionLost: the connection ended before the answer did.
    """

    def __init__(
        self,
        request: InferReq,
        *,
        send: Callable[[Frame], Awaitable[None]],
        live: dict[str, ClientStream],
        clock: Callable[[], float],
    ) -> None:
        self.id = request.id
        self.ack: CacheOutcome | None = None
        """What the cache decided; None until the server accepted the request."""
        self.queue_position: int | None = None
        self.done: InferDone | None = None
        self.ttft_s: float | None = None
        """Seconds from sending to the first piece of text; None until it came."""
        self.total_s: float | None = None
        """Seconds from sending to the end; None until then."""
        self._request = request
        self._send = send
        self._live = live
        self._clock = clock
        self._sent_s = 0.0
        self._last_seq = -1
        self._has_started = False
        self._has_ended = False
        self._error: Exception | None = None
        self._answered = asyncio.Event()
        self._inbox: asyncio.Queue[TokenDelta | None] = asyncio.Queue()

    @property
    def is_answered(self) -> bool:
        """Whether any frame of this request came back."""
        return self._answered.is_set()

    async def start(self) -> None:
        """Sends the request and waits until the server has accepted it; later calls do nothing."""
        if self._has_started:
            return
        self._has_started = True
        self._live[self.id] = self
        self._sent_s = self._clock()
        try:
            await self._send(self._request)
            await self._answered.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except Exception as error:
            # The request did not leave, so there is nothing to cancel.
            self.end(error)
            raise
        if self._error is not None and self.ack is None:
            raise self._error

    async def cancel(self) -> None:
        """Asks the server to stop; what it had already sent still arrives. Harmless when late."""
        if self._has_started and not self._has_ended:
            await self._send(Cancel(id=self.id))

    async def aclose(self) -> None:
        """Leaves the stream; one that has not ended is cancelled on the server."""
        if self._has_ended:
            return
        is_running = self._has_started
        self.end(BadState("the stream was left before its end"))
        if is_running:
            with contextlib.suppress(ConnectionLost):
                await self._send(Cancel(id=self.id))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # A generator, since the loop that a `break` leaves closes generators and nothing else.
    async def __aiter__(self) -> AsyncGenerator[TokenDelta]:
        try:
            await self.start()
            while not (self._has_ended and self._inbox.empty()):
                delta = await self._inbox.get()
                if delta is not None:
                    yield delta
            if self._error is not None:
                raise self._error
        finally:
            await self.aclose()

    def receive(self, frame: InferAck | InferChunk | InferDone | ErrorFrame) -> None:
        """Takes a frame of this stream from the connection's reader."""
        if isinstance(frame, InferAck):
            self.ack = frame.cache
            self.queue_position = frame.queue_position
        elif isinstance(frame, InferChunk):
            # A resumed or doubled stream may repeat itself; the merge rule is to drop that.
            delta = frame.delta
            if delta.seq <= self._last_seq:
                return
            self._last_seq = delta.seq
            if self.ttft_s is None and delta.text:
                self.ttft_s = self._clock() - self._sent_s
            self._inbox.put_nowait(delta)
        elif isinstance(frame, InferDone):
            self.done = frame
            self.end(None if frame.error is None else ServingError.from_info(frame.error))
        else:
            self.end(ServingError.from_info(frame.info))
        self._answered.set()

    def end(self, error: Exception | None) -> None:
        """Ends the iteration after what has arrived, with `error` if there is one."""
        if self._has_ended:
            return
        self._has_ended = True
        self._error = error
        self.total_s = self._clock() - self._sent_s
        self._live.pop(self.id, None)
        self._answered.set()
        self._inbox.put_nowait(None)
