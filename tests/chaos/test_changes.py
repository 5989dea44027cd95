"""Changes to a server that is in use: redeploys, scale-downs and hot settings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from bench.scripted_engine import answer_to
from tests.chaos.house import INGRESS, KEY, MODEL, House, running_house
from tests.chaos.ledger import Ledger
from tests.chaos.questions import scripted
from tests.chaos.scenario import Course, assert_nothing_lost, in_thread, run_course
from tests.chaos.swarm import Swarm

pytestmark = pytest.mark.chaos

CLIENTS = 8
CLIENTS_OF_A_ROLLOUT = 50
ROLLED_OUT_WITHIN_S = 300.0


def model_deployment(application: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        each for each in application["deployments"] if each["name"] == "Model"
    )
    return found


def healthy(house: House) -> bool:
    return set(house.deployment_statuses().values()) == {"HEALTHY"}


async def test_a_redeploy_under_load_cuts_no_socket_without_a_close(
    house: House, ledger: Ledger, repeats: int
) -> None:
    async def turn(course: Course, number: int) -> None:
        old = {*house.pids(MODEL), *house.pids(INGRESS)}

        def change(application: dict[str, Any]) -> None:
            # `args` rebuild everything: each replica is replaced by a new one.
            model = application["args"]["model"]
            model["max_waiting"] = model.get("max_waiting", 256) + 1

        await course.inject(lambda: house.deploy(change))
        await in_thread(
            house.until,
            lambda: old.isdisjoint({*house.pids(MODEL), *house.pids(INGRESS)}) and healthy(house),
            ROLLED_OUT_WITHIN_S,
            lambda: str(house.count()),
        )
        await course.heal()

    swarm = Swarm(house.ws_url, CLIENTS_OF_A_ROLLOUT, scripted("redeploy"), key=KEY)
    row = await run_course(
        "redeploy of all replicas",
        house,
        swarm,
        ledger,
        repeats,
        turn,
        lambda: f"{swarm.drains} DRAIN frames",
    )
    assert_nothing_lost(row)
    assert row.bare_closes == 0


async def test_streams_on_a_replica_that_is_scaled_away_end_as_they_should(
    house: House, ledger: Ledger, repeats: int
) -> None:
    def scale_to(replicas: int) -> None:
        house.deploy(lambda app: model_deployment(app).update(num_replicas=replicas))
        house.whole[MODEL] = replicas

    many = house.whole[MODEL]
    try:
        # Written into the config once, so that afterwards nothing but the number changes.
        await in_thread(scale_to, many)
        await in_thread(house.until_whole)

        async def turn(course: Course, number: int) -> None:
            await course.inject(lambda: scale_to(1))
            await course.heal()
            await in_thread(scale_to, many)
            await course.heal()

        swarm = Swarm(house.ws_url, CLIENTS, scripted("scale-down"), key=KEY, resumes=False)
        row = await run_course("scale-down 2 → 1", house, swarm, ledger, repeats, turn)
    finally:
        await in_thread(scale_to, many)
    assert_nothing_lost(row)
    assert row.bare_closes == 0
    assert row.refusals == 0


async def test_a_hot_change_restarts_nothing_and_drops_nothing(
    house: House, ledger: Ledger, repeats: int
) -> None:
    before = {*house.pids(MODEL), *house.pids(INGRESS)}

    async def turn(course: Course, number: int) -> None:
        def change(application: dict[str, Any]) -> None:
            user_config = model_deployment(application)["user_config"]
            user_config["max_batch_size"] = 16 + number % 2 * 16
            user_config["batch_wait_timeout_s"] = 0.001 * (number % 3)

        await course.inject(lambda: house.deploy(change))
        await in_thread(house.until, lambda: healthy(house), ROLLED_OUT_WITHIN_S)

    swarm = Swarm(house.ws_url, CLIENTS, scripted("hot change"), key=KEY, resumes=False)
    row = await run_course("user_config changed", house, swarm, ledger, repeats, turn)
    assert_nothing_lost(row)
    assert {*house.pids(MODEL), *house.pids(INGRESS)} == before, "nothing may be restarted"
    assert row.bare_closes == 0
    assert row.refusals == 0


@pytest.mark.parametrize(("grace_s", "num_tokens"), [(10, 3000), (120, 600)])
async def test_event_streams_end_within_the_grace_or_are_told_to_try_again(
    grace_s: int, num_tokens: int
) -> None:
    lengths = {"short": 100, "long": num_tokens}
    args: dict[str, Any] = {
        "model": {
            "backend": "mock",
            "num_replicas": 1,
            "mock_token_interval_s": 0.05,
            "num_cpus": 0.1,
        },
        "ingress": {"num_replicas": 1},
        "cache": {"enabled": False},
        "limits": {"drain_timeout_s": grace_s},
    }

    def change(application: dict[str, Any]) -> None:
        application["args"]["model"]["max_waiting"] = 257

    with running_house("tests.chaos.app:build", **args) as house:
        old = {*house.pids(MODEL), *house.pids(INGRESS)}
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=house.url, headers=headers, timeout=180) as client:
            reading = {
                name: asyncio.create_task(read_events(client, name, num_tokens))
                for name, num_tokens in lengths.items()
            }
            await asyncio.sleep(1.0)
            await in_thread(house.deploy, change)
            ended = dict(zip(reading, await asyncio.gather(*reading.values()), strict=True))
            await in_thread(
                house.until,
                lambda: old.isdisjoint({*house.pids(MODEL), *house.pids(INGRESS)}),
                ROLLED_OUT_WITHIN_S,
            )
            again = await read_events(client, "short", lengths["short"])
    assert again == ended["short"] == (answer_to("short", lengths["short"]), "length", None)
    text, reason, code = ended["long"]
    if num_tokens / 20 < grace_s:
        assert ended["long"] == (answer_to("long", num_tokens), "length", None)
    else:
        assert (reason, code) == (None, "overloaded")
        assert answer_to("long", num_tokens).startswith(text)


async def read_events(
    client: httpx.AsyncClient, prompt: str, num_tokens: int
) -> tuple[str, str | None, str | None]:
    """The text of an event stream, why it ended, and the code of its error."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    text, reason, code = "", None, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                code = event["error"]["code"]
                continue
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason, code
