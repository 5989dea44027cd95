"""L1: equal requests are answered in the ingress, for 90 s and never past the answer's life."""

from __future__ import annotations

from app.front_cache import FrontCache, Kept
from cache.hot import ENTRY_OVERHEAD_BYTES, MAX_STAY_S
from deployments.wire import StoredStream
from protocol.token_log import Terminal, TokenDelta


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def answer(text: str = "Paris") -> Kept:
    return Kept(
        StoredStream(deltas=(TokenDelta(0, text, (1,)),), terminal=Terminal(finish_reason="stop"))
    )


def test_an_answer_is_found_under_its_key_and_model_only() -> None:
    front = FrontCache(10_000, 900, Clock())
    front.keep("k", "rev-1", answer(), 100)
    assert front.find("k", "rev-1") == (answer(), 0.0)
    assert front.find("k", "rev-2") is None
    assert front.find("other", "rev-1") is None
    assert front.hits_total == 1


def test_an_answer_is_held_for_a_minute_and_a_half() -> None:
    clock = Clock()
    front = FrontCache(10_000, 900, clock)
    front.keep("k", "r", answer(), 100)
    clock.now_s += MAX_STAY_S - 1
    assert front.find("k", "r") == (answer(), MAX_STAY_S - 1)
    clock.now_s += 1
    assert front.find("k", "r") is None


def test_a_hit_never_outlives_the_answer_and_tells_its_whole_age() -> None:
    clock = Clock()
    front = FrontCache(10_000, 100, clock)
    front.keep("k", "r", answer(), 100, age_s=90)
    assert front.find("k", "r") == (answer(), 90.0)
    clock.now_s += 10
    assert front.find("k", "r") is None
    front.keep("late", "r", answer(), 100, age_s=100)
    assert front.find("late", "r") is None


def test_memory_is_bounded_and_the_least_recently_used_leaves() -> None:
    front = FrontCache(2 * (ENTRY_OVERHEAD_BYTES + 100), 900, Clock())
    front.keep("a", "r", answer("a"), 100)
    front.keep("b", "r", answer("b"), 100)
    assert front.find("a", "r")
    front.keep("c", "r", answer("c"), 100)
    assert front.find("b", "r") is None
    assert front.find("a", "r")
    assert front.find("c", "r")
    front.keep("huge", "r", answer(), 10_000)
    assert front.find("huge", "r") is None
    assert front.find("a", "r")


def test_everything_can_be_forgotten_at_once() -> None:
    front = FrontCache(10_000, 900, Clock())
    front.keep("k", "r", answer(), 100)
    front.clear()
    assert front.find("k", "r") is None
