"""Vectors of entries that were evicted: a paraphrase that is stored later takes on their history."""

from __future__ import annotations

from collections import OrderedDict

from cache.index import Vector, VectorIndex


class GhostVectors:
    """The latest evicted vectors, oldest forgotten first.

    They only tell the eviction policy that a question has been asked before in other words.
    No answer depends on them, so nearness alone decides.
    """

    def __init__(self, similarity: float) -> None:
        self._similarity = similarity
        self._index = VectorIndex()
        self._partitions: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._partitions)

    def add(self, partition: str, key: str, vector: Vector) -> None:
        self.remove(key)
        try:
            self._index.add(partition, key, vector)
        except ValueError:
            # Vectors of another dimension were left by a former embedder.
            return
        self._partitions[key] = partition

    def nearest(self, partition: str, vector: Vector) -> str | None:
        """The evicted key that asked the same, as far as its vector tells."""
        try:
            found = self._index.search(partition, vector, top=1)
        except ValueError:
            return None
        return found[0][0] if found and found[0][1] >= self._similarity else None

    def remove(self, key: str) -> None:
        partition = self._partitions.pop(key, None)
        if partition is not None:
            self._index.remove(partition, key)

    def trim(self, most: int) -> None:
        """Forgets the oldest beyond `most`."""
        while len(self._partitions) > most:
            self.remove(next(iter(self._partitions)))
