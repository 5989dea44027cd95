"""A clock that goes on between processes and never runs backwards within one."""

from __future__ import annotations

import time
from collections.abc import Callable


class WallClock:
    """Seconds since the epoch, for records that outlive the process.

    It follows the wall clock forward. When that is set back, it goes on at the speed of the
    steady one from where it was: an answer's life is never made longer by it.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._last_s, self._last_steady_s = wall(), steady()

    def __call__(self) -> float:
        steady_s = self._steady()
        self._last_s = max(self._last_s + max(0.0, steady_s - self._last_steady_s), self._wall())
        self._last_steady_s = steady_s
        return self._last_s
