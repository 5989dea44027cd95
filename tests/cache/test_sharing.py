"""Caches that share a store: each gives what another has kept, and nothing that another removed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from cache.answer import StoredAnswer
from cache.cold_redis import redis_store
from cache.cold_sqlite import sqlite_store
from cache.entries import Entry
from cache.key import PromptKey, make_key
from cache.prompt_cache import CacheConfig, Hit, Miss, PromptCache
from cache.sharing import Condemned, Removal, pack, unpack
from cache.stats import EntryFilter
from cache.write_behind import MAX_HEARD, Change, WriteBehindStore
from tests.cache.redis_server import RedisServer

PATIENCE_S = 30.0
VECTOR = np.eye(8, dtype=np.float32)[0]
TEXTS = ["What is the price?", "what is the price", "How do I go?"]
names = itertools.count()


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def by_sqlite(request: pytest.FixtureRequest, folder: Path) -> Callable[[], WriteBehindStore]:
    path = folder / "c.sqlite3"
    return lambda: sqlite_store(path, max_bytes=2**24, wall_clock=lambda: Clock.now)


def by_redis(request: pytest.FixtureRequest, folder: Path) -> Callable[[], WriteBehindStore]:
    url, name = request.getfixturevalue("redis_url"), f"sharing-{next(names)}"
    # Lives end by the server's own clock, which is not the test's.
    Clock.now = time.time()
    return lambda: redis_store(url, name=name, timeout_s=5.0)


Opens = Callable[..., PromptCache]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[by_sqlite, by_redis], ids=["sqlite", "redis"])
def open_cache(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Opens]:
    """Makes replicas on one store."""
    open_store = request.param(request, tmp_path)
    opened: list[PromptCache] = []

    def build(**values: Any) -> PromptCache:
        config = CacheConfig(**{"cold_max_bytes": 2**24, **values})
        store = open_store()
        opened.append(PromptCache(config, clock=clock, store=store, rng=random.Random(1)))
        return opened[-1]

    yield build
    for cache in opened:
        cache.close()


def key_of(number: int, tenant: str = "a") -> PromptKey:
    return make_key({"tenant": tenant}, TEXTS[number], max_tokens=None, allow_semantic=True)


def answer_of(text: str) -> StoredAnswer:
    return StoredAnswer(text.encode(), 5, "r1")


def put(cache: PromptCache, number: int, text: str = "answer", **parts: Any) -> None:
    assert cache.store(key_of(number, **parts), answer_of(text), VECTOR)


def exact(cache: PromptCache, number: int, **parts: Any) -> bytes | None:
    hit = cache.lookup_exact(key_of(number, **parts))
    return None if hit is None else hit.answer.payload


def eventually(holds: Callable[[], Any]) -> float:
    """Waits until `holds()`, and returns how long."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < PATIENCE_S
        time.sleep(0.01)
    return time.monotonic() - started_s


def test_each_gives_what_the_other_has_kept(open_cache: Opens) -> None:
    one, other = open_cache(), open_cache()
    put(one, 0, "42")
    eventually(lambda: exact(other, 0))
    hit = other.lookup_semantic(key_of(1), VECTOR)
    assert isinstance(hit, Hit)
    assert hit.answer == answer_of("42")
    put(other, 2, "go on")
    eventually(lambda: exact(one, 2) == b"go on")


def test_a_newer_answer_takes_the_place_of_the_others(open_cache: Opens, clock: Clock) -> None:
    one, other = open_cache(), open_cache()
    put(one, 0, "old")
    eventually(lambda: exact(other, 0))
    clock.now += 1
    put(one, 0, "new")
    eventually(lambda: exact(other, 0) == b"new")
    assert other.stats().entries == 1


@pytest.mark.parametrize(
    "which",
    [EntryFilter(), EntryFilter(tenant="a"), EntryFilter(prompt=TEXTS[0]),
     EntryFilter(id=key_of(0).exact[:16])],
)  # fmt: skip
def test_what_one_deletes_the_other_gives_no_more(which: EntryFilter, open_cache: Opens) -> None:
    one, other = open_cache(), open_cache()
    put(one, 0)
    put(one, 0, tenant="b")
    # The other has it in memory and not only in the store.
    eventually(lambda: exact(other, 0) and exact(other, 0, tenant="b"))
    before = other.epoch
    one.delete(which)
    waited_s = eventually(lambda: exact(other, 0) is None)
    assert waited_s < 10
    assert other.epoch > before
    is_for_all = which.tenant is which.id is None
    assert (exact(other, 0, tenant="b") is None) == is_for_all
    one.close()
    other.close()
    again = open_cache()
    assert exact(again, 0) is None
    assert (exact(again, 0, tenant="b") is None) == is_for_all


