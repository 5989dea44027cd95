import json
import math
import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.budget import (
    BAND_FLOORS,
    MAX_CATEGORIES,
    BudgetConfig,
    ErrorBudget,
    Evidence,
    upper_bound,
)

TRUSTED = tuple(Evidence(right=400 if floor >= 0.9 else 10, wrong=0) for floor in BAND_FLOORS)


def play(budget, truth, rng, *, requests, category="c"):
    """Asks `requests` times with (score, was_right) from `truth(i)`; returns served and wrong."""
    served = wrong = 0
    for i in range(requests):
        budget.count_request(category)
        score, was_right = truth(i)
        decision = budget.decide(category, score, rng)
        if decision.is_checked:
            budget.record(
                category,
                score,
                was_right,
                was_served=decision.action == "serve",
                check_rate=decision.check_rate,
            )
        if decision.action == "serve":
            served += 1
            wrong += not was_right
    return served, wrong


def test_without_evidence_nothing_is_served_but_checked():
    decision = ErrorBudget().decide("c", 0.999, random.Random(0))
    assert (decision.action, decision.is_checked) == ("shadow", True)


def test_with_shipped_evidence_a_good_score_is_served_at_once():
    budget = ErrorBudget(prior=TRUSTED)
    assert budget.decide("c", 0.99, random.Random(0)).action == "serve"
    assert budget.decide("c", 0.6, random.Random(0)).action == "shadow"


@pytest.mark.parametrize("score", [0.0, 0.49, -1.0, math.nan])
def test_a_score_too_low_or_not_a_number_is_refused(score):
    decision = ErrorBudget(prior=TRUSTED).decide("c", score, random.Random(0))
    assert (decision.action, decision.is_checked) == ("refuse", False)


def test_checks_gone_well_open_what_was_closed():
    budget, rng = ErrorBudget(), random.Random(0)
    play(budget, lambda i: (0.96, True), rng, requests=2000)
    assert budget.decide("c", 0.96, rng).action == "serve"
    assert budget.least_score("c") == 0.95


def test_mistakes_close_what_was_open_and_time_alone_does_not_open_it_again():
    budget, rng = ErrorBudget(prior=TRUSTED), random.Random(0)
    play(budget, lambda i: (0.99, False), rng, requests=500)
    assert (budget.least_score("c") or 1.0) > 0.99
    served, _ = play(budget, lambda i: (0.99, False), rng, requests=3000)
    assert served == 0


def test_bands_that_are_wrong_leave_better_bands_open():
    budget, rng = ErrorBudget(prior=TRUSTED), random.Random(0)
    play(budget, lambda i: (0.999, True) if i % 2 else (0.91, False), rng, requests=6000)
    assert (budget.least_score("c") or 1.0) > 0.9
    assert budget.decide("c", 0.999, rng).action == "serve"


def test_categories_learn_apart():
    budget, rng = ErrorBudget(prior=TRUSTED), random.Random(0)
    play(budget, lambda i: (0.99, False), rng, requests=500, category="bad")
    assert budget.decide("bad", 0.99, rng).action == "shadow"
    assert budget.decide("good", 0.99, rng).action == "serve"


def test_checks_become_rare_while_they_go_well_and_frequent_after_a_mistake():
    budget, rng = ErrorBudget(prior=TRUSTED), random.Random(0)
    assert budget.decide("c", 0.99, rng).check_rate == 1.0
    play(budget, lambda i: (0.99, True), rng, requests=2000)
    assert budget.decide("c", 0.99, rng).check_rate == pytest.approx(0.1)
    budget.record("c", 0.99, False, check_rate=0.1)
    assert budget.decide("c", 0.99, rng).check_rate == 1.0


def test_reported_mistakes_spend_credit_too():
    budget = ErrorBudget(prior=TRUSTED)
    for _ in range(13):
        budget.spend("c")
    assert budget.decide("c", 0.99, random.Random(0)).why == "error budget is spent"


