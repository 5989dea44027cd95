import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.budget import BAND_FLOORS
from cache.guards import compare
from cache.reading import understand
from cache.verifier import (
    DATA,
    NUM_WORDING_FEATURES,
    Pair,
    Verifier,
    features,
    save,
    wording_features,
)


@pytest.fixture(scope="module")
def shipped():
    return Verifier.load()


def vector(seed):
    row = np.random.default_rng(seed).standard_normal(384).astype(np.float32)
    return row / np.linalg.norm(row)


def pair(a, b, embedding):
    return Pair(compare(understand(a), understand(b)), embedding)


words = st.lists(
    st.sampled_from(
        [
            "how",
            "do",
            "i",
            "the",
            "a",
            "cancel",
            "order",
            "pay",
            "5",
            "not",
            "Ann",
            "card",
            "really",
            "`x`",
            "?",
        ]
    ),
    max_size=8,
).map(" ".join)


def test_the_shipped_model_is_small_and_calibrated(shipped):
    assert DATA.stat().st_size < 2_000_000
    assert shipped.dimensions == 384
    assert len(shipped.calibration) == len(BAND_FLOORS)
    assert sum(band.right for band in shipped.calibration) > 500


def test_a_paraphrase_scores_high_and_a_narrower_question_low(shipped):
    row = vector(1)
    same = pair("How do I cancel my order?", "What's the way to cancel my order?", row)
    other = pair("How do I store old potatoes?", "How do I peel and boil fresh carrots?", vector(2))
    scores = shipped.score(row, [same, other])
    assert scores.dtype == np.float32
    assert scores[0] > 0.9
    assert scores[1] < 0.5


@given(words, words, st.integers(0, 9), st.integers(0, 9))
def test_a_score_is_symmetric_and_repeatable(a, b, one, other):
    model = Verifier.load()
    first, second = vector(one), vector(other)
    forth = model.score(first, [pair(a, b, second)])
    back = model.score(second, [pair(b, a, first)])
    assert forth == pytest.approx(back, abs=1e-5)
    assert 0 <= forth[0] <= 1
    assert np.array_equal(forth, model.score(first, [pair(a, b, second)]))


def test_pairs_scored_together_score_as_they_do_alone(shipped):
    pairs = [
        pair("How do I pay?", f"How can I pay {word}?", vector(i)) for i, word in enumerate("abcd")
    ]
    together = shipped.score(vector(9), pairs)
    alone = [shipped.score(vector(9), [one])[0] for one in pairs]
    assert together == pytest.approx(alone, abs=1e-6)


def test_no_pairs_have_no_scores(shipped):
    assert shipped.score(vector(0), []).shape == (0,)


def test_embeddings_of_another_length_are_an_error(shipped):
    with pytest.raises(ValueError, match="shape"):
        shipped.score(np.ones(3, dtype=np.float32), [pair("a", "b", np.ones(3, dtype=np.float32))])


def test_the_features_are_as_many_as_the_model_takes():
    row = vector(0)
    assert features(row, [pair("a b", "a c", row)]).shape == (1, 2 * 384 + NUM_WORDING_FEATURES)
    assert len(wording_features(compare(understand("a"), understand("b")))) == NUM_WORDING_FEATURES


def test_a_saved_model_loads_as_it_was(shipped, tmp_path):
    save(tmp_path / "model.npz", shipped._weights, shipped.calibration, {"why": "test"})
    again = Verifier.load(tmp_path / "model.npz")
    row = vector(3)
    one = [pair("How do I pay?", "How can I pay now?", row)]
    assert again.score(row, one) == pytest.approx(shipped.score(row, one), abs=1e-3)
    assert again.calibration == shipped.calibration


def test_another_file_is_no_model(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="no verifier"):
        Verifier.load(tmp_path / "other.npz")
