"""The parts of `bench.echo` that need no cluster."""

from __future__ import annotations

import msgspec
import psutil
import pytest

from bench.echo import CachedAnswer, Figures, ask_for, breakdown, table
from bench.echo_server import app as echo_app
from bench.wire_clients import ConnectionFailed
from tests.app.fake_server import HELLO, Peer, fake_server

REQUEST = msgspec.json.encode({"type": "INFER_REQ", "id": "r", "prompt": "hi", "max_tokens": 1})


def answering(outcome: str):
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        while True:
            request = await peer.expect("INFER_REQ")
            await peer.ack(request["id"], outcome=outcome)
            await peer.chunk(request["id"], 0, "a")
            await peer.done(request["id"], 1, "length", cache={"outcome": outcome})

    return script


@pytest.mark.parametrize("connections", [1, 3])
async def test_every_connection_asks_again_after_its_answer(connections: int) -> None:
    async with fake_server(answering("exact")) as server:
        figures = await ask_for(
            server.url, connections, REQUEST, CachedAnswer(), [psutil.Process()], window_s=0.2
        )
    assert len(server.peers) == connections
    assert len(figures.latencies_s) > connections
    assert min(figures.latencies_s) > 0
    assert figures.computed == 0


def test_answers_that_were_computed_are_counted_apart() -> None:
    is_answer = CachedAnswer()
    assert not is_answer(b'{"type":"INFER_CHUNK","id":"r","seq":0,"text":"a"}')
    assert is_answer(b'{"type":"INFER_DONE","id":"r","cache":{"outcome":"exact"}}')
    assert is_answer.computed == 0
    assert is_answer(b'{"type":"INFER_DONE","id":"r","cache":{"outcome":"miss"}}')
    assert is_answer.computed == 1
    with pytest.raises(ConnectionFailed, match="no room"):
        is_answer(b'{"type":"ERROR","code":"overloaded","message":"no room"}')


def test_the_table_sets_the_rate_against_the_echo() -> None:
    ours, echo = (Figures([0.001] * count, 1.0, {"HAProxy": 0.5}, 0.1) for count in (100, 200))
    lines = table({100: ours}, {100: echo}).splitlines()
    assert {line.count("|") for line in lines} == {10}
    assert (
        lines[2] == "| 100 | Seedance, cached answer | 100 | 1.0 | 1.0 | 5000 | 1000 | 0 | 0.50 |"
    )
    assert breakdown({100: ours}) == "100 connections: HAProxy 5000"


async def test_the_echo_sends_back_what_came() -> None:
    inbox = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": "one"},
        {"type": "websocket.receive", "text": "two"},
        {"type": "websocket.disconnect"},
    ]
    sent = []

    async def receive() -> dict[str, object]:
        return inbox.pop(0)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await echo_app({"type": "websocket"}, receive, send)
    assert [message.get("text") for message in sent] == [None, "one", "two"]