@pytest.mark.parametrize("limit", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "truth",
    [
        lambda i: (0.99, False),
        lambda i: (0.99, i % 2 == 0),
        lambda i: (0.99, i < 5000),
        lambda i: (0.99, (i // 700) % 2 == 0),
        lambda i: (0.9 + 0.0999 * ((i * 7919) % 100) / 100, i % 50 != 0),
        lambda i: (0.99, i % 11 != 0 or i < 5000),
    ],
    ids=["wrong", "every other", "turns bad", "waves", "mixed scores", "worsens"],
)
def test_the_limit_holds_in_each_half_whatever_the_order(limit, seed, truth):
    budget = ErrorBudget(BudgetConfig(max_wrong_rate=limit), prior=TRUSTED)
    rng = random.Random(seed)
    place = count()
    for _ in range(2):
        _, wrong = play(budget, lambda _: truth(next(place)), rng, requests=5000)
        assert wrong <= limit * 5000


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 800), st.floats(0, 1)), min_size=3, max_size=8), st.integers()
)
def test_the_limit_holds_over_stretches_of_any_quality(stretches, seed):
    """An adversary who does not see the coin; 5 % of 6,000 leaves room for its bad luck."""
    budget, rng = ErrorBudget(BudgetConfig(max_wrong_rate=0.05), prior=TRUSTED), random.Random(seed)
    quality = [q for length, q in stretches for _ in range(length)]
    luck = random.Random(seed + 1)
    truth = [(0.99, luck.random() < quality[i % len(quality)]) for i in range(6000)]
    _, wrong = play(budget, truth.__getitem__, rng, requests=6000)
    assert wrong <= 0.05 * 6000


def test_the_state_survives_export_and_import():
    budget, rng = ErrorBudget(prior=TRUSTED), random.Random(0)
    play(budget, lambda i: (0.9 + i % 10 / 100, i % 60 != 0), rng, requests=800)
    state = json.loads(json.dumps(budget.export_state()))
    other = ErrorBudget(prior=TRUSTED)
    other.import_state(state)
    assert other.export_state() == budget.export_state()
    for score in (0.91, 0.95, 0.999):
        assert (
            other.decide("c", score, random.Random(1)).check_rate
            == budget.decide("c", score, random.Random(1)).check_rate
        )


@pytest.mark.parametrize(
    "state",
    [
        {"c": {}},
        {"c": None},
        {"c": {"credit": 1, "requests": 1, "seen": [1], "checks": [], "num_checks": 0, "streak": 0, "looks": 0}},
        {"c": {"credit": 1, "requests": 1, "seen": [0] * 12, "checks": [[99, True]], "num_checks": 0, "streak": 0, "looks": 0}},
        {"c": {"credit": math.nan, "requests": 1, "seen": [0] * 12, "checks": [], "num_checks": 0, "streak": 0, "looks": 0}},
    ],
)  # fmt: skip
def test_a_state_that_is_none_is_refused_whole(state):
    budget = ErrorBudget(prior=TRUSTED)
    with pytest.raises(ValueError, match=r"state|band"):
        budget.import_state(state)
    assert budget.export_state() == {}


def test_the_number_of_categories_is_bounded():
    budget = ErrorBudget()
    for i in range(MAX_CATEGORIES + 50):
        budget.count_request(str(i))
    assert len(budget.export_state()) == MAX_CATEGORIES


@pytest.mark.parametrize(
    "field", [{"max_wrong_rate": 0}, {"max_wrong_rate": 1}, {"confidence": 1.5}, {"check_rate": 0},
              {"prior_weight": -1}, {"window": 0}, {"credit_requests": 0}, {"trial_checks": 0}],
)  # fmt: skip
def test_bounds_out_of_range_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        BudgetConfig(**field)


def test_the_prior_has_a_band_for_each_floor():
    with pytest.raises(ValueError, match="bands"):
        ErrorBudget(prior=TRUSTED[:3])


@given(st.integers(1, 2000), st.floats(0, 1), st.floats(1e-6, 0.5))
def test_the_upper_bound_lies_above_the_rate_and_shrinks_with_evidence(checks, rate, level):
    bound = upper_bound(rate * checks, checks, level)
    assert rate <= bound <= 1
    assert upper_bound(10 * rate * checks, 10 * checks, level) <= bound + 1e-9


def test_the_upper_bound_without_mistakes_is_the_exact_one():
    assert upper_bound(0, 100, 0.05) == pytest.approx(1 - 0.05**0.01, abs=1e-9)
    assert upper_bound(0, 0, 0.05) == 1.0


def test_the_upper_bound_covers_the_truth_as_often_as_it_says():
    rng, misses = random.Random(5), 0
    for _ in range(2000):
        wrong = sum(rng.random() < 0.03 for _ in range(200))
        misses += upper_bound(wrong, 200, 0.05) < 0.03
    assert misses <= 0.05 * 2000
