"""The course of nearly every test here: streams run, something breaks, it heals, and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tests.chaos.house import House
from tests.chaos.ledger import Ledger, Row, make_row
from tests.chaos.swarm import Swarm, until

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Runs what blocks beside the swarm, whose clients must not wait for it."""
    return await asyncio.to_thread(function, *args)


@dataclass
class Course:
    """Faults that were injected while a swarm asked."""

    house: House
    swarm: Swarm
    fault_at_s: list[float] = field(default_factory=list)

    async def inject(self, fault: Callable[[], object]) -> None:
        """Breaks something in the middle of every client's answer.

        Raises:
            TimeoutError: the clients have no answers to be in the middle of.
        """
        await self.swarm.all_streaming()
        self.fault_at_s.append(time.monotonic())
        await in_thread(fault)

    async def moved_on(self, within_s: float) -> None:
        """Waits until every stream that the last fault met has said more.

        Raises:
            TimeoutError: one has not.
        """
        at_s = self.fault_at_s[-1]
        met = [stream for stream in self.swarm.streams if stream.is_live_at(at_s)]
        await until(
            lambda: all(stream.silence_after_s(at_s) is not None for stream in met), within_s
        )

    async def heal(self) -> None:
        await in_thread(self.house.until_whole)


async def run_course(
    name: str,
    house: House,
    swarm: Swarm,
    ledger: Ledger,
    repeats: int,
    turn: Callable[[Course, int], Awaitable[None]],
    notes: Callable[[], str] = lambda: "",
) -> Row:
    """Takes `turn` so many times under load, lets all streams end, and writes the row."""
    course = Course(house, swarm)
    try:
        async with swarm:
            for number in range(repeats):
                await turn(course, number)
            await swarm.finish()
    finally:
        # What went wrong half-way belongs into the table, too.
        row = make_row(
            name,
            course.fault_at_s,
            swarm.streams,
            bare_closes=swarm.bare_closes,
            notes=notes(),
        )
        ledger.add(row)
    return row


def assert_nothing_lost(row: Row) -> None:
    assert row.silent == 0, row
    assert row.lost == 0, row
    assert row.identical == row.streams, row
