"""Against floods of questions that nobody asked before: miss buckets, and misses remembered."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import LRUCache, TLRUCache

from cache.outcome import Miss

MAX_TENANTS = 10_000
MAX_NEGATIVES = 10_000
NEGATIVE_TTL_S = (5.0, 30.0)


class MissBuckets:
    """How many new answers a tenant may have stored: `rate` a second, `burst` at once.

    A tenant that was not seen for long is forgotten, which is as good as a full bucket.
    """

    def __init__(self, rate: float | None, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._levels: LRUCache[str, tuple[float, float]] = LRUCache(MAX_TENANTS)

    def take(self, tenant: str, now: float) -> bool:
        """Whether one more is allowed, which it then has used."""
        if self._rate is None:
            return True
        level, since = self._levels.get(tenant, (float(self._burst), now))
        level = min(float(self._burst), level + self._rate * (now - since))
        allowed = level >= 1
        self._levels[tenant] = level - 1 if allowed else level, now
        return allowed


@dataclass(frozen=True, slots=True)
class _KnownMiss:
    """`version` is the partition's at the time."""

    version: int
    miss: Miss
    ends_s: float


class KnownMisses:
    """Questions that were just looked up in vain: 5 to 30 s, jittered, by exact key only.

    A known miss ends when its partition gets a new entry, so it never hides one.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._rng = rng
        self._misses: TLRUCache[str, _KnownMiss] = TLRUCache(
            MAX_NEGATIVES, ttu=lambda key, miss, now: miss.ends_s, timer=clock
        )
        self._versions: LRUCache[str, int] = LRUCache(MAX_NEGATIVES)
        self._clock = clock
        self._next_version = 0

    def __len__(self) -> int:
        return len(self._misses)

    def add(self, partition: str, exact: str, miss: Miss) -> None:
        ends_s = self._clock() + self._rng.uniform(*NEGATIVE_TTL_S)
        if partition not in self._versions:
            self._renew(partition)
        self._misses[exact] = _KnownMiss(self._versions[partition], miss, ends_s)

    def get(self, partition: str, exact: str) -> Miss | None:
        """What the look-up said; None when the question is to be looked up."""
        known = self._misses.get(exact)
        if known is None or known.version != self._versions.get(partition):
            return None
        return known.miss

    def forget(self, partition: str) -> None:
        """Ends the known misses of a partition."""
        if partition in self._versions:
            self._renew(partition)

    def _renew(self, partition: str) -> None:
        self._next_version += 1
        self._versions[partition] = self._next_version
