"""The graph as a `StreamOpener`: cache first, then the model, and back into the cache.

Speaks to both deployments through two small ports, so that a test runs it
without Serve. Any failure of the cache is a miss; a failure of the model ends
the one stream with one error.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.serving import Stream
from deployments import wire
from deployments.cache_key import cache_key, is_cacheable
from deployments.metrics import GraphStats
from deployments.wire import ModelInfo
from protocol.errors import (
    CacheMiss,
    ErrorInfo,
    InternalError,
    ModelNotFound,
    Overloaded,
    ServingError,
)
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, FinishReason, Terminal, Timing, TokenLog, Usage

logger = logging.getLogger(__name__)

INFO_MAX_AGE_S = 10.0
"""A rollout may bring another model: after this time the replicas are asked again what they serve."""


STORE_TIMEOUT_S = 5.0
"""No one waits longer than a look-up may take; this only bounds what a dead cache leaves behind."""


class RecordStream(Protocol):
    """Packed `StreamRecord`s of one generation, as a Serve response generator gives them."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def cancel(self) -> None: ...


class ModelPort(Protocol):
    def generate(self, payload: bytes) -> RecordStream: ...

    async def info(self) -> bytes: ...

    async def stats(self) -> list[dict[str, Any]]:
        """One mapping a replica."""
        ...


class CachePort(Protocol):
    async def lookup(self, payload: bytes) -> bytes: ...

    async def store(self, payload: bytes) -> None: ...

    async def stats(self) -> list[dict[str, Any]]:
        """One mapping a replica."""
        ...


