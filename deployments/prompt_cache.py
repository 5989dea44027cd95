"""Serve shell of the prompt cache: one deployment, look-ups and stores as packed bytes."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from ray import serve

from cache.prompt_cache import CacheConfig, PromptCache
from deployments import wire
from deployments.cache_service import CacheService
from deployments.embedder import EmbedText, load_embedder
from deployments.embedder_thread import EmbedderThread

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
        embed: EmbedText | None = None
        if spec.embedder_folder is not None:
            try:
                embedder = load_embedder(spec.embedder_folder)
                embedder.embed(["warm up"])
                embed = EmbedderThread(embedder).embed
            except Exception:
                # Answers matter more than hits: without its embedder the cache is exact only.
                logger.exception("the embedder does not load; the cache answers exact repeats only")
        self._service = CacheService(
            PromptCache(spec.config, clock=time.monotonic),
            embed=embed,
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


PromptCacheDeployment = serve.deployment(
    name="PromptCache", max_ongoing_requests=1000, health_check_period_s=5
)(PromptCacheReplica)
