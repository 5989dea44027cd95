"""The routing benchmark's chats and figures, against servers that do what a test says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.routing import (
    Chat,
    Turn,
    chats_from,
    figures,
    make_chats,
    parse_options,
    read_chats,
    run_chats,
    server_config,
    table,
)
from tests.app.fake_server import HELLO, Peer, fake_server

CHATS = [Chat(0.0, "Be brief.", ("one?", "two?")), Chat(0.0, None, ("three?",))]


async def echo(peer: Peer) -> None:
    """Answers each question with its own text, as if half of the prompt had been computed."""
    await peer.send(**HELLO)
    while True:
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, request["messages"][-1]["content"].upper())
        num_messages = len(request["messages"])
        usage = {
            "prompt_tokens": 10 * num_messages,
            "completion_tokens": 1,
            "cached_tokens": 5 * num_messages,
            "total_tokens": 10 * num_messages + 1,
        }
        await peer.done(request["id"], 1, "length", usage=usage)


async def refuse(peer: Peer) -> None:
    await peer.send(**HELLO)
    while True:
        request = await peer.expect("INFER_REQ")
        failure = {"code": "overloaded", "message": "no room", "retryable": True}
        await peer.send("ERROR", id=request["id"], **failure)


async def test_each_turn_carries_what_was_said_before() -> None:
    async with fake_server(echo) as server:
        turns = await run_chats(server.url, CHATS, max_tokens=4)
    asked = [
        [message["content"] for message in frame["messages"]]
        for peer in server.peers
        for frame in peer.received
        if frame["type"] == "INFER_REQ"
    ]
    assert sorted(asked) == [
        ["Be brief.", "one?"],
        ["Be brief.", "one?", "ONE?", "two?"],
        ["three?"],
    ]
    result = figures(turns)
    assert result.errors == {}
    assert (result.turns, result.prompt_tokens) == (3, 70)
    assert result.hit_rate == result.later_hit_rate == 0.5
    assert result.ttft_ms_p50 > 0


async def test_a_chat_ends_with_its_first_failure() -> None:
    async with fake_server(refuse) as server:
        turns = await run_chats(server.url, CHATS, max_tokens=4)
    assert figures(turns).errors == {"Overloaded: no room": 2}
    assert math.isnan(figures(turns).hit_rate)


def test_figures_are_of_tokens_and_failures_are_left_out() -> None:
    turns = [
        Turn(0, 0.1, prompt_tokens=100, cached_tokens=0),
        Turn(1, 0.3, prompt_tokens=300, cached_tokens=200),
        Turn(2, error="lost"),
    ]
    result = figures(turns)
    assert result.hit_rate == 0.5
    assert result.later_hit_rate == pytest.approx(2 / 3)
    assert result.ttft_ms_p50 == pytest.approx(200)
    assert result.errors == {"lost": 1}
    assert "50.0%" in table({"prefix": result, "default": result})


def test_one_seed_makes_the_same_chats_and_they_share_system_prompts() -> None:
    chats = make_chats(20, 1, turns=3, systems=2, rate_per_s=5.0)
    assert chats == make_chats(20, 1, turns=3, systems=2, rate_per_s=5.0)
    assert chats != make_chats(20, 2, turns=3, systems=2, rate_per_s=5.0)
    assert len({chat.system for chat in chats}) == 2
    assert all(len(set(chat.questions)) == 3 for chat in chats)
    assert [chat.begins_s for chat in chats] == sorted(chat.begins_s for chat in chats)


def test_requests_of_a_trace_share_the_text_of_the_blocks_they_share() -> None:
    lines = [
        json.dumps({"timestamp": at, "input_length": 9, "output_length": 1, "hash_ids": ids})
        for at, ids in ((0, [0, 1]), (3000, [0, 1, 2, 3]), (4000, [7]))
    ]
    first, second = read_chats(lines, count=2, speed=3.0, block_chars=50, max_blocks=3)
    assert (first.begins_s, second.begins_s) == (0.0, 1.0)
    assert second.questions[0].startswith(first.questions[0])
    assert len(second.questions[0]) == 3 * 50 + 2


def test_a_trace_of_another_kind_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1}\n')
    with pytest.raises(ValueError, match="hash_ids"):
        chats_from(parse_options(["--trace", str(trace)]))


def test_the_server_gets_the_policy_and_no_prompt_cache() -> None:
    document = {"applications": [{"args": {"model": {"name": "m"}, "cache": {"ttl_s": 3}}}]}
    config = server_config(document, "default", 8123, parse_options(["--replicas", "3"]))
    args = config["applications"][0]["args"]
    assert args["routing"] == {"policy": "default", "margin_tokens": 2048}
    assert args["cache"] == {"enabled": False}
    assert args["model"] == {"name": "m", "num_replicas": 3, "num_threads": 1}
    assert document["applications"][0]["args"]["cache"] == {"ttl_s": 3}


def test_values_out_of_range_are_refused() -> None:
    for wrong in (["--turns", "0"], ["--rate", "0"], ["--speed", "nan"]):
        with pytest.raises(SystemExit, match="is"):
            parse_options(wrong)
