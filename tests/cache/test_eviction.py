"""The eviction contract over every policy, and each of ours against a slow reference."""

import itertools
import math

import pytest
from cachetools import LRUCache
from hypothesis import given
from hypothesis import strategies as st

from cache import windowed
from cache.lru_k import EvictionPolicy, LRUKCache
from cache.policies import make_policy
from cache.s3_fifo import S3FIFOCache
from cache.windowed import WindowedLRUK

MAX_BYTES = 100

POLICIES = {
    "windowed": WindowedLRUK,
    "windowed lru-3": lambda n: WindowedLRUK(n, k=3),
    "windowed without ghosts": lambda n: WindowedLRUK(n, ghosts=0),
    "s3-fifo": S3FIFOCache,
    "lru-3 that fades": lambda n: LRUKCache(n, k=3, half_life=5),
    "lru-1": lambda n: LRUKCache(n, k=1),
    "lru-2": LRUKCache,
    "lru-3": lambda n: LRUKCache(n, k=3),
    "lru-2 without ghosts": lambda n: LRUKCache(n, ghosts=0),
    "lru": lambda n: LRUCache(n, getsizeof=lambda size: size),
}

traces = st.lists(
    st.tuples(st.sampled_from(["use", "use", "use", "delete", "evict", "inherit"]),
              st.integers(0, 12), st.integers(1, 60)),
    max_size=200,
)  # fmt: skip


@pytest.fixture(params=POLICIES.values(), ids=POLICIES.keys())
def policy(request) -> EvictionPolicy:
    return request.param(MAX_BYTES)


def test_the_bound_is_never_exceeded(policy):
    for number in range(500):
        policy[f"k{number % 37}"] = 1 + number * 7 % 50
        assert policy.currsize <= policy.maxsize
        assert policy.currsize == sum(policy[key] for key in list(policy))


def test_an_item_too_large_is_refused(policy):
    with pytest.raises(ValueError, match="too large"):
        policy["a"] = MAX_BYTES + 1


def test_a_deleted_item_is_gone_and_its_bytes_are_free(policy):
    policy["a"] = 60
    del policy["a"]
    assert "a" not in policy
    assert policy.currsize == 0
    with pytest.raises(KeyError):
        policy["a"]


def test_an_evicted_item_is_returned_with_its_size(policy):
    policy["a"], policy["b"] = 10, 20
    assert policy.popitem() == ("a", 10)
    assert list(policy) == ["b"]


def test_an_empty_policy_has_no_victim(policy):
    with pytest.raises(KeyError):
        policy.popitem()


def test_an_item_used_again_outlives_one_used_once(policy):
    policy["a"], policy["b"] = 10, 10
    assert policy["a"] == policy["a"] == 10
    assert policy.popitem()[0] == "b"


@given(trace=traces)
@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
def test_any_trace_keeps_the_books(make, trace):
    policy, sizes = make(MAX_BYTES), {}
    for action, number, size in trace:
        key = str(number)
        if action == "use" and key in policy:
            assert policy[key] == sizes[key]
        elif action == "use":
            while policy.currsize + size > policy.maxsize:
                del sizes[policy.popitem()[0]]
            policy[key] = sizes[key] = size
        elif action == "delete" and key in policy:
            del policy[key], sizes[key]
        elif action == "evict" and sizes:
            victim, victim_size = policy.popitem()
            assert sizes.pop(victim) == victim_size
        elif action == "inherit" and hasattr(policy, "inherit"):
            policy.inherit(key, str(size % 13))
        assert set(policy) == set(sizes)
        assert policy.currsize == sum(sizes.values()) <= MAX_BYTES


