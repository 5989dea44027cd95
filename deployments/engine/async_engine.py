"""The engine as an event loop sees it: prepare, admit, follow, abort. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Emission, Engine, EngineStats, internal_error
from deployments.engine.loop import EngineLoop
from deployments.engine.preparation import prepare, prepare_warm_up
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import ServingError
from protocol.request import InferenceRequest
from protocol.token_log import Terminal, TokenLog

logger = logging.getLogger(__name__)

NUM_PREPARE_THREADS = 2
"""Tokenising lets go of the interpreter lock, so that two long prompts do not queue up."""


class AsyncEngine:
    """One engine for one event loop, the one that runs when `start` is awaited.

    The way of a request: `prepare` it, hand the sequence to `admit` (alone or with others),
    read `follow(seq)`, and `abort(seq)` when nobody reads any more. The sequence exists
    before it is admitted, so a cancel can never miss it.

    Args:
        engine: not used by anyone else from now on.
        rng: seeds of requests that name none; give one to make a test repeatable.
    """

    def __init__(self, engine: Engine, *, rng: random.Random | None = None) -> None:
        self._engine = engine
        self._rng = rng or random.SystemRandom()
        self._loop = EngineLoop(engine, on_step=self._post)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._pool = ThreadPoolExecutor(NUM_PREPARE_THREADS, thread_name_prefix="prepare")
        # Of its own, so that a request never waits for one that is still being written.
        self._warm_pool = ThreadPoolExecutor(1, thread_name_prefix="warm")
        # As long as somebody holds the sequence, its log can be followed.
        self._logs: WeakKeyDictionary[Sequence, TokenLog] = WeakKeyDictionary()
        self.on_first_token: Callable[[float], None] = lambda ttft_ms: None
        """Called on the event loop with each request's TTFT; not for one that goes on elsewhere's."""
        self._num_unprepared = self._num_unadmitted = 0

    async def start(self) -> None:
        """Starts the engine's thread and waits until it is warm.

        Raises:
            Exception: what the warm-up raised.
        """
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        await self._event_loop.run_in_executor(self._pool, self._loop.wait_until_ready)

    async def prepare(
        self, request: InferenceRequest, output_token_ids: SequenceOf[int] = ()
    ) -> Sequence:
        """Tokenises and checks a request on a worker thread.

        Args:
            output_token_ids: what was answered elsewhere; the answer goes on behind it.

        Raises:
            ServingError: the request cannot run; see `preparation.prepare`.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool,
                prepare,
                request,
                self._engine.tokenizer,
                self._engine.config,
                self._engine.clock,
                self._rng,
                output_token_ids,
            )
        except ServingError:
            self._num_unprepared += 1
            raise
        except Exception as exc:
            self._num_unprepared += 1
            raise internal_error(f"request {request.request_id} cannot be prepared", exc) from exc

    def admit(self, seqs: list[Sequence]) -> list[ServingError | None]:
        """Hands sequences to the engine and returns at once; the abandoned are dropped.

        Returns:
            For each sequence None, or why it was refused; its log has ended in both cases
            where it does not run.
        """
        return [self._admit(seq) for seq in seqs]

    def follow(self, seq: Sequence) -> TokenLog:
        """The sequence's log, which lives on the event loop."""
        log = self._logs.get(seq)
        if log is None:
            log = self._logs[seq] = TokenLog()
        return log

    def abort(self, seq: Sequence) -> None:
        """Gives a sequence up, admitted or not; harmless after its end."""
        self._loop.abort(seq)

    async def warm(self, request: InferenceRequest) -> None:
        """Computes what is known of a prompt that is still being written, where that delays nobody.

        Returns when it is computed or given up, also where the request cannot run: that is told
        once it is whole. A caller that is cancelled stops the work, and what is done stays.

        Args:
            request: as it would be if its text ended here; its `request_id` must be unique.
        """
        engine = self._engine
        try:
            seq = await asyncio.get_running_loop().run_in_executor(
                self._warm_pool,
                prepare_warm_up,
                request,
                engine.tokenizer,
                engine.config,
                engine.prefix_block_tokens,
                engine.clock,
            )
            if seq is None:
                return
            self._loop.submit(seq)
        except ServingError:
            return
        cursor = self.follow(seq).cursor()
        try:
            while await cursor.wait():
                pass
        finally:
            self.abort(seq)

    def stats(self) -> EngineStats:
        """The engine's numbers, and what ended before it reached the engine."""
        stats = self._loop.stats()
        finished = stats.finished_total
        if self._num_unadmitted:
            num_cancelled = finished.get("cancelled", 0) + self._num_unadmitted
            finished = finished | {"cancelled": num_cancelled}
        return dataclasses.replace(
            stats,
            finished_total=finished,
            refused_total=stats.refused_total + self._num_unprepared,
        )

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Immutable, so that any thread may use it."""
        return self._engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        """Lowered to what the runner can hold."""
        return self._engine.config

    @property
    def is_healthy(self) -> bool:
        return self._loop.is_healthy

    def heartbeat_age_s(self) -> float:
        return self._loop.heartbeat_age_s()

    async def close(self) -> None:
        """Ends everything that is live and joins the threads. May be called twice."""
        await asyncio.to_thread(self._loop.close)
        for pool in (self._pool, self._warm_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self, seq: Sequence) -> ServingError | None:
        log = self.follow(seq)
        timing = seq.timing(self._engine.clock())
        if seq.is_abandoned:
            self._num_unadmitted += 1
            log.finish(Terminal(finish_reason="cancelled", usage=seq.usage(), timing=timing))
            return None
        try:
            self._loop.submit(seq)
        except ServingError as error:
            log.finish(
                Terminal(finish_reason="error", usage=seq.usage(), timing=timing, error=error.info)
            )
            return error
        return None

    def _post(self, emissions: list[Emission]) -> None:
        """Takes a step's emissions across to the event loop, all in one call."""
        assert self._event_loop is not None, "start() comes first"
        try:
            self._event_loop.call_soon_threadsafe(self._apply, emissions)
        except RuntimeError:
            logger.info("event loop is closed, %d emissions dropped", len(emissions))

    def _apply(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            log = self.follow(emission.seq)
            if emission.deltas and log.next_seq == 0:
                self.on_first_token(emission.seq.timing(self._engine.clock()).ttft_ms)
            try:
                log.append(*emission.deltas)
            except ValueError:
                logger.exception("log of request %s refused a delta", emission.seq.request_id)
            if emission.terminal is not None:
                log.finish(emission.terminal)
