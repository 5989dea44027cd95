"""Model replicas that die or hang in mid-stream: clients hear the whole answer, once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.client import SeedanceClient
from tests.chaos.conftest import at_least_99_percent
from tests.chaos.house import KEY, MODEL, House, running_house
from tests.chaos.ledger import Ledger
from tests.chaos.questions import scripted
from tests.chaos.scenario import Course, assert_nothing_lost, run_course
from tests.chaos.swarm import Question, Swarm

pytestmark = pytest.mark.chaos

CLIENTS = 8
WATCHDOG_S = 5.0
LOOSE = 10
"""How much slower than promised a busy machine may be before a test says so."""


async def test_a_killed_model_replica_costs_no_stream_a_token(
    house: House, ledger: Ledger, repeats: int
) -> None:
    rng = random.Random(1)

    async def turn(course: Course, number: int) -> None:
        await course.inject(lambda: house.kill(rng.choice(house.pids(MODEL))))
        await course.heal()

    swarm = Swarm(house.ws_url, CLIENTS, scripted("killed model"), key=KEY)
    row = await run_course("model SIGKILL", house, swarm, ledger, repeats, turn)
    assert row.silent == 0, row
    assert row.identical >= at_least_99_percent(row.streams), row


async def test_a_model_replica_that_hangs_loses_its_streams_to_another(
    house: House, ledger: Ledger, repeats: int
) -> None:
    rng = random.Random(2)

    async def turn(course: Course, number: int) -> None:
        pid = rng.choice(house.pids(MODEL))
        await course.inject(lambda: house.stop(pid))
        try:
            await course.moved_on(WATCHDOG_S * LOOSE)
        finally:
            # It wakes up with all that it had to say: nobody may hear it.
            house.go_on(pid)
        await course.heal()

    swarm = Swarm(house.ws_url, CLIENTS, scripted("hung model"), key=KEY)
    row = await run_course("model SIGSTOP", house, swarm, ledger, repeats, turn)
    assert_nothing_lost(row)
    assert row.worst_recovery_s is not None
    assert row.worst_recovery_s < LOOSE * WATCHDOG_S


async def test_a_killed_replica_of_a_real_model_costs_no_stream_a_token(
    ledger: Ledger, repeats: int
) -> None:
    sent: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "cache": "bypass"}
    subjects = ("the sea", "a clock", "two brothers", "an old map", "winter", "a lost letter")
    prompts = [f"Tell me a story about {subject}." for subject in subjects]
    rng = random.Random(3)
    with running_house(
        "app.main:app",
        model={"num_replicas": 2, "num_threads": 1, "num_cpus": 0.1},
        ingress={"num_replicas": 1},
        cache={"enabled": False},
    ) as house:
        async with SeedanceClient(house.url, KEY) as client:
            truths = {prompt: (await client.complete(prompt, **sent)).text for prompt in prompts}

        def ask(number: int) -> Question:
            prompt = prompts[number % len(prompts)]
            messages = [{"role": "user", "content": prompt}]
            return Question(prompt, truths[prompt], {"messages": messages, **sent})

        async def turn(course: Course, number: int) -> None:
            await course.inject(lambda: house.kill(rng.choice(house.pids(MODEL))))
            await course.heal()

        swarm = Swarm(house.ws_url, 4, ask, key=KEY)
        row = await run_course("SmolLM2 SIGKILL", house, swarm, ledger, repeats, turn)
    assert row.silent == 0, row
    assert row.identical >= at_least_99_percent(row.streams), row