class SlowLRUK:
    """LRU-K as the paper says it, all accesses remembered, victims found by looking at all."""

    def __init__(self, k, ghosts, half_life=None):
        self.k, self.ghosts, self.now = k, ghosts, itertools.count()
        self.half_life = half_life
        self.held, self.past, self.gone = [], {}, []

    def use(self, key):
        self.past.setdefault(key, []).append(next(self.now))
        if key not in self.held:
            self.held.append(key)
            self.gone = [ghost for ghost in self.gone if ghost != key]

    def evict(self):
        def rank(key):
            seen = self.past[key]
            weight = seen[-1]
            if self.half_life:
                weight = sum(2 ** (time / self.half_life) for time in seen)
            return (seen[-self.k] if len(seen) >= self.k else -math.inf, weight)

        victim = min(self.held, key=rank)
        self.gone.append(victim)
        self.held.remove(victim)
        self.trim()
        return victim

    def delete(self, key):
        self.held.remove(key)
        del self.past[key]
        self.trim()

    def inherit(self, key, ghost):
        if key not in self.held and ghost in self.gone:
            past = self.past.pop(ghost)
            self.gone.remove(ghost)
            if key in self.gone:
                self.gone.remove(key)
                past = sorted(past + self.past[key])
            self.past[key] = past
            self.gone.append(key)

    def trim(self):
        while len(self.gone) > self.ghosts * max(1, len(self.held)):
            del self.past[self.gone.pop(0)]


def drive(fast, slow, trace):
    """Puts the same series to both, of items of one byte; the victims must be the same."""
    for action, number, other in trace:
        key, ghost = str(number), str(other % 13)
        if action == "use":
            if key in fast:
                fast[key]
            else:
                fast[key] = 1
            slow.use(key)
        elif action == "delete" and key in fast:
            del fast[key]
            slow.delete(key)
        elif action == "evict" and slow.held:
            assert fast.popitem()[0] == slow.evict()
        elif action == "inherit" and key != ghost:
            fast.inherit(key, ghost)
            slow.inherit(key, ghost)
        assert sorted(fast) == sorted(slow.held)
        assert fast.num_ghosts == len(slow.gone)


@given(
    trace=traces,
    k=st.integers(1, 4),
    ghosts=st.sampled_from([0, 0.5, 1, 4]),
    half_life=st.sampled_from([None, 3.0]),
)
def test_lru_k_evicts_what_the_slow_reference_evicts(trace, k, ghosts, half_life):
    # A ghost that was inherited is the youngest; without a limit their order shows nowhere.
    fast = LRUKCache(10_000, k=k, ghosts=ghosts, half_life=half_life)
    drive(fast, SlowLRUK(k, ghosts, half_life), trace)


class SlowWindowed:
    """Three lists, each in the order of use or of moving there; a plain LRU beside them."""

    def __init__(self, size, k, ghosts):
        self.size, self.k, self.ghosts, self.now = size, k, ghosts, itertools.count()
        self.past, self.gone, self.plain = {}, [], []
        self.fresh, self.leaving, self.main = [], [], []
        self.window = windowed.START_SHARE * size

    @property
    def held(self):
        return self.fresh + self.leaving + self.main

    def use(self, key):
        was_held = key in self.held
        if key in self.plain and not was_held:
            self.window += windowed.STEP_UP
        if was_held and key not in self.plain:
            self.window -= windowed.STEP
        least, most = windowed.LEAST_SHARE * self.size, windowed.GREATEST_SHARE * self.size
        self.window = min(most, max(least, self.window))
        self.plain = [*(other for other in self.plain if other != key), key][-self.size :]
        self.gone = [ghost for ghost in self.gone if ghost != key]
        self.past.setdefault(key, []).append(next(self.now))
        is_main = key in self.main or self.is_proven(key)
        for part in (self.fresh, self.leaving, self.main):
            if key in part:
                part.remove(key)
        (self.main if is_main else self.fresh).append(key)
        while len(self.main) > self.size - self.window:
            self.leaving.append(self.main.pop(0))

    def is_proven(self, key):
        seen = self.past[key]
        return (
            len(self.main) > 0
            and len(seen) >= self.k
            and seen[-self.k] > self.past[self.main[0]][-1]
        )

    def evict(self):
        while True:
            outside = [part for part in (self.fresh, self.leaving) if part]
            part = min(outside or [self.main], key=lambda part: self.past[part[0]][-1])
            victim = part.pop(0)
            if not outside or len(self.main) + 1 > self.size - self.window:
                break
            self.main.append(victim)
        self.gone.append(victim)
        self.trim()
        return victim

    def delete(self, key):
        for part in (self.fresh, self.leaving, self.main):
            if key in part:
                part.remove(key)
        self.plain = [other for other in self.plain if other != key]
        del self.past[key]
        self.trim()

    def inherit(self, key, ghost):
        SlowLRUK.inherit(self, key, ghost)

    def trim(self):
        while len(self.gone) > self.ghosts * max(1, len(self.held)):
            del self.past[self.gone.pop(0)]


