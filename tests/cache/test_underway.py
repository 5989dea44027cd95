"""Questions that are being answered, as those find them that mean the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cache.budget import ErrorBudget
from cache.key import PromptKey, make_key
from cache.prompt_cache import CacheConfig, Hit, Miss, PromptCache
from cache.underway import LIFE_S, MAX_QUESTIONS, Underway, as_candidate
from tests.cache.test_decision import ROW, TRUSTED
from tests.cache.test_learnt import answer_of, decider_of

TURN_ON, ENABLE, DISABLE = (f"How do I {verb} logs?" for verb in ("turn on", "enable", "disable"))
SAME = "how do i turn on logs"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def underway(clock: Clock) -> Underway:
    return Underway(clock)


def key_of(text: str, tenant: str = "a", max_tokens: int | None = None) -> PromptKey:
    return make_key({"tenant": tenant}, text, max_tokens=max_tokens, allow_semantic=True)


def names(
    underway: Underway, key: PromptKey, by: str = "one", vector: np.ndarray = ROW
) -> list[str]:
    return [question.name for question in underway.near(key, vector, by, 4)]


def test_the_nearest_of_the_same_partition_and_answerer_are_found(underway: Underway) -> None:
    for number, similarity in enumerate((0.5, 0.9, 0.7)):
        vector = np.zeros(8, dtype=np.float32)
        vector[0], vector[1] = similarity, np.sqrt(1 - similarity**2)
        underway.begin(key_of(f"q{number}"), vector, f"n{number}", "one")
    assert names(underway, key_of("asked")) == ["n1", "n2", "n0"]
    assert names(underway, key_of("asked"), by="another") == []
    assert names(underway, key_of("asked", tenant="b")) == []
    assert names(underway, key_of("asked"), vector=ROW[:4]) == []


def test_nobody_waits_for_an_equal_question_or_another_limit(underway: Underway) -> None:
    underway.begin(key_of(TURN_ON, max_tokens=5), ROW, "n", "one")
    assert names(underway, key_of(TURN_ON, max_tokens=5)) == []
    assert names(underway, key_of(ENABLE)) == []
    assert names(underway, key_of(ENABLE, max_tokens=6)) == []
    assert names(underway, key_of(ENABLE, max_tokens=5)) == ["n"]


def test_what_was_answered_or_begun_long_ago_is_not_waited_for(
    underway: Underway, clock: Clock
) -> None:
    underway.begin(key_of(TURN_ON), ROW, "n", "one")
    underway.begin(key_of(TURN_ON), ROW, "m", "other")
    underway.end(key_of(TURN_ON))
    assert names(underway, key_of(ENABLE)) == names(underway, key_of(ENABLE), by="other") == []
    underway.begin(key_of(TURN_ON), ROW, "n", "one")
    clock.now += LIFE_S
    assert names(underway, key_of(ENABLE)) == ["n"]
    clock.now += 0.1
    assert names(underway, key_of(ENABLE)) == []
    assert len(underway) == 0


def test_what_was_given_up_is_not_waited_for(underway: Underway) -> None:
    underway.begin(key_of(TURN_ON), ROW, "n", "one")
    underway.begin(key_of(TURN_ON), ROW, "n", "other")
    underway.give_up({"n"}, lambda by: by == "one")
    assert names(underway, key_of(ENABLE)) == []
    assert names(underway, key_of(ENABLE), by="other") == ["n"]


def test_their_number_is_bounded(underway: Underway) -> None:
    for number in range(MAX_QUESTIONS + 10):
        underway.begin(key_of(f"q{number}", tenant=f"{number % 50}"), ROW, "n", "one")
    assert len(underway) == MAX_QUESTIONS


# The one decision


def ask(cache: PromptCache, text: str, *running: str) -> Hit | Miss:
    underway = Underway(lambda: 0.0)
    for each in running:
        underway.begin(key_of(each), ROW, each, "one")
    near = underway.near(key_of(text), ROW, "one", 4)
    return cache.lookup_semantic(key_of(text), ROW, [as_candidate(each, ROW) for each in near])


def cache_over(budget: ErrorBudget | None) -> PromptCache:
    decider = None if budget is None else decider_of(budget)
    return PromptCache(CacheConfig(), clock=lambda: 0.0, decider=decider, rng=random.Random(1))


def shared(found: Hit | Miss) -> str | None:
    assert isinstance(found, Miss)
    return None if found.underway is None else found.underway.text


def test_a_running_question_is_put_to_the_same_decision_as_a_stored_one() -> None:
    budget = ErrorBudget(prior=TRUSTED)
    budget.keep_news()
    cache = cache_over(budget)
    assert shared(ask(cache, ENABLE, DISABLE)) is None
    assert shared(ask(cache, ENABLE, TURN_ON)) == TURN_ON
    assert shared(ask(cache, SAME, TURN_ON)) == TURN_ON
    news = budget.take_news()["a"]
    assert (news.requests, sum(news.seen)) == (3, 1)
    for _ in range(13):
        budget.spend("a")
    assert shared(ask(cache, ENABLE, TURN_ON)) is None
    assert shared(ask(cache, SAME, TURN_ON)) == TURN_ON


def test_without_evidence_or_a_verifier_the_same_wording_alone_is_shared() -> None:
    for cache in (cache_over(ErrorBudget()), cache_over(None)):
        assert shared(ask(cache, ENABLE, TURN_ON)) is None
        assert shared(ask(cache, SAME, TURN_ON)) == TURN_ON


def test_a_stored_answer_goes_before_one_that_is_to_come() -> None:
    cache = cache_over(ErrorBudget(prior=TRUSTED))
    cache.store(key_of(TURN_ON), answer_of(), ROW)
    assert isinstance(ask(cache, SAME, "how do i turn on logs."), Hit)


def test_nobody_waits_for_an_answer_near_one_that_was_wrong() -> None:
    cache = cache_over(ErrorBudget(prior=TRUSTED))
    cache.store(key_of(TURN_ON), answer_of(), ROW)
    cache.quarantine(key_of(TURN_ON).exact[:16])
    miss = ask(cache, ENABLE, TURN_ON)
    assert miss == Miss(None, "near an answer that was wrong")
