"""Nearest stored prompts of a partition, by inner product of unit vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
"""Shape (D,), unit norm, unless said otherwise."""


class VectorIndex:
    """One flat float32 matrix a partition; adding and removing are O(1) amortised.

    A partition's matrix doubles when full, halves at a quarter, and is freed with its last row.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, _Rows] = {}

    def __len__(self) -> int:
        return sum(len(rows.ids) for rows in self._partitions.values())

    @property
    def num_partitions(self) -> int:
        return len(self._partitions)

    def add(self, partition: str, row_id: str, vector: Vector) -> None:
        """Adds one row.

        Raises:
            ValueError: the partition holds `row_id`, or rows of another dimension.
        """
        rows = self._partitions.get(partition)
        if rows is None:
            rows = self._partitions[partition] = _Rows(len(vector))
        if row_id in rows.row_of:
            raise ValueError(f"row {row_id} is there already")
        rows.check_dimension(vector)
        rows.append(row_id, vector)

    def remove(self, partition: str, row_id: str) -> None:
        """Removes one row; KeyError when it is not there."""
        rows = self._partitions[partition]
        rows.remove(row_id)
        if not rows.ids:
            del self._partitions[partition]

    def search(self, partition: str, vector: Vector, top: int = 4) -> list[tuple[str, float]]:
        """The `top` nearest rows of the partition as (id, similarity), nearest first.

        Raises:
            ValueError: the partition holds rows of another dimension.
        """
        rows = self._partitions.get(partition)
        if rows is None:
            return []
        rows.check_dimension(vector)
        similarities = rows.matrix[: len(rows.ids)] @ vector
        if len(similarities) > top:
            nearest = np.argpartition(similarities, -top)[-top:]
        else:
            nearest = np.arange(len(similarities))
        nearest = nearest[np.argsort(-similarities[nearest], kind="stable")]
        return [(rows.ids[row], float(similarities[row])) for row in nearest]


class _Rows:
    """Rows of one partition: `matrix` (capacity, D), of which the first len(ids) are in use."""

    __slots__ = ("ids", "matrix", "row_of")

    def __init__(self, dimension: int) -> None:
        self.matrix = np.empty((1, dimension), dtype=np.float32)
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}

    def check_dimension(self, vector: Vector) -> None:
        if len(vector) != self.matrix.shape[1]:
            raise ValueError(
                f"embedding has {len(vector)} dimensions, the index {self.matrix.shape[1]}"
            )

    def append(self, row_id: str, vector: Vector) -> None:
        if len(self.ids) == len(self.matrix):
            self._resize(2 * len(self.matrix))
        self.matrix[len(self.ids)] = vector
        self.row_of[row_id] = len(self.ids)
        self.ids.append(row_id)

    def remove(self, row_id: str) -> None:
        row = self.row_of.pop(row_id)
        last_id = self.ids.pop()
        if last_id != row_id:
            self.ids[row] = last_id
            self.row_of[last_id] = row
            self.matrix[row] = self.matrix[len(self.ids)]
        if len(self.ids) <= len(self.matrix) // 4:
            self._resize(max(1, len(self.matrix) // 2))

    def _resize(self, capacity: int) -> None:
        matrix = np.empty((capacity, self.matrix.shape[1]), dtype=np.float32)
        used = min(len(self.ids), capacity)
        matrix[:used] = self.matrix[:used]
        self.matrix = matrix
