"""Tells that a peer does not acknowledge any more what it was sent. Knows nothing of WebSockets.

TCP itself notices only after a quarter of an hour. Its user time-out (`TCP_USER_TIMEOUT`)
notices sooner, but counts a peer that acknowledges with a full window as well: one that lives
and is only slow to read. Here the kernel is asked what it knows (`tcp_info`), and only a peer
that owes an acknowledgement, and has sent none of any kind, is lost.

Only sockets that were written to are asked for, until all of that is acknowledged: an idle one
costs nothing (and is the business of TCP keepalive).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

INTERVAL_S = 0.1
LATE_TICK_S = 0.3
"""Between two looks; a longer pause is our own, and nothing of it counts against a peer."""
RTO_FACTOR = 3.0
"""A slow network has at least as many of its own retransmission time-outs."""

_ESTABLISHED = 1
_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_INET_DIAG_INFO = 2
_ALL = 0xFFFFFFFF
_NO_COOKIE = (_ALL, _ALL)
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_DIAG_MESSAGE_BYTES = 72
_TCP_INFO_BYTES = 256


class Address(NamedTuple):
    """One end of a TCP connection."""

    host: IPv4Address | IPv6Address
    port: int

    @classmethod
    def of(cls, host: str, port: str) -> Address:
        """Raises `ValueError` when they are no address."""
        number = int(port)
        if not 0 < number < 65536:
            raise ValueError(f"{number} is no port")
        return cls(ip_address(host), number)


@dataclass(frozen=True)
class TcpState:
    """What the kernel knows of a connection; see `struct tcp_info` in Linux' `linux/tcp.h`.

    Attributes:
        unacked: segments on their way that the peer has not acknowledged.
        silent_s: since the last acknowledgement of any kind.
        rto_s: when a segment is taken for lost, before any back-off (RFC 6298).
    """

    unacked: int
    bytes_acked: int
    silent_s: float
    rto_s: float


def read_tcp_info(info: bytes) -> TcpState | None:
    """The state in a `struct tcp_info`; None when that is no living connection."""
    if len(info) < 128 or info[0] != _ESTABLISHED:
        return None
    (unacked,) = struct.unpack_from("=I", info, 24)
    (last_ack_ms,) = struct.unpack_from("=I", info, 56)
    rtt_us, rttvar_us = struct.unpack_from("=II", info, 68)
    (bytes_acked,) = struct.unpack_from("=Q", info, 120)
    rto_s = (rtt_us + 4 * rttvar_us) / 1e6
    return TcpState(unacked, bytes_acked, last_ack_ms / 1000, rto_s)


def own_state(own: socket.socket) -> TcpState | None:
    """The state of a socket of this process; None where the system does not tell."""
    try:
        return read_tcp_info(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES))
    except (OSError, AttributeError):
        return None


class SocketTable:
    """Asks the kernel for the state of other processes' sockets (`sock_diag(7)`); needs no rights.

    Raises:
        OSError: the system has no such table.
    """

    def __init__(self) -> None:
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
        self._netlink.settimeout(0.1)

    def close(self) -> None:
        self._netlink.close()

    def state(self, peer: Address, here: Address) -> TcpState | None:
        """Of the connection between two ends; None when this machine has none that lives.

        Raises:
            OSError: the table does not answer.
        """
        local, remote = here.host, peer.host
        if local.version != remote.version:
            return None
        family = socket.AF_INET if local.version == 4 else socket.AF_INET6
        request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, _INET_DIAG_INFO, _ALL)
        request += struct.pack("!HH16s16s", here.port, peer.port, local.packed, remote.packed)
        request += struct.pack("=III", 0, *_NO_COOKIE)
        size = _HEADER.size + len(request)
        head = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
        self._netlink.send(head + request)
        return _read_answer(self._netlink.recv(8192))


def _read_answer(answer: bytes) -> TcpState | None:
    size, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _NLMSG_ERROR:
        return None
    at = _HEADER.size + _DIAG_MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= size:
        length, name = _ATTRIBUTE.unpack_from(answer, at)
        if name == _INET_DIAG_INFO:
            return read_tcp_info(answer[at + _ATTRIBUTE.size : at + length])
        at += max(_ATTRIBUTE.size, (length + 3) & ~3)
    return None


class Debt:
    """Judges one peer by what the kernel says of it again and again. Pure.

    Args:
        timeout_s: time that a peer may owe an acknowledgement.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: float | None = None
        self._bytes_acked = 0

    def is_lost(self, state: TcpState, now_s: float) -> bool:
        """Whether the peer has owed for too long."""
        if state.unacked == 0:
            self._since_s = None
            return False
        if self._since_s is None or state.bytes_acked != self._bytes_acked:
            self._since_s, self._bytes_acked = now_s, state.bytes_acked
        timeout_s = max(self._timeout_s, RTO_FACTOR * state.rto_s)
        # A full window is acknowledged, and so is what a full buffer had to drop.
        return min(now_s - self._since_s, state.silent_s) >= timeout_s

    def forgive(self) -> None:
        """Begins anew."""
        self._since_s = None


@dataclass(eq=False)
class Watched:
    """One peer; `PeerWatch.expect` is told of each thing that was sent to it."""

    state: Callable[[], TcpState | None]
    on_lost: Callable[[], None]
    debt: Debt = field(repr=False)


class PeerWatch:
    """Looks after all peers of one event loop that have something to acknowledge.

    Args:
        timeout_s: as for `Debt`; 0 watches nobody.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._owing: dict[Watched, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = 0.0

    def watched(self, state: Callable[[], TcpState | None], on_lost: Callable[[], None]) -> Watched:
        """A peer to be watched; `on_lost` is called at most once, in the event loop."""
        return Watched(state, on_lost, Debt(self._timeout_s))

    def expect(self, peer: Watched) -> None:
        """Something was sent to it."""
        if self._timeout_s <= 0 or peer in self._owing:
            return
        self._owing[peer] = None
        if self._timer is None:
            self._ticked_s = self._clock()
            self._set_timer()

    def forget(self, peer: Watched) -> None:
        """It is gone."""
        self._owing.pop(peer, None)

    def tick(self) -> None:
        """Looks at everyone who may owe something."""
        now_s = self._clock()
        is_late = now_s - self._ticked_s > LATE_TICK_S
        self._ticked_s = now_s
        for peer in list(self._owing):
            state = peer.state()
            if is_late:
                peer.debt.forgive()
            if state is None:
                self.forget(peer)
            elif peer.debt.is_lost(state, now_s):
                self.forget(peer)
                peer.on_lost()
            elif state.unacked == 0:
                self.forget(peer)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._run)

    def _run(self) -> None:
        self._timer = None
        self.tick()
        if self._owing:
            self._set_timer()
