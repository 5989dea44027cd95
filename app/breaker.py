"""A circuit breaker: calls to a neighbour that fails are left out for a moment and cost nothing.

    closed ──failures in a row──▶ open ──time──▶ half-open ──the probe succeeds──▶ closed
                                   ▲                 │
                                   └──it fails───────┘   and stays open for twice as long

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

BreakerState = Literal["closed", "open", "half_open"]
T = TypeVar("T")

PROBE_SHARE = 0.5
"""Share of a call's time that whoever happens to probe waits; the probe itself has all of it."""


class SwitchedOff(Exception):
    """The breaker lets no call through now."""


class Breaker:
    """Counts what a neighbour does and says whether it may be asked.

    Args:
        failures_to_open: so many failures in a row open it.
        open_s: time without calls before the first probe; doubled by each probe that fails.
        max_open_s: longest such time, so also the longest until a recovery is noticed.
    """

    def __init__(
        self,
        *,
        failures_to_open: int = 5,
        open_s: float = 5.0,
        max_open_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_to_open = failures_to_open
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._clock = clock
        # A probe belongs to everyone: Serve must not cancel it with the request that began it.
        self._context = contextvars.copy_context()
        self._probes: set[asyncio.Task[Any]] = set()
        self._failures = 0
        self._open_s = open_s
        self._open_until_s: float | None = None
        self._is_probing = False
        self.failures_total = 0
        self.opened_total = 0
        self.skipped_total = 0

    @property
    def state(self) -> BreakerState:
        if self._open_until_s is None:
            return "closed"
        if self._is_probing or self._clock() >= self._open_until_s:
            return "half_open"
        return "open"

    def allows(self) -> bool:
        """Whether to call now; tell the result by `succeeded` or `failed`.

        Half-open it allows one call, the probe. A probe that tells nothing is given up
        after the time for which the breaker was open, and another may go.
        """
        if self._open_until_s is None:
            return True
        now_s = self._clock()
        if now_s < self._open_until_s:
            self.skipped_total += 1
            return False
        self._is_probing = True
        self._open_until_s = now_s + self._open_s
        return True

    def succeeded(self) -> None:
        """A call was answered in time, in a known form."""
        if self._open_until_s is not None and not self._is_probing:
            # The late answer to a call from before says less than the failures that came after.
            return
        self._failures = 0
        self._open_s = self._first_open_s
        self._open_until_s = None
        self._is_probing = False

    def failed(self) -> None:
        """A call failed, took too long, or was answered with what nobody can read."""
        self.failures_total += 1
        if self._is_probing:
            self._open_s = min(2 * self._open_s, self._max_open_s)
            self._open()
        elif self._open_until_s is None:
            self._failures += 1
            if self._failures >= self._failures_to_open:
                self.opened_total += 1
                self._open()

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """The result of `work()`, judged.

        Who is cancelled has learnt nothing, so that is no failure. A probe goes on when
        its caller leaves or has waited its share of the time.

        Raises:
            SwitchedOff: the breaker is open; nothing was called.
            TimeoutError: it took longer than `timeout_s`.
            Exception: whatever the work raised.
        """
        if not self.allows():
            raise SwitchedOff
        if not self._is_probing:
            return await self._judge(work, timeout_s)
        probe = asyncio.create_task(self._judge(work, timeout_s), context=self._context.copy())
        self._probes.add(probe)
        probe.add_done_callback(self._forget)
        done, _ = await asyncio.wait((probe,), timeout=timeout_s * PROBE_SHARE)
        if not done:
            raise TimeoutError
        return probe.result()

    def stats(self) -> dict[str, Any]:
        """State and counters, as plain values."""
        return {
            "state": self.state,
            "failures_total": self.failures_total,
            "opened_total": self.opened_total,
            "skipped_total": self.skipped_total,
        }

    async def _judge(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                result = await work()
        except Exception:
            self.failed()
            raise
        self.succeeded()
        return result

    def _open(self) -> None:
        self._failures = 0
        self._is_probing = False
        self._open_until_s = self._clock() + self._open_s

    def _forget(self, probe: asyncio.Task[Any]) -> None:
        self._probes.discard(probe)
        if not probe.cancelled():
            # Asked for, because its caller may be gone.
            probe.exception()
