"""Changes to a server that is in use: redeploys, scale-downs and hot settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.house import INGRESS, KEY, MODEL, House
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
