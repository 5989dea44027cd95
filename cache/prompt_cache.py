"""The prompt cache: exact look-up, semantic look-up, expiry and bounded memory, in one tier.

Belongs to one thread. Never embeds, never waits, never reads the clock itself.
A caller looks up exactly first, and semantically only when that found nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cache.answer import StoredAnswer
from cache.decision import refusal
from cache.expiry import ExpiryQueue
from cache.index import Vector, VectorIndex
from cache.key import PromptKey, truncated_key
from cache.lru_k import EvictionPolicy, LRUKCache

logger = logging.getLogger(__name__)

ENTRY_OVERHEAD_BYTES = 3072
"""Book-keeping of one entry with its four ghosts, keys and index slot; measured: at most 2,700."""
NORM_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Bounds and thresholds.

    Raises:
        ValueError: a value is out of range.
    """

    max_bytes: int = 256 * 2**20
    max_entry_bytes: int = 2**20
    ttl_s: float = 900.0
    semantic_threshold: float = 0.95
    num_candidates: int = 4
    lru_k: int = 2
    ghosts: float = 4.0

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes is {self.max_bytes}, the least is 1")
        if self.max_entry_bytes < 1:
            raise ValueError(f"max_entry_bytes is {self.max_entry_bytes}, the least is 1")
        if not 0 < self.ttl_s < float("inf"):
            raise ValueError(f"ttl_s is {self.ttl_s}, it must be positive and finite")
        if not 0 < self.semantic_threshold <= 1:
            raise ValueError(f"semantic_threshold is {self.semantic_threshold}, not in (0, 1]")
        if self.num_candidates < 1:
            raise ValueError(f"num_candidates is {self.num_candidates}, the least is 1")
        if self.lru_k < 1:
            raise ValueError(f"lru_k is {self.lru_k}, the least is 1")
        if not 0 <= self.ghosts < float("inf"):
            raise ValueError(f"ghosts is {self.ghosts}, it must be finite and at least 0")


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer that the request may be given; `similarity` is 1.0 when exact."""

    answer: StoredAnswer
    outcome: Literal["exact", "semantic"]
    tier: Literal["L2"]
    similarity: float
    age_s: float


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing may be given; `similarity` and `reason` tell of the best candidate.

    The reason may quote the words in which two prompts of one partition differ.
    """

    similarity: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counts since the start, and what is held now.

    `misses` counts questions, not calls: an exact look-up that finds nothing
    counts only when its key allows no semantic one. `errors` counts failures of
    any look-up or store, apart from misses. `refused_stores` were too large.
    """

    exact_hits: int = 0
    semantic_hits: int = 0
    misses: int = 0
    stores: int = 0
    refused_stores: int = 0
    evictions: int = 0
    expirations: int = 0
    errors: int = 0
    entries: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    key: PromptKey
    answer: StoredAnswer
    created: float
    is_indexed: bool


class PromptCache:
    """Stored answers by question.

    Args:
        clock: seconds, never backwards.
        policy: makes the policy that picks who leaves when that many bytes are held;
            None is LRU-K with ghosts.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        clock: Callable[[], float],
        policy: Callable[[int], EvictionPolicy] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._policy = (
            LRUKCache(config.max_bytes, k=config.lru_k, ghosts=config.ghosts)
            if policy is None
            else policy(config.max_bytes)
        )
        self._entries: dict[str, _Entry] = {}
        self._expiry = ExpiryQueue()
        self._index = VectorIndex()
        self._counts: Counter[str] = Counter()

    def lookup_exact(self, key: PromptKey) -> Hit | None:
        """The answer stored for this very question, or None."""
        now = self._expire()
        for exact in (key.exact, truncated_key(key).exact):
            entry = self._entries.get(exact)
            if (
                entry is not None
                and self._refusal(entry, key, now, None) is None
                and self._is_intact(entry)
            ):
                return self._hit(entry, "exact", 1.0, now)
        if not key.allow_semantic:
            self._counts["misses"] += 1
        return None

    def lookup_semantic(self, key: PromptKey, embedding: Vector | None) -> Hit | Miss:
        """The answer of the nearest question in the partition that the guards let pass.

        `embedding`: (D,) float32, unit norm; None when the text does not fit the
        embedder. An unusable embedding is a miss and counts as an error.
        """
        now = self._expire()
        found = self._nearest(key, embedding, now)
        if isinstance(found, Miss):
            self._counts["misses"] += 1
        return found

    def store(self, key: PromptKey, answer: StoredAnswer, embedding: Vector | None) -> bool:
        """Keeps `answer` for `key`, in place of an equal key's; False when it is too large.

        Only answers that ended by themselves, or at the limit (`is_truncated`), may be
        stored. Without a usable `embedding`, or truncated, the entry is found exactly
        only; an unusable one counts as an error.
        """
        if answer.is_truncated:
            key, embedding = truncated_key(key), None
        is_kept = self._put(key, answer, embedding, created=self._expire())
        self._counts["stores" if is_kept else "refused_stores"] += 1
        return is_kept

    def add_embedding(self, key: PromptKey, answer: StoredAnswer, embedding: Vector) -> bool:
        """Makes a stored answer findable by meaning; False when it is not held any more."""
        self._expire()
        entry = self._entries.get(key.exact)
        if entry is None or entry.answer is not answer:
            return False
        return self._put(key, answer, embedding, created=entry.created)

    def evict_expired(self) -> int:
        """Frees what has expired and returns how many; every look-up and store does so too."""
        before = self._counts["expirations"]
        self._expire()
        return self._counts["expirations"] - before

    def clear(self, *, tenant: str | None = None, partition: str | None = None) -> int:
        """Removes the entries of a tenant, of a partition, or all; returns how many."""
        doomed = [
            exact
            for exact, entry in self._entries.items()
            if tenant in (None, entry.key.tenant) and partition in (None, entry.key.partition)
        ]
        for exact in doomed:
            self._remove(exact)
        return len(doomed)

    def count_error(self) -> None:
        """Counts a failure outside, such as of the embedder, or a time-out."""
        self._counts["errors"] += 1

    def stats(self) -> CacheStats:
        return CacheStats(
            **self._counts, entries=len(self._entries), bytes=int(self._policy.currsize)
        )

    def _put(
        self, key: PromptKey, answer: StoredAnswer, embedding: Vector | None, *, created: float
    ) -> bool:
        if key.exact in self._entries:
            self._remove(key.exact)
        size = _entry_bytes(key, answer, embedding)
        if size > min(self._config.max_entry_bytes, self._config.max_bytes):
            return False
        while self._policy.currsize + size > self._config.max_bytes:
            victim, _ = self._policy.popitem()
            self._counts["evictions"] += 1
            self._forget(victim)
        is_indexed = self._add_to_index(key, embedding)
        self._policy[key.exact] = size
        self._entries[key.exact] = _Entry(key, answer, created, is_indexed)
        self._expiry.add(key.exact, created + self._config.ttl_s)
        return True

    def _nearest(self, key: PromptKey, embedding: Vector | None, now: float) -> Hit | Miss:
        if not key.allow_semantic:
            return Miss(None, "semantic matching is off")
        if embedding is None:
            return Miss(None, "prompt too long to embed")
        try:
            _check_unit(embedding)
            candidates = self._index.search(
                key.partition, embedding, top=self._config.num_candidates
            )
        except ValueError as exc:
            self._failed(exc)
            return Miss(None, f"unusable embedding: {exc}")
        reason = "no candidate"
        for rank, (exact, similarity) in enumerate(candidates):
            entry = self._entries[exact]
            refused = self._refusal(entry, key, now, similarity)
            if refused is None and self._is_intact(entry):
                # Rounding may lift the product of equal vectors above 1.
                return self._hit(entry, "semantic", min(similarity, 1.0), now)
            if rank == 0:
                reason = refused or "stored answer was damaged"
        return Miss(min(candidates[0][1], 1.0) if candidates else None, reason)

    def _is_intact(self, entry: _Entry) -> bool:
        """Whether the answer may be given out; a damaged one is removed and counts as an error."""
        if entry.answer.is_intact:
            return True
        logger.error("a stored answer of %d bytes was damaged", entry.answer.size_bytes)
        self._counts["errors"] += 1
        self._remove(entry.key.exact)
        return False

    def _refusal(
        self, entry: _Entry, key: PromptKey, now: float, similarity: float | None
    ) -> str | None:
        return refusal(
            entry.key,
            entry.answer,
            key,
            age_s=now - entry.created,
            ttl_s=self._config.ttl_s,
            similarity=similarity,
            threshold=self._config.semantic_threshold,
        )

    def _hit(
        self, entry: _Entry, outcome: Literal["exact", "semantic"], similarity: float, now: float
    ) -> Hit:
        self._counts[f"{outcome}_hits"] += 1
        # Reading is what the policy counts as an access.
        self._policy[entry.key.exact]
        return Hit(entry.answer, outcome, "L2", similarity, now - entry.created)

    def _add_to_index(self, key: PromptKey, embedding: Vector | None) -> bool:
        if embedding is None or not key.allow_semantic:
            return False
        try:
            _check_unit(embedding)
            self._index.add(key.partition, key.exact, embedding)
        except ValueError as exc:
            self._failed(exc)
            return False
        return True

    def _failed(self, exc: ValueError) -> None:
        logger.warning("embedding refused: %s", exc)
        self._counts["errors"] += 1

    def _expire(self) -> float:
        now = self._clock()
        for exact in self._expiry.take_due(now):
            self._counts["expirations"] += 1
            del self._policy[exact]
            self._drop(exact)
        return now

    def _remove(self, exact: str) -> None:
        del self._policy[exact]
        self._forget(exact)

    def _forget(self, exact: str) -> None:
        self._expiry.remove(exact)
        self._drop(exact)

    def _drop(self, exact: str) -> None:
        entry = self._entries.pop(exact)
        if entry.is_indexed:
            self._index.remove(entry.key.partition, exact)


def _entry_bytes(key: PromptKey, answer: StoredAnswer, embedding: Vector | None) -> int:
    vector_bytes = 0 if embedding is None else embedding.nbytes
    # Four bytes a character is the widest Python stores a string.
    return ENTRY_OVERHEAD_BYTES + 4 * len(key.text) + vector_bytes + answer.size_bytes


def _check_unit(embedding: Vector) -> None:
    if embedding.ndim != 1 or embedding.dtype != np.float32:
        raise ValueError(
            f"embedding is {embedding.dtype} of shape {embedding.shape}, not float32 (D,)"
        )
    norm = float(np.sqrt(embedding @ embedding))
    # Written so that NaN is refused.
    if not abs(norm - 1.0) <= NORM_TOLERANCE:
        raise ValueError(f"embedding has norm {norm:.4g}, not 1")
