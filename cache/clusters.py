"""Verified equivalents in the warm tier: which of them can be spared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cache.index import Vector


@dataclass(slots=True)
class _Cluster:
    members: dict[str, Vector]
    total: Vector


class Clusters:
    """Groups of at least two entries that may answer for each other.

    The centre of a group is the sum of its members' unit vectors, kept up to date as they
    come and go. An entry without an equivalent takes no space here.
    """

    def __init__(self) -> None:
        self._of: dict[str, _Cluster] = {}

    def __len__(self) -> int:
        return len({id(cluster) for cluster in self._of.values()})

    def members(self, key: str) -> frozenset[str]:
        """All that are equivalent to `key`, with itself; just itself without any."""
        cluster = self._of.get(key)
        return frozenset((key,) if cluster is None else cluster.members)

    def join(self, key: str, vector: Vector, other: str, other_vector: Vector) -> None:
        """Puts `key`, which is in no group, into that of `other`."""
        cluster = self._of.get(other)
        if cluster is None:
            cluster = self._of[other] = _Cluster({other: other_vector}, other_vector.copy())
        cluster.members[key] = vector
        cluster.total += vector
        self._of[key] = cluster

    def remove(self, key: str) -> None:
        """Takes `key` out; a group of one is none."""
        cluster = self._of.pop(key, None)
        if cluster is None:
            return
        cluster.total -= cluster.members.pop(key)
        if len(cluster.members) == 1:
            del self._of[next(iter(cluster.members))]

    def spare(self, key: str, hits: Callable[[str], int]) -> str:
        """Who of the group of `key` leaves in its place.

        Among those that were hit no more often than `key`, the farthest from the centre.
        """
        cluster = self._of.get(key)
        if cluster is None:
            return key
        total, most = cluster.total, hits(key)
        return min(
            (member for member in cluster.members if hits(member) <= most),
            key=lambda member: (float(np.dot(cluster.members[member], total)), member != key),
        )
