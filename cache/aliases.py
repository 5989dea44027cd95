"""Paraphrases that were answered: which stored question an exact key stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachetools import Cache, LRUCache

from cache.index import Vector

ALIAS_BYTES = 768
"""One alias with its keys, besides its vector; measured: at most 700."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The stored question's exact key, and the vector of the asked one."""

    target: str
    vector: Vector


class _Bounded(LRUCache[str, Alias]):
    """Tells who leaves for lack of space."""

    def __init__(self, max_bytes: int, on_leave: Callable[[str], None]) -> None:
        super().__init__(max_bytes, getsizeof=lambda alias: ALIAS_BYTES + alias.vector.nbytes)
        self._on_leave = on_leave

    def popitem(self) -> tuple[str, Alias]:
        exact, alias = super().popitem()
        self._on_leave(exact)
        return exact, alias


class AliasMap:
    """Bounded by bytes; the least recently used leaves first.

    An alias saves the embedding and the search, not the decision: the caller puts the pair
    to it again, so that an alias can never serve what a look-up by meaning would refuse.

    Attributes:
        on_add, on_remove: are told what changes, unless another process did it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.on_add: Callable[[str, Alias], None] = lambda exact, alias: None
        self.on_remove: Callable[[str], None] = lambda exact: None
        self._aliases = _Bounded(max_bytes, lambda exact: self.on_remove(exact))

    def __len__(self) -> int:
        return len(self._aliases)

    @property
    def bytes(self) -> int:
        return int(self._aliases.currsize)

    def add(self, exact: str, target: str, vector: Vector) -> None:
        known = self._aliases.get(exact)
        alias = Alias(target, vector)
        if self.adopt(exact, alias) and (known is None or known.target != target):
            self.on_add(exact, alias)

    def adopt(self, exact: str, alias: Alias) -> bool:
        """Takes over what another process has learnt; whether there is room for it."""
        is_held = exact != alias.target and self._aliases.getsizeof(alias) <= self._aliases.maxsize
        if is_held:
            self._aliases[exact] = alias
        return is_held

    def get(self, exact: str) -> Alias | None:
        return self._aliases.get(exact)

    def peek(self, exact: str) -> Alias | None:
        """As `get`, but it does not count as a use."""
        return Cache.__getitem__(self._aliases, exact) if exact in self._aliases else None

    def remove(self, exact: str) -> None:
        if self._aliases.pop(exact, None) is not None:
            self.on_remove(exact)

    def forget(self, exact: str) -> None:
        """As `remove`, where another process has done it."""
        self._aliases.pop(exact, None)

    def remove_targets(self, targets: set[str]) -> None:
        """Forgets all that stand for one of `targets`."""
        for exact in [exact for exact, alias in self._aliases.items() if alias.target in targets]:
            self.remove(exact)

    def clear(self) -> None:
        """Forgets all, as if it had never been learnt here."""
        while self._aliases:
            self.forget(next(iter(self._aliases)))

    def items(self) -> list[tuple[str, Alias]]:
        return list(self._aliases.items())
