"""What is asked of the cache, beside answers: vectors, an operator's orders, comparisons."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from app.front_cache import FrontCache
from app.ports import CachePort
from deployments import wire
from protocol.errors import InvalidRequest, ModelNotFound, Overloaded, ServingError

logger = logging.getLogger(__name__)

EMBED_TIMEOUT_S = 60.0
"""For all the texts of one client's request, which wait for the cache's own."""
COMPARE_TIMEOUT_S = 5.0


class CacheDesk:
    """Asks the cache.

    Args:
        cache: None where it is switched off.
        front: forgets what the cache is told to forget.
    """

    def __init__(self, cache: CachePort | None, front: FrontCache | None) -> None:
        self._cache = cache
        self._front = front

    async def embed(self, texts: tuple[str, ...]) -> wire.EmbedReply:
        """See `serving.ApiGraph.embed`."""
        if self._cache is None:
            raise ModelNotFound("the cache is off, and its embedder with it", param="model")
        call = wire.EmbedCall(texts=texts)
        try:
            async with asyncio.timeout(EMBED_TIMEOUT_S):
                raw = await self._cache.embed(wire.encode(call))
        except Exception as error:
            logger.warning("texts cannot be embedded: %r", error)
            raise Overloaded("no embedder answers", retry_after_s=1) from error
        reply = wire.decode_embed_reply(raw)
        if reply.refused is not None:
            raise ServingError.from_info(reply.refused)
        return reply

    async def manage(self, call: wire.ManageCall) -> list[Any]:
        """What each cache replica replies to an operator.

        Raises:
            ServingError: it is refused, or the cache is off or does not answer.
        """
        if self._cache is None:
            raise InvalidRequest("the cache is off")
        try:
            replies = [
                msgspec.json.decode(raw) for raw in await self._cache.manage(wire.encode(call))
            ]
        except Exception as error:
            logger.warning("the cache does not do as it is told: %r", error)
            raise Overloaded("the cache does not answer", retry_after_s=1) from error
        if not replies:
            raise Overloaded("no cache replica is ready", retry_after_s=1)
        for reply in replies:
            if "refused" in reply:
                raise InvalidRequest(**reply["refused"])
        if self._front is not None and call.action in ("delete", "feedback", "quarantine"):
            self._front.clear()
        return [reply["done"] for reply in replies]

    async def compare(self, check: wire.Check, stored: bytes, given: bytes) -> None:
        """Has the cache compare two answers; one that was wrong is condemned everywhere."""
        assert self._cache is not None, "only what the cache gave is compared"
        call = wire.CheckCall(check=check, stored=stored, given=given)
        async with asyncio.timeout(COMPARE_TIMEOUT_S):
            reply = wire.decode_check_reply(await self._cache.check(wire.encode(call)))
            if reply.agreement == "wrong":
                which = wire.EntryQuery(id=check.id)
                await self.manage(wire.ManageCall(action="quarantine", which=which))
