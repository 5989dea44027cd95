"""The prompt cache as a service: keys, embeds, looks up, stores. Never raises for a look-up.

Plain asyncio around `cache.PromptCache`, so that a test builds it with a fake
embedder; `prompt_cache.py` is its Serve shell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cachetools import LRUCache

from cache.answer import StoredAnswer
from cache.key import PromptKey
from cache.prompt_cache import Hit, Miss, PromptCache
from deployments.cache_key import cache_key
from deployments.embedder import Vector
from deployments.wire import LookupCall, LookupReply, StoreCall
from protocol.token_log import CacheOutcome

logger = logging.getLogger(__name__)

EmbedText = Callable[[str], Awaitable[Vector | None]]


class CacheService:
    """Look-ups and stores of one cache replica.

    Args:
        embed: None switches the semantic path off; it may raise or be slow.
        embed_timeout_s: a slower embedding makes the look-up a miss.
    """

    def __init__(
        self,
        cache: PromptCache,
        *,
        embed: EmbedText | None,
        embedder_revision: str,
        epoch: int,
        embed_timeout_s: float,
    ) -> None:
        self._cache = cache
        self._embed = embed
        self._embedder_revision = embedder_revision
        self._epoch = epoch
        self._embed_timeout_s = embed_timeout_s
        # A miss is followed by a store of the same prompt: its vector need not be computed twice.
        # Held by digest, because a prompt may be a megabyte long.
        self._recent: LRUCache[str, Vector] = LRUCache(maxsize=1024)
        self._embedding: set[asyncio.Task[None]] = set()

    async def lookup(self, call: LookupCall) -> LookupReply:
        """The decision for one request: exact first, then by meaning."""
        key = self._key(call)
        hit = self._cache.lookup_exact(key)
        if hit is not None:
            return _reply(hit)
        if self._embed is None or not key.allow_semantic:
            return LookupReply(outcome=CacheOutcome(reason="no equal prompt"))
        try:
            vector = await asyncio.wait_for(self._vector(key), self._embed_timeout_s)
        except TimeoutError:
            self._cache.count_error()
            return LookupReply(outcome=CacheOutcome(reason="embedding timed out"))
        except Exception:
            self._cache.count_error()
            logger.exception("embedding failed; the look-up is a miss")
            return LookupReply(outcome=CacheOutcome(reason="embedding failed"))
        if vector is None:
            return LookupReply(outcome=CacheOutcome(reason="prompt too long to embed"))
        return _reply(self._cache.lookup_semantic(key, vector))

    def store(self, call: StoreCall) -> None:
        """Keeps an answer. It can be hit exactly at once, and by meaning once it is embedded."""
        key = self._key(call)
        answer = StoredAnswer(
            payload=call.stored,
            completion_tokens=call.completion_tokens,
            model_revision=call.model_revision,
            is_truncated=call.is_truncated,
        )
        vector = self._recent.get(key.exact)
        self._cache.store(key, answer, vector)
        is_findable = key.allow_semantic and not answer.is_truncated
        if vector is None and self._embed is not None and is_findable:
            task = asyncio.create_task(self._embed_stored(key, answer))
            self._embedding.add(task)
            task.add_done_callback(self._embedding.discard)

    async def settle(self) -> None:
        """Waits until every stored answer is embedded."""
        while self._embedding:
            await asyncio.wait(self._embedding)

    async def _embed_stored(self, key: PromptKey, answer: StoredAnswer) -> None:
        try:
            vector = await self._vector(key)
        except Exception:
            self._cache.count_error()
            logger.exception("embedding failed; the answer is stored for exact hits only")
            return
        if vector is not None:
            self._cache.add_embedding(key, answer, vector)

    def stats(self) -> dict[str, Any]:
        """Counters and sizes, as plain values."""
        return dataclasses.asdict(self._cache.stats())

    def _key(self, call: LookupCall | StoreCall) -> PromptKey:
        return cache_key(
            call.request,
            model_revision=call.model_revision,
            embedder_revision=self._embedder_revision,
            epoch=self._epoch,
        )

    async def _vector(self, key: PromptKey) -> Vector | None:
        known = self._recent.get(key.exact)
        if known is not None:
            return known
        assert self._embed is not None
        vector = await self._embed(key.text)
        if vector is not None:
            self._recent[key.exact] = vector
        return vector


def _reply(decision: Hit | Miss) -> LookupReply:
    if isinstance(decision, Miss):
        return LookupReply(
            outcome=CacheOutcome(similarity=decision.similarity, reason=decision.reason)
        )
    return LookupReply(
        outcome=CacheOutcome(
            outcome=decision.outcome,
            tier=decision.tier,
            similarity=decision.similarity,
            age_s=round(decision.age_s, 3),
        ),
        stored=decision.answer.payload,
    )
