"""What a decision would be, told without deciding anything."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.budget import BAND_FLOORS, ErrorBudget
from cache.decision import Verdict
from cache.prompt_cache import CacheConfig, Hit, Miss, PromptCache
from cache.stats import Foreseen
from tests.cache.test_decision import ROW, TRUSTED
from tests.cache.test_learnt import ENABLE, TURN_ON, answer_of, decider_of, key_of, look_up

DISABLE = "How do I disable logs?"


def cache_over(budget: ErrorBudget | None) -> PromptCache:
    decider = None if budget is None else decider_of(budget)
    return PromptCache(CacheConfig(), clock=lambda: 0.0, decider=decider, rng=random.Random(1))


def foresee(cache: PromptCache, text: str) -> Foreseen:
    return cache.foresee(key_of(text), ROW)


@pytest.mark.parametrize("spent", [0, 13])
@pytest.mark.parametrize("prior", [TRUSTED, ()], ids=["trusted", "unknown"])
@pytest.mark.parametrize("text", [TURN_ON, ENABLE, DISABLE, "how do i turn on logs", "Why?"])
def test_what_is_foreseen_is_what_comes(text: str, prior: Any, spent: int) -> None:
    budget = ErrorBudget(prior=prior)
    cache = cache_over(budget)
    cache.store(key_of(TURN_ON), answer_of(), ROW)
    for _ in range(spent):
        budget.spend("a")
    # One request earns so little that it changes nothing here.
    foreseen = foresee(cache, text)
    found = look_up(cache, text)
    assert (foreseen.action == "serve") == isinstance(found, Hit)
    if found.verdict is not None:
        verdict: Verdict = found.verdict
        assert (foreseen.action, foreseen.score) == (verdict.action, verdict.score)
        assert foreseen.reason == verdict.reason
        assert foreseen.check_rate == verdict.check_rate
    if foreseen.action != "refuse":
        assert foreseen.id == key_of(TURN_ON).exact[:16]


def test_each_candidate_tells_what_the_live_decision_would_do_with_it() -> None:
    budget = ErrorBudget(prior=TRUSTED)
    cache = cache_over(budget)
    cache.store(key_of(TURN_ON), answer_of(), ROW)
    cache.store(key_of(DISABLE), answer_of(), ROW)

    def told() -> dict[str, tuple[str, str]]:
        explained = cache.explain(key_of(ENABLE), ROW)
        return {each.text: (each.action, each.reason) for each in explained}

    assert told() == {
        TURN_ON: ("serve", "score 1.000"),
        DISABLE: ("refuse", "opposites: disable / enable"),
    }
    for _ in range(13):
        budget.spend("a")
    assert told()[TURN_ON] == ("shadow", "error budget is spent")


def test_a_known_paraphrase_is_foreseen() -> None:
    cache = cache_over(ErrorBudget(prior=TRUSTED))
    cache.store(key_of(TURN_ON), answer_of(), ROW)
    look_up(cache, ENABLE)
    assert foresee(cache, ENABLE).by == "alias"
    assert cache.foresee(key_of(ENABLE), None).by == "alias"
    assert foresee(cache, "Why?").reason != ""
    assert cache.foresee(key_of("Why?"), None).reason == "prompt too long to embed"


def test_without_a_decider_the_same_wording_is_foreseen() -> None:
    cache = cache_over(None)
    cache.store(key_of(TURN_ON), answer_of(), ROW)
    assert foresee(cache, "how do i turn on logs").action == "serve"
    assert foresee(cache, ENABLE).action == "refuse"


@given(st.lists(st.tuples(st.sampled_from(["ask", "right", "wrong", "spend"]),
                          st.sampled_from(BAND_FLOORS)), max_size=60),
       st.sampled_from(BAND_FLOORS))  # fmt: skip
def test_a_preview_changes_nothing_and_is_right(
    steps: list[tuple[str, float]], score: float
) -> None:
    budget = ErrorBudget(prior=TRUSTED)
    for step, band in steps:
        match step:
            case "ask":
                budget.count_request("a")
                budget.decide("a", band, random.Random(0))
            case "spend":
                budget.spend("a")
            case _:
                budget.record("a", band, step == "right")
    before, twin = budget.export_state(), copy.deepcopy(budget)
    previewed = budget.preview("a", score)
    budget.least_score("a")
    budget.preview("never seen", score)
    assert budget.export_state() == before
    decided, other = (each.decide("a", score, random.Random(0)) for each in (budget, twin))
    assert decided == other
    assert (previewed.action, previewed.why, previewed.check_rate) == (
        decided.action, decided.why, decided.check_rate
    )  # fmt: skip


def test_explaining_counts_and_learns_nothing() -> None:
    budget = ErrorBudget(prior=TRUSTED)
    cache = cache_over(budget)
    cache.store(key_of(TURN_ON), answer_of(), ROW)
    assert isinstance(look_up(cache, ENABLE), Hit)
    before, stats = budget.export_state(), cache.stats()
    for text in (TURN_ON, ENABLE, DISABLE, "Why?"):
        foresee(cache, text)
        cache.explain(key_of(text), ROW)
    assert budget.export_state() == before
    assert cache.stats() == stats
    assert not isinstance(cache.known_miss(key_of("Why?")), Miss)
