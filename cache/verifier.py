"""How likely is it that two prompts have the same answer? A small model of pairs, in numpy.

Features: `|a - b|` and `a * b` of the unit embeddings, their cosine, and what
`cache.guards.compare` saw in the wording. One hidden layer. Trained by `bench/train_verifier.py`;
`cache/data/README.md` tells on what, and how well it does on what it was not trained on.

The model knows nothing of the vetoes' decision: what it scores has passed them already.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.budget import BAND_FLOORS, Evidence
from cache.guards import Comparison, are_askable
from cache.index import Vector
from cache.reading import Reading

DATA = Path(__file__).parent / "data" / "verifier.npz"
NUM_WORDING_FEATURES = 28
UNEXPLAINED, NUM_TOKENS = 2, 27
"""Places among the wording features: the share of tokens without a counterpart, and the least
number of tokens."""
MIN_LONG_TOKENS = 5


class Pair(NamedTuple):
    """A comparison of the asked prompt with a stored one, and the stored one's embedding."""

    comparison: Comparison
    embedding: Vector


@dataclass(frozen=True, slots=True)
class Weights:
    """The model: `sigmoid(relu(x @ hidden + hidden_bias) @ output + output_bias)`.

    `mean` and `scale`, (F,), even the features out; `hidden` is (F, H), `output` (H,). Of longer
    pairs that are reworded throughout, `likeness`, (W,), and its bias judge by the wording
    features alone: what the rest has learnt from questions does not carry over to paragraphs.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    hidden: NDArray[np.float32]
    hidden_bias: NDArray[np.float32]
    output: NDArray[np.float32]
    output_bias: float
    likeness: NDArray[np.float32]
    likeness_bias: float


class Verifier:
    """Scores pairs.

    Args:
        calibration: what was found when the scores of pairs it was not trained on were checked,
            by band of `cache.budget`.
    """

    def __init__(self, weights: Weights, *, calibration: Sequence[Evidence] = ()) -> None:
        self._weights = weights
        self.calibration = tuple(calibration)

    @classmethod
    def load(cls, path: Path = DATA) -> Verifier:
        """The shipped model.

        Raises:
            OSError: there is no such file.
            ValueError: it is not one of ours.
        """
        with np.load(path, allow_pickle=False) as file:
            try:
                weights = Weights(
                    mean=file["mean"].astype(np.float32),
                    scale=file["scale"].astype(np.float32),
                    hidden=file["hidden"].astype(np.float32),
                    hidden_bias=file["hidden_bias"].astype(np.float32),
                    output=file["output"].astype(np.float32),
                    output_bias=float(file["output_bias"]),
                    likeness=file["likeness"].astype(np.float32),
                    likeness_bias=float(file["likeness_bias"]),
                )
                calibration = [Evidence(float(r), float(w)) for r, w in file["calibration"]]
            except KeyError as exc:
                raise ValueError(f"{path} holds no verifier: {exc}") from exc
        if len(calibration) != len(BAND_FLOORS):
            raise ValueError(f"{path} has {len(calibration)} bands, there are {len(BAND_FLOORS)}")
        return cls(weights, calibration=calibration)

    @property
    def dimensions(self) -> int:
        """Length of the embeddings that it was trained with."""
        return (len(self._weights.mean) - NUM_WORDING_FEATURES) // 2

    def score(self, asked: Vector, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Probability that each pair has the same answer, (N,); `asked` is of shape (D,).

        Raises:
            ValueError: an embedding has another length than those it was trained with.
        """
        if not pairs:
            return np.empty(0, dtype=np.float32)
        for vector in (asked, *(pair.embedding for pair in pairs)):
            if vector.shape != (self.dimensions,):
                raise ValueError(f"embedding has shape {vector.shape}, not ({self.dimensions},)")
        return self.score_features(features(asked, pairs))

    def score_features(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `score`, for rows of `features`."""
        weights = self._weights
        even = np.clip((rows - weights.mean) * weights.scale, -5.0, 5.0)
        hidden = np.maximum(even @ weights.hidden + weights.hidden_bias, 0.0)
        logits = hidden @ weights.output + weights.output_bias
        wording = rows[:, -NUM_WORDING_FEATURES:]
        is_reworded = (wording[:, UNEXPLAINED] > 0) & (wording[:, NUM_TOKENS] >= MIN_LONG_TOKENS)
        likeness = wording @ weights.likeness + weights.likeness_bias
        logits = np.where(is_reworded, likeness, logits)
        return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -30, 30))), dtype=np.float32)


def features(asked: Vector, pairs: Sequence[Pair]) -> NDArray[np.float32]:
    """The rows that the model reads, (N, 2 D + wording features) float32; symmetric."""
    stored = np.stack([pair.embedding for pair in pairs])
    products = asked * stored
    wording = np.array([wording_features(pair.comparison) for pair in pairs], dtype=np.float32)
    wording[:, 0] = products.sum(axis=1)
    # How far likeness may be trusted depends on how much of the wording is left unexplained.
    wording[:, 1] = wording[:, 0] * wording[:, 2]
    return np.hstack([np.abs(asked - stored), products, wording]).astype(np.float32)


def wording_features(comparison: Comparison) -> list[float]:
    """What the wording tells; the first two places are left for the cosine."""
    first, second, alignment = comparison.first, comparison.second, comparison.alignment
    sizes = len(first.tokens), len(second.tokens)
    only = [len(side) for side in alignment.only]
    light = [len(side) for side in alignment.light]
    num_shared = len(alignment.shared)
    respelled = sum(one.shown.lower() != other.shown.lower() for one, other in alignment.shared)
    moved = sum(one.role != other.role for one, other in alignment.shared)
    markers = Counter(first.markers), Counter(second.markers)
    turned = (markers[0] - markers[1]).total() + (markers[1] - markers[0]).total()
    persons = set(first.persons), set(second.persons)
    names = sum(token.is_name for side in alignment.only for token in side)
    unexplained = sum(only) / max(sum(sizes), 1)
    trigrams = _likeness(_trigrams(first.letters), _trigrams(second.letters))
    words = _likeness(Counter(first.letters.split()), Counter(second.letters.split()))
    return [
        0.0,
        0.0,
        unexplained,
        unexplained * trigrams,
        unexplained * words,
        num_shared / max(*sizes, 1),
        num_shared / max(min(sizes), 1),
        min(min(only), 4),
        min(max(only), 6),
        float(not any(only)),
        float(not any(only) and not any(light)),
        min(min(light), 3),
        min(max(light), 3),
        alignment.num_slips,
        alignment.num_respelled,
        min(respelled, 5),
        min(moved, 5),
        min(turned, 4),
        abs(first.negations - second.negations),
        float(_numbers(first) == _numbers(second)),
        min(names, 3),
        float(persons[0] == persons[1]),
        float(first.ask == second.ask),
        float(are_askable(first.ask, second.ask)),
        trigrams,
        words,
        min(len(first.letters), len(second.letters))
        / max(len(first.letters), len(second.letters), 1),
        min(min(sizes), 12),
    ]


def _numbers(reading: Reading) -> list[str]:
    return sorted(token.concept for token in reading.tokens if token.kind == "number")


def _trigrams(text: str) -> Counter[str]:
    padded = f"  {text} "
    return Counter(padded[i : i + 3] for i in range(len(padded) - 2))


def _likeness(one: Counter[str], other: Counter[str]) -> float:
    """Shared counts by all counts: Jaccard's index of two bags."""
    shared = (one & other).total()
    return shared / max(one.total() + other.total() - shared, 1)


def save(
    path: Path, weights: Weights, calibration: Sequence[Evidence], about: Mapping[str, object]
) -> None:
    """Writes a model that `Verifier.load` reads; `about` is kept beside it as JSON."""
    np.savez_compressed(
        path,
        mean=weights.mean,
        scale=weights.scale,
        hidden=weights.hidden.astype(np.float16),
        hidden_bias=weights.hidden_bias,
        output=weights.output,
        output_bias=np.float32(weights.output_bias),
        likeness=weights.likeness,
        likeness_bias=np.float32(weights.likeness_bias),
        calibration=np.array([(e.right, e.wrong) for e in calibration], dtype=np.float32),
        about=np.array(json.dumps(about)),
    )
