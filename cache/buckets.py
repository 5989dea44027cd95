"""Vectors in buckets around centres, and how the centres are found, a little at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache.rows import Matrix, Rows, Vector

NUM_PROBES = 20
CENTRES_PER_ROOT = 3
"""Times √N: reading the centres takes about a third of a search. Fewer, larger buckets found as
much for as many rows read."""
SAMPLES_PER_CENTRE = 32
NUM_PASSES = 4
STEP_PRODUCTS = 3_000_000
"""Multiplications of one step: about 0.1 ms on one core."""
MIN_STEP_ROWS = 8
"""Fewer would only read the centres again."""


class Buckets:
    """Rows by their nearest centre; a search reads the buckets of the nearest centres only.

    Args:
        centres: (K, D) float32, unit norm.
        num_rows: that there were when the centres were found.
    """

    def __init__(self, centres: Matrix, num_rows: int) -> None:
        self.trained_rows = num_rows
        self.rows = [Rows(centres.shape[1]) for _ in range(len(centres))]
        self._centres = centres
        self._num_emptied = 0

    @property
    def step_rows(self) -> int:
        """How many rows are placed in one step."""
        return _step_rows(self._centres)

    @property
    def size_bytes(self) -> int:
        """Of the matrices."""
        return self._centres.nbytes + sum(rows.matrix.nbytes for rows in self.rows)

    def place(self, ids: list[str], matrix: Matrix) -> list[Rows]:
        """Adds rows, and returns where each one is now."""
        homes = [self.rows[label] for label in _labels(matrix, self._centres)]
        for row_id, vector, home in zip(ids, matrix, homes, strict=True):
            home.append(row_id, vector)
        return homes

    def probe(self, vector: Vector) -> list[Rows]:
        """The buckets in which the nearest rows are likely to be."""
        similarities = self._centres.dot(vector)
        if len(similarities) <= NUM_PROBES:
            return self.rows
        nearest = similarities.argpartition(-NUM_PROBES)[-NUM_PROBES:]
        return [self.rows[number] for number in nearest.tolist()]

    def some_rows(self) -> Rows | None:
        """Rows of a bucket that is not empty, the same until it is; None when all are."""
        # Only buckets that are being emptied are asked, and they take in nothing.
        while self._num_emptied < len(self.rows) and not self.rows[self._num_emptied].ids:
            self._num_emptied += 1
        return self.rows[self._num_emptied] if self._num_emptied < len(self.rows) else None


class Training:
    """Spherical k-means (Dhillon and Modha 2001) on a sample of rows, a bounded step at a time.

    The rows may change meanwhile: a sample is copied. Four passes from random rows, where
    the paper iterates until nothing changes: more did not find more neighbours.

    Args:
        pieces: where the rows are.
        num_rows: in all of them.
    """

    def __init__(self, pieces: Sequence[Rows], num_rows: int, rng: np.random.Generator) -> None:
        num_centres = max(1, round(CENTRES_PER_ROOT * num_rows**0.5))
        num_samples = min(num_rows, SAMPLES_PER_CENTRE * num_centres)
        dimension = pieces[0].matrix.shape[1]
        self._rng = rng
        self._num_rows = num_rows
        self._pieces = [rows for rows in pieces if rows.ids]
        # The largest first, since shares are rounded up and the last may find no room.
        self._pieces.sort(key=len)
        self._sample: Matrix = np.empty((num_samples, dimension), dtype=np.float32)
        self._num_sampled = 0
        self._num_centres = num_centres
        self._centres: Matrix | None = None
        self._sums: Matrix = np.zeros((num_centres, dimension), dtype=np.float32)
        self._next_row = 0
        self._num_passes = 0

    def step(self) -> Buckets | None:
        """Goes on a little; the empty buckets once their centres are found."""
        if self._centres is None:
            self._take_samples()
            return None
        end = self._next_row + _step_rows(self._centres)
        rows = self._sample[self._next_row : end]
        np.add.at(self._sums, _labels(rows, self._centres), rows)
        self._next_row = end
        if end >= len(self._sample):
            self._centres = self._moved()
            self._next_row = 0
            self._num_passes += 1
        return Buckets(self._centres, self._num_rows) if self._num_passes == NUM_PASSES else None

    def _take_samples(self) -> None:
        """From the next piece its share, and from all at the end as many as are missing."""
        room = len(self._sample) - self._num_sampled
        if self._pieces and room:
            rows = self._pieces.pop()
            share = -(-len(rows) * len(self._sample) // self._num_rows)
            share = min(share, room, len(rows))
            chosen = self._rng.choice(len(rows), size=share, replace=False)
            end = self._num_sampled + share
            self._sample[self._num_sampled : end] = rows.matrix[chosen]
            self._num_sampled = end
            return
        self._sample = self._sample[: self._num_sampled]
        self._rng.shuffle(self._sample)
        self._num_centres = min(self._num_centres, len(self._sample))
        self._centres = self._sample[: self._num_centres].copy()
        self._sums = self._sums[: self._num_centres]

    def _moved(self) -> Matrix:
        """The centres of what is nearest to each; one with nothing near starts elsewhere."""
        norms: Matrix = np.linalg.norm(self._sums, axis=1, keepdims=True).astype(np.float32)
        is_lost = norms[:, 0] < 1e-6
        centres: Matrix = (self._sums / np.maximum(norms, 1e-6)).astype(np.float32)
        centres[is_lost] = self._sample[
            self._rng.integers(len(self._sample), size=int(is_lost.sum()))
        ]
        self._sums[:] = 0
        return centres


def _labels(matrix: Matrix, centres: Matrix) -> list[int]:
    """For each row the number of its nearest centre."""
    labels: list[int] = (matrix @ centres.T).argmax(axis=1).tolist()
    return labels


def _step_rows(centres: Matrix) -> int:
    return max(MIN_STEP_ROWS, STEP_PRODUCTS // centres.size)
