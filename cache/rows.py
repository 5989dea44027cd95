"""A growing matrix of vectors with their ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
"""Shape (D,), unit norm, unless said otherwise."""
Matrix = NDArray[np.float32]
"""Shape (N, D)."""


class Rows:
    """Vectors by id: `matrix` (capacity, D) float32, of which the first len(ids) rows are in use.

    Adding and removing are O(1) amortised: the matrix grows by half when full and halves at
    a quarter, so that at most four times what is in use is held, and mostly less than half more.
    """

    __slots__ = ("ids", "matrix", "row_of")

    def __init__(self, dimension: int) -> None:
        self.matrix: Matrix = np.empty((1, dimension), dtype=np.float32)
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, row_id: str, vector: Vector) -> None:
        """Adds a row; the id must be new."""
        num_rows = len(self.ids)
        if num_rows == len(self.matrix):
            self._resize(num_rows + num_rows // 2 + 1)
        self.matrix[num_rows] = vector
        self.row_of[row_id] = num_rows
        self.ids.append(row_id)

    def remove(self, row_id: str) -> None:
        """Puts the last row in the place of this one; KeyError when it is not there."""
        row = self.row_of.pop(row_id)
        last_id = self.ids.pop()
        if last_id != row_id:
            self.ids[row] = last_id
            self.row_of[last_id] = row
            self.matrix[row] = self.matrix[len(self.ids)]
        self._shrink()

    def take_last(self, most: int) -> tuple[list[str], Matrix]:
        """Removes the last rows, at most so many, and returns them."""
        start = max(0, len(self.ids) - most)
        ids, matrix = self.ids[start:], self.matrix[start : len(self.ids)].copy()
        del self.ids[start:]
        for row_id in ids:
            del self.row_of[row_id]
        self._shrink()
        return ids, matrix

    def _shrink(self) -> None:
        if len(self.ids) <= len(self.matrix) // 4:
            self._resize(max(1, len(self.matrix) // 2))

    def _resize(self, capacity: int) -> None:
        matrix = np.empty((capacity, self.matrix.shape[1]), dtype=np.float32)
        used = min(len(self.ids), capacity)
        matrix[:used] = self.matrix[:used]
        self.matrix = matrix


def nearest(pieces: Sequence[Rows], vector: Vector, top: int) -> list[tuple[str, float]]:
    """The `top` rows of all pieces with the largest inner product, as (id, product)."""
    pieces = [rows for rows in pieces if rows.ids]
    if not pieces:
        return []
    # `dot`, which comes to the same as `@` and costs less a call.
    products = [rows.matrix[: len(rows.ids)].dot(vector) for rows in pieces]
    similarities = products[0] if len(products) == 1 else np.concatenate(products)
    if len(similarities) > top:
        found = similarities.argpartition(-top)[-top:].tolist()
    else:
        found = list(range(len(similarities)))
    ends = list(accumulate(map(len, products)))
    result = []
    # Stable, also where it turns the order round.
    for place in sorted(found, key=similarities.item, reverse=True):
        piece = bisect_right(ends, place)
        row = place - (ends[piece - 1] if piece else 0)
        result.append((pieces[piece].ids[row], similarities.item(place)))
    return result
