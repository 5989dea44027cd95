"""The swarm and its ledger themselves: a suite that overlooks a lost token would be worth nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.app.fake_server import HELLO, Peer, Script, fake_server
from tests.chaos import swarm as swarm_module
from tests.chaos.ledger import Ledger, make_row
from tests.chaos.swarm import Question, Stream, Swarm, until

ANSWER = "abcd"
TELLER = Callable[[Peer, dict[str, Any]], Any]


def ask(number: int) -> Question:
    return Question(f"question {number}", ANSWER, {"max_tokens": 4})


def telling(tell: TELLER) -> Script:
    """A server that greets and answers each request, or RESUME, by `tell`."""

    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        while True:
            frame = await peer.receive()
            if frame["type"] in ("INFER_REQ", "RESUME"):
                await tell(peer, frame)

    return script


async def whole(peer: Peer, request: dict[str, Any], start: int = 0, text: str = ANSWER) -> None:
    await peer.ack(request["id"])
    for seq in range(start, len(text)):
        await peer.chunk(request["id"], seq, text[seq])
    await peer.done(request["id"], len(text), "length")


async def first_streams(script: Script, count: int = 1, **options: Any) -> list[Stream]:
    """The streams of one client, after so many have ended."""
    async with fake_server(script) as server:
        swarm = Swarm(server.url, 1, ask, key="k", **options)
        async with swarm:
            await until(lambda: len(swarm.streams) > count, 10)
    return swarm.streams[:count]


async def test_a_whole_answer_is_identical() -> None:
    streams = await first_streams(telling(whole), 3)
    assert [stream.outcome for stream in streams] == ["identical"] * 3
    assert len({stream.prompt for stream in streams}) == 3


async def test_a_stream_that_was_cut_and_resumed_is_identical() -> None:
    async def tell(peer: Peer, request: dict[str, Any]) -> None:
        if request["type"] == "RESUME":
            assert request["stream"] == "token-r"
            assert request["last_seq"] == 1
            await whole(peer, request, start=2)
            return
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 1, "ab")
        await asyncio.sleep(0.05)
        peer.abort()

    (stream,) = await first_streams(telling(tell))
    assert stream.outcome == "identical"
    assert stream.closes == [1006]
    assert stream.silence_after_s(stream.frames[1][0]) is not None


async def test_a_client_that_must_not_come_back_calls_a_cut_a_failure() -> None:
    async def tell(peer: Peer, request: dict[str, Any]) -> None:
        await peer.ack(request["id"])
        await asyncio.sleep(0.05)
        peer.abort()

    (stream,) = await first_streams(telling(tell), resumes=False)
    assert stream.outcome == "failed"


@pytest.mark.parametrize(
    ("chunks", "count"),
    [
        ([(0, "a"), (1, "b"), (1, "b"), (2, "c"), (3, "d")], 4),
        ([(0, "a"), (1, "b"), (3, "d")], 4),
        ([(0, "a"), (1, "b"), (2, "c"), (3, "x")], 4),
        ([(0, "a"), (1, "b"), (2, "c"), (3, "d")], 5),
    ],
    ids=["doubled", "a hole", "other text", "other length"],
)
async def test_anything_but_the_answer_is_different(
    chunks: list[tuple[int, str]], count: int
) -> None:
    async def tell(peer: Peer, request: dict[str, Any]) -> None:
        await peer.ack(request["id"])
        for seq, text in chunks:
            await peer.chunk(request["id"], seq, text)
        await peer.send(
            "INFER_DONE",
            id=request["id"],
            seq=4,
            finish_reason="length",
            usage={"completion_tokens": count},
        )

    (stream,) = await first_streams(telling(tell))
    assert stream.outcome == "different"


async def test_an_error_ends_a_stream_unless_it_says_to_try_again() -> None:
    refused: set[str] = set()

    async def tell(peer: Peer, request: dict[str, Any]) -> None:
        if not refused:
            refused.add(request["prompt"])
            await peer.send(
                "ERROR", id=request["id"], code="overloaded", message="full", retryable=True
            )
        elif request["prompt"] in refused:
            await whole(peer, request)
        else:
            await peer.send("ERROR", id=request["id"], code="internal", message="broken")

    one, two = await first_streams(telling(tell), 2)
    assert (one.outcome, one.refusals) == ("identical", ["overloaded"])
    assert (two.outcome, two.why) == ("failed", "internal: broken")


async def test_a_stream_without_an_end_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_module, "SILENCE_S", 0.1)

    async def tell(peer: Peer, request: dict[str, Any]) -> None:
        await peer.ack(request["id"])

    (stream,) = await first_streams(telling(tell))
    assert stream.outcome == "silent"


async def test_after_a_drain_the_next_question_goes_over_a_new_connection() -> None:
    async def tell(peer: Peer, request: dict[str, Any]) -> None:
        await peer.send("DRAIN", deadline_s=5)
        await whole(peer, request)

    async with fake_server(telling(tell)) as server:
        swarm = Swarm(server.url, 1, ask, key="k")
        async with swarm:
            await until(lambda: len(swarm.streams) > 3, 10)
    assert len(server.peers) >= 3
    assert swarm.bare_closes == 0


async def test_seedances_own_client_is_judged_alike() -> None:
    streams = await first_streams(telling(whole), 2, through_client=True)
    assert [stream.outcome for stream in streams] == ["identical"] * 2


def stream_with(outcome: Any, begun_s: float, ended_s: float, *chunks_s: float) -> Stream:
    stream = Stream("q", "", begun_s, outcome=outcome, ended_s=ended_s)
    stream.frames = [(at_s, {"type": "INFER_CHUNK"}) for at_s in chunks_s]
    return stream


def test_a_row_counts_outcomes_and_the_longest_wait_after_a_fault() -> None:
    streams = [
        stream_with("identical", 0.0, 9.0, 1.0, 2.0, 5.5, 9.0),
        stream_with("identical", 0.0, 1.5, 1.0, 1.5),
        stream_with("different", 0.0, 9.0, 1.0, 3.0, 9.0),
        stream_with("silent", 4.0, 9.0),
        stream_with("left", 0.0, 9.0, 8.0),
    ]
    row = make_row("kill", [2.0, 4.0], streams)
    assert (row.faults, row.streams, row.identical, row.lost, row.silent) == (2, 4, 2, 1, 1)
    assert row.worst_recovery_s == 5.0
    ledger = Ledger()
    ledger.add(row)
    assert "| kill | 2 | 4 | 2 | 1 | 1 | 0 | 0 | 5.00 |  |" in ledger.table()
