"""Answers that nobody waits for: made in idle slots, to find out whether the cache was right.

A check never delays a user. It begins only while no model replica that this ingress knows of has
anything to do, two at a time at most may wait a moment for that, and it is given up as soon as a
request comes. What cannot be made is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from app.generation import Generation
from app.model_bus import Spawn
from deployments import wire
from deployments.replica_board import ReplicaBoard
from protocol.request import InferenceRequest
from protocol.token_log import TokenLog

logger = logging.getLogger(__name__)

MAX_WAITING = 2
"""Checks that may wait for an idle model, the running one among them."""
IDLE_PATIENCE_S = 2.0
LOOK_S = 0.1
MAX_S = 120.0
"""A longer answer is not worth it."""
LOWEST_PRIORITY = -100

Report = Callable[[wire.Check, bytes, bytes], Awaitable[None]]
NewGeneration = Callable[[InferenceRequest], Generation]


class ShadowChecks:
    """The checks of one ingress.

    Args:
        new_generation: makes one that is neither stored nor counted as a client's.
        report: gets the check, the stored answer and the model's, both packed.
        patience_s: longest wait for an idle model.
    """

    def __init__(
        self,
        board: ReplicaBoard,
        *,
        new_generation: NewGeneration,
        report: Report,
        spawn: Spawn,
        patience_s: float = IDLE_PATIENCE_S,
    ) -> None:
        self._board = board
        self._new_generation = new_generation
        self._report = report
        self._spawn = spawn
        self._patience_s = patience_s
        self._waiting = 0
        self._running: Generation | None = None
        self._counts: Counter[str] = Counter()

    def offer(self, request: InferenceRequest, check: wire.Check, stored: bytes) -> None:
        """Takes a check on, or drops it; returns at once."""
        if self._waiting >= MAX_WAITING:
            self.drop("busy")
            return
        self._waiting += 1
        self._spawn(self._run(request, check, stored))

    def report(self, check: wire.Check, stored: bytes, given: bytes) -> None:
        """Has an answer compared that the model gave anyway."""
        self._counts["free"] += 1
        self._spawn(self._guarded(self._report(check, stored, given)))

    def step_aside(self) -> None:
        """A request comes: what nobody waits for ends before the engine's next step."""
        if self._running is not None:
            self._running.cancel()

    def drop(self, reason: str) -> None:
        """Counts a check that will not be made."""
        self._counts[f"dropped_{reason}"] += 1

    def stats(self) -> dict[str, int]:
        """Checks that were run in idle slots, were free, or dropped, by reason."""
        return dict(self._counts)

    async def _run(self, request: InferenceRequest, check: wire.Check, stored: bytes) -> None:
        try:
            if not await self._until_idle():
                self.drop("busy")
                return
            log = await self._generate(request)
            terminal = None if log is None else log.terminal
            if log is None or terminal is None or terminal.finish_reason not in ("stop", "length"):
                self.drop("interrupted")
                return
            self._counts["run"] += 1
            given = wire.StoredStream(deltas=log.deltas, terminal=terminal)
            await self._guarded(self._report(check, stored, wire.encode(given)))
        finally:
            self._waiting -= 1

    async def _until_idle(self) -> bool:
        left_s = self._patience_s
        while self._running is not None or not self._board.is_idle():
            if left_s <= 0:
                return False
            left_s -= LOOK_S
            await asyncio.sleep(LOOK_S)
        return True

    async def _generate(self, request: InferenceRequest) -> TokenLog | None:
        generation = self._new_generation(
            msgspec.structs.replace(
                request,
                request_id=f"{request.request_id}.check",
                cache="bypass",
                priority=LOWEST_PRIORITY,
                timeout_s=MAX_S,
            )
        )
        self._running = generation
        try:
            await generation.start()
            await self._follow(generation)
        except Exception as error:
            logger.info("check of request %s was not made: %r", request.request_id, error)
            return None
        finally:
            generation.cancel()
            self._running = None
        return generation.log

    async def _follow(self, generation: Generation) -> None:
        """Until its end, or until somebody else is on the model, of this ingress or another."""
        cursor = generation.log.cursor()
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    if not await cursor.wait():
                        return
            except TimeoutError:
                pass
            if self._board.num_reported() > 1:
                generation.cancel()
                return

    async def _guarded(self, reporting: Awaitable[None]) -> None:
        try:
            await reporting
        except Exception as error:
            self.drop("failed")
            logger.warning("a check could not be told to the cache: %s", type(error).__name__)
