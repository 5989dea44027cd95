"""The parts of `bench.heartbeats` that need no cluster."""

from __future__ import annotations

import asyncio
import json
import os
import select
from pathlib import Path

import pytest

from bench.ends import NotingEnds
from bench.heartbeat_clients import Peer, Plan, hold, plan_line
from bench.heartbeats import (
    IDLE,
    STREAMING,
    Detections,
    Gap,
    Prefills,
    Server,
    Stalls,
    detections_table,
    gap_line,
    prefills_line,
    stalls_line,
)
from bench.wire_clients import ConnectionFailed
from tests.app.fake_server import HELLO, FakeServer, fake_server
from tests.app.fake_server import Peer as ServerSide


def port_of(server: FakeServer) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


async def leaving(peer: ServerSide) -> None:
    """Says one word to who asks, and leaves."""
    await peer.send(**HELLO)
    request = await peer.expect("INFER_REQ")
    await peer.ack(request["id"])
    await peer.chunk(request["id"], 0, "a")


async def heartbeat_first(peer: ServerSide) -> None:
    await peer.send(**HELLO)
    await peer.send(type="PING", ts=7)
    assert (await peer.expect("PONG"))["ts"] == 7
    await peer.send(type="PONG", ts=8)
    await peer.receive()


async def test_a_client_answers_heartbeats_whatever_it_reads() -> None:
    def talk(port: int) -> list[str]:
        peer = Peer("127.0.0.1", port, Plan("one"))
        types: list[str] = []
        while "PONG" not in types:
            types.extend(frame["type"] for frame in peer.read())
        peer.abort()
        return types

    async with fake_server(heartbeat_first) as server:
        heard = await asyncio.to_thread(talk, port_of(server))
    # The server's PING may have come with its greeting.
    assert heard in (["PING", "PONG"], ["PONG"])


async def test_clients_are_held_until_a_line_comes_and_the_closed_are_told() -> None:
    def run(port: int) -> list[set[str]]:
        plans = [Plan("asks", streams=True, receive_buffer=4096), Plan("waits")]
        peers = [Peer("127.0.0.1", port, plan) for plan in plans]
        reading, writing = os.pipe()
        with open(reading) as commands, open(writing, "w") as told:
            states = hold(peers, commands)
            begun = set(next(states))
            select.select([peers[0].socket], [], [], 10)
            print(file=told, flush=True)
            ended = set(next(states))
        for peer in peers:
            peer.close()
        return [begun, ended]

    async with fake_server(leaving) as server:
        begun, ended = await asyncio.to_thread(run, port_of(server))
    assert ended == {"asks"}
    assert begun <= ended


async def test_a_server_that_refuses_is_an_error() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionFailed, match="503"):
            await asyncio.to_thread(Peer, "127.0.0.1", port, Plan("one"))


def test_a_plan_is_one_line() -> None:
    line = plan_line("here", 80, [Plan("one", streams=True), Plan("two", receive_buffer=1)])
    told = json.loads(line)
    assert "\n" not in line
    assert [Plan(**plan) for plan in told["plans"]][1] == Plan("two", False, 1)


async def test_the_end_of_a_websocket_is_noted_by_its_name(tmp_path: Path) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("the end")

    file = tmp_path / "ends"
    noting = NotingEnds(app, file)
    scope = {"type": "websocket", "headers": [(b"x-bench-name", b"one")]}
    for each in (scope, {"type": "http", "headers": []}):
        with pytest.raises(RuntimeError):
            await noting(each, None, None)  # type: ignore[arg-type]
    assert list(Server(1, file, file).ended()) == ["one"]


def test_nothing_has_ended_before_the_first_note(tmp_path: Path) -> None:
    assert Server(1, tmp_path / "none", tmp_path / "none").ended() == {}


def test_the_table_has_medians_and_the_worst() -> None:
    detections = Detections()
    detections.take("FIN", IDLE, {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.01, "b": 2.03})
    detections.take("silence", STREAMING, {"d": 1.0}, {"d": 1.9})
    detections.stopped_s["silence", STREAMING] = [1.5, 2.5]
    lines = detections_table(detections).splitlines()
    assert lines[2] == "| FIN | idle | 2 | 20 | 30 |  |  |"
    assert lines[3] == "| silence | streaming | 1 | 900 | 900 | 2,000 | 2,500 |"
    assert lines[-1].startswith("1 were not noticed")


def test_the_lines_tell_their_figures() -> None:
    assert "64 of them streamed to (32 with a window" in stalls_line(
        Stalls(1000, 64, 32, 8.0, 6, 0)
    )
    assert "6 times for 8 s: 0 false closes" in stalls_line(Stalls(1000, 64, 32, 8.0, 6, 0))
    assert gap_line(Gap(4, 0.4, 0, [])).endswith("half of them streamed to: 0 given up.")
    assert "3 given up; 2 of them learnt of it within 8 s, 150 ms (median)" in gap_line(
        Gap(4, 3.0, 3, [0.1, 0.2])
    )
    line = prefills_line(Prefills([6000], [20.04], [0.001, 0.003]))
    assert "6,000 tokens (in 20.0 s): p50 2.0 ms" in line
    assert "most 3.0 ms of 2" in line
