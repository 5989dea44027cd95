"""What an event loop sees of an engine, whoever computes: prepare, admit, follow, abort."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Emission, EngineStats, internal_error
from deployments.engine.preparation import prepare
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import ServingError
from protocol.request import InferenceRequest
from protocol.token_log import Terminal, TokenLog

logger = logging.getLogger(__name__)

NUM_PREPARE_THREADS = 2
"""Tokenising lets go of the interpreter lock, so that two long prompts do not queue up."""


class EngineFront(abc.ABC):
    """One engine for one event loop, the one that runs when `start` is awaited.

    The way of a request: `prepare` it, hand the sequence to `admit` (alone or with others),
    read `follow(seq)`, and `abort(seq)` when nobody reads any more. The sequence exists
    before it is admitted, so a cancel can never miss it.

    Args:
        config: lowered to what the engine can hold.
        clock: seconds, monotonic.
        rng: seeds of requests that name none; give one to make a test repeatable.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        config: EngineConfig,
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.on_first_token: Callable[[float], None] = lambda ttft_ms: None
        """Called on the event loop with each request's TTFT; not for one that goes on elsewhere's."""
        self._clock = clock
        self._rng = rng or random.SystemRandom()
        self._pool = ThreadPoolExecutor(NUM_PREPARE_THREADS, thread_name_prefix="prepare")
        # As long as somebody holds the sequence, its log can be followed.
        self._logs: WeakKeyDictionary[Sequence, TokenLog] = WeakKeyDictionary()
        self._num_unprepared = self._num_unadmitted = 0

    @abc.abstractmethod
    async def start(self) -> None:
        """Makes the engine ready to compute.

        Raises:
            Exception: why it cannot.
        """

    @abc.abstractmethod
    async def warm(self, request: InferenceRequest) -> None:
        """Computes what is known of a prompt that is still being written, where that delays nobody.

        Returns when it is computed or given up, also where the request cannot run: that is told
        once it is whole. A caller that is cancelled stops the work, and what is done stays.

        Args:
            request: as it would be if its text ended here; its `request_id` must be unique.
        """

    @abc.abstractmethod
    def abort(self, seq: Sequence) -> None:
        """Gives a sequence up, admitted or not; harmless after its end."""

    @property
    @abc.abstractmethod
    def is_healthy(self) -> bool:
        """Whether a request would be served."""

    @abc.abstractmethod
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last proved to move; 0 without work."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends everything that is live and frees the model. May be called twice."""

    @abc.abstractmethod
    def _submit(self, seq: Sequence) -> None:
        """Accepts a sequence, whose emissions go to `_apply` on the event loop.

        Raises:
            ServingError: why it is refused.
        """

    @abc.abstractmethod
    def _stats(self) -> EngineStats:
        """Of what was submitted."""

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
                self._pool, self._prepare, request, output_token_ids
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

    def stats(self) -> EngineStats:
        """The engine's numbers, and what ended before it reached the engine."""
        stats = self._stats()
        finished = stats.finished_total
        if self._num_unadmitted:
            num_cancelled = finished.get("cancelled", 0) + self._num_unadmitted
            finished = finished | {"cancelled": num_cancelled}
        return dataclasses.replace(
            stats,
            finished_total=finished,
            refused_total=stats.refused_total + self._num_unprepared,
        )

    def _prepare(self, request: InferenceRequest, output_token_ids: SequenceOf[int]) -> Sequence:
        """Runs on a worker thread."""
        return prepare(
            request, self.tokenizer, self.config, self._clock, self._rng, output_token_ids
        )

    def _admit(self, seq: Sequence) -> ServingError | None:
        log = self.follow(seq)
        timing = seq.timing(self._clock())
        if seq.is_abandoned:
            self._num_unadmitted += 1
            log.finish(Terminal(finish_reason="cancelled", usage=seq.usage(), timing=timing))
            return None
        try:
            self._submit(seq)
        except ServingError as error:
            log.finish(
                Terminal(finish_reason="error", usage=seq.usage(), timing=timing, error=error.info)
            )
            return error
        return None

    def _apply(self, emissions: list[Emission]) -> None:
        """Writes emissions into the logs."""
        for emission in emissions:
            log = self.follow(emission.seq)
            if emission.deltas and log.next_seq == 0:
                self.on_first_token(emission.seq.timing(self._clock()).ttft_ms)
            try:
                log.append(*emission.deltas)
            except ValueError:
                logger.exception("log of request %s refused a delta", emission.seq.request_id)
            if emission.terminal is not None:
                log.finish(emission.terminal)