class Graph:
    """Opens streams.

    Args:
        cache: None switches the cache off.
        lookup_timeout_s: bound on one whole look-up, its embedding included.
        accept_timeout_s: bound on the model's accepting a request.
    """

    def __init__(
        self,
        model: ModelPort,
        cache: CachePort | None,
        *,
        lookup_timeout_s: float,
        accept_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._cache = cache
        self._lookup_timeout_s = lookup_timeout_s
        self._accept_timeout_s = accept_timeout_s
        self._clock = clock
        self._info: ModelInfo | None = None
        self._info_at_s = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._own_context = contextvars.copy_context()
        self._storing: dict[str, asyncio.Task[None]] = {}
        self.cache_errors_total = 0

    async def model_info(self) -> ModelInfo:
        """What the model replicas serve, as of a few seconds ago.

        Raises:
            ServingError: no model replica answers.
        """
        if self._info is None or self._clock() - self._info_at_s >= INFO_MAX_AGE_S:
            return await self._ask_info()
        return self._info

    async def check_ready(self) -> None:
        """Returns when a completion would work now.

        Raises:
            ServingError: it would not.
        """
        await self._ask_info()

    async def stats(self) -> GraphStats:
        """What every replica tells of itself; one that does not answer is left out."""
        return GraphStats(
            models=await _stats_of(self._model),
            caches=[] if self._cache is None else await _stats_of(self._cache),
            cache_call_errors=self.cache_errors_total,
        )

    async def open_stream(self, request: InferenceRequest) -> Stream:
        started_s = self._clock()
        info = await self.model_info()
        if request.model != info.id:
            raise ModelNotFound(
                f"model {request.model[:200]!r} is not served here, {info.id!r} is", param="model"
            )
        outcome = CacheOutcome()
        if self._cache is not None and is_cacheable(request) and request.cache != "refresh":
            outcome, log = await self._look_up(self._cache, request, info, started_s)
            if log is not None:
                return Stream(request=request, log=log, cache=outcome)
        if request.cache == "only":
            raise CacheMiss("no cached answer fits this request", param="cache")
        return await self._generate(request, info, outcome, started_s)

    async def _ask_info(self) -> ModelInfo:
        self._info = wire.decode_info(await self._answer_of(self._model.info()))
        self._info_at_s = self._clock()
        return self._info

    async def _look_up(
        self, cache: CachePort, request: InferenceRequest, info: ModelInfo, started_s: float
    ) -> tuple[CacheOutcome, TokenLog | None]:
        """What the cache decided and, on a hit, the whole answer; any failure is a miss."""
        call = wire.LookupCall(request=request, model_revision=info.revision)
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                await self._stored(request)
                reply = wire.decode_lookup_reply(await cache.lookup(wire.encode(call)))
            if reply.stored is None:
                return reply.outcome, None
            return reply.outcome, self._replay(wire.decode_stored(reply.stored), started_s)
        except TimeoutError:
            self.cache_errors_total += 1
            return CacheOutcome(reason="cache timed out"), None
        except Exception as error:
            self.cache_errors_total += 1
            logger.warning("cache look-up failed, taken as a miss: %s", type(error).__name__)
            return CacheOutcome(reason="cache failed"), None

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

    async def _generate(
        self, request: InferenceRequest, info: ModelInfo, outcome: CacheOutcome, started_s: float
    ) -> Stream:
        records = self._model.generate(wire.encode(request))
        arrivals = aiter(records)
        try:
            accepted = _acceptance(await self._answer_of(anext(arrivals)))
        except BaseException:
            records.cancel()
            raise
        generation = _Generation(request, records, arrivals, accepted, self._clock, started_s)
        generation.before_end = lambda terminal: self._begin_store(generation, info, terminal)
        pump = asyncio.create_task(generation.run())
        self._background.add(pump)
        pump.add_done_callback(self._background.discard)

        def cancel() -> None:
            if generation.end("cancelled"):
                records.cancel()
                pump.cancel()

        return Stream(
            request=request,
            log=generation.log,
            cache=outcome,
            queue_position=accepted.queue_position,
            cancel=cancel,
        )

    def _begin_store(self, generation: _Generation, info: ModelInfo, terminal: Terminal) -> None:
        """Starts to keep an answer that ended by itself or at its limit, if it may be reused.

        No client waits for it, but whoever asks the same again at once does: they
        have seen the end of the first answer and may expect to hit it.
        """
        request = generation.request
        is_whole = terminal.finish_reason in ("stop", "length")
        if self._cache is None or not is_whole or not is_cacheable(request):
            return
        if generation.accepted.revision != info.revision:
            # In mid-rollout another model has answered than the one we were told of.
            return
        stored = wire.StoredStream(deltas=generation.log.deltas, terminal=terminal)
        call = wire.StoreCall(
            request=request,
            model_revision=info.revision,
            completion_tokens=terminal.usage.completion_tokens,
            stored=wire.encode(stored),
            is_truncated=terminal.finish_reason == "length",
        )
        question = _question(request)
        # Outside the request's context: Serve cancels every call made in it when its client
        # leaves, and one who has the whole answer leaves at once.
        task = asyncio.create_task(
            self._store(self._cache, wire.encode(call)), context=self._own_context
        )
        self._storing[question] = task
        # An equal question's store may take this one's place there, and it must still finish.
        self._background.add(task)

        def forget(done: asyncio.Task[None]) -> None:
            self._background.discard(done)
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
            logger.warning("cache store failed: %s", type(error).__name__)

    async def _answer_of(self, call: Awaitable[bytes]) -> bytes:
        """The model's reply.

        Raises:
            ServingError: `overloaded` when no replica answers in time or at all.
        """
        try:
            async with asyncio.timeout(self._accept_timeout_s):
                return await call
        except TimeoutError:
            raise Overloaded(
                f"no model replica answered within {self._accept_timeout_s:g} s", retry_after_s=1
            ) from None
        except ServingError:
            raise
        except Exception as error:
            logger.warning("model call failed: %r", error)
            raise Overloaded("no model replica is ready", retry_after_s=1) from error


@dataclass
class _Generation:
    """One accepted request on its way from the model's records into its log."""

    request: InferenceRequest
    records: RecordStream
    arrivals: AsyncIterator[bytes]
    accepted: wire.Accepted
    clock: Callable[[], float]
    started_s: float
    before_end: Callable[[Terminal], None] = lambda terminal: None
    log: TokenLog = field(default_factory=TokenLog)
    first_delta_s: float | None = None

    async def run(self) -> None:
        """Moves records into the log until the one terminal; a broken hop ends it with an error."""
        try:
            async for raw in self.arrivals:
                self._take(wire.decode_record(raw))
            if self.log.terminal is None:
                raise InternalError("the model ended without a last record")
        except Exception as error:
            # After our own cancel, or after the last record, a broken hop changes nothing.
            if self.end("error", InternalError("the model replica failed; try again").info):
                logger.warning("request %s lost its model: %r", self.request.request_id, error)
        finally:
            self.end("cancelled")
            self.records.cancel()

    def end(self, reason: FinishReason, error: ErrorInfo | None = None) -> bool:
        """Ends the log from our side, with the figures known here; False if it had ended."""
        now_s = self.clock()
        first_s = now_s if self.first_delta_s is None else self.first_delta_s
        return self.log.finish(
            Terminal(
                finish_reason=reason,
                usage=Usage(
                    prompt_tokens=self.accepted.prompt_tokens,
                    completion_tokens=self.log.next_seq,
                ),
                timing=Timing(
                    ttft_ms=(first_s - self.started_s) * 1000,
                    total_ms=(now_s - self.started_s) * 1000,
                ),
                error=error,
            )
        )

    def _take(self, record: wire.StreamRecord) -> None:
        if self.log.terminal is not None:
            return
        if record.deltas:
            if self.first_delta_s is None:
                self.first_delta_s = self.clock()
            self.log.append(*record.deltas)
        if record.terminal is not None:
            self.before_end(record.terminal)
            self.log.finish(record.terminal)


def _question(request: InferenceRequest) -> str:
    """Equal for requests that the cache takes for equal."""
    return cache_key(request, model_revision="", embedder_revision="", epoch=0).exact


def _acceptance(raw: bytes) -> wire.Accepted:
    """The first record of a generation.

    Raises:
        ServingError: the model refused the request, or does not speak as we do.
    """
    try:
        first = wire.decode_record(raw)
    except ValueError as error:
        raise InternalError("the model did not answer in a known form") from error
    if first.refused is not None:
        raise ServingError.from_info(first.refused)
    if first.accepted is None:
        raise InternalError("the model did not accept the request")
    return first.accepted


async def _stats_of(port: ModelPort | CachePort) -> list[dict[str, Any]]:
    try:
        return await port.stats()
    except Exception as error:
        logger.warning("stats are incomplete: %r", error)
        return []
