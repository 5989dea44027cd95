"""S3-FIFO: three queues, no order to keep on a hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cachetools import Cache

MAX_FREQUENCY = 3


class S3FIFOCache(Cache[str, int]):
    """A small queue filters what is used once; a ghost queue lets what returns into the main one.

    Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP
    2023, with bytes for counts: the ghosts stand for as many bytes as the main queue.
    Every operation is O(1) amortised.

    Args:
        maxsize: bound of the sum of the values.
        small: share of the small queue.
        getsizeof: size of a value; None takes the value itself.
    """

    def __init__(
        self,
        maxsize: float,
        *,
        small: float = 0.1,
        getsizeof: Callable[[int], float] | None = None,
    ) -> None:
        if not 0 < small < 1:
            raise ValueError(f"small is {small}, not in (0, 1)")
        super().__init__(maxsize, getsizeof or (lambda value: value))
        self._small_size, self._small_target = 0, small * maxsize
        self._ghost_size, self._ghost_target = 0, (1 - small) * maxsize
        self._small: OrderedDict[str, int] = OrderedDict()
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghosts: OrderedDict[str, int] = OrderedDict()
        self._frequencies: dict[str, int] = {}

    @property
    def num_ghosts(self) -> int:
        return len(self._ghosts)

    def __getitem__(self, key: str) -> int:
        value = super().__getitem__(key)
        if key in self._frequencies:
            self._frequencies[key] = min(MAX_FREQUENCY, self._frequencies[key] + 1)
        return value

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        if key in self._frequencies:
            self._frequencies[key] = min(MAX_FREQUENCY, self._frequencies[key] + 1)
            if key in self._small:
                self._small_size += value - self._small[key]
                self._small[key] = value
            else:
                self._main[key] = value
            return
        self._frequencies[key] = 0
        if key in self._ghosts:
            self._ghost_size -= self._ghosts.pop(key)
            self._main[key] = value
        else:
            self._small[key] = value
            self._small_size += value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self._frequencies[key]
        if key in self._small:
            self._small_size -= self._small.pop(key)
        else:
            del self._main[key]

    def popitem(self) -> tuple[str, int]:
        """Evicts the victim; one that was never used again leaves a ghost."""
        while self._small or self._main:
            from_small = self._small_size >= self._small_target or not self._main
            if from_small and self._small:
                key, value = next(iter(self._small.items()))
                if self._frequencies[key] > 1:
                    self._to_main(key)
                    continue
                del self[key]
                self._remember(key, value)
                return key, value
            key, value = next(iter(self._main.items()))
            if self._frequencies[key] == 0:
                del self[key]
                return key, value
            self._frequencies[key] -= 1
            self._main.move_to_end(key)
        raise KeyError("the cache is empty")

    def inherit(self, key: str, ghost: str) -> None:
        """Gives `key`, which is not held, the place of an evicted item that it stands for."""
        if key not in self._frequencies and ghost in self._ghosts and key not in self._ghosts:
            self._ghosts[key] = self._ghosts.pop(ghost)

    def _to_main(self, key: str) -> None:
        value = self._small.pop(key)
        self._small_size -= value
        self._frequencies[key] = 0
        self._main[key] = value

    def _remember(self, key: str, value: int) -> None:
        self._ghosts[key] = value
        self._ghost_size += value
        while self._ghost_size > self._ghost_target:
            self._ghost_size -= self._ghosts.popitem(last=False)[1]
