"""The WebSocket gateway: bytes between a socket and a `Session`, streams between a `Session` and the graph.

Reader, writer and requests are separate tasks. The reader waits for no send,
unless its peer floods us and takes no answer, so a healthy peer's frames are read,
and its pings answered, whatever the model does; everything that leaves goes
through one queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from app.accounts import Accounts
from app.openai_errors import error_response, report_incident
from app.serving import Stream, StreamOpener
from protocol.errors import OriginRefused, Overloaded, ServingError
from protocol.frames import Hello
from protocol.parse import inference_request
from protocol.session import (
    CancelRequest,
    Close,
    Event,
    Send,
    Session,
    SessionLimits,
    StartRequest,
)
from protocol.token_log import CacheOutcome, Terminal

logger = logging.getLogger(__name__)

SUBPROTOCOLS = ("seedance.v1.json", "seedance.v1.bin")
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


class Gateway:
    """Serves WebSockets; one instance an ingress replica."""

    def __init__(
        self,
        opener: StreamOpener,
        accounts: Accounts,
        *,
        limits: SessionLimits,
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opener = opener
        self._accounts = accounts
        self._limits = limits
        self._max_connections = max_connections
        self._clock = clock
        self.open_connections = 0

    async def serve(self, socket: WebSocket) -> None:
        """Runs one connection from handshake to close. Raises nothing but cancellation."""
        self.open_connections += 1
        try:
            tenant = self._admit(socket)
            model = (await self._opener.model_info()).id
            await self._run(socket, tenant, model)
        except ServingError as error:
            # Before the socket is accepted a refusal can still carry a real HTTP status.
            with contextlib.suppress(*PEER_GONE):
                await socket.send_denial_response(error_response(error))
        except PEER_GONE as error:
            logger.debug("socket ended: %r", error)
        finally:
            self.open_connections -= 1

    async def _run(self, socket: WebSocket, tenant: str, model: str) -> None:
        offered = socket.scope.get("subprotocols") or []
        chosen = next((name for name in SUBPROTOCOLS if name in offered), None)
        await socket.accept(subprotocol=chosen)
        if offered and chosen is None:
            await socket.close(4406, "offer seedance.v1.json or seedance.v1.bin")
            return
        await Connection(
            socket,
            self._opener,
            Session(self._limits, self._clock, binary=chosen == "seedance.v1.bin"),
            limits=self._limits,
            tenant=tenant,
            model=model,
            clock=self._clock,
        ).run()

    def _admit(self, socket: WebSocket) -> str:
        if not self._accounts.allows_origin(socket.headers):
            raise OriginRefused("this origin is not allowed", param="Origin")
        tenant = self._accounts.tenant_of(socket.headers.get("authorization"))
        if self.open_connections > self._max_connections:
            raise Overloaded(
                f"{self._max_connections} connections are open, the limit",
                limit=self._max_connections,
                retry_after_s=5,
            )
        return tenant


class Connection:
    """One accepted socket: its session, its outbox and its running requests."""

    def __init__(
        self,
        socket: WebSocket,
        opener: StreamOpener,
        session: Session,
        *,
        limits: SessionLimits,
        tenant: str,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._opener = opener
        self._session = session
        self._limits = limits
        self._tenant = tenant
        self._model = model
        self._clock = clock
        self._outbox: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, Stream] = {}
        self._close: Close | None = None
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Reads, writes and watches until one of them ends; then nothing of the connection is left."""
        hello = Hello(
            session=uuid.uuid4().hex,
            model=self._model,
            limits=self._limits.announced,
            heartbeat_s=self._limits.heartbeat_s,
            resume_window_s=0,
        )
        self._apply(self._session.open(hello))
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._read(), name="reader"),
            asyncio.create_task(self._write(), name="writer"),
            asyncio.create_task(self._watch(), name="heartbeat"),
            asyncio.create_task(self._closing.wait(), name="closing"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._report(tasks)
        finally:
            for task in (*self._requests.values(), *tasks):
                task.cancel()
            await asyncio.gather(*self._requests.values(), *tasks, return_exceptions=True)
        if self._close is not None and self._socket.application_state == WebSocketState.CONNECTED:
            await self._say_goodbye(self._close)

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
            elif isinstance(event, Close):
                self._shut(event)
            elif isinstance(event, StartRequest):
                self._requests[event.id] = asyncio.create_task(self._run_request(event))
            elif isinstance(event, CancelRequest):
                self._cancel(event.id)

    async def _run_request(self, start: StartRequest) -> None:
        """One request, from its frame to its one terminal frame."""
        id, started_s = start.id, self._clock()
        stream: Stream | None = None
        try:
            request = inference_request(
                start.req,
                request_id=uuid.uuid4().hex,
                tenant=self._tenant,
                model=start.req.model or self._model,
            )
            stream = await self._opener.open_stream(request)
            self._streams[id] = stream
            self._put(
                self._session.accept(
                    id,
                    stream=request.request_id,
                    cache=stream.cache,
                    queue_position=stream.queue_position,
                )
            )
            await self._relay(id, stream)
        except ServingError as error:
            self._fail(id, stream, error)
        except Exception as error:
            self._fail(id, stream, report_incident(error))
        finally:
            if self._requests.get(id) is asyncio.current_task():
                del self._requests[id]
                self._streams.pop(id, None)
            if stream is not None:
                stream.cancel()
                self._log_end(stream, self._clock() - started_s)

    async def _relay(self, id: str, stream: Stream) -> None:
        cursor = stream.log.cursor()
        while deltas := await cursor.wait():
            for delta in deltas:
                await self._has_room.wait()
                self._put(self._session.chunk(id, delta))
        terminal = stream.log.terminal
        assert terminal is not None, "a cursor ends only with its log"
        self._put(self._session.done(id, terminal, seq=stream.log.next_seq, cache=stream.cache))

    def _fail(self, id: str, stream: Stream | None, error: ServingError) -> None:
        """Tells why a request could not start, or why it could not go on."""
        if stream is None:
            self._put(self._session.refuse(id, error.info))
            return
        failed = Terminal(finish_reason="error", error=error.info)
        self._put(self._session.done(id, failed, seq=stream.log.next_seq, cache=stream.cache))

    def _cancel(self, id: str) -> None:
        """Ends a request now: its log gets the terminal record, which its relay passes on."""
        stream = self._streams.get(id)
        if stream is not None:
            stream.cancel()
            return
        # Not opened yet, so nothing of it was sent: its last frame is its first.
        self._requests.pop(id).cancel()
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
        logger.info(
            "request %s (websocket): %s, %d tokens, cache %s, %.3f s",
            stream.request.request_id,
            terminal.finish_reason if terminal is not None else "lost",
            stream.log.next_seq,
            stream.cache.outcome,
            seconds,
        )

    async def _send(self, data: str | bytes) -> None:
        if isinstance(data, str):
            await self._socket.send_text(data)
        else:
            await self._socket.send_bytes(data)
