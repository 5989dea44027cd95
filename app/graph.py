"""The graph as a `StreamOpener`: cache first, then the model, and back into the cache.

Speaks to both deployments through two small ports, so that a test runs it
without Serve. Any failure of the cache is a miss; a failure of the model ends
the one stream with one error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from app.serving import Stream
from deployments import wire
from deployments.cache_key import is_cacheable
from deployments.metrics import GraphStats
from deployments.wire import ModelInfo
from protocol.errors import CacheMiss, InternalError, ModelNotFound, Overloaded, ServingError
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal, Timing, TokenLog, Usage

logger = logging.getLogger(__name__)


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
        self._background: set[asyncio.Task[None]] = set()
        self.cache_errors_total = 0

    async def model_info(self) -> ModelInfo:
        if self._info is None:
            self._info = wire.decode_info(await self._answer_of(self._model.info()))
        return self._info

    async def check_ready(self) -> None:
        """Returns when a completion would work now.

        Raises:
            ServingError: it would not.
        """
        self._info = wire.decode_info(await self._answer_of(self._model.info()))

    async def stats(self) -> GraphStats:
        """What every replica tells of itself; one that does not answer is left out."""
        stats = GraphStats(cache_call_errors=self.cache_errors_total)
        try:
            stats.models.extend(await self._model.stats())
            if self._cache is not None:
                stats.caches.extend(await self._cache.stats())
        except Exception as error:
            logger.warning("stats are incomplete: %r", error)
        return stats

    async def open_stream(self, request: InferenceRequest) -> Stream:
        started_s = self._clock()
        info = await self.model_info()
        if request.model != info.id:
            raise ModelNotFound(
                f"model {request.model[:200]!r} is not served here, {info.id!r} is", param="model"
            )
        outcome = CacheOutcome()
        if self._cache is not None and is_cacheable(request) and request.cache != "refresh":
            reply = await self._look_up(self._cache, request, info)
            outcome = reply.outcome
            if reply.stored is not None:
                return self._replay(request, reply, started_s)
        if request.cache == "only":
            raise CacheMiss("no cached answer fits this request", param="cache")
        return await self._generate(request, info, outcome)

    async def _look_up(
        self, cache: CachePort, request: InferenceRequest, info: ModelInfo
    ) -> wire.LookupReply:
        call = wire.LookupCall(request=request, model_revision=info.revision)
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                reply = wire.decode_lookup_reply(await cache.lookup(wire.encode(call)))
            if reply.stored is not None:
                wire.decode_stored(reply.stored)
            return reply
        except TimeoutError:
            self.cache_errors_total += 1
            return wire.LookupReply(outcome=CacheOutcome(reason="cache timed out"))
        except Exception as error:
            self.cache_errors_total += 1
            logger.warning("cache look-up failed, taken as a miss: %s", type(error).__name__)
            return wire.LookupReply(outcome=CacheOutcome(reason="cache failed"))

    def _replay(
        self, request: InferenceRequest, reply: wire.LookupReply, started_s: float
    ) -> Stream:
        assert reply.stored is not None
        stored = wire.decode_stored(reply.stored)
        log = TokenLog()
        log.append(*stored.deltas)
        elapsed_ms = (self._clock() - started_s) * 1000
        timing = Timing(queue_ms=0.0, ttft_ms=elapsed_ms, total_ms=elapsed_ms)
        terminal = stored.terminal
        log.finish(
            Terminal(finish_reason=terminal.finish_reason, usage=terminal.usage, timing=timing)
        )
        return Stream(request=request, log=log, cache=reply.outcome)

    async def _generate(
        self, request: InferenceRequest, info: ModelInfo, outcome: CacheOutcome
    ) -> Stream:
        records = self._model.generate(wire.encode(request))
        arrivals = aiter(records)
        try:
            first = wire.decode_record(await self._answer_of(anext(arrivals)))
        except BaseException:
            records.cancel()
            raise
        if first.refused is not None:
            raise ServingError.from_info(first.refused)
        if first.accepted is None:
            records.cancel()
            raise InternalError("the model did not accept the request")
        log = TokenLog()
        pump = asyncio.create_task(self._pump(arrivals, records, log, request, info))
        self._background.add(pump)
        pump.add_done_callback(self._background.discard)
        accepted = first.accepted

        def cancel() -> None:
            if log.terminal is None:
                usage = Usage(prompt_tokens=accepted.prompt_tokens, completion_tokens=log.next_seq)
                log.finish(Terminal(finish_reason="cancelled", usage=usage))
                records.cancel()
                pump.cancel()

        return Stream(
            request=request,
            log=log,
            cache=outcome,
            queue_position=accepted.queue_position,
            cancel=cancel,
        )

    async def _pump(
        self,
        arrivals: AsyncIterator[bytes],
        records: RecordStream,
        log: TokenLog,
        request: InferenceRequest,
        info: ModelInfo,
    ) -> None:
        """Moves records into the log until the one terminal; a broken hop ends it with an error."""
        try:
            async for raw in arrivals:
                record = wire.decode_record(raw)
                if log.terminal is not None:
                    return
                if record.deltas:
                    log.append(*record.deltas)
                if record.terminal is not None:
                    log.finish(record.terminal)
            if log.terminal is None:
                raise InternalError("the model ended without a last record")
        except Exception as error:
            if log.terminal is not None:
                # Cancelled by us: Serve then raises an error of its own in our reader.
                return
            logger.warning("request %s lost its model: %r", request.request_id, error)
            info_of_error = InternalError("the model replica failed; try again").info
            log.finish(
                Terminal(
                    finish_reason="error",
                    usage=Usage(completion_tokens=log.next_seq),
                    error=info_of_error,
                )
            )
        finally:
            if log.terminal is None:
                log.finish(Terminal(finish_reason="cancelled"))
            records.cancel()
        await self._store(request, info, log)

    async def _store(self, request: InferenceRequest, info: ModelInfo, log: TokenLog) -> None:
        """Keeps a finished answer, if it ended by itself and may be reused."""
        terminal = log.terminal
        if self._cache is None or terminal is None or terminal.finish_reason != "stop":
            return
        if not is_cacheable(request):
            return
        stored = wire.StoredStream(deltas=log.deltas, terminal=terminal)
        call = wire.StoreCall(
            request=request,
            model_revision=info.revision,
            completion_tokens=terminal.usage.completion_tokens,
            stored=wire.encode(stored),
        )
        try:
            await self._cache.store(wire.encode(call))
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
