from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import closing, suppress

import pytest

from app.peer_watch import (
    INTERVAL_S,
    Address,
    Debt,
    PeerWatch,
    SocketTable,
    TcpState,
    own_state,
    read_tcp_info,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells of its sockets")
TIMEOUT_S = 0.7
FAST = 0.001


def owing(silent_s: float, *, bytes_acked: int = 0, rto_s: float = FAST) -> TcpState:
    return TcpState(unacked=3, bytes_acked=bytes_acked, silent_s=silent_s, rto_s=rto_s)


PAID = TcpState(unacked=0, bytes_acked=9, silent_s=60.0, rto_s=FAST)


def looks(debt: Debt, states: list[TcpState], every_s: float = INTERVAL_S) -> list[bool]:
    return [debt.is_lost(state, at * every_s) for at, state in enumerate(states)]


def test_a_peer_that_acknowledges_nothing_for_the_time_out_is_lost() -> None:
    states = [owing(0.1 * look) for look in range(9)]
    assert looks(Debt(TIMEOUT_S), states).index(True) == 7


def test_a_long_silence_before_the_first_word_does_not_count() -> None:
    assert looks(Debt(TIMEOUT_S), [PAID, owing(60.0), owing(60.1), PAID]) == [False] * 4


def test_a_peer_that_acknowledges_bit_by_bit_is_not_lost() -> None:
    states = [owing(2.0, bytes_acked=look) for look in range(100)]
    assert not any(looks(Debt(TIMEOUT_S), states))


def test_a_peer_whose_window_is_full_is_not_lost() -> None:
    # It acknowledges each probe, and what its buffer has to drop, but never takes a byte.
    states = [owing(0.3 * (look % 2)) for look in range(100)]
    assert not any(looks(Debt(TIMEOUT_S), states))


def test_a_slow_network_gets_more_time() -> None:
    states = [owing(0.1 * look, rto_s=1.0) for look in range(40)]
    assert looks(Debt(TIMEOUT_S), states).index(True) == 30


class Bench:
    """A watch whose clock and peers are ours."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.now_s = 100.0
        self.watch = PeerWatch(timeout_s, clock=lambda: self.now_s)
        self.lost: list[str] = []
        self.asked: list[str] = []

    def peer(self, name: str, state: Callable[[], TcpState | None]) -> None:
        def ask() -> TcpState | None:
            self.asked.append(name)
            return state()

        self.watch.expect(self.watch.watched(ask, lambda: self.lost.append(name)))

    def pass_time(self, seconds: float, every_s: float = INTERVAL_S) -> None:
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.watch.tick()


async def test_only_the_lost_peer_is_told_of_and_only_once() -> None:
    bench = Bench()
    bench.peer("lost", lambda: owing(9.0))
    bench.peer("well", lambda: PAID)
    bench.pass_time(3.0)
    assert bench.lost == ["lost"]


async def test_a_peer_that_has_all_is_not_asked_for_again() -> None:
    bench = Bench()
    bench.peer("well", lambda: PAID)
    bench.pass_time(3.0)
    assert bench.asked == ["well"]


async def test_a_connection_that_the_system_does_not_know_is_left_alone() -> None:
    bench = Bench()
    bench.peer("elsewhere", lambda: None)
    bench.pass_time(3.0)
    assert bench.lost == []
    assert bench.asked == ["elsewhere"]


async def test_a_pause_of_our_own_is_not_held_against_anyone() -> None:
    bench = Bench()
    bench.peer("well", lambda: owing(9.0))
    bench.pass_time(0.5)
    bench.now_s += 10.0
    bench.watch.tick()
    bench.pass_time(0.5)
    assert bench.lost == []


async def test_nobody_is_watched_with_no_time_out() -> None:
    bench = Bench(timeout_s=0.0)
    bench.peer("lost", lambda: owing(9.0))
    bench.pass_time(3.0)
    assert bench.asked == []


async def test_a_peer_that_is_gone_is_not_asked_for() -> None:
    watch, asked = PeerWatch(TIMEOUT_S), asyncio.Event()
    peer = watch.watched(lambda: asked.set(), lambda: None)
    watch.expect(peer)
    watch.forget(peer)
    watch.tick()
    assert not asked.is_set()


async def test_the_watch_looks_by_itself() -> None:
    asked = asyncio.Event()
    watch = PeerWatch(TIMEOUT_S)
    watch.expect(watch.watched(lambda: asked.set(), lambda: None))
    async with asyncio.timeout(10):
        await asked.wait()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return server.accept()[0], client


def ends(here: socket.socket) -> tuple[Address, Address]:
    peer, own = here.getpeername(), here.getsockname()
    return Address.of(peer[0], str(peer[1])), Address.of(own[0], str(own[1]))


@linux
def test_the_table_tells_of_a_socket_what_the_socket_tells_itself() -> None:
    here, client = connected()
    with here, client:
        here.sendall(b"x" * 100)
        client.recv(100, socket.MSG_WAITALL)
        with closing(SocketTable()) as table:
            own, told = own_state(here), table.state(*ends(here))
        assert own is not None
        assert told is not None
        assert told.bytes_acked == own.bytes_acked
        assert told.unacked == own.unacked
        assert 0 < own.rto_s < 10


@linux
def test_the_table_knows_no_connection_that_is_none() -> None:
    here, client = connected()
    peer, own = ends(here)
    with closing(SocketTable()) as table:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = Address.of("127.0.0.1", str(listening.getsockname()[1]))
            assert table.state(peer, listener) is None
        assert table.state(peer, Address.of("192.0.2.1", "80")) is None
        assert table.state(peer, Address.of("::1", "80")) is None
        here.close()
        client.close()
        assert table.state(peer, own) is None


@linux
def test_a_reader_that_sleeps_with_full_buffers_owes_nothing() -> None:
    here, client = connected()
    with here, client:
        here.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                here.send(bytes(65536))
        state = own_state(here)
        assert state is not None
        assert not Debt(TIMEOUT_S).is_lost(state, 0.0)


@pytest.mark.parametrize("info", [b"", bytes(127), bytes(200), b"\x0a" + bytes(199)])
def test_what_is_no_living_connection_has_no_state(info: bytes) -> None:
    assert read_tcp_info(info) is None


def test_the_state_is_read_from_where_linux_puts_it() -> None:
    info = bytearray(232)
    info[0] = 1
    struct.pack_into("=I", info, 24, 5)
    struct.pack_into("=I", info, 56, 1500)
    struct.pack_into("=II", info, 68, 100_000, 25_000)
    struct.pack_into("=Q", info, 120, 2**40)
    assert read_tcp_info(bytes(info)) == TcpState(5, 2**40, 1.5, 0.2)


@pytest.mark.parametrize(
    ("host", "port"), [("", "1"), ("host", "1"), ("127.0.0.1", "0"), ("::1", "65536"), ("::1", "x")]
)
def test_what_is_no_address_is_refused(host: str, port: str) -> None:
    with pytest.raises(ValueError):
        Address.of(host, port)
