"""Answers from the cache and into it: L1 in this process, and the tiers behind the cache port.

Any failure of the cache is a miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.breaker import Breaker, SwitchedOff
from app.epoch_watch import EpochWatch
from app.front_cache import FrontCache, Kept
from app.model_bus import Spawn
from app.ports import CachePort
from app.single_flight import flight_key
from deployments import wire
from deployments.cache_key import cache_key
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal, Timing, TokenLog

logger = logging.getLogger(__name__)

MAX_OVER = 256
"""Answers that came to nothing, of which the cache has not been told yet."""
STORE_TIMEOUT_S = 5.0
"""No one waits longer than a look-up may take; this only bounds what a dead cache leaves behind."""


@dataclass(frozen=True)
class Found:
    """What a look-up brought: on a hit `log`, and what else is to be done with it.

    `flight` names a running request of this ingress whose answer does for this one.
    """

    outcome: CacheOutcome = field(default_factory=CacheOutcome)
    log: TokenLog | None = None
    stored: bytes = b""
    check: wire.Check | None = None
    flight: str | None = None


class AnswerCache:
    """The cache, as those see it who open streams.

    Args:
        front: holds answers in this process.
        ingress: this ingress's name.
        lookup_timeout_s: for one whole look-up, its embedding included.
    """

    def __init__(
        self,
        cache: CachePort,
        front: FrontCache | None,
        *,
        ingress: str,
        lookup_timeout_s: float,
        spawn: Spawn,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._front = front
        self._ingress = ingress
        self._lookup_timeout_s = lookup_timeout_s
        self._spawn = spawn
        self._clock = clock
        self._breaker = Breaker(clock=clock)
        self._epochs: EpochWatch | None = None
        if front is not None:
            self._epochs = EpochWatch(cache.epochs, front.clear, spawn=spawn, clock=clock)
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._over: deque[str] = deque(maxlen=MAX_OVER)
        self.errors_total = 0

    @property
    def is_storing(self) -> bool:
        """Whether an answer is on its way into the cache."""
        return bool(self._storing)

    def breaker_stats(self) -> dict[str, Any]:
        """See `Breaker.stats`."""
        return self._breaker.stats()

    def at_hand(self, key: str, revision: str, started_s: float) -> Found | None:
        """The answer to the request of that `flight_key`, if this ingress holds it itself."""
        if self._front is None or self._epochs is None:
            return None
        self._epochs.wake()
        found = self._front.find(key, revision) if self._epochs.is_fresh else None
        if found is None:
            return None
        kept, age_s = found
        outcome = CacheOutcome(
            outcome=kept.outcome,
            tier="L1",
            similarity=kept.similarity,
            age_s=round(age_s, 3),
            id=kept.id,
        )
        return Found(outcome, self._replay(kept.stored, started_s))

    async def look_up(
        self, request: InferenceRequest, revision: str, started_s: float, flight: str = ""
    ) -> Found:
        """What the cache decided and, on a hit, the whole answer; any failure is a miss.

        Args:
            flight: names the request, where it may share an answer with another that is running.
        """
        try:
            return await self._breaker.call(
                lambda: self._ask(request, revision, started_s, flight), self._lookup_timeout_s
            )
        except SwitchedOff:
            return Found(CacheOutcome(reason="cache is switched off for a moment"))
        except TimeoutError:
            self.errors_total += 1
            return Found(CacheOutcome(reason="cache timed out"))
        except Exception as error:
            self.errors_total += 1
            logger.warning("cache look-up failed, taken as a miss: %s", type(error).__name__)
            return Found(CacheOutcome(reason="cache failed"))

    def give_up(self, flight: str | None) -> None:
        """Says, with the next look-up, that nobody needs to wait for that request's answer."""
        if flight:
            self._over.append(flight)

    def keep(
        self,
        request: InferenceRequest,
        revision: str,
        stored: wire.StoredStream,
        packed: bytes,
        entry_id: str | None,
    ) -> None:
        """Holds an answer at hand and begins to store it.

        No client waits for that, but whoever asks the same again at once does: they
        have seen the end of the first answer and may expect to hit it.

        Args:
            packed: `stored`, packed.
        """
        self._hold(request, revision, Kept(stored, entry_id), len(packed), 0.0)
        if self._breaker.state != "closed":
            return
        terminal = stored.terminal
        call = wire.StoreCall(
            request=request,
            model_revision=revision,
            completion_tokens=terminal.usage.completion_tokens,
            stored=packed,
            is_truncated=terminal.finish_reason == "length",
        )
        question = _question(request)
        task = self._spawn(self._store(wire.encode(call)))
        self._storing[question] = task

        def forget(done: asyncio.Task[None]) -> None:
            # An equal question's store may have taken this one's place.
            if self._storing.get(question) is done:
                del self._storing[question]

        task.add_done_callback(forget)

    async def _ask(
        self, request: InferenceRequest, revision: str, started_s: float, flight: str
    ) -> Found:
        await self._stored(request)
        call = wire.LookupCall(
            request=request,
            model_revision=revision,
            flight=flight,
            ingress=self._ingress,
            over=tuple(self._over),
        )
        self._over.clear()
        reply = wire.decode_lookup_reply(await self._cache.lookup(wire.encode(call)))
        outcome = reply.outcome
        if reply.stored is None:
            return Found(outcome, check=reply.check, flight=reply.flight)
        stored = wire.decode_stored(reply.stored)
        log = self._replay(stored, started_s)
        is_current = self._epochs is not None and self._epochs.knows(reply.epoch)
        if reply.promote and is_current and outcome.outcome in ("exact", "semantic"):
            similarity = 1.0 if outcome.similarity is None else outcome.similarity
            kept = Kept(stored, outcome.id, outcome.outcome, similarity)
            self._hold(request, revision, kept, len(reply.stored), outcome.age_s or 0.0)
        return Found(outcome, log, reply.stored, reply.check)

    def _hold(
        self,
        request: InferenceRequest,
        revision: str,
        kept: Kept,
        size_bytes: int,
        age_s: float,
    ) -> None:
        """Keeps an answer at hand for whoever asks exactly the same."""
        if request.cache == "refresh":
            # It takes the place of the one that others get.
            request = msgspec.structs.replace(request, cache="auto")
        key = flight_key(request)
        if self._front is not None and key is not None:
            self._front.keep(key, revision, kept, size_bytes, age_s)

    def _replay(self, stored: wire.StoredStream, started_s: float) -> TokenLog:
        """The answer as it was, with its own usage, in the time that it took now."""
        log = TokenLog()
        log.append(*stored.deltas)
        elapsed_ms = (self._clock() - started_s) * 1000
        timing = Timing(queue_ms=0.0, ttft_ms=elapsed_ms, total_ms=elapsed_ms)
        terminal = stored.terminal
        log.finish(
            Terminal(finish_reason=terminal.finish_reason, usage=terminal.usage, timing=timing)
        )
        return log

    async def _stored(self, request: InferenceRequest) -> None:
        """Waits until an equal request's answer, if one is just being stored, can be found."""
        if self._storing and (storing := self._storing.get(_question(request))) is not None:
            await asyncio.wait((storing,))

    async def _store(self, payload: bytes) -> None:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._cache.store(payload)
        except Exception as error:
            self.errors_total += 1
            self._breaker.failed()
            logger.warning("cache store failed: %s", type(error).__name__)


def _question(request: InferenceRequest) -> str:
    """Equal for requests that the cache takes for equal."""
    return cache_key(request, model_revision="", embedder_revision="", epoch=0).exact
