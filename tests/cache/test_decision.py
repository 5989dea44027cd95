import random

import numpy as np
import pytest

from cache.answer import StoredAnswer
from cache.budget import BAND_FLOORS, ErrorBudget, Evidence
from cache.decision import QUARANTINE_RADIUS, Candidate, Decider, Verdict
from cache.key import make_key
from cache.verifier import NUM_WORDING_FEATURES, Verifier, Weights

ANSWER = StoredAnswer(b"an answer", 4, "r1")
TRUSTED = tuple(Evidence(right=400, wrong=0) for _ in BAND_FLOORS)
SIZE = 8
ROW = np.eye(SIZE, dtype=np.float32)[0]


def verifier(certainty=9.0):
    """Trusts any pair as much as its cosine times `certainty` says."""
    width = 2 * SIZE + NUM_WORDING_FEATURES
    hidden = np.zeros((width, 1), dtype=np.float32)
    hidden[2 * SIZE] = 1.0
    return Verifier(
        Weights(
            mean=np.zeros(width, dtype=np.float32),
            scale=np.ones(width, dtype=np.float32),
            hidden=hidden,
            hidden_bias=np.zeros(1, dtype=np.float32),
            output=np.array([certainty], dtype=np.float32),
            output_bias=0.0,
            likeness=np.zeros(NUM_WORDING_FEATURES, dtype=np.float32),
            likeness_bias=0.0,
        )
    )


def decider(*, prior=TRUSTED, certainty=9.0, **fields):
    fields.setdefault("verifier", verifier(certainty))
    return Decider(budget=ErrorBudget(prior=prior), rng=random.Random(0), **fields)


def key(text, **fields):
    fields = {"max_tokens": None, "allow_semantic": True, **fields}
    return make_key({"tenant": "t"}, text, **fields)


def candidate(text, *, similarity=0.99, age_s=0.0, answer=ANSWER, embedding=ROW, **fields):
    return Candidate(key(text, **fields), answer, age_s, similarity, embedding)


def choose(made, asked, *candidates, **fields):
    return made.choose(key(asked, **fields), ROW, candidates, ttl_s=60, category="c")


def test_the_same_wording_needs_no_evidence():
    verdict = choose(decider(prior=()), "how do i pay", candidate("How do I pay?"))
    assert (verdict.action, verdict.reason, verdict.score) == ("serve", "same wording", None)


def test_a_paraphrase_is_served_when_its_score_is_trusted():
    verdict = choose(decider(), "How do I enable logs?", candidate("How do I turn on logs?"))
    assert verdict.action == "serve"
    assert verdict.choice == 0
    assert verdict.is_checked  # the first ones always are
    assert verdict.score == pytest.approx(1 / (1 + np.exp(-9.0)), abs=1e-4)


def test_without_evidence_a_paraphrase_is_only_checked():
    verdict = choose(
        decider(prior=()), "How do I enable logs?", candidate("How do I turn on logs?")
    )
    assert (verdict.action, verdict.is_checked, verdict.choice) == ("shadow", True, 0)


def test_strict_mode_serves_the_same_wording_only():
    strict = decider(mode="strict")
    verdict = choose(strict, "How do I enable logs?", candidate("How do I turn on logs?"))
    assert verdict.action == "refuse"
    assert choose(strict, "how do i pay", candidate("How do I pay?")).action == "serve"
    assert (
        choose(strict, "how do i pay", candidate("How do I pay?", similarity=0.9)).action
        == "refuse"
    )


def test_a_veto_outweighs_any_score():
    verdict = choose(decider(), "How do I disable logs?", candidate("How do I turn on logs?"))
    assert (verdict.action, verdict.is_checked) == ("refuse", False)
    assert verdict.reason == "opposites: disable / turn on"


def test_the_best_of_several_candidates_is_chosen():
    near = candidate("How do I turn off logs?", similarity=0.99)
    right = candidate("How do I turn on logs?", similarity=0.9)
    assert choose(decider(), "How do I enable logs?", near, right).choice == 1
    same = candidate("how do i enable logs", similarity=0.97)
    assert choose(decider(), "How do I enable logs?", near, right, same).choice == 2


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (candidate("How do I turn on logs?", similarity=0.5), "below threshold"),
        (candidate("How do I turn on logs?", similarity=float("nan")), "below threshold"),
        (candidate("How do I turn on logs?", age_s=60.0), "expired"),
        (candidate("How do I turn on logs?", allow_semantic=False), "semantic matching is off"),
        (candidate("How do I turn on logs?", answer=StoredAnswer(b"x", 90, "r")), "answer has 90 tokens, max_tokens is 50"),
        (candidate("How do I turn on logs?", max_tokens=50, answer=StoredAnswer(b"x", 50, "r", is_truncated=True)), "answer was cut"),
    ],
)  # fmt: skip
def test_what_holds_for_every_hit_holds_here(other, reason):
    verdict = choose(decider(), "How do I enable logs?", other, max_tokens=50)
    assert (verdict.action, verdict.reason) == ("refuse", reason)


def test_another_partition_is_never_served():
    other = Candidate(
        make_key({"tenant": "u"}, "How do I pay?", max_tokens=None, allow_semantic=True),
        ANSWER, 0.0, 1.0, ROW,
    )  # fmt: skip
    assert choose(decider(), "How do I pay?", other).reason == "other partition"


def test_no_candidate_is_a_refusal_that_still_counts_as_a_request():
    budget = ErrorBudget()
    made = Decider(budget=budget, verifier=verifier(), rng=random.Random(0))
    assert choose(made, "How do I pay?").reason == "no candidate"
    assert budget.export_state()["c"]["requests"] == 1


def test_an_embedding_of_another_length_is_refused():
    odd = candidate("How do I turn on logs?", embedding=np.ones(3, dtype=np.float32))
    verdict = choose(decider(), "How do I enable logs?", odd)
    assert (verdict.action, verdict.reason) == ("refuse", "embedding has shape (3,), not (8,)")


def test_a_mistake_quarantines_and_is_learnt_from():
    made = decider(prior=())
    verdict = choose(made, "How do I enable logs?", candidate("How do I turn on logs?"))
    assert made.record(verdict, was_right=True) is None
    quarantine = made.record(verdict, was_right=False)
    assert quarantine is not None
    assert quarantine.radius == QUARANTINE_RADIUS


def test_mistakes_of_the_same_wording_spend_the_budget():
    made = decider()
    verdict = Verdict(action="serve", reason="same wording", choice=0, category="c")
    for _ in range(13):
        made.record(verdict, was_right=False)
    asked = choose(made, "How do I enable logs?", candidate("How do I turn on logs?"))
    assert (asked.action, asked.reason) == ("shadow", "error budget is spent")


@pytest.mark.parametrize("name", ["same_wording_similarity", "min_similarity"])
def test_similarities_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=name):
        decider(**{name: 0.0})
