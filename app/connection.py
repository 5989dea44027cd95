"""One WebSocket connection: bytes between its socket and a `Session`, streams between that and the graph.

Reader, writer and requests are separate tasks. The reader waits for no send,
unless its peer floods us and takes no answer, so a healthy peer's frames are read,
and its pings answered, whatever the model does; everything that leaves goes
through one `Outbox`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from app.accounts import DEFAULT_TENANT
from app.incoming import IncomingRequest
from app.openai_errors import report_incident
from app.outbox import Outbox
from app.outcomes import RequestOutcomes, RequestRecord
from app.relay import Relay
from app.serving import Stream
from app.stream_keeper import StreamKeeper
from protocol.errors import Replaced, ServingError
from protocol.events import (
    CancelRequest,
    Close,
    EndRequest,
    Event,
    GrantCredit,
    InputArrived,
    ReceiveRequest,
    ResumeRequest,
    Send,
    StartRequest,
)
from protocol.frames import Hello, InferReq, Resume
from protocol.parse import inference_request
from protocol.request import InferenceRequest
from protocol.session import Session, SessionLimits
from protocol.token_log import CacheOutcome, Terminal

logger = logging.getLogger(__name__)

PEER_GONE = (RuntimeError, OSError, WebSocketDisconnect)
"""What Starlette and uvicorn raise when the peer is gone in mid-handshake or mid-send."""
CLOSE_TIMEOUT_S = 2.0
"""Time that a client has to take the last frames before its connection is dropped."""
UNREAD_CHECKS = 4
"""How often within its time it is looked whether a client takes anything."""
LEAVE_TIMEOUT_S = 2.0
"""Time that a client has to leave by itself when it has nothing more to wait for."""
TOO_SLOW = Close(4410, "nothing was taken of what was sent")
GOING_AWAY = Close(1001, "this server is going away: connect again")


@dataclass(eq=False)
class _Request:
    """A live request of one connection, which owns its stream.

    Attributes:
        asked: what it is, once all of it has come.
        incoming: what has come of it before.
        is_cancelled: its stream is to be cancelled as soon as it is found.
        has_left: its client does not wait for the end.
    """

    id: str
    on_replaced: Callable[[_Request], None]
    record: RequestRecord
    asked: InferReq | Resume | None
    task: asyncio.Task[None] = field(init=False)
    incoming: IncomingRequest | None = None
    stream: Stream | None = None
    relay: Relay | None = None
    is_cancelled: bool = False
    has_left: bool = False

    def replace(self) -> None:
        self.on_replaced(self)


class Connection:
    """One accepted socket: its session, its outbox and its running requests.

    Args:
        check: raises `ServingError` once the credential of the handshake is good no more.
    """

    def __init__(
        self,
        socket: WebSocket,
        keeper: StreamKeeper,
        session: Session,
        outcomes: RequestOutcomes,
        *,
        limits: SessionLimits,
        tenant: str,
        check: Callable[[], None],
        model: str,
        unread_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._keeper = keeper
        self._session = session
        self._outcomes = outcomes
        self._limits = limits
        self._name = uuid.uuid4().hex
        self._tenant = tenant
        self._check = check
        self._model = model
        self._unread_timeout_s = unread_timeout_s
        self._clock = clock
        self._outbox = Outbox(self._send, clock)
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
            session=self._name,
            model=self._model,
            limits=self._limits.announced,
            heartbeat_s=self._limits.heartbeat_s,
            resume_window_s=self._keeper.window_s,
        )
        self._apply(self._session.open(hello))
        self._tasks = [
            asyncio.create_task(self._read(), name="reader"),
            asyncio.create_task(self._outbox.run(), name="writer"),
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
        for request in requests:
            if request.incoming is not None:
                tasks += request.incoming.close()
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
                await self._outbox.flush()
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
        if self._outbox.is_flooded:
            await self._outbox.until_room()

    async def _watch(self) -> None:
        """Keeps the heartbeat, and looks whether anything is taken of what waits."""
        check_s = self._unread_timeout_s / UNREAD_CHECKS
        while True:
            now_s = self._clock()
            await asyncio.sleep(max(0.0, min(self._session.next_tick_at - now_s, check_s)))
            self._apply(self._session.tick(self._clock()))
            if self._outbox.stuck_s(self._clock()) >= self._unread_timeout_s:
                self._shut(TOO_SLOW)

    def _apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Send):
                self._outbox.put(event.data)
                if event.refused is not None:
                    self._outcomes.refuse(event.refused)
            elif isinstance(event, GrantCredit):
                relay = self._requests[event.id].relay
                if relay is not None:
                    relay.pump()
            elif isinstance(event, StartRequest | ReceiveRequest | ResumeRequest):
                self._start(event)
            elif isinstance(event, InputArrived):
                incoming = self._requests[event.id].incoming
                assert incoming is not None, "only a request that is received has input"
                incoming.arrive()
            elif isinstance(event, CancelRequest):
                self._cancel(event.id)
            elif isinstance(event, EndRequest):
                self._requests[event.id].record.failed(event.error)
                self._forget(event.id)
            elif isinstance(event, Close):
                self._shut(event)

    def _start(self, event: StartRequest | ReceiveRequest | ResumeRequest) -> None:
        request = self._requests.get(event.id)
        if request is not None and isinstance(event, StartRequest):
            assert request.incoming is not None, "the last piece of its input came"
            request.incoming.arrive(event.req)
            return
        request = _Request(event.id, self._hand_over, self._outcomes.begin(), None)
        self._requests[event.id] = request
        if isinstance(event, ReceiveRequest):
            request.incoming = IncomingRequest(
                event.req,
                self._session,
                check=self._inference_request,
                warm=lambda so_far: self._keeper.warm(self._inference_request(so_far)),
                apply=self._apply,
            )
        else:
            request.asked = event.req
        request.task = asyncio.create_task(self._run_request(request))

    async def _run_request(self, request: _Request) -> None:
        """One request, from its frame to its one terminal frame."""
        id, started_s = request.id, self._clock()
        try:
            self._check()
            if not isinstance(request.asked, Resume):
                request.record.admit(self._tenant)
            if request.incoming is not None:
                request.asked = await request.incoming.whole()
            asked = request.asked
            assert asked is not None, "all of it has come"
            stream = request.stream = await self._stream_of(request, asked)
            request.record.opened([stream])
            if request.is_cancelled:
                stream.cancel()
            is_resume = isinstance(asked, Resume)
            self._outbox.put(
                self._session.accept(
                    id,
                    stream=stream.token or stream.request.request_id,
                    cache=stream.cache,
                    queue_position=None if is_resume else stream.queue_position,
                )
            )
            self._apply(self._session.take_input(id))
            request.relay = Relay(
                id,
                stream,
                self._session,
                self._outbox,
                next_seq=asked.last_seq + 1 if isinstance(asked, Resume) else 0,
                boundary=asked.boundary or "grapheme",
                anchor=asked.anchor or "plain",
            )
            await request.relay.run()
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
            if request.incoming is not None:
                request.incoming.close()
            if self._requests.get(id) is request:
                del self._requests[id]
                self._apply(self._session.relax())
            if request.stream is not None:
                self._keeper.detach(request.stream, request)
                self._log_end(request.stream, self._clock() - started_s)

    async def _stream_of(self, request: _Request, asked: InferReq | Resume) -> Stream:
        """The stream that is asked for.

        Raises:
            ServingError: it could not start, or not go on.
        """
        if isinstance(asked, Resume):
            return await self._keeper.resume(asked.stream, self._tenant, asked.last_seq, request)
        return await self._keeper.open(self._inference_request(asked), request)

    def _inference_request(self, req: InferReq) -> InferenceRequest:
        request = inference_request(
            req,
            request_id=uuid.uuid4().hex,
            tenant=self._tenant,
            model=req.model or self._model,
        )
        if self._tenant != DEFAULT_TENANT:
            return request
        # Where nobody has a key all are one tenant, and one socket must not starve the others.
        return msgspec.structs.replace(request, share=self._name)

    def _fail(self, request: _Request, error: ServingError) -> None:
        """Tells why a request could not start, or why it could not go on."""
        request.record.failed(error)
        stream = request.stream
        if stream is None:
            self._outbox.put(self._session.refuse(request.id, error.info))
            return
        self._keeper.drop(stream, request)
        failed = Terminal(finish_reason="error", error=error.info)
        self._outbox.put(
            self._session.done(request.id, failed, seq=stream.log.next_seq, cache=stream.cache)
        )

    def _hand_over(self, request: _Request) -> None:
        """Another RESUME took the stream: here its request ends, with what was sent so far."""
        assert request.stream is not None
        next_seq = 0
        if request.relay is not None:
            next_seq = request.relay.next_seq
            request.relay.stop()
        elif isinstance(request.asked, Resume):
            next_seq = request.asked.last_seq + 1
        self._forget(request.id, has_left=True)
        error = Replaced("another RESUME has taken this stream over")
        replaced = Terminal(finish_reason="error", error=error.info)
        cache = request.stream.cache
        self._outbox.put(self._session.done(request.id, replaced, seq=next_seq, cache=cache))

    def _cancel(self, id: str) -> None:
        """Ends a request now: its log gets the terminal record, which its relay passes on."""
        request = self._requests[id]
        if request.stream is not None:
            request.stream.cancel()
            if request.relay is not None:
                request.relay.cut()
            return
        if isinstance(request.asked, Resume):
            # It runs somewhere, and has to be found before it can be stopped.
            request.is_cancelled = True
            return
        # Not opened yet, so nothing of it was sent: its last frame is its first.
        self._forget(id)
        cancelled = Terminal(finish_reason="cancelled")
        self._outbox.put(self._session.done(id, cancelled, seq=0, cache=CacheOutcome()))
        self._apply(self._session.relax())

    def _forget(self, id: str, *, has_left: bool = False) -> None:
        """Ends what is done for a request. A task that has not begun never comes to its `finally`."""
        request = self._requests.pop(id)
        request.record.ended(has_left=has_left)
        if request.incoming is not None:
            request.incoming.close()
        request.task.cancel()

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
