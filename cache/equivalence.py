"""The decision on entries: may one answer a question, and may two answer for each other?"""

from __future__ import annotations

from dataclasses import replace

from cache.config import CacheConfig
from cache.decision import refusal
from cache.entries import Entry
from cache.key import PromptKey


def refusal_of(
    entry: Entry, key: PromptKey, now: float, similarity: float | None, config: CacheConfig
) -> str | None:
    """Why `key` must not get the answer of `entry`; None means it may. See `decision.refusal`."""
    return refusal(
        entry.key,
        entry.answer,
        key,
        age_s=now - entry.created,
        ttl_s=config.life_s,
        similarity=similarity,
        threshold=config.semantic_threshold,
    )


def are_equivalent(one: Entry, other: Entry, similarity: float, config: CacheConfig) -> bool:
    """Whether either may answer for the other, at any age and without a limit of tokens.

    Only the same wording counts: what is merely probable is decided anew for each request.
    """
    return all(
        refusal_of(held, replace(asked, max_tokens=None), held.created, similarity, config) is None
        for held, asked in ((one, other.key), (other, one.key))
    )
