"""How many requests join the engine at once, and how long the first of them waits for the others.

An idle replica takes each request at once. The more wait, the more of them cross together:
their time to the first token is the queue's then, and each crossing costs the event loop.
Plain arithmetic around a clock; `model.py` applies it to `@serve.batch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LEAST_INTERVAL_S = 0.25
"""Between two changes: the backlog moves faster than a change of the window shows."""


@dataclass(frozen=True)
class AdmissionBounds:
    """What the window moves between; it may change while serving (`user_config`).

    Args:
        min_batch_size: most requests of a batch while nobody waits.
        max_batch_size: the same at `full_backlog`.
        batch_wait_timeout_s: longest wait for a batch to fill, reached at `full_backlog`.
        full_backlog: waiting requests from which on the window is open; None is
            `max_batch_size`.

    Raises:
        ValueError: a value is out of range; the message names it and the limits.
    """

    max_batch_size: int = 32
    batch_wait_timeout_s: float = 0.0
    min_batch_size: int = 1
    full_backlog: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch_size <= 4096:
            raise ValueError(f"max_batch_size is {self.max_batch_size}, allowed are 1 to 4096")
        if not 0 <= self.batch_wait_timeout_s <= 10:
            raise ValueError(
                f"batch_wait_timeout_s is {self.batch_wait_timeout_s}, allowed are 0 to 10"
            )
        if not 1 <= self.min_batch_size <= self.max_batch_size:
            raise ValueError(
                f"min_batch_size is {self.min_batch_size}, allowed are 1 to max_batch_size = "
                f"{self.max_batch_size}"
            )
        if self.full_backlog is not None and not 1 <= self.full_backlog <= 1_000_000:
            raise ValueError(f"full_backlog is {self.full_backlog}, allowed are 1 to 1000000")


@dataclass(frozen=True)
class Window:
    """Most requests of a batch, and how long its first one waits for it to fill."""

    batch_size: int
    wait_s: float


class AdmissionWindow:
    """Follows the backlog between bounds, by linear interpolation."""

    def __init__(self, bounds: AdmissionBounds, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed_s: float | None = None
        self.set_bounds(bounds)

    def set_bounds(self, bounds: AdmissionBounds) -> None:
        """Closes the window to the new bounds' least; the next update opens it as needed."""
        self._bounds = bounds
        self._changed_s = None
        self.window = Window(bounds.min_batch_size, 0.0)

    def update(self, backlog: int) -> bool:
        """Follows the backlog, at most once in `LEAST_INTERVAL_S`; nobody waits in vain, though.

        Args:
            backlog: requests that wait.

        Returns:
            Whether the window is another one now.
        """
        now_s = self._clock()
        is_soon = self._changed_s is not None and now_s - self._changed_s < LEAST_INTERVAL_S
        # Shut at once, so that a request to an idle replica never waits for company.
        if is_soon and backlog > 0:
            return False
        window = self._window(backlog)
        if window == self.window:
            return False
        self.window = window
        self._changed_s = now_s
        return True

    def _window(self, backlog: int) -> Window:
        bounds = self._bounds
        part = min(1.0, max(0, backlog) / (bounds.full_backlog or bounds.max_batch_size))
        size_range = bounds.max_batch_size - bounds.min_batch_size
        return Window(
            bounds.min_batch_size + round(part * size_range), part * bounds.batch_wait_timeout_s
        )
