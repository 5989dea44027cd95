"""Keeps the answers that an ingress holds itself in step with what is removed from the cache.

Every cache replica has an epoch that changes with each removal. While requests come, all are
asked for it a few times a second. What is held here may be given only as long as it was heard
lately that nothing has changed, and is forgotten when something has: a removal is seen here
within a second, also when it is not told at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

ASK_S = 0.25
FRESH_S = 0.75
"""With the time that replicas take to hear of each other, a removal shows within a second."""
WATCH_S = 10.0
"""Nobody is asked after so long without a request."""


class EpochWatch:
    """Asks while there are requests.

    Args:
        ask: tells the epochs of all replicas; it may raise, hang, or find none.
        forget: drops what is held here.
        spawn: starts a task that no request owns.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[list[str]]],
        forget: Callable[[], None],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._forget = forget
        self._spawn = spawn
        self._clock = clock
        self._epochs: frozenset[str] = frozenset()
        self._heard_s = self._woken_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Says that a request has come."""
        self._woken_s = self._clock()
        if self._task is None or self._task.done():
            self._task = self._spawn(self._watch())

    @property
    def is_fresh(self) -> bool:
        """Whether what is held may be given."""
        return self._clock() - self._heard_s < FRESH_S

    def knows(self, epoch: str) -> bool:
        """Whether nothing was removed, as far as is known, since a replica was in that epoch."""
        return self.is_fresh and epoch in self._epochs

    async def _watch(self) -> None:
        while self._clock() - self._woken_s < WATCH_S:
            await self._hear()
            await asyncio.sleep(ASK_S)

    async def _hear(self) -> None:
        # What is told holds for the time at which it was asked for.
        asked_s = self._clock()
        try:
            async with asyncio.timeout(FRESH_S):
                epochs = frozenset(await self._ask())
        except Exception as error:
            logger.debug("the cache does not tell what was removed: %r", error)
            return
        if not epochs:
            return
        if epochs != self._epochs:
            self._forget()
        self._epochs, self._heard_s = epochs, asked_s
