"""The graph as a `StreamOpener`: cache first, then the model, and back into the cache.

Speaks to both deployments through two small ports, so that a test runs it
without Serve. Any failure of the cache is a miss; the loss of a model replica is
a pause (see `generation.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from app.answer_cache import AnswerCache, Found
from app.background import Background
from app.cache_desk import CacheDesk
from app.front_cache import FrontCache
from app.generation import FailoverLimits, Generation
from app.live_streams import LiveStreams, stream_of
from app.model_bus import ModelBus
from app.model_desk import ModelDesk
from app.ports import CachePort, ModelPort
from app.resume import ResumeTokens
from app.serving import Stream
from app.shadow_checks import ShadowChecks
from app.single_flight import SingleFlight, flight_key
from app.takeover import Takeover
from deployments import wire
from deployments.cache_key import is_cacheable
from deployments.metrics import GraphStats, IngressStats
from deployments.replica_board import ReplicaBoard
from deployments.wire import ModelInfo
from protocol.errors import CacheMiss, ModelNotFound
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal

logger = logging.getLogger(__name__)

NOWHERE_ELSE = ""
"""Stands for the replica in the token of a stream that only this ingress can resume."""


@dataclass(frozen=True)
class GraphLimits:
    """Bounds on what the graph takes on and waits for.

    Args:
        lookup_timeout_s: for one whole look-up, its embedding included.
        max_pending: unfinished requests of this ingress on the model.
        watchdog_s: silence or standstill after which a model replica is given up.
    """

    lookup_timeout_s: float
    max_pending: int
    watchdog_s: float
    failover: FailoverLimits


class Graph:
    """Opens streams, and is the one door to the deployments.

    Args:
        cache: None switches the cache off.
        board: of the model's replicas.
        ingress: this ingress's name, unique among all that ever were.
        front: holds answers in this process; nothing without a cache.
        shares_by_meaning: whether a request may wait for the answer to another that means the
            same, as it may for an equal one's.
    """

    def __init__(
        self,
        model: ModelPort,
        cache: CachePort | None,
        board: ReplicaBoard,
        *,
        ingress: str,
        limits: GraphLimits,
        tokens: ResumeTokens,
        front: FrontCache | None = None,
        shares_by_meaning: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shares_by_meaning = shares_by_meaning
        self._model = model
        self._cache = cache
        self._front = None if cache is None else front
        self._board = board
        self._tokens = tokens
        self._clock = clock
        self._background = Background()
        spawn = self._background.spawn
        self._flights = SingleFlight(
            context=self._background.context,
            token_of=lambda shared, request: self._token_here(request),
        )
        self._bus = ModelBus(
            model,
            board,
            ingress=ingress,
            watchdog_s=limits.watchdog_s,
            clock=clock,
            spawn=spawn,
        )
        self._live = LiveStreams(
            model,
            self._bus,
            board,
            limits=limits.failover,
            max_pending=limits.max_pending,
            before_end=self._keep,
            spawn=spawn,
            clock=clock,
        )
        self._takeover = Takeover(
            model,
            self._bus,
            board,
            self._live,
            timeout_s=limits.failover.submit_timeout_s,
            clock=clock,
        )
        self._model_desk = ModelDesk(
            model, accept_timeout_s=limits.failover.accept_timeout_s, spawn=spawn, clock=clock
        )
        self._cache_desk = CacheDesk(cache, self._front)
        self._checks = ShadowChecks(
            board,
            new_generation=self._live.new_check,
            report=self._cache_desk.compare,
            spawn=spawn,
        )
        self._answers: AnswerCache | None = None
        if cache is not None:
            self._answers = AnswerCache(
                cache,
                front,
                ingress=ingress,
                lookup_timeout_s=limits.lookup_timeout_s,
                spawn=spawn,
                clock=clock,
            )

    @property
    def is_storing(self) -> bool:
        """Whether an answer is on its way into the cache."""
        return self._answers is not None and self._answers.is_storing

    async def model_info(self) -> ModelInfo:
        """What the model replicas serve, as of a few seconds ago.

        Raises:
            ServingError: no model replica answers.
        """
        return await self._model_desk.info()

    async def check_ready(self) -> None:
        """Returns when a completion would work now.

        Raises:
            ServingError: it would not.
        """
        await self._model_desk.ask_info()

    async def stats(self) -> GraphStats:
        """What models and caches tell of themselves; one that does not answer is left out."""
        return GraphStats(
            models=await _stats_of(self._model),
            caches=[] if self._cache is None else await _stats_of(self._cache),
        )

    def own_stats(self) -> IngressStats:
        """What this ingress counts."""
        board = self._board
        return IngressStats(
            ingress=self._bus.ingress,
            cache_call_errors=0 if self._answers is None else self._answers.errors_total,
            front_hits=0 if self._front is None else self._front.hits_total,
            front_entries=0 if self._front is None else self._front.entries,
            front_bytes=0 if self._front is None else self._front.bytes,
            coalesced_total=self._flights.coalesced_total,
            failovers_total=self._live.failovers_total,
            resumes_total=self._takeover.resumes_total,
            breaker={} if self._answers is None else self._answers.breaker_stats(),
            checks=self._checks.stats(),
            routing={
                "prefix": board.prefix_routed_total,
                "overflow": board.overflow_total,
                "other": board.routed_total - board.prefix_routed_total - board.overflow_total,
            },
        )

    async def open_stream(self, request: InferenceRequest) -> Stream:
        started_s = self._clock()
        info = await self.model_info()
        if request.model != info.id:
            raise ModelNotFound(
                f"model {request.model[:200]!r} is not served here, {info.id!r} is", param="model"
            )
        attempts = itertools.count()

        key = flight_key(request)

        async def answer() -> Stream:
            own, flight = request, self._shared_as(request, key)
            if attempt := next(attempts):
                # The one of this name was taken to another ingress, and goes on there. Others
                # may ride on this one: it must not wait for one of them.
                name = f"{request.request_id}.{attempt}"
                own, flight = msgspec.structs.replace(request, request_id=name), ""
            return await self._answer(own, info.revision, started_s, flight)

        if key is None:
            return await answer()
        if self._answers is not None:
            at_hand = self._stream_of(request, self._answers.at_hand(key, info.revision, started_s))
            if at_hand is not None:
                return at_hand
        return await self._flights.open(key, request, answer)

    async def resume_stream(self, token: str, tenant: str) -> Stream:
        named = self._tokens.open(token, tenant)
        info = await self.model_info()
        generation = await self._takeover.resume(named, info.revision)
        return stream_of(generation, CacheOutcome(), token)

    async def warm(self, request: InferenceRequest) -> None:
        """Has the replica that the request will go to compute what is known of its prompt.

        Returns when that is done or given up.
        """
        if request.cache == "only" or not self._model_desk.may_serve(request.model):
            return
        self._checks.step_aside()
        await self._model_desk.warm(request)

    async def tokenize(self, call: wire.TokenizeCall) -> wire.TokenizeReply:
        return await self._model_desk.tokenize(call)

    async def embed(self, texts: tuple[str, ...]) -> wire.EmbedReply:
        return await self._cache_desk.embed(texts)

    async def manage_cache(self, call: wire.ManageCall) -> list[Any]:
        """What each cache replica replies to an operator.

        Raises:
            ServingError: it is refused, or the cache is off or does not answer.
        """
        return await self._cache_desk.manage(call)

    async def close(self) -> None:
        """Ends the links to the model, and whatever goes on in the background."""
        await self._bus.close()
        await self._background.close()

    def _shared_as(self, request: InferenceRequest, key: str | None) -> str:
        """Under what name others that mean the same may share the answer; empty: not at all.

        Nobody shares what ends by the clock of one of them, or may end in calls of tools, which
        are never given again.
        """
        is_shared = self._shares_by_meaning and request.timeout_s is None and not request.tools
        return key if is_shared and key is not None else ""

    async def _share(self, request: InferenceRequest, found: Found) -> Stream | None:
        """The answer of the running request that was found; None when there is none to be had."""
        assert found.flight is not None
        stream = await self._flights.join(found.flight, request)
        if stream is None:
            if self._answers is not None:
                self._answers.give_up(found.flight)
            if found.check is not None:
                self._checks.drop("interrupted")
            return None
        if (check := found.check) is not None:
            self._at_whole_end(stream, lambda whole: self._checks.offer(request, check, whole))
        return dataclasses.replace(stream, cache=found.outcome)

    def _at_whole_end(self, stream: Stream, use: Callable[[bytes], None]) -> None:
        """Has the packed answer used when it has come whole."""
        log = stream.log

        def look() -> None:
            if (terminal := log.terminal) is None:
                return
            unsubscribe()
            if terminal.finish_reason in ("stop", "length"):
                use(wire.encode(wire.StoredStream(deltas=log.deltas, terminal=terminal)))
            else:
                self._checks.drop("interrupted")

        unsubscribe = log.subscribe(look)
        look()

    async def _answer(
        self, request: InferenceRequest, revision: str, started_s: float, flight: str
    ) -> Stream:
        """From the cache, or else from the model."""
        found = Found()
        if self._answers is not None and is_cacheable(request) and request.cache != "refresh":
            found = await self._answers.look_up(request, revision, started_s, flight)
            if found.flight is not None:
                if (shared := await self._share(request, found)) is not None:
                    return shared
                reason = "an answer that was waited for did not come"
                similarity = found.outcome.similarity
                found = Found(CacheOutcome(similarity=similarity, reason=reason))
            if found.log is not None and found.check is not None:
                self._checks.offer(request, found.check, found.stored)
            if (stream := self._stream_of(request, found)) is not None:
                return stream
        if request.cache == "only":
            raise CacheMiss("no cached answer fits this request", param="cache")
        self._live.check_room()
        self._checks.step_aside()
        generation = await self._live.start(request, revision, started_s, found)
        token = self._tokens.sign(request.request_id, generation.replica, request.tenant)
        return stream_of(generation, found.outcome, token)

    def _stream_of(self, request: InferenceRequest, found: Found | None) -> Stream | None:
        """The stream of an answer that was found whole."""
        if found is None or found.log is None:
            return None
        token = self._token_here(request)
        return Stream(request=request, log=found.log, cache=found.outcome, token=token)

    def _token_here(self, request: InferenceRequest) -> str:
        """A token for a stream that no model replica knows by this name."""
        return self._tokens.sign(request.request_id, NOWHERE_ELSE, request.tenant)

    def _keep(self, ended: Generation, terminal: Terminal, revision: str, found: Found) -> None:
        """Keeps an answer that ended by itself or at its limit, if it may be reused."""
        request = ended.request
        is_whole = terminal.finish_reason in ("stop", "length")
        answered_by = None if ended.accepted is None else ended.accepted.revision
        # In mid-rollout another model may have answered than the one we were told of.
        is_ours = is_whole and answered_by == revision
        if self._answers is None or not is_ours or not is_cacheable(request):
            if self._answers is not None:
                self._answers.give_up(flight_key(request))
            if found.check is not None:
                self._checks.drop("interrupted")
            return
        stored = wire.StoredStream(deltas=ended.log.deltas, terminal=terminal)
        packed = wire.encode(stored)
        if found.check is not None and found.check.stored is not None:
            self._checks.report(found.check, found.check.stored, packed)
        self._answers.keep(request, revision, stored, packed, found.outcome.id)


async def _stats_of(port: ModelPort | CachePort) -> list[dict[str, Any]]:
    try:
        return await port.stats()
    except Exception as error:
        logger.warning("stats are incomplete: %r", error)
        return []
