"""Where answers were proven wrong: no look-up by meaning in that neighbourhood for a while."""

from __future__ import annotations

from cache.expiry import ExpiryQueue
from cache.index import Vector, VectorIndex

MAX_ZONES = 10_000


class Quarantine:
    """Zones around vectors, each in its partition. They outlive the entries that caused them.

    Bounded in number; the oldest opens first.
    """

    def __init__(self, similarity: float, duration_s: float) -> None:
        self._similarity, self._duration_s = similarity, duration_s
        self._zones = VectorIndex()
        self._partitions: dict[str, str] = {}
        self._expiry = ExpiryQueue()

    def __len__(self) -> int:
        return len(self._partitions)

    def add(self, partition: str, zone_id: str, vector: Vector, now: float) -> None:
        """Closes the neighbourhood of `vector`; once more for one that is closed already."""
        self._remove(zone_id)
        if len(self._partitions) >= MAX_ZONES:
            self._remove(next(iter(self._partitions)))
        self._zones.add(partition, zone_id, vector)
        self._partitions[zone_id] = partition
        self._expiry.add(zone_id, now + self._duration_s)

    def covers(self, partition: str, vector: Vector) -> bool:
        """Whether `vector` lies in a closed neighbourhood."""
        nearest = self._zones.search(partition, vector, top=1)
        return bool(nearest) and nearest[0][1] >= self._similarity

    def expire(self, now: float) -> None:
        """Opens what was closed long enough."""
        for zone_id in self._expiry.take_due(now):
            self._zones.remove(self._partitions.pop(zone_id), zone_id)

    def _remove(self, zone_id: str) -> None:
        if zone_id in self._partitions:
            self._expiry.remove(zone_id)
            self._zones.remove(self._partitions.pop(zone_id), zone_id)
