"""The prompt cache as a service: keys, embeds, looks up, stores. Never raises for a look-up.

Plain asyncio around `cache.PromptCache`, so that a test builds it with a fake
embedder; `prompt_cache.py` is its Serve shell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from cache.answer import StoredAnswer
from cache.key import PromptKey
from cache.prompt_cache import Hit, Miss, PromptCache
from deployments.cache_key import cache_key
from deployments.embedder import EmbedderBusy, Embeddings, EmbedText, Vector
from deployments.wire import LookupCall, LookupReply, StoreCall, decode_stored
from protocol.token_log import CacheOutcome

logger = logging.getLogger(__name__)

HOPELESS_S = 60.0
"""An embedder that has been stuck for so long does not come back by itself."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        # A miss is followed by a store of the same prompt: its vector is remembered for that.
        self._embeddings = None if embed is None else Embeddings(embed, clock=clock)
        self._embedder_revision = embedder_revision
        self._epoch = epoch
        self._embed_timeout_s = embed_timeout_s
        self._embedding: set[asyncio.Task[None]] = set()

    async def lookup(self, call: LookupCall) -> LookupReply:
        """The decision for one request: exact first, then by meaning."""
        key = self._key(call)
        hit = self._cache.lookup_exact(key)
        if hit is not None:
            return _reply(hit)
        if self._embeddings is None or not key.allow_semantic:
            return LookupReply(outcome=CacheOutcome(reason="no equal prompt"))
        known = self._cache.known_miss(key)
        if known is not None:
            return _reply(known)
        try:
            vector = await self._vector(self._embeddings, key, self._embed_timeout_s)
        except EmbedderBusy:
            return self._failed("embedder is busy")
        except TimeoutError:
            return self._failed("embedding timed out")
        except Exception as error:
            logger.warning("embedding failed, the look-up is a miss: %r", error)
            return self._failed("embedding failed")
        if vector is None:
            return LookupReply(outcome=CacheOutcome(reason="prompt too long to embed"))
        return _reply(self._cache.lookup_semantic(key, vector))

    def store(self, call: StoreCall) -> None:
        """Keeps an answer. It can be hit exactly at once, and by meaning once it is embedded."""
        try:
            decode_stored(call.stored)
        except ValueError as error:
            self._cache.count_error()
            logger.warning("an answer that cannot be read is not stored: %s", error)
            return
        key = self._key(call)
        answer = StoredAnswer(
            payload=call.stored,
            completion_tokens=call.completion_tokens,
            model_revision=call.model_revision,
            is_truncated=call.is_truncated,
        )
        embeddings = self._embeddings
        vector = None if embeddings is None else embeddings.known(key.exact)
        self._cache.store(key, answer, vector, model=call.request.model)
        is_findable = key.allow_semantic and not answer.is_truncated
        if vector is None and embeddings is not None and is_findable:
            task = asyncio.create_task(self._embed_stored(embeddings, key, answer))
            self._embedding.add(task)
            task.add_done_callback(self._embedding.discard)

    async def settle(self) -> None:
        """Waits until every stored answer is embedded."""
        while self._embedding:
            await asyncio.wait(self._embedding)

    def check_health(self) -> None:
        """Raises where a new embedder would help.

        Raises:
            RuntimeError: the embedder is stuck for good; the answers go with it, but most
                hits are by meaning.
        """
        stuck_s = 0.0 if self._embeddings is None else self._embeddings.stuck_for_s
        if stuck_s > HOPELESS_S:
            raise RuntimeError(f"the embedder has not moved for {stuck_s:.0f} s")

    def stats(self) -> dict[str, Any]:
        """Counters and sizes, as plain values."""
        return dataclasses.asdict(self._cache.stats())

    async def _embed_stored(
        self, embeddings: Embeddings, key: PromptKey, answer: StoredAnswer
    ) -> None:
        try:
            vector = await self._vector(embeddings, key, None)
        except Exception as error:
            self._cache.count_error()
            logger.warning("embedding failed, the answer is for exact hits only: %r", error)
            return
        if vector is not None:
            self._cache.add_embedding(key, answer, vector)

    def _failed(self, reason: str) -> LookupReply:
        self._cache.count_error()
        return LookupReply(outcome=CacheOutcome(reason=reason))

    def _key(self, call: LookupCall | StoreCall) -> PromptKey:
        return cache_key(
            call.request,
            model_revision=call.model_revision,
            embedder_revision=self._embedder_revision,
            epoch=self._epoch,
        )

    async def _vector(
        self, embeddings: Embeddings, key: PromptKey, timeout_s: float | None
    ) -> Vector | None:
        known = embeddings.known(key.exact)
        if known is not None:
            return known
        computing = embeddings.begin(key.exact, key.text)
        done, _ = await asyncio.wait((computing,), timeout=timeout_s)
        if not done:
            raise TimeoutError
        return computing.result()


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
