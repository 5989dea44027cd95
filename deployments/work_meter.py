"""What a replica tells the autoscaler of its load: plain numbers, measured without blocking."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

MAX_SAMPLES = 1024
LEAST_INTERVAL_S = 0.5
"""Over a shorter time the CPU clock's own steps show."""


class WorkMeter:
    """Recent TTFTs and the CPU load of this process. For one thread.

    Args:
        num_cores: that the replica computes with; 100 % is all of them.
        window_s: how long a TTFT counts.
        cpu_clock: CPU seconds of all threads of the process.
    """

    def __init__(
        self,
        *,
        num_cores: float = 1.0,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._num_cores = num_cores
        self._window_s = window_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._measured_s, self._cpu_s = clock(), cpu_clock()
        self._cpu_percent = 0.0

    def first_token(self, ttft_ms: float) -> None:
        """Counts a request that got its first token now."""
        self._ttfts.append((self._clock(), ttft_ms))

    def stats(self, *, tokens: int, running: int, waiting: int) -> dict[str, float]:
        """For Serve's `record_autoscaling_stats`; the keys are `ReplicaLoad`'s fields."""
        return {
            "tokens": float(tokens),
            "running": float(running),
            "waiting": float(waiting),
            "ttft_p95_ms": self._ttft_p95_ms(),
            "cpu_percent": self._measure_cpu(),
        }

    def _ttft_p95_ms(self) -> float:
        """0 without a recent one: a NaN would stop the scaling of an idle replica."""
        oldest_s = self._clock() - self._window_s
        while self._ttfts and self._ttfts[0][0] < oldest_s:
            self._ttfts.popleft()
        if not self._ttfts:
            return 0.0
        values = sorted(ttft_ms for _, ttft_ms in self._ttfts)
        return values[math.ceil(0.95 * len(values)) - 1]

    def _measure_cpu(self) -> float:
        now_s, cpu_s = self._clock(), self._cpu_clock()
        elapsed_s = now_s - self._measured_s
        if elapsed_s >= LEAST_INTERVAL_S:
            used_s = max(0.0, cpu_s - self._cpu_s)
            self._cpu_percent = 100.0 * used_s / (elapsed_s * self._num_cores)
            self._measured_s, self._cpu_s = now_s, cpu_s
        return self._cpu_percent