@given(
    trace=traces,
    size=st.integers(1, 9),
    k=st.integers(1, 3),
    ghosts=st.sampled_from([0, 0.5, 1, 4]),
)
def test_windowed_lru_k_evicts_what_the_slow_reference_evicts(trace, size, k, ghosts):
    fast, slow = WindowedLRUK(size, k=k, ghosts=ghosts), SlowWindowed(size, k, ghosts)
    drive_full(fast, slow, trace, size)
    assert fast.window_share == pytest.approx(slow.window / size)


def drive_full(fast, slow, trace, size):
    """As `drive`, with room made as the prompt cache makes it."""
    for action, number, other in trace:
        key = str(number)
        if action == "use" and key not in fast:
            while fast.currsize + 1 > size:
                assert fast.popitem()[0] == slow.evict()
        drive(fast, slow, [(action, number, other)])


class SlowS3FIFO:
    """Three lists, looked through from their heads."""

    def __init__(self, size):
        self.size = size
        self.small, self.main, self.gone, self.uses = [], [], [], {}

    @property
    def held(self):
        return self.small + self.main

    def use(self, key):
        if key in self.held:
            self.uses[key] = min(3, self.uses[key] + 1)
            return
        self.uses[key] = 0
        if key in self.gone:
            self.gone.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)

    def evict(self):
        while True:
            if self.small and (len(self.small) >= 0.1 * self.size or not self.main):
                key = self.small.pop(0)
                if self.uses[key] < 2:
                    self.gone.append(key)
                    while len(self.gone) > 0.9 * self.size:
                        self.gone.pop(0)
                    return key
                self.uses[key] = 0
            else:
                key = self.main.pop(0)
                if self.uses[key] == 0:
                    return key
                self.uses[key] -= 1
            self.main.append(key)

    def delete(self, key):
        (self.small if key in self.small else self.main).remove(key)

    def inherit(self, key, ghost):
        if key not in self.held and ghost in self.gone and key not in self.gone:
            self.gone.remove(ghost)
            self.gone.append(key)


@given(trace=traces, size=st.integers(1, 12))
def test_s3_fifo_evicts_what_the_slow_reference_evicts(trace, size):
    drive_full(S3FIFOCache(size), SlowS3FIFO(size), trace, size)


def asked_in_turn(policy, keys):
    hits = 0
    for key in keys:
        if key in policy:
            policy[key]
            hits += 1
        else:
            while policy.currsize >= policy.maxsize:
                policy.popitem()
            policy[key] = 1
    return hits


def test_a_loop_larger_than_the_cache_is_held_in_part():
    loop = [str(number % 30) for number in range(3000)]
    assert asked_in_turn(LRUCache(20), loop) == 0
    assert asked_in_turn(WindowedLRUK(20), loop) > 1000


def test_the_window_widens_where_the_latest_come_again():
    policy = WindowedLRUK(20)
    for start in range(0, 4000, 15):
        asked_in_turn(policy, [str(start + step % 15) for step in range(45)])
    assert policy.window_share == pytest.approx(windowed.GREATEST_SHARE, abs=0.4)


