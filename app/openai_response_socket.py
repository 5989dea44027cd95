"""/v1/responses over a WebSocket: `response.create` in, the events of its response out.

Requests of one lane (`stream_id`, or none) are answered one after the other, lanes side by
side; every event repeats the lane of its request. The connection remembers its last
responses, so that `previous_response_id` can name one; nothing outlives the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.websockets import WebSocket

from app.accounts import Accounts, Holder
from app.connection import GOING_AWAY, PEER_GONE
from app.openai_bodies import check_model
from app.openai_errors import error_reply, error_response, report_incident
from app.openai_exchange import raise_failure
from app.openai_replies import Event, Heading, encode
from app.openai_requests import Caller
from app.openai_response_requests import ResponsePlan, Turn, plan_response, read_input
from app.openai_response_types import SocketBody
from app.openai_response_writer import ResponseWriter
from app.outcomes import RequestOutcomes, RequestRecord
from app.serving import Stream, StreamOpener
from protocol.errors import (
    InputTooLarge,
    InvalidRequest,
    OriginRefused,
    Overloaded,
    RateLimited,
    ServingError,
)
from protocol.parse import decode_struct

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 16
"""Responses of one connection that `previous_response_id` can name, the last ones."""
MAX_REMEMBERED_CHARS = 4 * 2**20


class _ClientLeft(Exception):
    """The connection broke while we wrote."""


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    stream_id: str | None = None


class ResponseSockets:
    """Serves the sockets; one instance an ingress replica.

    Args:
        max_live_requests: of one connection, running or waiting for their lane.
        unread_timeout_s: a client that takes nothing for so long is given up.
    """

    def __init__(
        self,
        graph: StreamOpener,
        accounts: Accounts,
        *,
        max_connections: int,
        max_live_requests: int,
        max_message_bytes: int,
        unread_timeout_s: float = 30.0,
        outcomes: RequestOutcomes | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.graph = graph
        self.max_live_requests = max_live_requests
        self.max_message_bytes = max_message_bytes
        self.unread_timeout_s = unread_timeout_s
        self.outcomes = outcomes or RequestOutcomes()
        self.clock = clock
        self.new_id = new_id
        self.is_draining = False
        self.accounts = accounts
        self._max_connections = max_connections
        self._connections: set[_Connection] = set()

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def serve(self, socket: WebSocket) -> None:
        """Runs one connection from handshake to close. Raises nothing but cancellation."""
        try:
            holder = self._admit(socket)
        except ServingError as error:
            self.outcomes.refuse_handshake(error.code)
            with contextlib.suppress(*PEER_GONE):
                await socket.send_denial_response(error_response(error))
            return
        connection = _Connection(self, socket, holder)
        self._connections.add(connection)
        try:
            await socket.accept()
            await connection.run()
        except (*PEER_GONE, _ClientLeft) as error:
            logger.debug("socket ended: %r", error)
        finally:
            self._connections.discard(connection)

    async def drain(self, deadline_s: float) -> None:
        """Takes nothing new; closes each connection once it is idle, and all at the deadline."""
        self.is_draining = True
        closing = [asyncio.create_task(one.drain(deadline_s)) for one in self._connections]
        await asyncio.gather(*closing, return_exceptions=True)

    def _admit(self, socket: WebSocket) -> Holder:
        if self.is_draining:
            raise Overloaded(GOING_AWAY.reason)
        if not self.accounts.allows_origin(socket.headers):
            raise OriginRefused("this origin is not allowed", param="Origin")
        holder = self.accounts.holder_of(socket.headers.get("authorization"))
        if self.open_connections >= self._max_connections:
            raise Overloaded(
                f"{self._max_connections} connections are open, the limit",
                limit=self._max_connections,
                retry_after_s=5,
            )
        return holder


class _Connection:
    """One socket, its lanes, and what it remembers."""

    def __init__(self, sockets: ResponseSockets, socket: WebSocket, holder: Holder) -> None:
        self._sockets = sockets
        self._socket = socket
        self._holder = holder
        self._lanes: dict[str | None, deque[SocketBody]] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._num_live = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._sending = asyncio.Lock()
        self._remembered: OrderedDict[str, list[Turn]] = OrderedDict()

    async def run(self) -> None:
        """Reads until the client leaves; then everything that still runs is cancelled."""
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._take(message)
        finally:
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)

    async def drain(self, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._is_idle.wait()
        with contextlib.suppress(*PEER_GONE):
            await self._socket.close(GOING_AWAY.code, GOING_AWAY.reason)

    async def _take(self, message: Any) -> None:
        lane: str | None = None
        try:
            raw: str | bytes = message.get("text") or message.get("bytes") or b""
            self._check_size(raw)
            envelope = decode_struct(raw, _Envelope)
            lane = envelope.stream_id
            if envelope.type == "response.create":
                self._enqueue(decode_struct(raw, SocketBody))
            elif envelope.type == "response.steer":
                await self._refuse_steering(raw, lane)
            else:
                raise InvalidRequest(
                    f"type must be response.create, got {envelope.type[:60]!a}", param="type"
                )
        except ServingError as error:
            self._sockets.outcomes.refuse(error.code)
            await self._send_error(error, lane)

    def _check_size(self, raw: str | bytes) -> None:
        limit = self._sockets.max_message_bytes
        size = len(raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass"))
        if size > limit:
            raise InputTooLarge(f"the message has {size} bytes, the limit is {limit}", limit=limit)

    def _enqueue(self, body: SocketBody) -> None:
        if self._sockets.is_draining:
            raise Overloaded(GOING_AWAY.reason, retry_after_s=1)
        limit = self._sockets.max_live_requests
        if self._num_live >= limit:
            raise RateLimited(
                f"{limit} requests run or wait on this connection, the limit",
                limit=limit,
                retry_after_s=1,
            )
        self._num_live += 1
        self._is_idle.clear()
        queue = self._lanes.get(body.stream_id)
        if queue is not None:
            queue.append(body)
            return
        self._lanes[body.stream_id] = deque([body])
        worker = asyncio.create_task(self._work(body.stream_id))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    async def _work(self, lane: str | None) -> None:
        """Answers the requests of a lane until there are none."""
        queue = self._lanes[lane]
        try:
            while queue:
                try:
                    await self._answer(queue.popleft())
                finally:
                    self._num_live -= 1
        except _ClientLeft:
            # Whoever reads from it learns that as well.
            with contextlib.suppress(*PEER_GONE):
                await self._socket.close(1011)
        finally:
            self._num_live -= len(queue)
            del self._lanes[lane]
            if self._num_live == 0:
                self._is_idle.set()

    async def _answer(self, body: SocketBody) -> None:
        record = self._sockets.outcomes.begin()
        has_left = True
        try:
            await self._generate(body, record)
            has_left = False
        except ServingError as error:
            record.failed(error)
            has_left = False
            await self._send_error(error, body.stream_id)
        except _ClientLeft:
            raise
        except Exception as exc:
            incident = report_incident(exc)
            record.failed(incident)
            has_left = False
            await self._send_error(incident, body.stream_id)
        finally:
            record.ended(has_left=has_left)

    async def _generate(self, body: SocketBody, record: RequestRecord) -> None:
        self._sockets.accounts.check(self._holder)
        record.admit(self._holder.tenant)
        graph = self._sockets.graph
        info = check_model(body.model, await graph.model_info())
        caller = Caller(
            reply_id=f"resp_{self._sockets.new_id()}", tenant=self._holder.tenant, model=info.id
        )
        earlier = self._remembered.get(body.previous_response_id or "")
        planned = plan_response(body, caller, earlier=earlier)
        heading = Heading(
            id=caller.reply_id,
            created=int(self._sockets.clock()),
            model=info.id,
            revision=info.revision,
        )
        writer = ResponseWriter(heading, planned, lane=body.stream_id)
        (request,) = planned.plan.requests
        if body.generate is False:
            await graph.warm(request)
            await self._send(writer.prepared())
            self._remember(caller.reply_id, planned, [])
            return
        stream = await graph.open_stream(request)
        try:
            record.opened([stream])
            await self._relay(stream, writer, record)
            self._remember(caller.reply_id, planned, writer.output)
        finally:
            stream.cancel()

    async def _relay(self, stream: Stream, writer: ResponseWriter, record: RequestRecord) -> None:
        await self._send(writer.opening(0))
        cursor = stream.log.cursor()
        while deltas := await cursor.wait():
            for delta in deltas:
                await self._send(writer.piece(0, delta))
        try:
            raise_failure(stream.log)
        except ServingError as error:
            record.failed(error)
            await self._send(writer.failure(error))
        else:
            await self._send(writer.closing(0, stream.log))

    def _remember(self, name: str, planned: ResponsePlan, output: Sequence[dict[str, Any]]) -> None:
        self._remembered[name] = [*planned.turns, *read_input(output)]
        while len(self._remembered) > MAX_REMEMBERED or (
            len(self._remembered) > 1 and self._remembered_chars > MAX_REMEMBERED_CHARS
        ):
            self._remembered.popitem(last=False)

    @property
    def _remembered_chars(self) -> int:
        return sum(
            len(turn["content"] or "") for turns in self._remembered.values() for turn in turns
        )

    async def _refuse_steering(self, raw: str | bytes, lane: str | None) -> None:
        steer = msgspec.json.decode(raw)
        await self._send_json(
            {
                "type": "response.steer.failed",
                "sequence_number": 0,
                "error": {
                    "code": "steering_not_supported",
                    "message": "a running response takes no input: send it when it has ended",
                    "type": "invalid_request_error",
                },
                "steer": {
                    "input": steer.get("input", ""),
                    "previous_response_id": steer.get("previous_response_id", ""),
                },
            },
            lane,
        )

    async def _send_error(self, error: ServingError, lane: str | None) -> None:
        told = msgspec.to_builtins(error_reply(error).error)
        event = {"type": "error", "status": error.http_status, "error": told}
        await self._send_json(event, lane)

    async def _send_json(self, event: dict[str, Any], lane: str | None) -> None:
        if lane is not None:
            event["stream_id"] = lane
        await self._send([Event(encode(event))])

    async def _send(self, events: Sequence[Event]) -> None:
        async with self._sending:
            try:
                async with asyncio.timeout(self._sockets.unread_timeout_s):
                    for event in events:
                        await self._socket.send_text(event.data.decode())
            except PEER_GONE as error:
                raise _ClientLeft from error
