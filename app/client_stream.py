"""One answer as a client reads it: an async iterator that outlives its connections.

A task of the stream does all its sending: it puts the request on a connection, feeds it
pieces and credit, and goes on over the next one when that is lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from typing import TYPE_CHECKING, Self

from app.client_connection import ClientConnection, ConnectionLost
from protocol import frames
from protocol.errors import BadState, InvalidRequest, ServingError
from protocol.events import CLOSE_CODES
from protocol.token_log import CacheOutcome, TokenDelta

if TYPE_CHECKING:
    from app.client import SeedanceClient

FINAL_CODES = frozenset({1002, 1003, 1007, 1008, 1010}) | {
    code for code, row in CLOSE_CODES.items() if not row.should_reconnect
}
"""Close codes after which the same would only happen again."""
MAX_ACK_STEP = 48
"""Less than the 64 tokens of credit that a server with a full input buffer gives."""
SAID_AGAIN = ("return_token_ids", "boundary", "anchor", "window")
"""What a RESUME has to tell of the request."""
STALLED_S = 0.25
"""After so long without a chunk what was read is acknowledged, be it less than a step."""
PIECE_CHARS = 4096
"""Longer pieces are cut, so that one is a small part of the server's buffer."""
BLIND_CHARS = 2 * PIECE_CHARS
"""After so much of a prompt the client waits until it has heard whether that buffer is high."""


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
        Exception: what the pieces of its prompt raised.
    """

    def __init__(
        self,
        request: frames.InferReq,
        client: SeedanceClient,
        pieces: AsyncIterable[str] | None = None,
    ) -> None:
        self.id = request.id
        self.ack: CacheOutcome | None = None
        """What the cache decided; None until the server accepted the request."""
        self.queue_position: int | None = None
        self.anchor: frames.Anchor | None = None
        """The newest checkpoint of the server."""
        self.done: frames.InferDone | None = None
        self.ttft_s: float | None = None
        """Seconds from sending to the first piece of text; None until it came."""
        self.total_s: float | None = None
        """Seconds from sending to the end; None until then."""
        self.token: str | None = None
        """What resumes it; None until the server accepted the request."""
        self.has_ended = False
        self.problem: Exception | None = None
        """Why it has to pause before it goes on."""
        self.waiting_since_s: float | None = None
        """When it began to wait for a connection, unless it has got on since then."""
        self.delays: Iterator[float] = iter(())
        """The pauses it makes meanwhile."""
        self._request, self._client, self._source = request, client, pieces
        self._tasks: list[asyncio.Task[None]] = []
        self._answered, self._stirred, self._has_room = (asyncio.Event() for _ in range(3))
        self._sent_s = 0.0
        self._error: Exception | None = None
        self._inbox: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        self._last_seq = self._read_seq = self._acked_seq = -1
        window = request.window
        self._ack_step = max(1, min(window // 4, MAX_ACK_STEP)) if window else math.inf
        self._pieces: list[str | None] = []
        self._is_high = self._must_stop = self._is_moving = False

    @property
    def is_wanted(self) -> bool:
        """Whether it has to do with the server any more, be it only to stop there."""
        return not self.has_ended or (self._must_stop and self.token is not None)

    async def start(self) -> None:
        """Sends the request, once, and waits until the server has accepted it."""
        if not self._tasks and not self.has_ended:
            self._sent_s = self._client.clock()
            self._tasks.append(asyncio.create_task(self._run()))
            if self._source is not None:
                self._tasks.append(asyncio.create_task(self._feed(self._source)))
            self._client.streams[self] = self._tasks
            self._tasks[0].add_done_callback(self._let_go)
        try:
            await self._answered.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if self._error is not None and self.ack is None:
            raise self._error

    async def cancel(self) -> None:
        """Asks the server to stop; what it had already sent still arrives. Harmless when late."""
        if not self.has_ended:
            self._must_stop = True
            self._stirred.set()

    async def aclose(self) -> None:
        """Leaves the stream; one that has not ended is cancelled on the server."""
        self._leave(BadState("the stream was left before its end"))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # A generator, since the loop that a `break` leaves closes generators and nothing else.
    async def __aiter__(self) -> AsyncGenerator[TokenDelta]:
        try:
            await self.start()
            while not (self.has_ended and self._inbox.empty()):
                delta = await self._inbox.get()
                if delta is not None:
                    self._read_seq = delta.seq
                    if self._read_seq - self._acked_seq >= self._ack_step:
                        self._stirred.set()
                    yield delta
            if self._error is not None:
                raise self._error
        finally:
            await self.aclose()

    def receive(self, frame: frames.ServerFrame, *, is_draining: bool = False) -> None:
        """Takes a frame of this stream, or an error of none, from the connection's reader."""
        match frame:
            case frames.InferAck():
                if self.token is None:
                    self.ack, self.queue_position = frame.cache, frame.queue_position
                    self.waiting_since_s = None
                    self._pieces.clear()
                self.token = frame.stream
                self._answered.set()
            # A resumed or doubled stream may repeat itself; the merge rule is to drop that.
            case frames.InferChunk() if frame.seq > self._last_seq:
                self._last_seq = frame.seq
                self.waiting_since_s = None
                if self.ttft_s is None and frame.text:
                    self.ttft_s = self._client.clock() - self._sent_s
                self._inbox.put_nowait(frame.delta)
            case frames.Anchor():
                self.anchor = frame
            case frames.InputState():
                self._is_high = frame.level == "high"
                self._stirred.set()
            case frames.InferDone():
                self.done = frame
                self._must_stop = False
                self.end(None if frame.error is None else ServingError.from_info(frame.error))
            case frames.ErrorFrame():
                self._receive_error(frame, is_draining)

    def _receive_error(self, frame: frames.ErrorFrame, is_draining: bool) -> None:
        error = ServingError.from_info(frame.info)
        is_misplaced = is_draining and frame.code == "overloaded"
        is_passing = is_misplaced or (self.token is not None and frame.retryable)
        if frame.id is None:
            if not self._answered.is_set():
                self._leave(error)
        elif is_passing and self._client.is_resuming:
            self._move(None if is_misplaced else error)
        else:
            self._must_stop = False
            self.end(error)

    def lose(self, lost: ConnectionLost, resume_window_s: float) -> None:
        """Its connection has ended: goes on over the next one, where there is to be one."""
        is_kept = self.token is None or resume_window_s > 0
        can_go_on = is_kept and lost.code not in FINAL_CODES
        if can_go_on and self._client.is_resuming:
            self._move(lost)
        else:
            self.end(ConnectionLost(str(lost), lost.code))

    def end(self, error: Exception | None) -> None:
        """Ends the iteration after what has arrived, with `error` if there is one."""
        if self.has_ended:
            return
        self.has_ended = True
        self._error = error
        self.total_s = self._client.clock() - self._sent_s
        self._inbox.put_nowait(None)
        self._answered.set()
        self._stirred.set()
        for feeding in self._tasks[1:]:
            feeding.cancel()

    def _leave(self, error: Exception) -> None:
        if not self.has_ended:
            self._must_stop = True
            self.end(error)

    def _move(self, problem: Exception | None) -> None:
        self._is_moving = True
        self.problem = problem
        self._stirred.set()

    async def _run(self) -> None:
        """Carries the stream from connection to connection until it ends."""
        self._is_moving = True
        try:
            while self._is_moving and (connection := await self._client.find_connection(self)):
                await self._talk(connection)
        except Exception as error:
            self.end(error)

    def _let_go(self, carrying: asyncio.Task[None]) -> None:
        self._client.streams.pop(self, None)
        if not carrying.cancelled():
            # A Ctrl-C can hit any task: it is told elsewhere, and no news here.
            carrying.exception()

    async def _talk(self, connection: ClientConnection) -> None:
        """Sends what there is to send on one connection, until it ends or has to move."""
        self._is_moving = self._is_high = is_stopped = is_stalled = False
        self._num_sent = self._num_unchecked = 0
        self._acked_seq = self._last_seq
        connection.streams[self.id] = self
        try:
            await connection.send(self._opening())
            while not self._is_moving:
                self._stirred.clear()
                if self._must_stop and not is_stopped:
                    is_stopped = True
                    await connection.send(frames.Cancel(id=self.id))
                if self.has_ended:
                    break
                await self._send_pieces(connection)
                if self._read_seq - self._acked_seq >= (1 if is_stalled else self._ack_step):
                    self._acked_seq = self._read_seq
                    await connection.send(frames.Ack(id=self.id, seq=self._acked_seq))
                is_stalled = await self._wait_until_stirred()
        finally:
            connection.leave(self)

    def _opening(self) -> frames.InferReq | frames.Resume:
        """The frame that starts it on a connection, or goes on with it."""
        if self.token is None:
            return self._request
        again = {name: getattr(self._request, name) for name in SAID_AGAIN}
        return frames.Resume(id=self.id, stream=self.token, last_seq=self._last_seq, **again)

    async def _wait_until_stirred(self) -> bool:
        """Returns whether nothing came for so long that the server may be waiting for credit."""
        heard_seq = self._last_seq
        try:
            async with asyncio.timeout(STALLED_S if self._request.window else None):
                await self._stirred.wait()
        except TimeoutError:
            return self._inbox.empty() and self._last_seq == heard_seq
        return False

    async def _send_pieces(self, connection: ClientConnection) -> None:
        """Sends the pieces that the connection has not had yet, unless the server is full of them."""
        try:
            while self._num_sent < len(self._pieces) and not (
                self._is_high or self._is_moving or self._must_stop or self.has_ended
            ):
                text, number = self._pieces[self._num_sent], self._num_sent
                self._num_sent += 1
                is_last = True if text is None else None
                await connection.send(
                    frames.InputChunk(id=self.id, input_id=number, text=text or "", is_last=is_last)
                )
                self._num_unchecked += len(text or "")
                if self._num_unchecked >= BLIND_CHARS:
                    self._num_unchecked = 0
                    await connection.ping()
        except InvalidRequest as error:
            self._leave(error)
        if self._num_sent == len(self._pieces):
            self._has_room.set()

    async def _feed(self, source: AsyncIterable[str]) -> None:
        """Takes the pieces of the prompt, no faster than they can be sent; they are kept to be sent again."""
        try:
            async for text in source:
                starts = range(0, len(text), PIECE_CHARS)
                self._pieces += [text[start : start + PIECE_CHARS] for start in starts]
                self._has_room.clear()
                self._stirred.set()
                await self._has_room.wait()
            self._pieces.append(None)
            self._stirred.set()
        except Exception as error:
            self._leave(error)
