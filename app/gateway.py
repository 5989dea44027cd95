"""The WebSocket gateway: who may connect, and an orderly end for all who have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from starlette.websockets import WebSocket

from app.accounts import Accounts, Holder
from app.connection import GOING_AWAY, PEER_GONE, Connection
from app.openai_errors import error_response
from app.outcomes import RequestOutcomes
from app.resume import ResumableStreams
from app.serving import StreamOpener
from app.stream_keeper import StreamKeeper
from app.tickets import Tickets, offered_ticket
from protocol.errors import OriginRefused, Overloaded, ServingError
from protocol.session import Session, SessionLimits

logger = logging.getLogger(__name__)

SUBPROTOCOLS = ("seedance.v1.json", "seedance.v1.bin")


class Gateway:
    """Serves WebSockets; one instance an ingress replica.

    Args:
        tickets: those of this ingress.
        outcomes: counts the requests.
        unread_timeout_s: how long a client may take nothing of what waits for it.
        resume_window_s: how long a stream waits for a RESUME after its connection was lost
            and after its end; 0 ends it with its connection.
        max_resumable_streams, max_resumable_bytes: what may wait, at most.
    """

    def __init__(
        self,
        opener: StreamOpener,
        accounts: Accounts,
        *,
        limits: SessionLimits,
        max_connections: int,
        tickets: Tickets | None = None,
        outcomes: RequestOutcomes | None = None,
        unread_timeout_s: float = 30.0,
        resume_window_s: float = 0.0,
        max_resumable_streams: int = 4096,
        max_resumable_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opener = opener
        resumable = ResumableStreams(
            resume_window_s,
            max_streams=max_resumable_streams,
            max_bytes=max_resumable_bytes,
            clock=clock,
        )
        self._keeper = StreamKeeper(opener, resumable, clock)
        self._accounts = accounts
        self._tickets = tickets or Tickets()
        self._outcomes = outcomes or RequestOutcomes()
        self._limits = limits
        self._max_connections = max_connections
        self._unread_timeout_s = unread_timeout_s
        self._clock = clock
        self._connections: set[Connection] = set()
        self._is_deserted = asyncio.Event()
        self._is_deserted.set()
        self.open_connections = 0
        self.is_draining = False

    @property
    def keeper(self) -> StreamKeeper:
        """Keeps the streams of this ingress that lost their client, however it was connected."""
        return self._keeper

    @property
    def live_requests(self) -> int:
        """Requests that are not answered to their end, on all connections."""
        return sum(connection.live_requests for connection in self._connections)

    @property
    def resumable_streams(self) -> int:
        """Streams that wait for their client to come back, running or finished."""
        return self._keeper.num_kept

    async def drain(self, deadline_s: float) -> None:
        """Takes nothing new, and returns when every connection is closed.

        One without a live request is closed soon; at the deadline all are, and what they
        still had can be resumed elsewhere. Further calls only wait.
        """
        if not self.is_draining:
            self.is_draining = True
            for connection in self._connections:
                connection.drain(deadline_s)
        await self._is_deserted.wait()

    def close(self) -> None:
        """Stops the streams that wait for their client; the last call, after the connections."""
        self._keeper.close()

    async def serve(self, socket: WebSocket) -> None:
        """Runs one connection from handshake to close. Raises nothing but cancellation."""
        self.open_connections += 1
        try:
            holder = await self._admit(socket)
            model = (await self._opener.model_info()).id
            await self._run(socket, holder, model)
        except ServingError as error:
            self._outcomes.refuse_handshake(error.code)
            # Before the socket is accepted a refusal can still carry a real HTTP status.
            with contextlib.suppress(*PEER_GONE):
                await socket.send_denial_response(error_response(error))
        except PEER_GONE as error:
            logger.debug("socket ended: %r", error)
        finally:
            self.open_connections -= 1

    async def _run(self, socket: WebSocket, holder: Holder, model: str) -> None:
        offered = socket.scope.get("subprotocols") or []
        chosen = next((name for name in SUBPROTOCOLS if name in offered), None)
        await socket.accept(subprotocol=chosen)
        if offered and chosen is None:
            await socket.close(4406, "offer seedance.v1.json or seedance.v1.bin")
            return
        if self.is_draining:
            await socket.close(GOING_AWAY.code, GOING_AWAY.reason)
            return
        connection = Connection(
            socket,
            self._keeper,
            Session(self._limits, self._clock, binary=chosen == "seedance.v1.bin"),
            self._outcomes,
            limits=self._limits,
            tenant=holder.tenant,
            check=lambda: self._accounts.check(holder),
            model=model,
            unread_timeout_s=self._unread_timeout_s,
            clock=self._clock,
        )
        self._connections.add(connection)
        self._is_deserted.clear()
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._is_deserted.set()

    async def _admit(self, socket: WebSocket) -> Holder:
        if self.is_draining:
            raise Overloaded(GOING_AWAY.reason)
        if not self._accounts.allows_origin(socket.headers):
            raise OriginRefused("this origin is not allowed", param="Origin")
        ticket = offered_ticket(socket.scope.get("subprotocols") or [])
        holder = None
        if ticket is None:
            holder = self._accounts.holder_of(socket.headers.get("authorization"))
        if self.open_connections > self._max_connections:
            raise Overloaded(
                f"{self._max_connections} connections are open, the limit",
                limit=self._max_connections,
                retry_after_s=5,
            )
        # Last, since it is good once. Where a proxy asks for a password, the browser sends
        # that as its Authorization, so that the ticket counts and not the header.
        if holder is None:
            assert ticket is not None
            holder = await self._tickets.redeem(ticket)
            self._accounts.check(holder)
        return holder
