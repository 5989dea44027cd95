"""What outlives a process: kills, damaged files, full disks, and the clock that goes on."""

from __future__ import annotations

import logging
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.budget import ErrorBudget
from cache.cold import ColdStoreError
from cache.cold_sqlite import SqliteBackend, sqlite_store
from cache.key import make_key
from cache.prompt_cache import CacheConfig, PromptCache
from cache.stats import EntryFilter
from cache.wall_clock import WallClock
from cache.write_behind import WriteBehindStore
from tests.cache import killed_writer
from tests.cache.killed_writer import answer_of, key_of, tenant_of, wording_of
from tests.cache.test_decision import TRUSTED

ROOT = Path(__file__).parents[2]
MARGIN_S = 1.0
PATIENCE_S = 30.0
NOW = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_cache(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., PromptCache]]:
    """Makes caches on one file; each is a process of its own as far as they can tell."""
    opened: list[PromptCache] = []

    def build(store: WriteBehindStore | None = None, **values: Any) -> PromptCache:
        store = store or sqlite_store(tmp_path / "c.sqlite3", max_bytes=2**24, wall_clock=clock)
        config = CacheConfig(**{"cold_max_bytes": 2**24, **values})
        opened.append(PromptCache(config, clock=clock, store=store, rng=random.Random(1)))
        return opened[-1]

    yield build
    for cache in opened:
        cache.close()


def put(cache: PromptCache, number: int, **values: Any) -> None:
    assert cache.store(key_of(number), answer_of(number), None, **values)


def held(cache: PromptCache, number: int) -> bytes | None:
    hit = cache.lookup_exact(key_of(number))
    return None if hit is None else hit.answer.payload


