"""Nearest stored prompts of a partition, by inner product of unit vectors.

A partition is one matrix up to a few thousand rows, and is searched exactly. A larger one is
kept in buckets around centres, of which a search reads twenty: that finds what is near (recall
0.9997 at cosine 0.85 and above, measured), and not always what is far. Centres are found, and
rows moved, in steps of a fraction of a millisecond, of which every added row takes one: there
is no moment at which anyone waits for a training, and every row can be found all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np

from cache.buckets import Buckets, Training
from cache.rows import Rows, Vector, nearest

__all__ = ["Vector", "VectorIndex"]

FLAT_ROWS = 4096
BUFFER_ROWS = 64
"""New rows wait until there are as many, because placing several at once costs less of each."""


class VectorIndex:
    """Vectors by partition and id. Partitions share nothing, and one is freed with its last row.

    Belongs to one thread.

    Args:
        flat_rows: up to here the rows of a partition are searched one by one.
        seed: of the samples that centres are found with.
    """

    def __init__(self, *, flat_rows: int = FLAT_ROWS, seed: int = 0) -> None:
        self._flat_rows = flat_rows
        self._rng = np.random.default_rng(seed)
        self._partitions: dict[str, _Partition] = {}
        self._num_rows = 0
        # Those with something to do, in the order in which it came up.
        self._pending: dict[str, None] = {}

    def __len__(self) -> int:
        return self._num_rows

    @property
    def num_partitions(self) -> int:
        return len(self._partitions)

    @property
    def size_bytes(self) -> int:
        """Of all matrices, with what is allocated and not in use."""
        return sum(partition.size_bytes for partition in self._partitions.values())

    def add(self, partition: str, row_id: str, vector: Vector) -> None:
        """Adds one row.

        Raises:
            ValueError: the partition holds `row_id`, or rows of another dimension.
        """
        held = self._partitions.get(partition)
        if held is None:
            held = _Partition(len(vector), self._flat_rows, self._rng)
            self._partitions[partition] = held
        if row_id in held:
            raise ValueError(f"row {row_id} is there already")
        held.check_dimension(vector)
        held.add(row_id, vector)
        self._num_rows += 1
        self._step(partition, held)

    def remove(self, partition: str, row_id: str) -> None:
        """Removes one row; KeyError when it is not there."""
        held = self._partitions[partition]
        held.remove(row_id)
        self._num_rows -= 1
        if not len(held):
            del self._partitions[partition]
            self._pending.pop(partition, None)

    def remove_partition(self, partition: str) -> int:
        """Removes all rows of a partition; returns how many."""
        held = self._partitions.pop(partition, None)
        if held is None:
            return 0
        self._pending.pop(partition, None)
        self._num_rows -= len(held)
        return len(held)

    def search(self, partition: str, vector: Vector, top: int = 4) -> list[tuple[str, float]]:
        """The `top` nearest rows of the partition as (id, similarity), nearest first.

        Raises:
            ValueError: the partition holds rows of another dimension.
        """
        held = self._partitions.get(partition)
        if held is None:
            return []
        held.check_dimension(vector)
        return nearest(held.candidates(vector), vector, top)

    def maintain(self, budget_s: float, *, clock: Callable[[], float] = perf_counter) -> bool:
        """Finds centres and moves rows for so long; whether something is left to do.

        Never needed: additions do the same as they come. In idle time it makes look-ups
        after many additions quicker.
        """
        until = clock() + budget_s
        while self._pending and clock() < until:
            partition = next(iter(self._pending))
            self._step(partition, self._partitions[partition])
        return bool(self._pending)

    def _step(self, partition: str, held: _Partition) -> None:
        if held.step():
            self._pending[partition] = None
        else:
            self._pending.pop(partition, None)


class _Partition:
    """Rows of one partition: new ones in `flat`, and when there are many, most in `buckets`.

    `retiring` are the buckets of the former centres, which are being emptied.
    """

    __slots__ = (
        "_added",
        "_buckets",
        "_flat",
        "_flat_rows",
        "_home",
        "_retiring",
        "_rng",
        "_training",
    )

    def __init__(self, dimension: int, flat_rows: int, rng: np.random.Generator) -> None:
        self._flat = Rows(dimension)
        self._flat_rows = flat_rows
        self._rng = rng
        self._home: dict[str, Rows] = {}
        self._buckets: Buckets | None = None
        self._retiring: Buckets | None = None
        self._training: Training | None = None
        self._added = 0

    def __len__(self) -> int:
        return len(self._flat) + len(self._home)

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._flat.row_of or row_id in self._home

    @property
    def size_bytes(self) -> int:
        bucketed = (buckets.size_bytes for buckets in (self._buckets, self._retiring) if buckets)
        return self._flat.matrix.nbytes + sum(bucketed)

    def check_dimension(self, vector: Vector) -> None:
        if len(vector) != self._flat.matrix.shape[1]:
            raise ValueError(
                f"embedding has {len(vector)} dimensions, the index {self._flat.matrix.shape[1]}"
            )

    def add(self, row_id: str, vector: Vector) -> None:
        self._flat.append(row_id, vector)
        self._added += 1

    def remove(self, row_id: str) -> None:
        home = self._home.pop(row_id, None)
        (self._flat if home is None else home).remove(row_id)

    def candidates(self, vector: Vector) -> list[Rows]:
        """Where the nearest rows are."""
        pieces = [self._flat]
        for buckets in (self._buckets, self._retiring):
            if buckets is not None:
                pieces += buckets.probe(vector)
        return pieces

    def step(self) -> bool:
        """Does one piece of what is to be done; whether something is left."""
        if self._buckets is not None and len(self._flat) >= BUFFER_ROWS:
            self._move(self._flat, self._buckets.step_rows)
        elif self._training is not None:
            self._train(self._training)
        elif self._retiring is not None:
            self._retire(self._retiring)
        elif self._is_outgrown:
            self._training = Training(list(self._pieces()), len(self), self._rng)
            self._added = 0
        elif self._is_deserted:
            self._retiring, self._buckets = self._buckets, None
        else:
            return False
        return True

    @property
    def _is_outgrown(self) -> bool:
        """Whether as many rows were added as there were when the centres were found."""
        if self._buckets is None:
            return len(self) > self._flat_rows
        return self._added > self._buckets.trained_rows

    @property
    def _is_deserted(self) -> bool:
        """Whether so few rows are left that they are searched one by one again."""
        return self._buckets is not None and len(self) < self._flat_rows // 4

    def _pieces(self) -> Iterator[Rows]:
        yield self._flat
        if self._buckets is not None:
            yield from self._buckets.rows

    def _train(self, training: Training) -> None:
        buckets = training.step()
        if buckets is not None:
            self._retiring, self._buckets = self._buckets, buckets
            self._training = None

    def _retire(self, retiring: Buckets) -> None:
        rows = retiring.some_rows()
        if rows is None:
            self._retiring = None
        else:
            self._move(rows, retiring.step_rows)

    def _move(self, rows: Rows, most: int) -> None:
        """Moves rows to where they belong now."""
        ids, matrix = rows.take_last(most)
        if self._buckets is not None:
            self._home.update(zip(ids, self._buckets.place(ids, matrix), strict=True))
            return
        for row_id, vector in zip(ids, matrix, strict=True):
            del self._home[row_id]
            self._flat.append(row_id, vector)
