"""Serve shell of the prompt cache: one deployment, look-ups and stores as packed bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray import serve

from cache.prompt_cache import CacheConfig, PromptCache
from deployments import wire
from deployments.cache_service import CacheService
from deployments.embedder import Embedder, Vector

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache replica is built from."""

    config: CacheConfig
    embedder_folder: Path | None
    embedder_revision: str
    epoch: int
    embed_timeout_s: float
    log_level: str


class PromptCacheReplica:
    """One cache, its embedder, and what Serve calls of them."""

    def __init__(self, spec: CacheSpec) -> None:
        logging.getLogger().setLevel(spec.log_level)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._embedder: Embedder | None = None
        if spec.embedder_folder is not None:
            try:
                self._embedder = Embedder(spec.embedder_folder)
                self._embedder.embed(["warm up"])
            except Exception:
                # Answers matter more than hits: without its embedder the cache is exact only.
                logger.exception("the embedder does not load; the cache answers exact repeats only")
        self._service = CacheService(
            PromptCache(spec.config, clock=time.monotonic),
            embed=self._embed_text if self._embedder is not None else None,
            embedder_revision=spec.embedder_revision,
            epoch=spec.epoch,
            embed_timeout_s=spec.embed_timeout_s,
        )

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises."""
        self._service.check_health()

    async def lookup(self, payload: bytes) -> bytes:
        return wire.encode(await self._service.lookup(wire.decode_lookup_call(payload)))

    async def store(self, payload: bytes) -> None:
        self._service.store(wire.decode_store_call(payload))

    async def stats(self) -> dict[str, Any]:
        return self._service.stats()

    async def _embed_text(self, text: str) -> Vector | None:
        vector: Vector | None = await self._embed_batch(text)
        return vector

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.0)
    async def _embed_batch(self, texts: list[str]) -> list[Vector | None]:
        assert self._embedder is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._embedder.embed, texts)


PromptCacheDeployment = serve.deployment(
    name="PromptCache", max_ongoing_requests=1000, health_check_period_s=5
)(PromptCacheReplica)
