"""What `make chaos` does at length, once: parts of a real cluster die, and clients hear the whole answer.

On the scripted engine, whose answers are known, with two model replicas of few places and two
ingresses.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.chaos.house import INGRESS, KEY, MODEL, House, running_house
from tests.chaos.ledger import Ledger
from tests.chaos.questions import scripted
from tests.chaos.scenario import Course, assert_nothing_lost, run_course
from tests.chaos.swarm import Swarm

CLIENTS = 4
RUNNING, WAITING = 4, 2
PLACES = 2 * (RUNNING + WAITING)
AT_ONCE = 30
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with running_house(
        "tests.chaos.app:build",
        model={
            "backend": "mock",
            "num_replicas": 2,
            "max_num_seqs": RUNNING,
            "max_waiting": WAITING,
            "mock_token_interval_s": 0.05,
            "num_cpus": 0.1,
        },
        ingress={"num_replicas": 2},
        cache={"semantic": False},
    ) as house:
        yield house


@pytest.mark.parametrize("kind", [MODEL, INGRESS], ids=["model", "ingress"])
async def test_a_killed_replica_costs_no_stream_a_token(house: House, kind: str) -> None:
    await asyncio.to_thread(house.until_whole)

    async def turn(course: Course, number: int) -> None:
        await course.inject(lambda: house.kill(house.pids(kind)[0]))
        await course.moved_on(60.0)

    swarm = Swarm(house.ws_url, CLIENTS, scripted(f"killed {kind}"), key=KEY)
    assert_nothing_lost(await run_course(kind, house, swarm, Ledger(), 1, turn))


async def test_what_nobody_comes_back_for_stops_computing(house: House) -> None:
    await asyncio.to_thread(house.until_whole)
    async with connect(house.ws_url, additional_headers=HEADERS) as socket:
        for number in range(3):
            ask = {"type": "INFER_REQ", "id": f"r{number}", "prompt": f"left {number}"}
            await socket.send(json.dumps(ask | {"max_tokens": 2000, "cache": "bypass"}))
        while json.loads(await socket.recv())["type"] != "INFER_CHUNK":
            pass
    running = "seedance_requests_running"
    await asyncio.to_thread(house.until, lambda: house.metric(running) == 0, 20.0)


async def test_equal_questions_at_the_same_time_are_computed_once(house: House) -> None:
    await asyncio.to_thread(house.until_whole)
    tokens = "seedance_generated_tokens_total"
    before = house.metric(tokens)
    body: dict[str, Any] = {"prompt": "asked by many", "temperature": 0, "max_tokens": 40}
    async with httpx.AsyncClient(base_url=house.url, headers=HEADERS, timeout=60) as http:
        replies = await asyncio.gather(
            *(http.post("/v1/completions", json=body) for _ in range(2 * PLACES))
        )
    assert {reply.status_code for reply in replies} == {200}
    answers = [reply.json() for reply in replies]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert len({answer["id"] for answer in answers}) == len(answers)
    # One for each of the two ingresses at most.
    assert house.metric(tokens) - before <= 2 * 40


@pytest.mark.parametrize("way", ["http", "sockets", "socket"])
async def test_more_requests_than_places_are_refused_at_once(house: House, way: str) -> None:
    await asyncio.to_thread(house.until_whole)
    seen: list[tuple[str, float]] = []
    async with asyncio.TaskGroup() as group:
        if way == "socket":
            group.create_task(_flood_socket(house, range(AT_ONCE), seen))
        for number in range(AT_ONCE if way != "socket" else 0):
            ask = _ask_http if way == "http" else _ask_socket
            group.create_task(ask(house, number, seen))
    counts = Counter(what for what, _ in seen)
    assert counts["accepted"] + counts["refused"] == AT_ONCE, counts
    assert counts["accepted"] <= PLACES, counts
    assert counts["refused"] >= AT_ONCE - PLACES
    assert max(after_s for what, after_s in seen if what == "refused") < 5.0
    waiting = await asyncio.to_thread(house.metric, "seedance_requests_waiting")
    assert waiting <= 2 * WAITING


def _question(number: int) -> dict[str, Any]:
    return {"prompt": f"at once {number}", "max_tokens": 60, "temperature": 0, "cache": "bypass"}


async def _ask_http(house: House, number: int, seen: list[tuple[str, float]]) -> None:
    begun_s = time.monotonic()
    async with httpx.AsyncClient(timeout=60, headers=HEADERS) as http:
        reply = await http.post(f"{house.url}/v1/completions", json=_question(number))
    if reply.status_code == 503:
        assert reply.json()["error"]["code"] == "overloaded"
        assert float(reply.headers["retry-after"]) > 0
    seen.append(({200: "accepted", 503: "refused"}[reply.status_code], time.monotonic() - begun_s))


async def _ask_socket(house: House, number: int, seen: list[tuple[str, float]]) -> None:
    await _flood_socket(house, range(number, number + 1), seen)


async def _flood_socket(house: House, numbers: range, seen: list[tuple[str, float]]) -> None:
    async with connect(house.ws_url, additional_headers=HEADERS) as socket:
        begun_s = time.monotonic()
        for number in numbers:
            frame = {"type": "INFER_REQ", "id": f"r{number}", **_question(number)}
            await socket.send(json.dumps(frame))
        left = len(numbers)
        while left:
            frame = json.loads(await socket.recv())
            if frame["type"] == "INFER_DONE":
                assert frame["finish_reason"] == "length", frame
                left -= 1
            elif frame["type"] == "INFER_ACK":
                seen.append(("accepted", time.monotonic() - begun_s))
            elif frame["type"] == "ERROR":
                assert (frame["code"], frame["retryable"]) == ("overloaded", True)
                assert frame["retry_after_s"] > 0
                seen.append(("refused", time.monotonic() - begun_s))
                left -= 1
