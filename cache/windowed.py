"""LRU-K with ghosts behind a recency window that sizes itself: the policy of the warm tier."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable

from cachetools import Cache

START_SHARE = 0.45
LEAST_SHARE, GREATEST_SHARE = 0.01, 0.9
STEP, STEP_UP = 0.2, 0.4
"""How far one event moves the window, in sizes of the item; measured by `bench/cache_trace.py`."""


class WindowedLRUK(Cache[str, int]):
    """A window of the latest, and a main part that is entered only on proof.

    An item is proven when its K-th last access, ghosts included, is later than the last
    access of the main part's oldest item: it has come back sooner than that one will have.
    The oldest then makes room and passes through the window once more. When the window has
    become smaller, the oldest outside move into the room that this leaves, unproven; in the
    main part they are as young as if they had been used then. So what is asked once
    stays in probation, a scan or a loop larger than the cache leaves the main part alone,
    and with the window at its widest the policy is LRU.

    The comparison is LRU-K's retained history (O'Neil, O'Neil, Weikum 1993) put to the use
    of LIRS (Jiang, Zhang 2002). The window follows what a plain LRU of the same size, of
    which only keys are kept, would have done: it widens for each hit that only LRU would
    have had, and narrows for each that LRU would have missed; ARC (Megiddo, Modha 2003)
    steers by two ghost lists instead.

    Every operation is O(1) amortised.

    Args:
        maxsize: bound of the sum of the values.
        k: accesses that prove an item.
        ghosts: histories kept of evicted items, as a multiple of the items held.
        getsizeof: size of a value; None takes the value itself.
    """

    def __init__(
        self,
        maxsize: float,
        *,
        k: int = 2,
        ghosts: float = 4.0,
        getsizeof: Callable[[int], float] | None = None,
    ) -> None:
        if k < 1:
            raise ValueError(f"k is {k}, the least is 1")
        if ghosts < 0:
            raise ValueError(f"ghosts is {ghosts}, the least is 0")
        super().__init__(maxsize, getsizeof or (lambda value: value))
        self._k = k
        self._ghost_factor = ghosts
        self._now = itertools.count().__next__
        self._times: dict[str, tuple[int, ...]] = {}
        # Oldest first: the window by last access, the others also by when they moved there.
        self._window: OrderedDict[str, int] = OrderedDict()
        self._leaving: OrderedDict[str, int] = OrderedDict()
        self._main: OrderedDict[str, int] = OrderedDict()
        self._main_size = 0
        self._window_size = START_SHARE * maxsize
        self._ghosts: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._plain_lru: OrderedDict[str, int] = OrderedDict()
        self._plain_size = 0

    @property
    def num_ghosts(self) -> int:
        return len(self._ghosts)

    @property
    def window_share(self) -> float:
        """The part of the size that is kept for the latest."""
        return self._window_size / self.maxsize

    def __getitem__(self, key: str) -> int:
        value = super().__getitem__(key)
        if key in self._times:
            self._learn(key, value, was_held=True)
            self._touch(key, value)
        return value

    def __setitem__(self, key: str, value: int) -> None:
        was_held = key in self._times
        if was_held and key in self._main:
            self._main_size += value - self._main[key]
        super().__setitem__(key, value)
        self._learn(key, value, was_held=was_held)
        if not was_held:
            self._times[key] = self._ghosts.pop(key, ())
        self._touch(key, value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._take_out(key)
        del self._times[key]
        self._forget_plain(key)
        self._trim()

    def popitem(self) -> tuple[str, int]:
        """Evicts the victim and keeps its history as a ghost."""
        key = self._victim()
        value = Cache.__getitem__(self, key)
        Cache.__delitem__(self, key)
        self._take_out(key)
        self._ghosts[key] = self._times.pop(key)
        self._trim()
        return key, value

    def inherit(self, key: str, ghost: str) -> None:
        """Gives `key`, which is not held, the history of an evicted item that it stands for."""
        if key not in self._times and ghost in self._ghosts:
            times = sorted((*self._ghosts.pop(ghost), *self._ghosts.pop(key, ())), reverse=True)
            self._ghosts[key] = tuple(times[: self._k])

    def _touch(self, key: str, value: int) -> None:
        self._times[key] = times = (self._now(), *self._times[key])[: self._k]
        if key in self._main:
            self._main[key] = value
            self._main.move_to_end(key)
        else:
            self._leaving.pop(key, None)
            self._window[key] = value
            self._window.move_to_end(key)
            oldest = next(iter(self._main), None)
            if oldest is not None and len(times) == self._k and times[-1] > self._times[oldest][0]:
                del self._window[key]
                self._to_main(key, value)
        room = self.maxsize - self._window_size
        while self._main_size > room:
            oldest, size = self._main.popitem(last=False)
            self._main_size -= size
            self._leaving[oldest] = size

    def _victim(self) -> str:
        """The oldest outside of the main part, after what still fits there has moved in."""
        while (key := self._oldest_outside()) is not None:
            size = self._leaving.get(key) or self._window.get(key, 0)
            if self._main_size + size > self.maxsize - self._window_size:
                return key
            self._leaving.pop(key, None)
            self._window.pop(key, None)
            self._to_main(key, size)
        if not self._main:
            raise KeyError("the cache is empty")
        return next(iter(self._main))

    def _oldest_outside(self) -> str | None:
        fresh, leaving = next(iter(self._window), None), next(iter(self._leaving), None)
        if fresh is None or leaving is None:
            return fresh if leaving is None else leaving
        return min(fresh, leaving, key=lambda key: self._times[key][0])

    def _to_main(self, key: str, size: int) -> None:
        self._main[key] = size
        self._main_size += size

    def _take_out(self, key: str) -> None:
        if key in self._main:
            self._main_size -= self._main.pop(key)
        else:
            self._leaving.pop(key, None)
            self._window.pop(key, None)

    def _learn(self, key: str, value: int, *, was_held: bool) -> None:
        """Compares with a plain LRU, and moves the border of the window."""
        plain = key in self._plain_lru
        if plain and was_held and self._plain_lru[key] == value:
            # Nearly every hit: both have it, so there is nothing to learn.
            self._plain_lru.move_to_end(key)
            return
        if plain and not was_held:
            self._window_size += STEP_UP * value
        elif was_held and not plain:
            self._window_size -= STEP * value
        least, greatest = LEAST_SHARE * self.maxsize, GREATEST_SHARE * self.maxsize
        self._window_size = min(greatest, max(least, self._window_size))
        self._forget_plain(key)
        self._plain_lru[key] = value
        self._plain_size += value
        while self._plain_size > self.maxsize:
            self._plain_size -= self._plain_lru.popitem(last=False)[1]

    def _forget_plain(self, key: str) -> None:
        self._plain_size -= self._plain_lru.pop(key, 0)

    def _trim(self) -> None:
        while len(self._ghosts) > self._ghost_factor * max(1, len(self._times)):
            self._ghosts.popitem(last=False)