def eventually(holds: Callable[[], Any]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


# Kills


def kill_while_writing(path: Path, first: int, wait_s: float) -> tuple[dict[int, float], float]:
    """What a writer has acknowledged when it was killed, and when that was."""
    command = [sys.executable, "-m", "tests.cache.killed_writer", str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        time.sleep(wait_s)
        writer.kill()
        killed_s = time.monotonic()
        lines += writer.stdout.readlines()
    words = [line.split() for line in lines if line.endswith("\n")]
    return {int(number): float(said_s) for number, said_s in words}, killed_s


def check_kills(path: Path, times: int) -> None:
    chance, first, stored = random.Random(5), 1, set[int]()
    num_sure = num_learnt = 0
    for _ in range(times):
        said, killed_s = kill_while_writing(path, first, chance.uniform(1.2, 2.0))
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        sure = [number for number, said_s in said.items() if killed_s - said_s > MARGIN_S]
        removed = {-number for number in sure if number < 0}
        in_doubt = {-number for number in said if number < 0} - removed
        stored |= {number for number in sure if number > 0}
        stored -= removed | in_doubt
        budget = ErrorBudget(prior=TRUSTED)
        with closing(killed_writer.open_cache(path, budget)) as cache:
            wrong = [n for n in stored if held(cache, n) != answer_of(n).payload]
            assert wrong == []
            assert [n for n in removed if held(cache, n) is not None] == []
            learnt = [n for n in sure if n > 0 and n % 10 == 0]
            assert [n for n in learnt if budget.credit(tenant_of(n)) > 0] == []
            for n in learnt:
                # Once a request has earned something, the paraphrase is known.
                budget.count_request(tenant_of(n))
                assert cache.lookup_exact(wording_of(n, "enable")) is not None
            num_learnt += len(learnt)
            assert cache.stats().errors == 0
        num_sure += len(sure)
        first = max(said) + 10
    assert num_sure > 20 * times
    assert num_learnt > times


def test_what_was_acknowledged_a_second_ago_outlives_a_kill(tmp_path: Path) -> None:
    check_kills(tmp_path / "c.sqlite3", 5)


@pytest.mark.soak
def test_what_was_acknowledged_a_second_ago_outlives_fifty_kills(tmp_path: Path) -> None:
    check_kills(tmp_path / "c.sqlite3", 50)


# Restarts


def test_a_new_process_finds_both_tiers_with_their_ages(
    open_cache: Callable[..., PromptCache], clock: Clock
) -> None:
    cache = open_cache(ttl_s=60.0)
    put(cache, 1, model="m", tags=("t",))
    clock.now += 60
    cache.evict_expired()
    put(cache, 2)
    clock.now += 10
    cache.close()
    again = open_cache(ttl_s=60.0)
    for number, age_s in ((1, 70.0), (2, 10.0)):
        hit = again.lookup_exact(key_of(number))
        assert hit is not None
        assert (hit.answer, hit.age_s, hit.tier) == (answer_of(number), age_s, "L3")
    (info,) = again.find(EntryFilter(tag="t"))
    assert info.model == "m"


def test_a_restart_makes_no_answer_live_longer(
    open_cache: Callable[..., PromptCache], clock: Clock
) -> None:
    cache = open_cache()
    put(cache, 1)
    cache.close()
    clock.now += 3599
    again = open_cache()
    assert held(again, 1)
    clock.now += 1
    assert held(again, 1) is None
    again.close()
    assert open_cache().stats().cold_entries == 0


def test_meaning_outlives_a_restart(open_cache: Callable[..., PromptCache]) -> None:
    vector = np.eye(8, dtype=np.float32)[0]
    first, second = (
        make_key({"tenant": "a"}, text, max_tokens=None, allow_semantic=True)
        for text in ("What is the price?", "what is the price")
    )
    cache = open_cache()
    cache.store(first, answer_of(1), vector)
    cache.close()
    hit = open_cache().lookup_semantic(second, vector)
    assert getattr(hit, "answer", None) == answer_of(1)


@pytest.mark.parametrize("action", ["delete", "clear", "replace", "quarantine"])
def test_what_was_removed_stays_so_after_a_restart(
    action: str, open_cache: Callable[..., PromptCache]
) -> None:
    cache = open_cache()
    put(cache, 1)
    cache.flush()
    match action:
        case "delete":
            cache.delete(EntryFilter(prompt="question 1"))
        case "clear":
            cache.clear()
        case "replace":
            cache.store(key_of(1), answer_of(2), None)
        case "quarantine":
            cache.quarantine(key_of(1).exact[:16])
    cache.close()
    expected = answer_of(2).payload if action == "replace" else None
    assert held(open_cache(), 1) == expected


def test_every_entry_has_one_record_wherever_it_is_held(
    open_cache: Callable[..., PromptCache], clock: Clock
) -> None:
    cache = open_cache(max_bytes=30_000, cold_max_bytes=60_000, ttl_s=60.0)
    chance = random.Random(3)
    for step in range(400):
        put(cache, chance.randrange(40))
        held(cache, chance.randrange(40))
        clock.now += chance.choice((0, 1, 20))
        if step % 50 == 49:
            cache.delete(EntryFilter(prompt=f"question {chance.randrange(40)}"))
        tiers = cache._tiers
        assert tiers.shared is not None
        known = {entry.key.exact for entry, _ in tiers.entries()}
        assert {exact for _, exact, _ in tiers.shared.scan()} == known
        assert cache.stats().errors == 0


def test_entries_of_the_warm_tier_come_back_where_the_cold_one_is_full(
    open_cache: Callable[..., PromptCache],
) -> None:
    cache = open_cache(cold_max_bytes=20_000)
    for number in range(20):
        put(cache, number)
    cache.close()
    again = open_cache(cold_max_bytes=20_000)
    assert again.stats().entries > 0
    assert all(held(again, number) for number in range(20))


def test_a_clock_that_is_set_back_makes_no_answer_younger() -> None:
    wall, steady = Clock(), Clock()
    clock = WallClock(wall, steady)
    start = clock()
    wall.now += 5
    steady.now += 5
    assert clock() == start + 5
    wall.now -= 3600
    steady.now += 10
    assert clock() == start + 15
    wall.now += 7200
    assert clock() == wall.now


# Files that cannot be used


@pytest.mark.parametrize("content", [b"", b"rubbish" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_damaged_is_moved_aside(
    content: bytes, tmp_path: Path, open_cache: Callable[..., PromptCache], caplog: Any
) -> None:
    (tmp_path / "c.sqlite3").write_bytes(content)
    cache = open_cache()
    put(cache, 1)
    cache.close()
    assert held(open_cache(), 1)
    aside = [path.read_bytes() for path in tmp_path.glob("*.damaged-*")]
    assert aside == ([content] if content else [])
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == len(aside)


@pytest.mark.parametrize("change", ["PRAGMA user_version = 99", "PRAGMA application_id = 7"])
def test_a_file_of_somebody_else_is_moved_aside(
    change: str, tmp_path: Path, open_cache: Callable[..., PromptCache]
) -> None:
    open_cache().close()
    with closing(sqlite3.connect(tmp_path / "c.sqlite3")) as connection:
        connection.execute(change)
    cache = open_cache()
    put(cache, 1)
    assert held(cache, 1)
    assert len(list(tmp_path.glob("*.damaged-*[0-9]"))) == 1


def test_a_file_that_is_damaged_while_it_is_used_is_replaced(
    tmp_path: Path, open_cache: Callable[..., PromptCache], clock: Clock
) -> None:
    cache = open_cache(ttl_s=60.0)
    put(cache, 1)
    clock.now += 60
    cache.evict_expired()
    put(cache, 2)
    cache.flush()
    path = tmp_path / "c.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(b"\xff" * size)

    def is_replaced() -> bool:
        held(cache, 1)
        return bool(list(tmp_path.glob("*.damaged-*")))

    eventually(is_replaced)
    store = cache._tiers.shared
    eventually(lambda: store is not None and store.is_up)
    # What is in memory is written into the new file.
    assert held(cache, 2)
    cache.close()
    again = open_cache()
    assert held(again, 1) is None
    assert held(again, 2)


def test_a_file_grows_no_larger_than_it_may(tmp_path: Path, clock: Clock) -> None:
    path, data = tmp_path / "c.sqlite3", bytes(20_000)
    with closing(sqlite_store(path, max_bytes=2**20, wall_clock=clock)) as store:
        for number in range(200):
            store.put("p", str(number), data)
            assert store.flush(PATIENCE_S)
        assert path.stat().st_size <= 2**20
        kept = {int(name) for _, name, _ in store.scan()}
        assert 199 in kept
        assert 0 not in kept
        assert len(kept) > 20


def test_what_nobody_held_ends_with_its_life(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "c.sqlite3"
    with closing(sqlite_store(path, max_bytes=2**20, wall_clock=clock)) as store:
        store.put("p", "1", b"x", clock.now + 10)
        store.put("p", "2", b"x", clock.now + 20)
    clock.now += 10
    with closing(sqlite_store(path, max_bytes=2**20, wall_clock=clock)) as store:
        eventually(lambda: [name for _, name, _ in store.scan()] == ["2"])


# A disk that fails


class FullDisk(SqliteBackend):
    """Takes nothing while it is full."""

    is_full = False

    def commit(self, *args: Any) -> None:
        if self.is_full:
            raise ColdStoreError("no space left on device")
        super().commit(*args)


def test_a_full_disk_costs_nothing_but_what_a_restart_would_find(
    tmp_path: Path, open_cache: Callable[..., PromptCache], clock: Clock
) -> None:
    disk = FullDisk(tmp_path / "c.sqlite3", max_bytes=2**24, wall_clock=clock)
    store = WriteBehindStore(disk, max_pending_bytes=10_000)
    cache = open_cache(store)
    put(cache, 1)
    cache.flush()
    disk.is_full = True
    for number in range(2, 40):
        put(cache, number)
    eventually(lambda: not store.is_up)
    assert all(held(cache, number) for number in range(2, 40))
    assert cache.stats().errors > 0
    cache.delete(EntryFilter(prompt="question 1"))
    disk.is_full = False
    assert cache.flush(PATIENCE_S)
    put(cache, 50)
    assert cache.flush(PATIENCE_S)
    cache.close()
    again = open_cache()
    assert held(again, 1) is None
    assert held(again, 2)
    assert held(again, 50)
    assert held(again, 39) is None


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(
    tmp_path: Path, open_cache: Callable[..., PromptCache], clock: Clock
) -> None:
    (tmp_path / "file").write_text("")
    store = sqlite_store(tmp_path / "file" / "c.sqlite3", max_bytes=2**20, wall_clock=clock)
    cache = open_cache(store)
    put(cache, 1)
    assert held(cache, 1)
    assert not store.is_up
    (tmp_path / "file").unlink()
    assert cache.flush(PATIENCE_S)
    assert (tmp_path / "file" / "c.sqlite3").exists()


def test_a_file_from_before_anything_learnt_was_kept_goes_on(
    open_cache: Callable[..., PromptCache], tmp_path: Path
) -> None:
    cache = open_cache()
    put(cache, 1)
    cache.close()
    with closing(sqlite3.connect(tmp_path / "c.sqlite3")) as connection:
        connection.execute("DROP TABLE learnt")
    again = open_cache()
    assert held(again, 1) == answer_of(1).payload
    again._aliases.add("a", "b", np.ones(4, dtype=np.float32))
    again.close()
    assert open_cache().stats().aliases == 1
