"""The breaker: a neighbour that fails is left alone for a moment, and found again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.breaker import Breaker, SwitchedOff
from tests.protocol.fakes import FakeClock

SOON_S = 30.0
"""Time-out of calls that are not meant to run into it."""


class Neighbour:
    """Answers, fails or hangs, and counts how often it was asked."""

    def __init__(self) -> None:
        self.does: Callable[[], str] | None = lambda: "answer"
        self.num_calls = 0
        self.num_left = 0
        self.answers = asyncio.Event()

    async def __call__(self) -> str:
        self.num_calls += 1
        if self.does is None:
            try:
                await self.answers.wait()
            except asyncio.CancelledError:
                self.num_left += 1
                raise
            return "late answer"
        return self.does()

    def fail(self) -> str:
        raise ConnectionError("gone")


async def turn() -> None:
    """Lets everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def opened(clock: FakeClock, failures: int = 5) -> Breaker:
    breaker = Breaker(clock=clock)
    for _ in range(failures):
        breaker.failed()
    return breaker


def test_a_closed_breaker_lets_everything_through() -> None:
    breaker = Breaker(clock=FakeClock())
    assert all(breaker.allows() for _ in range(100))
    assert breaker.state == "closed"


def test_failures_in_a_row_open_it() -> None:
    breaker = opened(FakeClock(), failures=4)
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    assert breaker.state == "open"
    assert breaker.stats() == {
        "state": "open",
        "failures_total": 5,
        "opened_total": 1,
        "skipped_total": 1,
    }


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(clock=FakeClock())
    for _ in range(20):
        for _ in range(4):
            breaker.failed()
        breaker.succeeded()
    assert breaker.state == "closed"


def test_after_a_while_one_probe_goes_and_the_others_wait_for_its_result() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.now += 4.9
    assert not breaker.allows()
    clock.now += 0.1
    assert breaker.stats()["state"] == "half_open"
    assert breaker.allows()
    assert not breaker.allows()
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()


def test_probes_that_fail_become_rarer_up_to_a_limit() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    waits = []
    for _ in range(4):
        since = clock.now
        while not breaker.allows():
            clock.now += 0.5
        waits.append(clock.now - since)
        breaker.failed()
    assert waits == [5.0, 10.0, 10.0, 10.0]
    clock.now += 10
    assert breaker.allows()
    breaker.succeeded()
    for _ in range(5):
        breaker.failed()
    clock.now += 5
    assert breaker.allows(), "a recovery begins again with short times"


def test_a_probe_that_tells_nothing_does_not_keep_the_others_out() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.now += 5
    assert breaker.allows()
    clock.now += 5
    assert breaker.allows()
    assert not breaker.allows()


def test_late_results_from_before_it_opened_change_nothing() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.now += 3
    breaker.failed()
    breaker.succeeded()
    assert breaker.state == "open"
    clock.now += 2
    assert breaker.allows(), "a late failure does not put the probe off"


@given(st.lists(st.sampled_from(["ok", "fail", "lost", "tick"]), max_size=200))
def test_whatever_happens_it_closes_within_its_longest_time_of_a_recovery(steps: list[str]) -> None:
    clock = FakeClock()
    breaker = Breaker(clock=clock, open_s=5, max_open_s=10)
    for step in steps:
        if step == "tick":
            clock.now += 1
        elif breaker.allows() and step != "lost":
            breaker.succeeded() if step == "ok" else breaker.failed()
    # No traffic meanwhile, and the first call finds it.
    clock.now += 10
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state == "closed"


# ------------------------------------------------------------------ calls


async def test_a_call_gives_its_result_and_its_error() -> None:
    breaker, neighbour = Breaker(clock=FakeClock()), Neighbour()
    assert await breaker.call(neighbour, SOON_S) == "answer"
    neighbour.does = neighbour.fail
    with pytest.raises(ConnectionError):
        await breaker.call(neighbour, SOON_S)
    assert breaker.failures_total == 1


async def test_a_neighbour_that_hangs_costs_the_first_few_their_time_and_then_nothing() -> None:
    breaker, neighbour = Breaker(clock=FakeClock()), Neighbour()
    neighbour.does = None
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await breaker.call(neighbour, 0.001)
    assert neighbour.num_left == 5, "who runs out of time lets go of the call"
    for _ in range(100):
        with pytest.raises(SwitchedOff):
            await breaker.call(neighbour, SOON_S)
    assert neighbour.num_calls == 5


async def test_who_is_cancelled_has_learnt_nothing() -> None:
    breaker, neighbour = Breaker(clock=FakeClock()), Neighbour()
    neighbour.does = None
    for _ in range(10):
        call = asyncio.create_task(breaker.call(neighbour, SOON_S))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (breaker.state, breaker.failures_total) == ("closed", 0)


async def test_a_probe_outlives_the_request_that_began_it() -> None:
    clock = FakeClock()
    breaker, neighbour = opened(clock), Neighbour()
    clock.now += 5
    neighbour.does = None
    call = asyncio.create_task(breaker.call(neighbour, SOON_S))
    await turn()
    assert neighbour.num_calls == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    neighbour.answers.set()
    await turn()
    assert breaker.state == "closed"


async def test_a_slow_probe_lets_its_request_go_before_it_is_judged() -> None:
    clock = FakeClock()
    breaker, neighbour = opened(clock), Neighbour()
    clock.now += 5
    neighbour.does = None
    with pytest.raises(TimeoutError):
        await breaker.call(neighbour, 0.5)
    assert (breaker.state, neighbour.num_left) == ("half_open", 0)
    neighbour.answers.set()
    await turn()
    assert breaker.state == "closed"


async def test_a_probe_that_succeeds_answers_its_request() -> None:
    clock = FakeClock()
    breaker, neighbour = opened(clock), Neighbour()
    clock.now += 5
    assert await breaker.call(neighbour, SOON_S) == "answer"
    assert breaker.state == "closed"


async def test_a_probe_that_fails_tells_its_request_and_opens_the_breaker_again() -> None:
    clock = FakeClock()
    breaker, neighbour = opened(clock), Neighbour()
    clock.now += 5
    neighbour.does = neighbour.fail
    with pytest.raises(ConnectionError):
        await breaker.call(neighbour, SOON_S)
    assert breaker.state == "open"
    assert breaker.opened_total == 1
