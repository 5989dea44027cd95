"""Look-alikes that need other answers, through the whole decision with its defaults."""

import random
from collections import Counter

import numpy as np
import pytest

from cache.answer import StoredAnswer
from cache.budget import ErrorBudget
from cache.decision import Candidate, Decider
from cache.key import make_key
from cache.verifier import Verifier
from tests.cache.adversarial import traps

TRAPS = traps()
ANSWER = StoredAnswer(b"an answer", 4, "r1")


def key(text):
    return make_key({"tenant": "t"}, text, max_tokens=None, allow_semantic=True)


def vector(seed, size=384):
    row = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return row / np.linalg.norm(row)


@pytest.fixture(scope="module")
def decider():
    verifier = Verifier.load()
    return Decider(
        budget=ErrorBudget(prior=verifier.calibration), verifier=verifier, rng=random.Random(0)
    )


def test_the_traps_are_many_and_of_four_languages():
    assert len({(trap.a, trap.b) for trap in TRAPS}) >= 500
    assert all(trap.a != trap.b for trap in TRAPS)
    assert min(Counter(trap.language for trap in TRAPS).values()) >= 70


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: f"{t.language} {t.kind}: {t.a[:30]}")
def test_no_trap_is_served_even_if_the_embeddings_are_equal(trap, decider):
    row = vector(1)
    for stored, asked in ((trap.a, trap.b), (trap.b, trap.a)):
        candidate = Candidate(key(stored), ANSWER, 0.0, 1.0, row)
        verdict = decider.choose(key(asked), row, [candidate], ttl_s=60, category=f"{stored}")
        assert verdict.action != "serve", verdict
