"""Faults in front of the model: ingress, proxy and controller."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.chaos.house import CONTROLLER, HAPROXY, KEY, PYTHON_PROXY, House
from tests.chaos.ledger import Ledger, make_row
from tests.chaos.questions import scripted
from tests.chaos.scenario import Course, assert_nothing_lost, in_thread, run_course
from tests.chaos.swarm import Stream, Swarm

pytestmark = pytest.mark.chaos

CLIENTS = 8
ORPHANS_STOP_S = 2.0
LOOSE = 10
"""How much slower than promised a busy machine may be before a test says so."""


@pytest.mark.parametrize("through_client", [False, True], ids=["plain", "seedance-client"])
async def test_clients_of_a_killed_ingress_resume_on_another(
    house: House, ledger: Ledger, repeats: int, through_client: bool
) -> None:
    async def turn(course: Course, number: int) -> None:
        await course.inject(lambda: house.kill(house.busiest_ingress()))
        await course.heal()

    swarm = Swarm(
        house.ws_url,
        CLIENTS,
        scripted(f"killed ingress {through_client}"),
        key=KEY,
        through_client=through_client,
    )
    name = "ingress SIGKILL" + (", app.client" if through_client else "")
    row = await run_course(name, house, swarm, ledger, repeats, turn)
    assert_nothing_lost(row)
    assert row.worst_recovery_s is not None
    assert row.worst_recovery_s < LOOSE


async def test_streams_outlive_the_proxy(house: House, ledger: Ledger, repeats: int) -> None:
    kind = HAPROXY if house.whole[HAPROXY] else PYTHON_PROXY

    def kill() -> None:
        for pid in house.pids(kind):
            house.kill(pid)

    async def turn(course: Course, number: int) -> None:
        await course.inject(kill)
        await course.heal()

    swarm = Swarm(house.ws_url, CLIENTS, scripted("killed proxy"), key=KEY)
    row = await run_course(f"{kind} SIGKILL", house, swarm, ledger, repeats, turn)
    assert_nothing_lost(row)


async def test_a_killed_controller_costs_no_token(
    house: House, ledger: Ledger, repeats: int
) -> None:
    async def turn(course: Course, number: int) -> None:
        before = house.pids(CONTROLLER)
        await course.inject(lambda: house.kill(before[0]))
        await in_thread(house.until, lambda: house.pids(CONTROLLER) not in ([], before), 60.0)
        await course.heal()

    # It must not even be noticed: nobody comes back for a stream.
    swarm = Swarm(house.ws_url, CLIENTS, scripted("killed controller"), key=KEY, resumes=False)
    row = await run_course("controller SIGKILL", house, swarm, ledger, repeats, turn)
    assert_nothing_lost(row)
    assert row.bare_closes == 0
    assert row.refusals == 0


async def test_the_engine_stops_what_a_dead_ingress_had_asked_for(
    house: House, ledger: Ledger, repeats: int
) -> None:
    stopped_after_s: list[float] = []
    fault_at_s: list[float] = []
    streams: list[Stream] = []
    for _ in range(repeats):
        # Far longer than the test waits, so that none ends by itself; and nobody resumes.
        swarm = Swarm(house.ws_url, CLIENTS, scripted("orphan", 2000), key=KEY, resumes=False)
        async with swarm:
            await swarm.all_streaming()
            swarm.ask_no_more()
            fault_at_s.append(time.monotonic())
            house.kill(house.busiest_ingress())
            await swarm.until_cut()
            await in_thread(until_running, house, swarm.num_running, ORPHANS_STOP_S * LOOSE)
            stopped_after_s.append(time.monotonic() - fault_at_s[-1])
            await swarm.leave()
        streams += swarm.streams
        await in_thread(until_running, house, 0, 30.0)
        await in_thread(house.until_whole)
    notes = f"{len(streams)} orphans, stopped after {max(stopped_after_s):.2f} s at most"
    ledger.add(make_row("ingress SIGKILL, orphans", fault_at_s, streams, notes=notes))


def until_running(house: House, most: int, within_s: float) -> None:
    """Waits until the engines work for no more than `most` requests.

    Raises:
        AssertionError: they still do.
    """

    def is_so() -> bool:
        try:
            metrics = house.metrics()
        except httpx.HTTPError:
            return False  # the proxy has not noticed yet
        busy = metrics["seedance_requests_running"] + metrics["seedance_requests_waiting"]
        return busy <= most

    house.until(is_so, within_s)
