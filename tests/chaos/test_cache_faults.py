"""A cache that dies, hangs or answers rubbish: no request fails, and hardly one waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import numpy as np
import pytest

from app.client import SeedanceClient
from app.settings import CacheSettings
from tests.chaos.house import CACHE, KEY, House
from tests.chaos.ledger import Ledger, Row
from tests.chaos.questions import scripted
from tests.chaos.rubbish import KINDS
from tests.chaos.scenario import Course, assert_nothing_lost, in_thread, run_course
from tests.chaos.swarm import Stream, Swarm

pytestmark = pytest.mark.chaos

CLIENTS = 6
SHORT_ANSWER = 20
"""A second: a fault meets many look-ups."""
FAULT_S = 4.0
CLOSED_WITHIN_S = 60.0
OPENINGS = "seedance_cache_breaker_openings_total"
IS_CLOSED = "seedance_cache_breaker_state:state=closed"
LOOSE = 10
"""How much slower than promised a busy machine may be before a test says so."""


def lookup_budget_s() -> float:
    settings = CacheSettings()
    return settings.embed_timeout_s + settings.lookup_timeout_s


class CacheFault:
    """A fault of the cache, and how long requests waited for their acceptance meanwhile."""

    def __init__(self, house: House, name: str) -> None:
        self.house = house
        self.swarm = Swarm(
            house.ws_url, CLIENTS, scripted(name, SHORT_ANSWER, cache="auto"), key=KEY
        )
        self.name = name
        self.windows: list[tuple[float, float]] = []
        self.openings = 0.0
        self.closed_after_s: list[float] = []

    async def run(
        self, ledger: Ledger, repeats: int, begin: Callable[[int], None], end: Callable[[], None]
    ) -> Row:
        before = self._metric(OPENINGS)

        async def turn(course: Course, number: int) -> None:
            await course.inject(lambda: begin(number))
            try:
                await asyncio.sleep(FAULT_S)
            finally:
                end()
            healed_s = time.monotonic()
            self.windows.append((course.fault_at_s[-1], healed_s))
            await course.heal()
            await self._hit_again(f"{self.name}, hit {number}")
            self.closed_after_s.append(time.monotonic() - healed_s)

        row = await run_course(
            self.name, self.house, self.swarm, ledger, repeats, turn, self._notes(before)
        )
        assert_nothing_lost(row)
        assert row.refusals == 0
        assert self.added_delay_s() < LOOSE * lookup_budget_s()
        return row

    def added_delay_s(self) -> float:
        """The longest wait for acceptance in a fault, above the median outside of faults."""
        outside = [wait for stream, wait in self._waits() if not self._is_inside(stream)]
        inside = [wait for stream, wait in self._waits() if self._is_inside(stream)]
        return max(inside, default=0.0) - float(np.median(outside)) if outside else 0.0

    def _waits(self) -> list[tuple[Stream, float]]:
        streams = self.swarm.streams
        return [(each, wait) for each in streams if (wait := each.accepted_after_s) is not None]

    def _is_inside(self, stream: Stream) -> bool:
        return any(begun_s <= stream.begun_s < ended_s for begun_s, ended_s in self.windows)

    def _notes(self, openings_before: float) -> Callable[[], str]:
        def notes() -> str:
            opened = self._metric(OPENINGS) - openings_before
            closed = f"{max(self.closed_after_s, default=float('nan')):.1f}"
            return (
                f"added delay {1000 * self.added_delay_s():.0f} ms at most (budget "
                f"{1000 * lookup_budget_s():.0f}); breaker opened {opened:.0f} times, hits again "
                f"{closed} s after at most"
            )

        return notes

    def _metric(self, name: str) -> float:
        try:
            return self.house.metric(name)
        except httpx.HTTPError:
            return float("nan")

    async def _hit_again(self, prompt: str) -> None:
        """Waits until an answer is found again, which needs the breaker closed.

        Raises:
            TimeoutError: it is not.
        """
        fields = {"max_tokens": SHORT_ANSWER, "temperature": 0}
        async with asyncio.timeout(CLOSED_WITHIN_S), SeedanceClient(self.house.url, KEY) as client:
            for turn in range(1000):
                # Two ingresses have a breaker each: a new connection meets either.
                done = await client.complete(prompt=prompt, **fields)
                if done.cache.outcome == "exact":
                    return
                await asyncio.sleep(0.1 * min(turn, 5))


async def test_a_killed_cache_fails_no_request(house: House, ledger: Ledger, repeats: int) -> None:
    fault = CacheFault(house, "cache SIGKILL")

    def kill(number: int) -> None:
        for pid in house.pids(CACHE):
            house.kill(pid)

    await fault.run(ledger, repeats, kill, lambda: None)


async def test_a_cache_that_hangs_fails_no_request(
    house: House, ledger: Ledger, repeats: int
) -> None:
    fault = CacheFault(house, "cache SIGSTOP")
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped[:] = house.pids(CACHE)
        for pid in stopped:
            house.stop(pid)

    def go_on() -> None:
        for pid in stopped:
            house.go_on(pid)

    before = await in_thread(house.metric, OPENINGS)
    await fault.run(ledger, repeats, stop, go_on)
    assert await in_thread(house.metric, OPENINGS) > before, "the breaker must open"
    assert await in_thread(house.metric, IS_CLOSED) > 0, "and close again"


async def test_a_cache_that_answers_rubbish_fails_no_request(
    house: House, ledger: Ledger, repeats: int
) -> None:
    fault = CacheFault(house, "cache answers rubbish")

    def begin(number: int) -> None:
        house.rubbish.write_text(KINDS[number % len(KINDS)])

    before = await in_thread(house.metric, OPENINGS)
    await fault.run(ledger, repeats, begin, lambda: house.rubbish.unlink(missing_ok=True))
    assert await in_thread(house.metric, OPENINGS) > before, "the breaker must open"
