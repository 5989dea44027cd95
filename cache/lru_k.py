"""Who leaves when space is short: the eviction contract, and LRU-K with ghosts.

A policy is any `cachetools.Cache` whose values are their own sizes in bytes. It
knows nothing of answers, expiry or similarity.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from cachetools import Cache

COMPACT_SLACK = 64


class EvictionPolicy(Protocol):
    """What the prompt cache asks of a policy; each `cachetools.Cache` of sizes fulfils it.

    Reading an item counts as an access. `popitem` evicts the policy's victim;
    `del` forgets an item that left for another reason.
    """

    @property
    def maxsize(self) -> float: ...

    @property
    def currsize(self) -> float: ...

    def __len__(self) -> int: ...

    def __contains__(self, key: object, /) -> bool: ...

    def __getitem__(self, key: str, /) -> int: ...

    def __setitem__(self, key: str, value: int, /) -> None: ...

    def __delitem__(self, key: str, /) -> None: ...

    def popitem(self) -> tuple[str, int]: ...


class _History:
    """Times of an item's last accesses, newest first, at most K; `number` breaks ties."""

    __slots__ = ("number", "times", "weight")

    def __init__(self, times: tuple[float, ...], weight: float, number: int) -> None:
        self.times = times
        self.weight = weight
        self.number = number

    def rank(self, k: int) -> tuple[float, float, int]:
        """Lower leaves first: the K-th last access (never: -inf), then the lighter one."""
        kth = self.times[k - 1] if len(self.times) == k else -math.inf
        return kth, self.weight, self.number


class LRUKCache(Cache[str, int]):
    """Evicts the item whose K-th last access is oldest; items with fewer accesses go first.

    O'Neil, O'Neil, Weikum: The LRU-K page replacement algorithm for database disk
    buffering, SIGMOD 1993, with a correlated reference period of 0. The history
    of evicted items is kept for as many as `ghosts` times the items held (their
    "retained information", bounded by count instead of time): without it an item
    that returns would start from nothing, and LRU-K falls behind LRU.

    Among those with too few accesses the one used last longest ago leaves first or, with a
    `half_life`, the one whose accesses weigh least, each halved in that time (LRFU: Lee et
    al. 2001). Weights are kept as the logarithm at time 0, so that none has to be decayed.

    Every operation is O(log n): one heap record an item, which may be older
    than the item's history. Ranks only rise, so a record that is still current when it
    reaches the top is the minimum.

    Args:
        maxsize: bound of the sum of the values.
        k: accesses that count.
        ghosts: histories kept of evicted items, as a multiple of the items held.
        half_life: in units of `timer`.
        timer: time of an access; None counts accesses. Must not run backwards.
        getsizeof: size of a value; None takes the value itself.
    """

    def __init__(
        self,
        maxsize: float,
        *,
        k: int = 2,
        ghosts: float = 4.0,
        half_life: float | None = None,
        timer: Callable[[], float] | None = None,
        getsizeof: Callable[[int], float] | None = None,
    ) -> None:
        if k < 1:
            raise ValueError(f"k is {k}, the least is 1")
        if ghosts < 0:
            raise ValueError(f"ghosts is {ghosts}, the least is 0")
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life is {half_life}, it must be positive")
        super().__init__(maxsize, getsizeof or (lambda value: value))
        self._half_life = half_life
        self._k = k
        self._ghost_factor = ghosts
        self._timer: Callable[[], float] = timer or itertools.count().__next__
        self._numbers = itertools.count()
        self._histories: dict[str, _History] = {}
        self._ghosts: OrderedDict[str, _History] = OrderedDict()
        self._heap: list[tuple[tuple[float, float, int], str]] = []

    @property
    def num_ghosts(self) -> int:
        return len(self._ghosts)

    def __getitem__(self, key: str) -> int:
        value = super().__getitem__(key)
        if key in self._histories:
            self._touch(key)
        return value

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        if key in self._histories:
            self._touch(key)
            return
        history = self._ghosts.pop(key, None) or _History((), -math.inf, 0)
        history.number = next(self._numbers)
        self._histories[key] = history
        self._touch(key)
        heappush(self._heap, (history.rank(self._k), key))

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self._histories[key]
        self._trim()

    def popitem(self) -> tuple[str, int]:
        """Evicts the victim and keeps its history as a ghost."""
        key = self._victim()
        value = Cache.__getitem__(self, key)
        self._ghosts[key] = self._histories[key]
        del self[key]
        return key, value

    def inherit(self, key: str, ghost: str) -> None:
        """Gives `key`, which is not held, the history of an evicted item that it stands for."""
        if key in self._histories or ghost not in self._ghosts:
            return
        history, own = self._ghosts.pop(ghost), self._ghosts.pop(key, None)
        if own is not None:
            times = sorted((*history.times, *own.times), reverse=True)
            history.times = tuple(times[: self._k])
            history.weight = _sum(history.weight, own.weight)
        self._ghosts[key] = history

    def _touch(self, key: str) -> None:
        now, history = self._timer(), self._histories[key]
        history.times = (now, *history.times)[: self._k]
        if self._half_life is None:
            history.weight = now
        else:
            history.weight = _sum(history.weight, now / self._half_life)

    def _victim(self) -> str:
        while self._heap:
            rank, key = self._heap[0]
            history = self._histories.get(key)
            if history is None or history.number != rank[2]:
                heappop(self._heap)
            elif (current := history.rank(self._k)) != rank:
                heapreplace(self._heap, (current, key))
            else:
                return key
        raise KeyError("the cache is empty")

    def _trim(self) -> None:
        while len(self._ghosts) > self._ghost_factor * max(1, len(self._histories)):
            self._ghosts.popitem(last=False)
        if len(self._heap) > 2 * len(self._histories) + COMPACT_SLACK:
            self._heap = [(item.rank(self._k), key) for key, item in self._histories.items()]
            heapify(self._heap)


def _sum(a: float, b: float) -> float:
    """The logarithm (base 2) of the sum of two numbers of which the logarithms are given."""
    less, more = min(a, b), max(a, b)
    return more if less == -math.inf else more + math.log2(1 + 2.0 ** (less - more))
