"""L1 of the prompt cache: answers to requests that are equal to the byte, in the ingress itself.

A hit costs no hop. See `cache.hot` for what is held, and for how long.
"""

from __future__ import annotations

from collections.abc import Callable

from cache.hot import HotTier
from deployments.wire import StoredStream


class FrontCache:
    """Answers by the whole request, each for the model revision that gave it.

    Args:
        ttl_s: life of an answer from when it was stored first.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._tier: HotTier[StoredStream] = HotTier(max_bytes, life_s=ttl_s, clock=clock)
        self.hits_total = 0

    def find(self, key: str, revision: str) -> tuple[StoredStream, float] | None:
        """The answer to the request of that key, if this model gave it, and its age in seconds."""
        found = self._tier.find(key, revision)
        if found is not None:
            self.hits_total += 1
        return found

    def keep(
        self, key: str, revision: str, stored: StoredStream, size_bytes: int, age_s: float = 0.0
    ) -> None:
        """Holds an answer that was stored `age_s` ago; one that is too large is left out."""
        self._tier.keep(key, revision, stored, size_bytes, age_s)

    def alias(self, key: str, target: str) -> None:
        """Lets a verified paraphrase be answered as the request of the key `target`."""
        self._tier.alias(key, target)

    def enter_epoch(self, epoch: int) -> None:
        """Forgets everything when the cache's epoch is another one than before."""
        self._tier.enter_epoch(epoch)