def test_a_deletion_reaches_what_only_the_other_holds(open_cache: Opens) -> None:
    one, other = open_cache(cold_max_bytes=1), open_cache()
    put(other, 0)
    other.flush()
    eventually(lambda: one.delete(EntryFilter()) or exact(other, 0) is None)
    # It is one or the other that takes the record out of the store, behind its caller's back.
    assert one.flush()
    other.close()
    assert exact(open_cache(), 0) is None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_is_written_late_does_not_come_back(
    is_wrong: bool, open_cache: Opens, clock: Clock
) -> None:
    one, other, third = open_cache(), open_cache(), open_cache()
    put(one, 0)
    clock.now += 2
    if is_wrong:
        one.feedback(key_of(0).exact[:16], was_right=False)
    else:
        one.delete(EntryFilter(tenant="a"))
    one.flush()
    eventually(lambda: third.epoch)
    # As if the other had answered before, and had not heard of it when it wrote.
    clock.now -= 1
    other._tiers.put(Entry(key_of(0), answer_of("late"), clock.now, VECTOR), clock.now)
    other.flush()
    clock.now += 2
    other._tiers.put(Entry(key_of(2), answer_of("next"), clock.now, None), clock.now)
    for cache in (one, third):
        eventually(lambda cache=cache: exact(cache, 2))
        assert exact(cache, 0) is None
    eventually(lambda: exact(other, 0) is None)
    # A deletion that is still on its way would take the next answer along.
    assert all(cache.flush() for cache in (one, other, third))
    put(one, 0, "anew")
    eventually(lambda: exact(third, 0) == b"anew")


def test_a_deletion_reaches_records_that_nobody_has_room_for(open_cache: Opens) -> None:
    first = open_cache()
    put(first, 0)
    put(first, 2)
    first.close()
    small = open_cache(cold_max_bytes=1, max_bytes=1)
    assert exact(small, 0) is None
    small.delete(EntryFilter(prompt=TEXTS[0]))
    small.close()
    again = open_cache()
    assert exact(again, 0) is None
    assert exact(again, 2)


def test_what_one_finds_wrong_the_other_does_not_give_either(open_cache: Opens) -> None:
    one, other = open_cache(), open_cache()
    put(one, 0, "wrong")
    eventually(lambda: isinstance(other.lookup_semantic(key_of(1), VECTOR), Hit))
    one.feedback(key_of(0).exact[:16], was_right=False)
    eventually(lambda: exact(other, 0) is None)
    assert exact(other, 1) is None
    miss = other.lookup_semantic(key_of(1), VECTOR)
    assert miss == Miss(None, "near an answer that was wrong")


def test_a_miss_is_forgotten_when_another_learns_the_answer(open_cache: Opens) -> None:
    one, other = open_cache(), open_cache()
    assert isinstance(other.lookup_semantic(key_of(0), VECTOR), Miss)
    assert other.known_miss(key_of(0))
    put(one, 2)
    eventually(lambda: other.known_miss(key_of(0)) is None)


def test_both_may_come_and_go(open_cache: Opens) -> None:
    chance, caches = random.Random(4), [open_cache(), open_cache()]
    for step in range(60):
        cache = chance.choice(caches)
        match chance.choice(["put", "put", "ask", "delete", "restart"]):
            case "put":
                put(cache, chance.randrange(3), f"{step}")
            case "ask":
                exact(cache, chance.randrange(3))
            case "delete":
                cache.delete(EntryFilter(prompt=TEXTS[chance.randrange(3)]))
            case "restart":
                cache.close()
                caches[caches.index(cache)] = open_cache()
    one, other = caches

    def is_known() -> bool:
        # A deletion that is still on its way may take the first one with it.
        put(one, 0, "last")
        one.flush()
        return exact(other, 0) == b"last"

    eventually(is_known)
    assert one.stats().errors == other.stats().errors == 0


# A server that comes and goes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def replica(server: RedisServer) -> Iterator[Opens]:
    opened = []

    def build(**values: Any) -> PromptCache:
        config = CacheConfig(**{"cold_max_bytes": 2**24, **values})
        store = redis_store(server.url, name="n", timeout_s=1.0)
        opened.append(PromptCache(config, clock=time.time, store=store))
        return opened[-1]

    yield build
    for cache in opened:
        cache.close()


def test_a_server_that_is_down_costs_hits_and_comes_back(
    server: RedisServer, replica: Opens
) -> None:
    one = replica()
    put(one, 0, "kept")
    one.flush()
    other = replica()
    server.stop()
    assert exact(other, 0) is None
    # It is asked once: from then on nobody waits for it.
    started_s = time.monotonic()
    for _ in range(1000):
        assert exact(other, 0) is None
    assert time.monotonic() - started_s < 10
    assert other.stats().errors > 0
    # What is in memory is given, and what is stored meanwhile is written later.
    assert exact(one, 0) == b"kept"
    put(one, 2, "meanwhile")
    one.delete(EntryFilter(prompt=TEXTS[0]))
    server.start()
    eventually(lambda: exact(other, 2) == b"meanwhile")
    eventually(lambda: exact(other, 0) is None)


