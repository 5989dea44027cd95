"""Removals of late, against what was answered before them and arrives from elsewhere afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cache.entries import Entry
from cache.inventory import is_meant
from cache.stats import EntryFilter

REMEMBER_S = 60.0
"""Another process has written what it knew before a removal, or has heard of it, by then."""


class LateRemovals:
    """What was asked to be removed, for as long as a record of before may still come in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._removals: deque[tuple[EntryFilter, float, float]] = deque()

    def add(self, which: EntryFilter, asked: float) -> None:
        """`asked`: when it was meant, which decides the ages that the filter names."""
        self._forget_old()
        self._removals.append((which, asked, self._clock()))

    def cover(self, entry: Entry) -> bool:
        """Whether an entry is one of those that were to be removed."""
        self._forget_old()
        return any(
            entry.created < asked and is_meant(entry, which, asked)
            for which, asked, _ in self._removals
        )

    def __len__(self) -> int:
        return len(self._removals)

    def _forget_old(self) -> None:
        while self._removals and self._clock() - self._removals[0][2] > REMEMBER_S:
            self._removals.popleft()
