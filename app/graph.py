"""The graph as a `StreamOpener`: cache first, then the model, and back into the cache.

Speaks to both deployments through two small ports, so that a test runs it
without Serve. Any failure of the cache is a miss; the loss of a model replica is
a pause (see `generation.py`).
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from app.breaker import Breaker, SwitchedOff
from app.epoch_watch import EpochWatch
from app.front_cache import FrontCache, Kept
from app.generation import FailoverLimits, Generation, SubmitPort
from app.model_bus import BusPort, ModelBus, Nobody
from app.resume import Named, ResumeTokens, resume_expired
from app.serving import Stream
from app.shadow_checks import ShadowChecks
from app.single_flight import SingleFlight, flight_key
from deployments import wire
from deployments.cache_key import cache_key, is_cacheable
from deployments.metrics import GraphStats, IngressStats
from deployments.prompt_chain import prompt_chain
from deployments.replica_board import ReplicaBoard
from deployments.wire import ModelInfo
from protocol.errors import (
    CacheMiss,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServingError,
)
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal, Timing, TokenLog

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", wire.TokenizeReply, wire.EmbedReply)

INFO_MAX_AGE_S = 10.0
"""A rollout may bring another model: after this time the replicas are asked again what they serve."""
INFO_PATIENCE_S = 1.0
INFO_TIMEOUT_S = 2.0
"""A replica tells it at once: while none is there, probes and first requests hear so and do not hang."""
FIND_GRACE_S = 0.25
"""Time for the other replicas to tell of a stream that one has found."""
NOWHERE_ELSE = ""
"""Stands for the replica in the token of a stream that only this ingress can resume."""
CHECK_LIMITS = FailoverLimits(
    accept_timeout_s=1.0, submit_timeout_s=1.0, failover_timeout_s=1.0, max_failovers=0
)
"""A check that meets any trouble is dropped."""
STORE_TIMEOUT_S = 5.0
"""No one waits longer than a look-up may take; this only bounds what a dead cache leaves behind."""
EMBED_TIMEOUT_S = 60.0
"""For all the texts of one client's request, which wait for the cache's own."""
WARM_TIMEOUT_S = 10.0
"""What was computed until then stays, and the next piece of the prompt goes on behind it."""


class ModelPort(BusPort, SubmitPort, Protocol):
    async def warm(self, payload: bytes, route: wire.Route) -> None:
        """Has a replica compute what is known of a packed `InferenceRequest`, and waits for it."""
        ...

    async def tokenize(self, payload: bytes) -> bytes:
        """Packed `TokenizeCall` in, packed `TokenizeReply` out."""
        ...

    async def find(self, name: str, replica: str) -> bytes:
        """A packed `Found`, or nothing when that replica has no such stream."""
        ...

    async def attach(self, name: str, ingress: str, replica: str) -> bytes:
        """A packed `Attached`, or nothing when that replica has no such stream."""
        ...

    async def info(self) -> bytes: ...

    async def stats(self) -> list[dict[str, Any]]:
        """One mapping a replica."""
        ...


class CachePort(Protocol):
    async def lookup(self, payload: bytes) -> bytes: ...

    async def store(self, payload: bytes) -> None: ...

    async def embed(self, payload: bytes) -> bytes:
        """Packed `EmbedCall` in, packed `EmbedReply` out."""
        ...

    async def check(self, payload: bytes) -> bytes:
        """Packed `CheckCall` in, packed `CheckReply` out."""
        ...

    async def manage(self, payload: bytes) -> list[bytes]:
        """Packed `ManageCall` in, the JSON of each replica out."""
        ...

    async def epochs(self) -> list[str]:
        """What each replica says its epoch is."""
        ...

    async def stats(self) -> list[dict[str, Any]]:
        """One mapping a replica."""
        ...


@dataclass(frozen=True)
class _Found:
    """What a look-up brought: on a hit `log`, and what else is to be done with it."""

    outcome: CacheOutcome
    log: TokenLog | None = None
    stored: bytes = b""
    check: wire.Check | None = None


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
    """Opens streams.

    Args:
        cache: None switches the cache off.
        board: of the model's replicas.
        ingress: this ingress's name, unique among all that ever were.
        front: holds answers in this process; nothing without a cache.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._front = None if cache is None else front
        self._model = model
        self._cache = cache
        self._board = board
        self._limits = limits
        self._tokens = tokens
        self._clock = clock
        self._info: ModelInfo | None = None
        self._info_at_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        # In HAProxy mode Serve cancels every call made in a request's context when its client
        # leaves: whatever outlives one request runs in this one.
        self._own_context = contextvars.copy_context()
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._breaker = Breaker(clock=clock)
        self._flights = SingleFlight(
            context=self._own_context,
            token_of=lambda shared, request: self._token_here(request),
        )
        self._bus = ModelBus(
            model,
            board,
            ingress=ingress,
            watchdog_s=limits.watchdog_s,
            clock=clock,
            spawn=self._spawn,
        )
        self._checks = ShadowChecks(
            board,
            new_generation=self._new_check,
            report=self._report_check,
            spawn=self._spawn,
        )
        self._epochs: EpochWatch | None = None
        if cache is not None and self._front is not None:
            self._epochs = EpochWatch(
                cache.epochs, self._front.clear, spawn=self._spawn, clock=clock
            )
        self._live: dict[str, Generation] = {}
        self.cache_errors_total = 0
        self.failovers_total = 0
        self.resumes_total = 0

    async def model_info(self) -> ModelInfo:
        """What the model replicas serve, as of a few seconds ago.

        Raises:
            ServingError: no model replica answers.
        """
        if self._info is None:
            return await self._ask_info()
        if self._clock() - self._info_at_s >= INFO_MAX_AGE_S:
            if self._asking is None:
                self._asking = self._spawn(self._renew_info())
            # One that hangs is not waited for: the others still serve what was told before.
            await asyncio.wait((self._asking,), timeout=INFO_PATIENCE_S)
        return self._info

    async def check_ready(self) -> None:
        """Returns when a completion would work now.

        Raises:
            ServingError: it would not.
        """
        await self._ask_info()

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
            cache_call_errors=self.cache_errors_total,
            front_hits=0 if self._front is None else self._front.hits_total,
            front_entries=0 if self._front is None else self._front.entries,
            front_bytes=0 if self._front is None else self._front.bytes,
            coalesced_total=self._flights.coalesced_total,
            failovers_total=self.failovers_total,
            resumes_total=self.resumes_total,
            breaker={} if self._cache is None else self._breaker.stats(),
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

        async def answer() -> Stream:
            own = request
            if attempt := next(attempts):
                # The one of this name was taken to another ingress, and goes on there.
                name = f"{request.request_id}.{attempt}"
                own = msgspec.structs.replace(request, request_id=name)
            return await self._answer(own, info, started_s)

        key = flight_key(request)
        if key is None:
            return await answer()
        return self._at_hand(key, request, info, started_s) or await self._flights.open(
            key, request, answer
        )

    def _at_hand(
        self, key: str, request: InferenceRequest, info: ModelInfo, started_s: float
    ) -> Stream | None:
        """The answer, if this ingress holds it itself."""
        if self._front is None or self._epochs is None:
            return None
        self._epochs.wake()
        found = self._front.find(key, info.revision) if self._epochs.is_fresh else None
        if found is None:
            return None
        kept, age_s = found
        return Stream(
            request=request,
            log=self._replay(kept.stored, started_s),
            cache=CacheOutcome(
                outcome=kept.outcome,
                tier="L1",
                similarity=kept.similarity,
                age_s=round(age_s, 3),
                id=kept.id,
            ),
            token=self._token_here(request),
        )

    async def _answer(self, request: InferenceRequest, info: ModelInfo, started_s: float) -> Stream:
        """From the cache, or else from the model."""
        found = _Found(CacheOutcome())
        if self._cache is not None and is_cacheable(request) and request.cache != "refresh":
            found = await self._look_up(self._cache, request, info, started_s)
            if found.log is not None:
                if found.check is not None:
                    self._checks.offer(request, found.check, found.stored)
                token = self._token_here(request)
                return Stream(request=request, log=found.log, cache=found.outcome, token=token)
        if request.cache == "only":
            raise CacheMiss("no cached answer fits this request", param="cache")
        return await self._generate(request, info, found, started_s)

    def _token_here(self, request: InferenceRequest) -> str:
        """A token for a stream that no model replica knows by this name."""
        return self._tokens.sign(request.request_id, NOWHERE_ELSE, request.tenant)

    async def tokenize(self, call: wire.TokenizeCall) -> wire.TokenizeReply:
        raw = await self._answer_of(self._model.tokenize(wire.encode(call)))
        return _unless_refused(wire.decode_tokenize_reply(raw))

    async def embed(self, texts: tuple[str, ...]) -> wire.EmbedReply:
        if self._cache is None:
            raise ModelNotFound("the cache is off, and its embedder with it", param="model")
        call = wire.EmbedCall(texts=texts)
        try:
            async with asyncio.timeout(EMBED_TIMEOUT_S):
                raw = await self._cache.embed(wire.encode(call))
        except Exception as error:
            logger.warning("texts cannot be embedded: %r", error)
            raise Overloaded("no embedder answers", retry_after_s=1) from error
        return _unless_refused(wire.decode_embed_reply(raw))

    async def warm(self, request: InferenceRequest) -> None:
        """Has the replica that the request will go to compute what is known of its prompt.

        Returns when that is done or given up.
        """
        is_served = self._info is None or request.model == self._info.id
        if request.cache == "only" or not is_served:
            return
        self._checks.step_aside()
        try:
            route = wire.Route(chain=prompt_chain(request), is_warm_up=True)
            async with asyncio.timeout(WARM_TIMEOUT_S):
                await self._model.warm(wire.encode(request), route)
        except Exception as error:
            # The request itself will tell, if anything is wrong.
            logger.info("request %s is not computed ahead: %r", request.request_id, error)

    async def resume_stream(self, token: str, tenant: str) -> Stream:
        named = self._tokens.open(token, tenant)
        info = await self.model_info()
        generation = self._live.get(named.stream)
        if generation is None:
            generation = await self._take_over(named, info)
        else:
            generation.unpark()
        return self._stream_of(generation, CacheOutcome(), token)

    async def _take_over(self, named: Named, info: ModelInfo) -> Generation:
        """Moves a stream from wherever it is to this ingress.

        Raises:
            ResumeExpired: no replica has it.
        """
        self._bus.expect(named.stream, Nobody())
        try:
            replica, attached = await self._attach(named)
        except BaseException:
            if named.stream not in self._live:
                self._bus.forget(named.stream)
            raise
        live = self._live.get(named.stream)
        if live is not None:
            # Somebody else asked for it too, and was faster.
            return live
        started_s = self._clock() - attached.age_s
        generation = self._new_generation(attached.submit.request, info, started_s)
        generation.adopt(replica, attached)
        self.resumes_total += 1
        return generation

    async def close(self) -> None:
        """Ends the links to the model, and whatever goes on in the background."""
        await self._bus.close()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew_info(self) -> None:
        try:
            await self._ask_info()
        except ServingError as error:
            logger.warning("no model replica tells what it serves: %s", error.message)
        finally:
            self._asking = None

    async def _ask_info(self) -> ModelInfo:
        self._info = wire.decode_info(await self._answer_of(self._model.info()))
        self._info_at_s = self._clock()
        return self._info

    async def _look_up(
        self, cache: CachePort, request: InferenceRequest, info: ModelInfo, started_s: float
    ) -> _Found:
        """What the cache decided and, on a hit, the whole answer; any failure is a miss."""
        call = wire.LookupCall(request=request, model_revision=info.revision)

        async def ask() -> _Found:
            await self._stored(request)
            reply = wire.decode_lookup_reply(await cache.lookup(wire.encode(call)))
            outcome = reply.outcome
            if reply.stored is None:
                return _Found(outcome, check=reply.check)
            stored = wire.decode_stored(reply.stored)
            log = self._replay(stored, started_s)
            is_current = self._epochs is not None and self._epochs.knows(reply.epoch)
            if reply.promote and is_current and outcome.outcome in ("exact", "semantic"):
                similarity = 1.0 if outcome.similarity is None else outcome.similarity
                kept = Kept(stored, outcome.id, outcome.outcome, similarity)
                self._hold(request, info.revision, kept, len(reply.stored), outcome.age_s or 0.0)
            return _Found(outcome, log, reply.stored, reply.check)

        try:
            return await self._breaker.call(ask, self._limits.lookup_timeout_s)
        except SwitchedOff:
            return _Found(CacheOutcome(reason="cache is switched off for a moment"))
        except TimeoutError:
            self.cache_errors_total += 1
            return _Found(CacheOutcome(reason="cache timed out"))
        except Exception as error:
            self.cache_errors_total += 1
            logger.warning("cache look-up failed, taken as a miss: %s", type(error).__name__)
            return _Found(CacheOutcome(reason="cache failed"))

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

    async def _attach(self, named: Named) -> tuple[str, wire.Attached]:
        """Has the replica that knows most of a stream move it to our bus.

        Raises:
            ResumeExpired: no replica has it.
        """
        copies = await self._find(named) if named.replica else []
        for replica in copies:
            try:
                async with asyncio.timeout(self._limits.failover.submit_timeout_s):
                    raw = await self._model.attach(named.stream, self._bus.ingress, replica)
            except Exception as error:
                logger.info("stream %s cannot be had from %s: %r", named.stream, replica, error)
                continue
            if raw:
                copies.remove(replica)
                await self._end_copies(named.stream, copies)
                return replica, wire.decode_attached(raw)
        raise resume_expired()

    async def _end_copies(self, name: str, replicas: list[str]) -> None:
        """Has replicas forget their old copies of a stream, and other ingresses those that they follow."""

        async def end(replica: str) -> None:
            await self._model.attach(name, self._bus.ingress, replica)
            await self._model.cancel((name,), self._bus.ingress, replica, keep=False)

        calls = [asyncio.create_task(end(replica)) for replica in replicas]
        if not calls:
            return
        _, late = await asyncio.wait(calls, timeout=FIND_GRACE_S)
        for call in late:
            call.cancel()
        failed = await asyncio.gather(*calls, return_exceptions=True)
        for replica, error in zip(replicas, failed, strict=True):
            if error is not None:
                logger.info("stream %s may still have a copy at %s: %r", name, replica, error)

    async def _find(self, named: Named) -> list[str]:
        """The replicas that have a stream, the newest copy first.

        After a failover it is not where its token says. All are asked at once; when one has it,
        those that are silent are not waited for much longer.
        """
        calls = {
            asyncio.create_task(self._model.find(named.stream, replica)): replica
            for replica in self._board.replicas | {named.replica}
        }
        found: dict[str, wire.Found] = {}
        waiting = set(calls)
        deadline_s = self._clock() + self._limits.failover.submit_timeout_s
        try:
            while waiting and (left_s := deadline_s - self._clock()) > 0:
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                for call in done:
                    if (error := call.exception()) is not None:
                        logger.info("%s cannot tell of a stream: %r", calls[call], error)
                    elif raw := call.result():
                        found[calls[call]] = wire.decode_found(raw)
                        deadline_s = min(deadline_s, self._clock() + FIND_GRACE_S)
        finally:
            for call in waiting:
                call.cancel()
        return sorted(found, key=lambda replica: msgspec.structs.astuple(found[replica]))[::-1]

    async def _generate(
        self, request: InferenceRequest, info: ModelInfo, found: _Found, started_s: float
    ) -> Stream:
        if len(self._live) >= self._limits.max_pending:
            limit = self._limits.max_pending
            raise Overloaded(
                f"{limit} requests are running or waiting, the limit", limit=limit, retry_after_s=1
            )
        self._checks.step_aside()
        generation = self._new_generation(request, info, started_s, found)
        try:
            await generation.start()
        except BaseException:
            self._live.pop(generation.name, None)
            raise
        token = self._tokens.sign(request.request_id, generation.replica, request.tenant)
        return self._stream_of(generation, found.outcome, token)

    def _new_generation(
        self,
        request: InferenceRequest,
        info: ModelInfo,
        started_s: float,
        found: _Found | None = None,
    ) -> Generation:
        def before_end(ended: Generation, terminal: Terminal) -> None:
            self._live.pop(ended.name, None)
            self.failovers_total += ended.failovers
            self._begin_store(ended, info, terminal, found or _Found(CacheOutcome()))

        generation = self._live[request.request_id] = Generation(
            request,
            self._bus,
            self._model,
            self._limits.failover,
            clock=self._clock,
            spawn=self._spawn,
            started_s=started_s,
            replicas=lambda: self._board.replicas,
            before_end=before_end,
        )
        return generation

    def _new_check(self, request: InferenceRequest) -> Generation:
        """A generation that no client waits for."""
        return Generation(
            request,
            self._bus,
            self._model,
            CHECK_LIMITS,
            clock=self._clock,
            spawn=self._spawn,
            started_s=self._clock(),
            replicas=lambda: self._board.replicas,
        )

    async def _report_check(self, check: wire.Check, stored: bytes, given: bytes) -> None:
        """Has the cache compare two answers; one that was wrong is condemned everywhere."""
        assert self._cache is not None
        call = wire.CheckCall(check=check, stored=stored, given=given)
        async with asyncio.timeout(STORE_TIMEOUT_S):
            reply = wire.decode_check_reply(await self._cache.check(wire.encode(call)))
            if reply.agreement == "wrong":
                which = wire.EntryQuery(id=check.id)
                await self.manage_cache(wire.ManageCall(action="quarantine", which=which))

    async def manage_cache(self, call: wire.ManageCall) -> list[Any]:
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

    def _stream_of(self, generation: Generation, outcome: CacheOutcome, token: str) -> Stream:
        accepted = generation.accepted
        return Stream(
            request=generation.request,
            log=generation.log,
            cache=outcome,
            queue_position=None if accepted is None else accepted.queue_position,
            prompt_tokens=0 if accepted is None else accepted.prompt_tokens,
            cancel=generation.cancel,
            park=generation.park,
            unpark=generation.unpark,
            token=token,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that no request owns."""
        task = asyncio.create_task(work, context=self._own_context)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _begin_store(
        self, generation: Generation, info: ModelInfo, terminal: Terminal, found: _Found
    ) -> None:
        """Starts to keep an answer that ended by itself or at its limit, if it may be reused.

        No client waits for it, but whoever asks the same again at once does: they
        have seen the end of the first answer and may expect to hit it.
        """
        request = generation.request
        is_whole = terminal.finish_reason in ("stop", "length")
        revision = None if generation.accepted is None else generation.accepted.revision
        # In mid-rollout another model may have answered than the one we were told of.
        is_ours = is_whole and revision == info.revision
        if self._cache is None or not is_ours or not is_cacheable(request):
            if found.check is not None:
                self._checks.drop("interrupted")
            return
        stored = wire.StoredStream(deltas=generation.log.deltas, terminal=terminal)
        packed = wire.encode(stored)
        if found.check is not None and found.check.stored is not None:
            self._checks.report(found.check, found.check.stored, packed)
        kept = Kept(stored, found.outcome.id)
        self._hold(request, info.revision, kept, len(packed), 0.0)
        if self._breaker.state != "closed":
            return
        call = wire.StoreCall(
            request=request,
            model_revision=info.revision,
            completion_tokens=terminal.usage.completion_tokens,
            stored=packed,
            is_truncated=terminal.finish_reason == "length",
        )
        question = _question(request)
        task = self._spawn(self._store(self._cache, wire.encode(call)))
        self._storing[question] = task

        def forget(done: asyncio.Task[None]) -> None:
            # An equal question's store may have taken this one's place.
            if self._storing.get(question) is done:
                del self._storing[question]

        task.add_done_callback(forget)

    async def _stored(self, request: InferenceRequest) -> None:
        """Waits until an equal request's answer, if one is just being stored, can be found."""
        if self._storing and (storing := self._storing.get(_question(request))) is not None:
            await asyncio.wait((storing,))

    async def _store(self, cache: CachePort, payload: bytes) -> None:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await cache.store(payload)
        except Exception as error:
            self.cache_errors_total += 1
            self._breaker.failed()
            logger.warning("cache store failed: %s", type(error).__name__)

    async def _answer_of(self, call: Awaitable[bytes]) -> bytes:
        """The model's reply.

        Raises:
            ServingError: `overloaded` when no replica answers in time or at all.
        """
        timeout_s = min(INFO_TIMEOUT_S, self._limits.failover.accept_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError:
            raise Overloaded(
                f"no model replica answered within {timeout_s:g} s", retry_after_s=1
            ) from None
        except ServingError:
            raise
        except Exception as error:
            logger.warning("model call failed: %r", error)
            raise Overloaded("no model replica is ready", retry_after_s=1) from error


def _unless_refused(reply: Reply) -> Reply:
    if reply.refused is not None:
        raise ServingError.from_info(reply.refused)
    return reply


def _question(request: InferenceRequest) -> str:
    """Equal for requests that the cache takes for equal."""
    return cache_key(request, model_revision="", embedder_revision="", epoch=0).exact


async def _stats_of(port: ModelPort | CachePort) -> list[dict[str, Any]]:
    try:
        return await port.stats()
    except Exception as error:
        logger.warning("stats are incomplete: %r", error)
        return []
