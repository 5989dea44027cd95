"""One answer as a client reads it: an async iterator that knows how to stop the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from protocol.errors import BadState, ServingError
from protocol.frames import ErrorFrame, InferAck, InferChunk, InferDone, InferReq, Resume
from protocol.token_log import CacheOutcome, TokenDelta

if TYPE_CHECKING:
    from app.client_connection import ClientConnection


class ConnectionLost(ConnectionError):
    """The connection could not be made, or ended; `code` is the close code when there was one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Carrier(Protocol):
    """What a stream needs of whoever has the connections."""

    async def launch(self, stream: ClientStream) -> None: ...

    async def cancel(self, stream: ClientStream) -> None: ...

    async def leave(self, stream: ClientStream) -> None: ...

    def release(self, stream: ClientStream) -> None: ...


class ClientStream:
    """An answer that is streamed, made by `SeedanceClient.stream`.

    Iterate it once, alone or inside `async with`. Either way the request is
    sent at the start, and leaving early cancels it on the server. After the
    last delta `done` holds the finish reason, usage, timing and cache outcome;
    a reply cancelled with `cancel` ends normally with finish reason `cancelled`.
    When its connection is lost it waits for the next one and goes on there.

    Raises, while it starts or is iterated:
        ServingError: the server refused the request, failed during it, or did not keep it
            long enough for a connection to come back (`ResumeExpired`).
        ConnectionLost: the connection ended before the answer did, and none came after it.
    """

    def __init__(self, request: InferReq, carrier: Carrier, clock: Callable[[], float]) -> None:
        self.id = request.id
        self.ack: CacheOutcome | None = None
        """What the cache decided; None until the server accepted the request."""
        self.queue_position: int | None = None
        self.done: InferDone | None = None
        self.ttft_s: float | None = None
        """Seconds from sending to the first piece of text; None until it came."""
        self.total_s: float | None = None
        """Seconds from sending to the end; None until then."""
        self.token: str | None = None
        """What resumes it; None until the server accepted the request."""
        self.connection: ClientConnection | None = None
        """Where it is now; None while it waits for one."""
        self.is_cancelled = False
        self.waiting_since_s: float | None = None
        """When it lost its connection, unless it has got on since then."""
        self.problem: Exception | None = None
        """Why there is no connection for it."""
        self._request = request
        self._carrier = carrier
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

    def opening(self) -> InferReq | Resume:
        """The frame that starts it on a connection, or goes on with it."""
        if self.token is None:
            return self._request
        return Resume(
            id=self.id,
            stream=self.token,
            last_seq=self._last_seq,
            return_token_ids=self._request.return_token_ids,
        )

    async def start(self) -> None:
        """Sends the request and waits until the server has accepted it; later calls do nothing."""
        if self._has_started:
            return
        self._has_started = True
        self._sent_s = self._clock()
        try:
            await self._carrier.launch(self)
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
            await self._carrier.cancel(self)

    async def aclose(self) -> None:
        """Leaves the stream; one that has not ended is cancelled on the server."""
        if self._has_ended:
            return
        is_running = self._has_started
        self.end(BadState("the stream was left before its end"))
        if is_running:
            await self._carrier.leave(self)

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
            if self.token is None:
                self.ack, self.queue_position = frame.cache, frame.queue_position
                self.waiting_since_s = None
            self.token = frame.stream
        elif isinstance(frame, InferChunk):
            # A resumed or doubled stream may repeat itself; the merge rule is to drop that.
            delta = frame.delta
            if delta.seq <= self._last_seq:
                return
            self._last_seq = delta.seq
            self.waiting_since_s = None
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
        self._carrier.release(self)
        self._answered.set()
        self._inbox.put_nowait(None)
