"""Serve shell of the prompt cache: one deployment, look-ups and stores as packed bytes."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import serve
from tokenizers import Tokenizer

from cache.budget import BudgetConfig, ErrorBudget
from cache.decision import Decider
from cache.prompt_cache import CacheConfig, PromptCache
from cache.reading import understand
from cache.verifier import Verifier
from cache.wall_clock import WallClock
from deployments import wire
from deployments.cache_admin import CacheAdmin
from deployments.cache_service import CacheService
from deployments.cache_store import StoreSpec, open_store
from deployments.embedder import EmbedText, load_embedder
from deployments.embedder_thread import EmbedderThread

logger = logging.getLogger(__name__)


METERED_CATEGORIES = 20
"""A metric of each of thousands of tenants would be too many."""
VERIFIER_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
"""The verifier knows the vectors of this model and of no other."""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache replica is built from.

    Args:
        budget: None serves the same wording only.
    """

    config: CacheConfig
    embedder_folder: Path | None
    embedder_revision: str
    epoch: int
    embed_timeout_s: float
    log_level: str
    store: StoreSpec
    budget: BudgetConfig | None = None


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
        verifier = None if embed is None or spec.budget is None else _verifier()
        budget = None
        if verifier is not None:
            budget = ErrorBudget(spec.budget, prior=verifier.calibration)
        clock = WallClock()
        self._cache = cache = PromptCache(
            spec.config,
            clock=clock,
            store=open_store(spec.store, serve.get_replica_context().app_name, clock),
            decider=None if budget is None else _decider(spec.config, budget, verifier),
        )
        self._service = CacheService(
            cache,
            embed=embed,
            embedder_revision=spec.embedder_revision,
            epoch=spec.epoch,
            embed_timeout_s=spec.embed_timeout_s,
            count_tokens=_token_counter(None if embed is None else spec.embedder_folder),
        )
        self._admin = CacheAdmin(self._service, cache, budget=budget, verifier=verifier)

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises."""
        self._service.check_health()

    async def lookup(self, payload: bytes) -> bytes:
        return wire.encode(await self._service.lookup(wire.decode_lookup_call(payload)))

    async def store(self, payload: bytes) -> None:
        self._service.store(wire.decode_store_call(payload))

    async def embed(self, payload: bytes) -> bytes:
        """Packed `EmbedCall` in, packed `EmbedReply` out."""
        return wire.encode(await self._service.embed(wire.decode_embed_call(payload)))

    async def check(self, payload: bytes) -> bytes:
        """Packed `CheckCall` in, packed `CheckReply` out."""
        found = await self._service.check(wire.decode_check_call(payload))
        return wire.encode(wire.CheckReply(agreement=found))

    async def manage(self, payload: bytes) -> bytes:
        """Packed `ManageCall` in, JSON out; see `CacheAdmin`."""
        return await self._admin.manage(wire.decode_manage_call(payload))

    async def epoch(self) -> str:
        return self._service.epoch()

    async def stats(self) -> dict[str, Any]:
        return self._service.stats() | {"budget": self._admin.budget_stats(METERED_CATEGORIES)}

    def __del__(self) -> None:
        """Called by Serve when the replica has served its last request."""
        if hasattr(self, "_cache"):
            self._cache.close()


PromptCacheDeployment = serve.deployment(
    name="PromptCache", max_ongoing_requests=1000, health_check_period_s=5
)(PromptCacheReplica)


def _token_counter(folder: Path | None) -> Callable[[str], int]:
    """Counts the tokens of a text as the embedder has them; 0 without an embedder."""
    if folder is None:
        return lambda text: 0
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text).ids)


def _verifier() -> Verifier | None:
    """The shipped verifier, warm; without it the same wording is served only."""
    try:
        verifier = Verifier.load()
        understand("warm up")
    except Exception:
        logger.exception("the verifier does not load; the cache serves the same wording only")
        return None
    return verifier


def _decider(config: CacheConfig, budget: ErrorBudget, verifier: Verifier | None) -> Decider:
    # The coin that says what is checked must not be guessed from outside.
    return Decider(
        budget=budget,
        verifier=verifier,
        rng=random.SystemRandom(),
        same_wording_similarity=config.semantic_threshold,
    )
