"""One WebSocket connection: bytes between its socket and a `Session`, streams between that and the graph.

Reader, writer and requests are separate tasks. The reader waits for no send,
unless its peer floods us and takes no answer, so a healthy peer's frames are read,
and its pings answered, whatever the model does; everything that leaves goes
through one queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from app.openai_errors import report_incident
from app.outcomes import RequestOutcomes, RequestRecord
from app.serving import Stream
from app.stream_keeper import StreamKeeper
from protocol.errors import Replaced, ServingError
from protocol.frames import Hello
from protocol.parse import inference_request
from protocol.session import (
    CancelRequest,
    Close,
    Event,
    ResumeRequest,
    Send,
    Session,
    SessionLimits,
    StartRequest,
)
from protocol.token_log import CacheOutcome, Cursor, Terminal

logger = logging.getLogger(__name__)

OUTBOX_FRAMES = 256
"""Frames that may wait for one socket before its streams pause."""
MAX_UNSENT_REPLIES = 1024
"""Error and pong frames that may wait for a client that floods us and does not read."""
PEER_GONE = (RuntimeError, OSError, WebSocketDisconnect)
"""What Starlette and uvicorn raise when the peer is gone in mid-handshake or mid-send."""
UNREAD_TIMEOUT_S = 10.0
"""Time that such a client has to begin to read; nothing more of it is read meanwhile."""
CLOSE_TIMEOUT_S = 2.0
"""Time that a client has to take the last frames before its connection is dropped."""
LEAVE_TIMEOUT_S = 2.0
"""Time that a client has to leave by itself when it has nothing more to wait for."""
GOING_AWAY = Close(1001, "this server is going away: connect again")


@dataclass(eq=False)
class _Request:
    """A live request of one connection, which owns its stream.

    Attributes:
        next_seq: where it goes on: one above the last token's number that was passed on.
        is_cancelled: its stream is to be cancelled as soon as it is found.
        has_left: its client does not wait for the end.
    """

    id: str
    on_replaced: Callable[[_Request], None]
    record: RequestRecord
    task: asyncio.Task[None] = field(init=False)
    stream: Stream | None = None
    next_seq: int = 0
    is_resume: bool = False
    is_cancelled: bool = False
    has_left: bool = False

    def replace(self) -> None:
        self.on_replaced(self)


class Connection:
    """One accepted socket: its session, its outbox and its running requests."""

    def __init__(
        self,
        socket: WebSocket,
        keeper: StreamKeeper,
        session: Session,
        outcomes: RequestOutcomes,
        *,
        limits: SessionLimits,
        tenant: str,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._keeper = keeper
        self._session = session
        self._outcomes = outcomes
        self._limits = limits
        self._tenant = tenant
        self._model = model
        self._clock = clock
        self._outbox: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._requests: dict[str, _Request] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._has_left = False
        self._close: Close | None = None
        self._closing = asyncio.Event()

    @property
    def live_requests(self) -> int:
        return len(self._requests)

    async def run(self) -> None:
        """Reads, writes and watches until one of them ends; then nothing of the connection is left."""
        hello = Hello(
            session=uuid.uuid4().hex,
            model=self._model,
            limits=self._limits.announced,
            heartbeat_s=self._limits.heartbeat_s,
            resume_window_s=self._keeper.window_s,
        )
        self._apply(self._session.open(hello))
        self._tasks = [
            asyncio.create_task(self._read(), name="reader"),
            asyncio.create_task(self._write(), name="writer"),
            asyncio.create_task(self._watch(), name="heartbeat"),
            asyncio.create_task(self._closing.wait(), name="closing"),
        ]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._report(self._tasks)
        finally:
            await self._leave_streams()
        if self._close is not None and self._socket.application_state == WebSocketState.CONNECTED:
            await self._say_goodbye(self._close)

    def drain(self, deadline_s: float) -> None:
        """Takes no new requests; closes when the live ones are done, at the latest in `deadline_s`."""
        if not (events := self._session.drain(deadline_s)):
            return
        self._apply(events)
        self._tasks.append(asyncio.create_task(self._wind_down(deadline_s)))

    async def _wind_down(self, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while running := [request.task for request in self._requests.values()]:
                    await asyncio.wait(running)
                await asyncio.sleep(LEAVE_TIMEOUT_S)
        self._shut(GOING_AWAY)

    async def _leave_streams(self) -> None:
        """Ends all tasks; what they relayed waits for a RESUME, unless the client wanted to go."""
        self._session.close()
        requests = [*self._requests.values()]
        # First what cannot be interrupted: this task may be cancelled at its next await.
        self._leave(requests)
        tasks = [request.task for request in requests] + self._tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in requests:
            request.record.ended(has_left=True)
        if requests and self._close is None and not self._has_left:
            await self._hear_out()
            self._leave(requests)

    def _leave(self, requests: Iterable[_Request]) -> None:
        leave = self._keeper.drop if self._has_left else self._keeper.detach
        for request in requests:
            if request.stream is not None:
                leave(request.stream, request)

    async def _hear_out(self) -> None:
        """Takes what had come and was not read, without waiting: the client may have said goodbye.

        Serve cancels our task when its client is gone, perhaps before we have read why.
        """
        reading = asyncio.create_task(self._skip())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _skip(self) -> None:
        while (message := await self._socket.receive())["type"] == "websocket.receive":
            pass
        self._has_left = _is_goodbye(message)

    def _report(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """A task that failed by our own fault ends the connection as the server's failure."""
        for task in tasks:
            error = task.exception() if task.done() else None
            if error is not None and not isinstance(error, PEER_GONE):
                self._shut(Close(1011, report_incident(error).message))

    async def _say_goodbye(self, close: Close) -> None:
        """Sends what is left, so that the peer sees why it is closed, and then closes."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while not self._outbox.empty():
                    await self._send(self._outbox.get_nowait())
                await self._socket.close(close.code, close.reason)
        except TimeoutError:
            # It reads nothing, not even this: the server drops the connection when we return.
            logger.debug("peer did not take the close %d", close.code)

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] != "websocket.receive":
                self._has_left = _is_goodbye(message)
                return
            text = message.get("text")
            self._apply(self._session.receive(text if text is not None else message["bytes"]))
            await self._give_way()

    async def _give_way(self) -> None:
        """Lets the writer and other connections run: what came already is received without a pause."""
        await asyncio.sleep(0)
        if self._outbox.qsize() < OUTBOX_FRAMES + MAX_UNSENT_REPLIES:
            return
        try:
            async with asyncio.timeout(UNREAD_TIMEOUT_S):
                await self._has_room.wait()
        except TimeoutError:
            self._shut(Close(4410, "replies are not read"))

    async def _write(self) -> None:
        while True:
            data = await self._outbox.get()
            if self._outbox.qsize() < OUTBOX_FRAMES:
                self._has_room.set()
            await self._send(data)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._session.next_tick_at - self._clock()))
            self._apply(self._session.tick(self._clock()))

    def _apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Send):
                self._put(event.data)
                if event.refused is not None:
                    self._outcomes.refuse(event.refused)
            elif isinstance(event, Close):
                self._shut(event)
            elif isinstance(event, StartRequest | ResumeRequest):
                self._start(event)
            elif isinstance(event, CancelRequest):
                self._cancel(event.id)

    def _start(self, event: StartRequest | ResumeRequest) -> None:
        request = _Request(event.id, self._hand_over, self._outcomes.begin())
        self._requests[event.id] = request
        if isinstance(event, ResumeRequest):
            request.is_resume, request.next_seq = True, event.last_seq + 1
        request.task = asyncio.create_task(self._run_request(request, event))

    async def _run_request(self, request: _Request, event: StartRequest | ResumeRequest) -> None:
        """One request, from its frame to its one terminal frame."""
        id, started_s = request.id, self._clock()
        try:
            stream = request.stream = await self._stream_of(request, event)
            request.record.opened([stream])
            if request.is_cancelled:
                stream.cancel()
            self._put(
                self._session.accept(
                    id,
                    stream=stream.token or stream.request.request_id,
                    cache=stream.cache,
                    queue_position=None if request.is_resume else stream.queue_position,
                )
            )
            await self._relay(request, stream)
            self._keeper.detach(stream, request, has_all=True)
        except asyncio.CancelledError:
            request.has_left = self._requests.get(id) is request
            raise
        except ServingError as error:
            self._fail(request, error)
        except Exception as error:
            self._fail(request, report_incident(error))
        finally:
            request.record.ended(has_left=request.has_left)
            if self._requests.get(id) is request:
                del self._requests[id]
            if request.stream is not None:
                self._keeper.detach(request.stream, request)
                self._log_end(request.stream, self._clock() - started_s)

    async def _stream_of(self, request: _Request, event: StartRequest | ResumeRequest) -> Stream:
        """The stream that a frame asks for.

        Raises:
            ServingError: it could not start, or not go on.
        """
        if isinstance(event, ResumeRequest):
            return await self._keeper.resume(event.stream, self._tenant, event.last_seq, request)
        asked = inference_request(
            event.req,
            request_id=uuid.uuid4().hex,
            tenant=self._tenant,
            model=event.req.model or self._model,
        )
        return await self._keeper.open(asked, request)

    async def _relay(self, request: _Request, stream: Stream) -> None:
        """Passes the whole log on, as far as there is room in the outbox.

        News goes there within the call that brings it, with no task to wake between: at a
        frame a token that is much of what a token costs here.
        """
        cursor = stream.log.cursor(request.next_seq)
        is_due = asyncio.Event()

        def hear() -> None:
            if self._requests.get(request.id) is request:
                self._pass_on(request, cursor)
                if cursor.is_at_end or not self._has_room.is_set():
                    is_due.set()

        unsubscribe = stream.log.subscribe(hear)
        try:
            self._pass_on(request, cursor)
            while not cursor.is_at_end:
                if self._has_room.is_set():
                    is_due.clear()
                    await is_due.wait()
                await self._has_room.wait()
                self._pass_on(request, cursor)
        finally:
            unsubscribe()
        terminal = stream.log.terminal
        assert terminal is not None, "a cursor ends only with its log"
        self._put(
            self._session.done(request.id, terminal, seq=stream.log.next_seq, cache=stream.cache)
        )

    def _pass_on(self, request: _Request, cursor: Cursor) -> None:
        """Sends what is new, as far as there is room."""
        for delta in cursor.take(max(0, OUTBOX_FRAMES - self._outbox.qsize())):
            self._put(self._session.chunk(request.id, delta))
            request.next_seq = delta.seq + 1

    def _fail(self, request: _Request, error: ServingError) -> None:
        """Tells why a request could not start, or why it could not go on."""
        request.record.failed(error)
        stream = request.stream
        if stream is None:
            self._put(self._session.refuse(request.id, error.info))
            return
        self._keeper.drop(stream, request)
        failed = Terminal(finish_reason="error", error=error.info)
        self._put(
            self._session.done(request.id, failed, seq=stream.log.next_seq, cache=stream.cache)
        )

    def _hand_over(self, request: _Request) -> None:
        """Another RESUME took the stream: here its request ends, with what was sent so far."""
        assert request.stream is not None
        request.record.ended(has_left=True)
        request.task.cancel()
        del self._requests[request.id]
        error = Replaced("another RESUME has taken this stream over")
        replaced = Terminal(finish_reason="error", error=error.info)
        cache = request.stream.cache
        self._put(self._session.done(request.id, replaced, seq=request.next_seq, cache=cache))

    def _cancel(self, id: str) -> None:
        """Ends a request now: its log gets the terminal record, which its relay passes on."""
        request = self._requests[id]
        if request.stream is not None:
            request.stream.cancel()
            return
        if request.is_resume:
            # It runs somewhere, and has to be found before it can be stopped.
            request.is_cancelled = True
            return
        # Not opened yet, so nothing of it was sent: its last frame is its first. A task that has
        # not begun never comes to its `finally`.
        request.record.ended()
        request.task.cancel()
        del self._requests[id]
        cancelled = Terminal(finish_reason="cancelled")
        self._put(self._session.done(id, cancelled, seq=0, cache=CacheOutcome()))

    def _put(self, data: str | bytes) -> None:
        self._outbox.put_nowait(data)
        if self._outbox.qsize() >= OUTBOX_FRAMES:
            self._has_room.clear()

    def _shut(self, close: Close) -> None:
        self._close = self._close or close
        self._closing.set()

    def _log_end(self, stream: Stream, seconds: float) -> None:
        terminal = stream.log.terminal
        # The engine logs what it computed; a line for each hit would cost as much as the hit.
        logger.debug(
            "request %s (websocket): %s, %d tokens, cache %s, %.3f s",
            stream.request.request_id,
            terminal.finish_reason if terminal is not None else "left",
            stream.log.next_seq,
            stream.cache.outcome,
            seconds,
        )

    async def _send(self, data: str | bytes) -> None:
        if isinstance(data, str):
            await self._socket.send_text(data)
        else:
            await self._socket.send_bytes(data)


def _is_goodbye(message: Message) -> bool:
    """Whether the peer ended the connection on purpose, and so will not come back for its streams."""
    code = message.get("code")
    # 1005 stands for a close frame without a code, which has an (empty) reason, and for a
    # connection that broke, which has none.
    return code in (1000, 1001) or (code == 1005 and "reason" in message)
