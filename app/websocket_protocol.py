"""How Serve's HTTP servers speak WebSocket: in turns, without compression, with an eye on the peer.

Serve calls `install` before an HTTP server starts, in an ingress as in a proxy:
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` in deploy/serve.env.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.middleware import Middleware
from uvicorn.config import WS_PROTOCOLS, Config
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from app.fair_reading import FairReading
from app.peer_watch import Address, PeerWatch, SocketTable, TcpState, Watched, own_state
from app.serve_headers import ServeHeaders

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 64 * 1024
PEER_HEADER = "x-seedance-peer"
"""Both ends of the client's connection, as deploy/haproxy.sh makes HAProxy tell them."""


@dataclass(frozen=True)
class PeerSettings:
    """How soon a peer that is silent is taken for lost.

    Attributes:
        keepalive_idle_s: silence before TCP asks, in whole seconds; 0: it never asks.
        keepalive_interval_s, keepalive_probes: as many questions, so far apart, go without an
            answer.
        unacked_timeout_s: time in which what was sent has to be acknowledged; 0: any.
    """

    keepalive_idle_s: int = 1
    keepalive_interval_s: int = 1
    keepalive_probes: int = 3
    unacked_timeout_s: float = 0.7


def read_peer_settings(environment: Mapping[str, str]) -> PeerSettings:
    """`SEEDANCE_…` of deploy/serve.env; what is not set has its default.

    Raises:
        ValueError: a value is no number, or below 0.
    """
    default = PeerSettings()
    settings = PeerSettings(
        keepalive_idle_s=int(
            environment.get("SEEDANCE_KEEPALIVE_IDLE_S", default.keepalive_idle_s)
        ),
        keepalive_interval_s=int(
            environment.get("SEEDANCE_KEEPALIVE_INTERVAL_S", default.keepalive_interval_s)
        ),
        keepalive_probes=int(
            environment.get("SEEDANCE_KEEPALIVE_PROBES", default.keepalive_probes)
        ),
        unacked_timeout_s=float(
            environment.get("SEEDANCE_UNACKED_TIMEOUT_S", default.unacked_timeout_s)
        ),
    )
    is_allowed = (
        settings.keepalive_idle_s >= 0
        and settings.keepalive_interval_s >= 1
        and settings.keepalive_probes >= 1
        and settings.unacked_timeout_s >= 0
    )
    if not is_allowed:
        raise ValueError(f"{settings} is out of range")
    return settings


def cap_send_buffer(own: socket.socket) -> None:
    """Keeps the kernel from taking megabytes for a client that does not read."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def keep_alive(own: socket.socket, settings: PeerSettings) -> None:
    """Makes TCP ask a peer that is silent; where the options are unknown, at its own pace."""
    if settings.keepalive_idle_s == 0:
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", settings.keepalive_idle_s),
        ("TCP_KEEPINTVL", settings.keepalive_interval_s),
        ("TCP_KEEPCNT", settings.keepalive_probes),
    ):
        if hasattr(socket, name):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Peers:
    """The clients of one server process, behind HAProxy or at its own sockets."""

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings
        self._watch = PeerWatch(settings.unacked_timeout_s)
        self._table: SocketTable | None = None
        self._is_blind = False

    def watched(self, transport: asyncio.Transport, told: str | None) -> Watched:
        """The client of a transport.

        Args:
            told: its `PEER_HEADER`. One that lies spares its sender from being watched.
        """
        own: socket.socket = transport.get_extra_info("socket")
        ends = None if told is None else read_ends(told)

        def state() -> TcpState | None:
            return own_state(own) if told is None else self._ask(ends)

        return self._watch.watched(state, transport.abort)

    def expect(self, peer: Watched) -> None:
        self._watch.expect(peer)

    def forget(self, peer: Watched) -> None:
        self._watch.forget(peer)

    def _ask(self, ends: tuple[Address, Address] | None) -> TcpState | None:
        if ends is None or self._is_blind:
            return None
        try:
            self._table = self._table or SocketTable()
            return self._table.state(*ends)
        except (OSError, AttributeError) as error:
            logger.warning("clients behind a proxy are not watched here: %r", error)
            self._is_blind = True
            return None


def read_ends(told: str) -> tuple[Address, Address] | None:
    """Peer and own end in a `PEER_HEADER`; None when it says something else."""
    try:
        peer, peer_port, here, here_port = told.split()
        ends = Address.of(peer, peer_port), Address.of(here, here_port)
    except ValueError:
        return None
    return ends


class Conversation(ServerProtocol):
    """What websockets makes of the bytes; a client may close between two fragments."""

    def recv_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            # A control frame like any other there (RFC 6455, 5.4), which websockets takes for a
            # broken protocol: a client that leaves on purpose would count as lost.
            self.current_size = None
        super().recv_frame(frame)


class WebSocketProtocol(FairReading):
    """Reads in turns, agrees on no permessage-deflate, and drops a peer that is lost."""

    peers: ClassVar[Peers]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # No extensions: a few bytes of permessage-deflate unpack to megabytes, and tokens are too
        # short to gain by it.
        self.conn = Conversation(max_size=config.ws_max_size, logger=self.logger)
        self._peer: Watched | None = None

    def handle_connect(self, event: Request) -> None:
        own: socket.socket = self.transport.get_extra_info("socket")
        cap_send_buffer(own)
        keep_alive(own, self.peers.settings)
        self._peer = self.peers.watched(self.transport, event.headers.get(PEER_HEADER))
        super().handle_connect(event)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._peer is not None:
            self.peers.forget(self._peer)
        super().connection_lost(exc)

    async def send(self, message: Any) -> None:
        await super().send(message)
        self._expect()

    def send_keepalive_ping(self) -> None:
        super().send_keepalive_ping()
        # As long as this is not acknowledged TCP does not ask by itself.
        self._expect()

    def handle_ping(self) -> None:
        super().handle_ping()
        self._expect()

    def _expect(self) -> None:
        if self._peer is not None:
            self.peers.expect(self._peer)


def install() -> list[Middleware]:
    """Makes the servers of this process use `WebSocketProtocol`; adds `ServeHeaders`.

    Raises:
        ValueError: a setting is out of range.
    """

    class Configured(WebSocketProtocol):
        peers = Peers(read_peer_settings(os.environ))

    WS_PROTOCOLS["auto"] = Configured  # type: ignore[assignment]
    return [Middleware(ServeHeaders, is_ingress=_is_replica())]


def _is_replica() -> bool:
    """Whether this process serves an ingress replica, and not a proxy."""
    # Whoever calls us has imported it; others need none of it.
    context = sys.modules.get("ray.serve.context")
    return context is not None and context._get_internal_replica_context() is not None
