"""L1 of the prompt cache: answers to requests that are equal to the byte, in the ingress itself.

A hit costs no hop. See `cache.hot` for what is held, and for how long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cache.hot import HotTier
from deployments.wire import StoredStream


@dataclass(frozen=True, slots=True)
class Kept:
    """A held answer. `similarity` is that of the stored question to the request's own."""

    stored: StoredStream
    id: str | None = None
    outcome: Literal["exact", "semantic"] = "exact"
    similarity: float = 1.0


class FrontCache:
    """Answers by the whole request, each for the model revision that gave it.

    Args:
        ttl_s: life of an answer from when it was stored first.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._tier: HotTier[Kept] = HotTier(max_bytes, life_s=ttl_s, clock=clock)
        self.hits_total = 0

    @property
    def entries(self) -> int:
        return len(self._tier)

    @property
    def bytes(self) -> int:
        return self._tier.bytes

    def find(self, key: str, revision: str) -> tuple[Kept, float] | None:
        """The answer to the request of that key, if this model gave it, and its age in seconds."""
        found = self._tier.find(key, revision)
        if found is not None:
            self.hits_total += 1
        return found

    def keep(
        self, key: str, revision: str, kept: Kept, size_bytes: int, age_s: float = 0.0
    ) -> None:
        """Holds an answer that was stored `age_s` ago; one that is too large is left out."""
        self._tier.keep(key, revision, kept, size_bytes, age_s)

    def clear(self) -> None:
        """Forgets everything: what was removed elsewhere may be here under any key."""
        self._tier.clear()
