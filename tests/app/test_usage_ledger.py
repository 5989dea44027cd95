"""The ledger: what it wrote in the end is what was counted, whatever the store did meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.usage_ledger import Batch, Row, UsageLedger, Used
from tests.app.stack import eventually
from tests.protocol.fakes import FakeClock

USED = Used(1, 10, 5, 2, 0)
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC).timestamp()
DAY = "2026-03-04"


class FakeStore:
    """Takes each number of a writer once, as the real one does; `faults` are what it does next."""

    def __init__(self, *faults: str) -> None:
        self.faults = list(faults)
        self.last: Counter[str] = Counter()
        self.totals: dict[Row, Used] = {}
        self.batches: list[Batch] = []

    async def write(self, batch: Batch) -> None:
        fault = self.faults.pop(0) if self.faults else "none"
        await asyncio.sleep(0)
        if fault == "down":
            raise ConnectionError("the store is down")
        if batch.number > self.last[batch.writer]:
            self.last[batch.writer] = batch.number
            self.batches.append(batch)
            for row, used in batch.rows.items():
                self.totals[row] = self.totals.get(row, Used()).plus(used)
        if fault == "lost reply":
            raise ConnectionError("the connection broke")
        if fault == "hang":
            await asyncio.Event().wait()


def ledger_of(
    store: FakeStore, *, wall_clock: FakeClock | None = None, **options: float
) -> UsageLedger:
    return UsageLedger(
        store.write,
        wall_clock=wall_clock or FakeClock(NOON),
        **options,  # type: ignore[arg-type]
    )


async def test_what_is_counted_is_written_in_one_batch() -> None:
    store = FakeStore()
    ledger = ledger_of(store)
    for _ in range(3):
        ledger.count("red", USED)
    ledger.count("blue", USED)
    assert store.totals == {}
    assert await ledger.flush()
    assert store.totals == {Row("red", DAY): Used(3, 30, 15, 6, 0), Row("blue", DAY): USED}
    assert len(store.batches) == 1
    assert await ledger.flush()
    assert len(store.batches) == 1, "nothing is written without need"


async def test_days_are_those_of_utc() -> None:
    store, clock = FakeStore(), FakeClock(NOON)
    ledger = ledger_of(store, wall_clock=clock)
    ledger.count("red", USED)
    clock.now += 12 * 3600
    ledger.count("red", USED)
    await ledger.flush()
    assert store.totals == {Row("red", DAY): USED, Row("red", "2026-03-05"): USED}


async def test_a_store_that_is_down_is_tried_again_and_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore("down", "down", "down")
    ledger = ledger_of(store)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            ledger.count("red", USED)
            assert not await ledger.flush()
        assert ledger.stats() == {
            "pending_rows": 2,
            "flush_errors_total": 3,
            "lost_requests_total": 0,
        }
        assert await ledger.flush()
        assert await ledger.flush()
    assert store.totals == {Row("red", DAY): Used(3, 30, 15, 6, 0)}
    told = [record.message for record in caplog.records if record.name == "app.usage_ledger"]
    assert len(told) == 2
    assert told[-1] == "usage is written again"


async def test_what_waits_is_bounded_and_what_is_lost_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore("down")
    ledger = ledger_of(store, max_rows=2)
    ledger.count("a", USED)
    await ledger.flush()
    for tenant in "bcda":
        ledger.count(tenant, USED)
    ledger.count("b", USED)
    stats = ledger.stats()
    assert (stats["pending_rows"], stats["lost_requests_total"]) == (2, 3)
    assert "usage is lost" in caplog.text


async def test_a_store_that_hangs_is_given_up_and_tried_again() -> None:
    store = FakeStore("hang")
    ledger = ledger_of(store, timeout_s=0.01)
    ledger.count("red", USED)
    assert not await ledger.flush()
    assert await ledger.flush()
    assert store.totals == {Row("red", DAY): USED}


async def test_it_writes_by_itself_and_the_rest_at_its_close() -> None:
    store = FakeStore()
    ledger = ledger_of(store)
    ledger.start(0.001)
    ledger.count("red", USED)
    await eventually(lambda: bool(store.totals), "nothing is written")
    await ledger.close()
    ledger.count("red", USED)
    await ledger.close()
    assert store.totals == {Row("red", DAY): USED.plus(USED)}


async def test_closing_in_the_midst_of_a_write_loses_and_doubles_nothing() -> None:
    store = FakeStore("hang")
    ledger = ledger_of(store)
    ledger.start(0.001)
    ledger.count("red", USED)
    await eventually(lambda: bool(store.totals), "nothing is written")
    ledger.count("red", USED)
    await ledger.close()
    assert store.totals == {Row("red", DAY): USED.plus(USED)}


async def test_what_cannot_be_written_at_the_close_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = ledger_of(FakeStore("down"))
    ledger.count("red", USED)
    await ledger.close()
    assert "is lost with this process" in caplog.text


FAULTS = st.sampled_from(["none", "down", "lost reply", "hang"])
USES = st.builds(Used, *(st.integers(0, 1000) for _ in Used._fields))
STEPS = st.lists(st.one_of(st.tuples(st.sampled_from("abc"), USES), st.none()), max_size=40)


@given(faults=st.lists(FAULTS, max_size=15), steps=STEPS)
def test_totals_are_what_was_counted(
    faults: list[str], steps: list[tuple[str, Used] | None]
) -> None:
    async def run() -> None:
        store = FakeStore(*faults)
        ledger = ledger_of(store, timeout_s=0.001)
        counted: dict[Row, Used] = {}
        for step in steps:
            if step is None:
                await ledger.flush()
                continue
            row = Row(step[0], DAY)
            ledger.count(*step)
            counted[row] = counted.get(row, Used()).plus(step[1])
        store.faults.clear()
        with contextlib.suppress(asyncio.CancelledError):
            await ledger.close()
        assert store.totals == counted

    asyncio.run(run())
