"""Replicas follow the work on a real cluster, and idle sockets neither add nor hold one."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from websockets.asyncio.client import connect

from app.client import SeedanceClient
from tests.e2e.cluster import KEY_A, Server, running_server

pytestmark = pytest.mark.chaos

IDLE_SOCKETS = 200
ROWS = 8
IDLE_FOR_S = 30.0
"""Several times what the policy takes to add a replica."""
ARGS: dict[str, Any] = {
    "model": {
        "backend": "mock",
        "mock_token_interval_s": 0.05,
        "max_num_seqs": ROWS,
        "num_cpus": 0,
    },
    "cache": {"semantic": False},
    # The idle sockets read nothing, so that they answer no heartbeat either.
    "limits": {"heartbeat_s": 600},
    "autoscaling": {
        "enabled": True,
        "min_replicas": 1,
        "max_replicas": 3,
        "upscale_cooldown_s": 2,
        "downscale_cooldown_s": 5,
    },
    "ingress": {"max_replicas": 3},
}


async def seen(server: Server, wanted: int, *, within_s: float = 120) -> list[int]:
    """The counts of model replicas on the way to the wanted one.

    Raises:
        AssertionError: it was not reached.
    """
    counts = [replicas(server)["Model"]]
    deadline_s = time.monotonic() + within_s
    while counts[-1] != wanted:
        assert time.monotonic() < deadline_s, f"{wanted} replicas were not reached: {counts}"
        await asyncio.sleep(0.25)
        if (count := replicas(server)["Model"]) != counts[-1]:
            counts.append(count)
    return counts


def replicas(server: Server) -> dict[str, int]:
    return {name: len(server.replica_pids(name)) for name in ("Ingress", "Model")}


async def ask_for_ever(client: SeedanceClient, number: int, finished: list[str]) -> None:
    turn = 0
    while True:
        done = await client.complete(f"question {number}.{turn}", cache="bypass", max_tokens=100)
        finished.append(done.finish_reason)
        turn += 1


async def test_the_model_follows_its_work_from_one_to_three_and_back() -> None:
    with running_server(**ARGS) as server:
        async with AsyncExitStack() as stack:
            headers = {"authorization": f"Bearer {KEY_A}"}
            idle = [
                await stack.enter_async_context(
                    connect(server.ws_url, additional_headers=headers, compression=None)
                )
                for _ in range(IDLE_SOCKETS)
            ]
            until_s = time.monotonic() + IDLE_FOR_S
            while time.monotonic() < until_s:
                assert replicas(server) == {"Ingress": 1, "Model": 1}, "idle sockets are no work"
                await asyncio.sleep(1)

            client = await stack.enter_async_context(SeedanceClient(server.url, KEY_A))
            finished: list[str] = []
            askers = [
                asyncio.create_task(ask_for_ever(client, number, finished))
                for number in range(3 * ROWS)
            ]
            await seen(server, 3)
            assert not [asker for asker in askers if asker.done()], "no request failed on the way"
            for asker in askers:
                asker.cancel()
            await asyncio.gather(*askers, return_exceptions=True)

            assert (await seen(server, 1))[-3:] == [3, 2, 1], "they leave one by one"
            assert replicas(server)["Ingress"] == 1
            assert set(finished) == {"length"}
            await asyncio.gather(*(socket.ping() for socket in idle))
            answer = await client.complete("still there?", cache="bypass", max_tokens=5)
            assert answer.finish_reason == "length"
