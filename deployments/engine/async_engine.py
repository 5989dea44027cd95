"""Our own engine behind an event loop: the thread that computes, and the way to it and back."""

from __future__ import annotations

import asyncio
import logging
import random
from concurrent.futures import ThreadPoolExecutor

from deployments.engine.engine import Emission, Engine, EngineStats
from deployments.engine.front import EngineFront
from deployments.engine.loop import EngineLoop
from deployments.engine.preparation import prepare_warm_up
from deployments.engine.sequence import Sequence
from protocol.errors import ServingError
from protocol.request import InferenceRequest

logger = logging.getLogger(__name__)


class AsyncEngine(EngineFront):
    """An `Engine` on a thread of its own.

    Args:
        engine: not used by anyone else from now on.
        rng: see `EngineFront`.
    """

    def __init__(self, engine: Engine, *, rng: random.Random | None = None) -> None:
        super().__init__(engine.tokenizer, engine.config, engine.clock, rng)
        self._engine = engine
        self._loop = EngineLoop(engine, on_step=self._post)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        # Of its own, so that a request never waits for one that is still being written.
        self._warm_pool = ThreadPoolExecutor(1, thread_name_prefix="warm")

    async def start(self) -> None:
        """Starts the engine's thread and waits until it is warm."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        await self._event_loop.run_in_executor(self._pool, self._loop.wait_until_ready)

    def abort(self, seq: Sequence) -> None:
        self._loop.abort(seq)

    async def warm(self, request: InferenceRequest) -> None:
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

    @property
    def is_healthy(self) -> bool:
        return self._loop.is_healthy

    def heartbeat_age_s(self) -> float:
        return self._loop.heartbeat_age_s()

    async def close(self) -> None:
        await asyncio.to_thread(self._loop.close)
        for pool in (self._pool, self._warm_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, seq: Sequence) -> None:
        self._loop.submit(seq)

    def _stats(self) -> EngineStats:
        return self._loop.stats()

    def _post(self, emissions: list[Emission]) -> None:
        """Takes a step's emissions across to the event loop, all in one call."""
        assert self._event_loop is not None, "start() comes first"
        try:
            self._event_loop.call_soon_threadsafe(self._apply, emissions)
        except RuntimeError:
            logger.info("event loop is closed, %d emissions dropped", len(emissions))
