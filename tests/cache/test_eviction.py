"""The eviction contract over every policy, and LRU-K against a slow reference."""

import itertools
import math

import pytest
from cachetools import LRUCache
from hypothesis import given
from hypothesis import strategies as st

from cache.lru_k import EvictionPolicy, LRUKCache

MAX_BYTES = 100

POLICIES = {
    "lru-1": lambda n: LRUKCache(n, k=1),
    "lru-2": LRUKCache,
    "lru-3": lambda n: LRUKCache(n, k=3),
    "lru-2 without ghosts": lambda n: LRUKCache(n, ghosts=0),
    "lru": lambda n: LRUCache(n, getsizeof=lambda size: size),
}

traces = st.lists(
    st.tuples(st.sampled_from(["use", "use", "use", "delete", "evict"]),
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
        assert set(policy) == set(sizes)
        assert policy.currsize == sum(sizes.values()) <= MAX_BYTES


class SlowLRUK:
    """LRU-K as the paper says it, all accesses remembered, victims found by looking at all."""

    def __init__(self, k, ghosts):
        self.k, self.ghosts, self.now = k, ghosts, itertools.count()
        self.held, self.past, self.gone = [], {}, []

    def use(self, key):
        self.past.setdefault(key, []).append(next(self.now))
        if key not in self.held:
            self.held.append(key)
            self.gone = [ghost for ghost in self.gone if ghost != key]

    def evict(self):
        def rank(key):
            seen = self.past[key]
            return (seen[-self.k] if len(seen) >= self.k else -math.inf, seen[-1])

        victim = min(self.held, key=rank)
        self.gone.append(victim)
        self.held.remove(victim)
        self.trim()
        return victim

    def delete(self, key):
        self.held.remove(key)
        del self.past[key]
        self.trim()

    def trim(self):
        while len(self.gone) > self.ghosts * max(1, len(self.held)):
            del self.past[self.gone.pop(0)]


@given(trace=traces, k=st.integers(1, 4), ghosts=st.sampled_from([0, 0.5, 1, 4]))
def test_lru_k_evicts_what_the_slow_reference_evicts(trace, k, ghosts):
    fast, slow = LRUKCache(10_000, k=k, ghosts=ghosts), SlowLRUK(k, ghosts)
    for action, number, _ in trace:
        key = str(number)
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
        assert sorted(fast) == sorted(slow.held)
        assert fast.num_ghosts == len(slow.gone)


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


@pytest.mark.parametrize("settings", [{"k": 0}, {"ghosts": -1}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="the least is"):
        LRUKCache(10, **settings)
