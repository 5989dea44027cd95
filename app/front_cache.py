"""L1 of the prompt cache: answers to requests that are equal to the byte, in the ingress itself.

A hit costs no hop. What may be reused at all is decided elsewhere: this holds what the
cache has given for the very same request, or is just being told. It lives for a minute at
most, because nobody tells it when another ingress has an answer made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachetools import TLRUCache

from deployments.wire import StoredStream

MAX_AGE_S = 60.0
ENTRY_OVERHEAD_BYTES = 1024


@dataclass(frozen=True)
class FrontEntry:
    """An answer as it came; times in seconds of the clock.

    Attributes:
        made_s: when it was stored first, wherever that was.
    """

    stored: StoredStream
    revision: str
    made_s: float
    expires_s: float
    size_bytes: int


class FrontCache:
    """Bounded by bytes; the least recently used leaves first.

    Args:
        ttl_s: life of an answer from when it was stored first.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: TLRUCache[str, FrontEntry] = TLRUCache(
            max_bytes,
            ttu=lambda key, entry, now_s: entry.expires_s,
            timer=clock,
            getsizeof=lambda entry: entry.size_bytes,
        )
        self.hits_total = 0

    def find(self, key: str, revision: str) -> tuple[StoredStream, float] | None:
        """The answer to the request of that key, if this model gave it, and its age in seconds."""
        entry = self._entries.get(key)
        if entry is None or entry.revision != revision:
            return None
        self.hits_total += 1
        return entry.stored, self._clock() - entry.made_s

    def keep(
        self, key: str, revision: str, stored: StoredStream, size_bytes: int, age_s: float = 0.0
    ) -> None:
        """Holds an answer that was stored `age_s` ago; one that is too large is left out."""
        now_s = self._clock()
        expires_s = min(now_s + MAX_AGE_S, now_s - age_s + self._ttl_s)
        size_bytes += ENTRY_OVERHEAD_BYTES
        if size_bytes <= self._entries.maxsize and expires_s > now_s:
            self._entries[key] = FrontEntry(stored, revision, now_s - age_s, expires_s, size_bytes)