@pytest.mark.parametrize("make", [WindowedLRUK, LRUKCache, S3FIFOCache])
def test_a_paraphrase_takes_on_the_history_of_what_was_evicted(make):
    policy = make(4)
    for key in "abcdefgh":
        asked_in_turn(policy, key)
    ghosts = policy.num_ghosts
    policy.inherit("A", "c" if make is not S3FIFOCache else "d")
    assert policy.num_ghosts == ghosts
    policy.inherit("B", "no such ghost")
    assert policy.num_ghosts == ghosts


def test_every_name_makes_its_policy():
    kinds = [type(make_policy(name, 10)) for name in ("windowed", "lru-k", "s3-fifo", "lru")]
    assert kinds == [WindowedLRUK, LRUKCache, S3FIFOCache, LRUCache]


def test_lru_2_resists_a_scan_that_empties_lru():
    def survivors(policy):
        for _ in range(2):
            for number in range(5):
                key = f"hot{number}"
                if key in policy:
                    policy[key]
                else:
                    policy[key] = 1
        for number in range(50):
            policy[f"scan{number}"] = 1
        return sum(key.startswith("hot") for key in policy)

    assert survivors(LRUKCache(10)) == 5
    assert survivors(LRUCache(10)) == 0


def test_a_ghost_that_returns_remembers_its_last_access():
    policy = LRUKCache(2)
    policy["a"] = policy["b"] = 1
    policy["c"] = 1
    policy["a"] = 1
    # "a" has two accesses now, "c" one.
    assert policy.popitem()[0] == "c"


def test_a_deleted_item_leaves_no_ghost():
    policy = LRUKCache(10)
    policy["a"] = 1
    del policy["a"]
    assert policy.num_ghosts == 0


def test_the_clock_may_be_injected():
    times = iter([3.0, 1.0, 2.0, 5.0])
    policy = LRUKCache(10, k=1, timer=lambda: next(times))
    for key in "abc":
        policy[key] = 1
    policy["a"]
    assert [policy.popitem()[0] for _ in range(3)] == ["b", "c", "a"]


def test_book_keeping_does_not_grow_with_traffic():
    policy = LRUKCache(10)
    for number in range(2_000):
        policy[str(number)] = 1
        policy[str(number)]
        if number % 3:
            del policy[str(number)]
    assert policy.num_ghosts <= 40
    assert len(policy._heap) <= 2 * len(policy) + 64


@pytest.mark.parametrize("make", [LRUKCache, WindowedLRUK])
@pytest.mark.parametrize("settings", [{"k": 0}, {"ghosts": -1}])
def test_impossible_settings_are_refused(make, settings):
    with pytest.raises(ValueError, match="the least is"):
        make(10, **settings)


def test_impossible_shares_and_half_lives_are_refused():
    with pytest.raises(ValueError, match="small is 1"):
        S3FIFOCache(10, small=1)
    with pytest.raises(ValueError, match="half_life is 0"):
        LRUKCache(10, half_life=0)


@pytest.mark.parametrize("make", [WindowedLRUK, S3FIFOCache])
def test_histories_and_queues_stay_bounded(make):
    policy = make(10)
    for number in range(2_000):
        asked_in_turn(policy, [str(number), str(number // 2)])
        if number % 3 == 0 and str(number) in policy:
            del policy[str(number)]
    assert policy.num_ghosts <= 40
    assert len(policy) <= 10


def test_a_replaced_size_is_counted_once():
    for make in (WindowedLRUK, S3FIFOCache, LRUKCache):
        policy = make(100)
        policy["a"], policy["b"] = 10, 10
        policy["a"] = 30
        policy["a"] = 20
        assert policy.currsize == 30
        assert sorted([policy.popitem(), policy.popitem()]) == [("a", 20), ("b", 10)]
