"""Paraphrases that were answered: which stored question an exact key stands for."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache

from cache.index import Vector

ALIAS_BYTES = 768
"""One alias with its keys, besides its vector; measured: at most 700."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The stored question's exact key, and the vector of the asked one."""

    target: str
    vector: Vector


class AliasMap:
    """Bounded by bytes; the least recently used leaves first.

    An alias saves the embedding and the search, not the decision: the caller puts the pair
    to it again, so that an alias can never serve what a look-up by meaning would refuse.
    """

    def __init__(self, max_bytes: int) -> None:
        self._aliases: LRUCache[str, Alias] = LRUCache(
            max_bytes, getsizeof=lambda alias: ALIAS_BYTES + alias.vector.nbytes
        )

    def __len__(self) -> int:
        return len(self._aliases)

    @property
    def bytes(self) -> int:
        return int(self._aliases.currsize)

    def add(self, exact: str, target: str, vector: Vector) -> None:
        alias = Alias(target, vector)
        if exact != target and self._aliases.getsizeof(alias) <= self._aliases.maxsize:
            self._aliases[exact] = alias

    def get(self, exact: str) -> Alias | None:
        return self._aliases.get(exact)

    def remove(self, exact: str) -> None:
        self._aliases.pop(exact, None)

    def remove_targets(self, targets: set[str]) -> None:
        """Forgets all that stand for one of `targets`."""
        for exact in [exact for exact, alias in self._aliases.items() if alias.target in targets]:
            del self._aliases[exact]