def test_a_server_that_is_down_at_first_is_read_when_it_comes(
    server: RedisServer, replica: Opens
) -> None:
    one = replica()
    put(one, 0)
    put(one, 2)
    one.close()
    server.stop()
    late = replica()
    assert exact(late, 0) is None
    late.delete(EntryFilter(prompt=TEXTS[2]))
    server.start()
    eventually(lambda: exact(late, 0))
    assert exact(late, 2) is None
    assert late.flush(PATIENCE_S)
    late.close()
    assert exact(replica(), 2) is None


def test_a_server_that_was_emptied_empties_the_caches(server: RedisServer, replica: Opens) -> None:
    cache = replica()
    put(cache, 0)
    cache.flush()
    before = cache.epoch
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    eventually(lambda: exact(cache, 0) is None)
    assert cache.epoch > before
    put(cache, 2)
    cache.flush()
    assert exact(replica(), 2)


def test_records_on_a_server_end_with_the_life_of_their_answer(
    server: RedisServer, replica: Opens
) -> None:
    cache = replica(cold_ttl_s=500.0, ttl_s=100.0)
    put(cache, 0)
    cache.flush()
    with redis.Redis.from_url(server.url) as client:
        (key,) = client.scan_iter("*:r:*")
        assert 0 < client.pttl(key) <= 500_000


def test_caches_of_two_names_share_nothing(server: RedisServer) -> None:
    stores = [redis_store(server.url, name=name, timeout_s=5.0) for name in ("one", "two")]
    stores[0].put("p", "1", b"x")
    stores[0].flush()
    assert list(stores[1].scan()) == []
    for store in stores:
        store.close()


# What is told


def test_notices_are_read_as_they_were_written() -> None:
    removal = Removal(EntryFilter(tenant="Ä", older_than_s=2.5), 17.25)
    assert unpack(pack(removal)) == removal
    wrong = unpack(pack(Condemned("p", "e", VECTOR)))
    assert isinstance(wrong, Condemned)
    assert wrong.vector is not None
    assert (wrong.partition, wrong.exact, wrong.vector.tolist()) == ("p", "e", VECTOR.tolist())
    assert unpack(pack(Condemned("p", "e", None))) == Condemned("p", "e", None)


@pytest.mark.parametrize("rubbish", [b"", b"[]", b"{}", b'{"removal": {"x": 1}}', b"\xff"])
def test_a_notice_that_cannot_be_read_is_left_aside(rubbish: bytes) -> None:
    assert unpack(rubbish) is None


class ChattyBackend:
    """Says a lot at once."""

    def __init__(self, changes: list[Change]) -> None:
        self._changes = changes

    def open(self) -> bool:
        return True

    def commit(self, notices: Any, writes: Any) -> None:
        raise AssertionError("nothing was written")

    def hear(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def read(self, partition: str, record_id: str) -> bytes | None:
        return None

    def scan(self, partition: str | None) -> Iterator[tuple[str, str, bytes]]:
        yield from ()

    def close(self) -> None:
        pass


def test_who_falls_far_behind_reads_everything_anew() -> None:
    said = [Change("gone", "p", str(number)) for number in range(MAX_HEARD + 1)]
    store = WriteBehindStore(ChattyBackend(said))
    eventually(lambda: store.has_heard)
    assert store.take_change() == Change("reset")
    assert store.take_change() == said[-1]
    assert store.take_change() is None
    store.close()


def test_a_removal_does_not_wait_behind_records_that_came_before_it() -> None:
    puts = [Change("put", "p", str(number)) for number in range(1000)]
    notice = Change("notice", data=b"{}")
    store = WriteBehindStore(ChattyBackend([*puts, notice]))
    eventually(lambda: store.has_heard)
    assert store.take_change() == notice
    assert [store.take_change() for _ in puts] == puts
    store.close()


def test_a_removal_counts_at_once_however_much_else_is_heard(
    open_cache: Opens, clock: Clock
) -> None:
    one, other = open_cache(), open_cache()
    put(one, 0)
    eventually(lambda: exact(other, 0))
    before = other.epoch
    for number in range(500):
        one.store(key_of(2, tenant=f"t{number}"), answer_of("x"), None)
    clock.now += 1
    one.delete(EntryFilter(prompt=TEXTS[0]))
    assert one.flush()
    store = other._tiers.shared
    assert store is not None
    eventually(lambda: len(store._heard_notices))
    assert len(store._heard) > 32
    assert other.epoch > before
    assert exact(other, 0) is None


def test_a_record_from_before_a_removal_that_comes_after_it_is_not_taken_in(
    open_cache: Opens, clock: Clock
) -> None:
    one, other = open_cache(), open_cache()
    clock.now += 1
    put(one, 0)
    clock.now += 1
    one.flush()
    # Both are heard in one go, and the removal is obeyed first.
    one.delete(EntryFilter(tenant="a"))
    clock.now += 1
    put(one, 0, tenant="b")
    one.flush()
    eventually(lambda: exact(other, 0, tenant="b"))
    assert exact(other, 0) is None
