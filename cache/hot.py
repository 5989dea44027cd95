"""L1, the hot tier: values by a key that is equal to the byte, in the process that is asked.

What may be reused at all is decided elsewhere: this holds what was given for the very same
request, or is just being told, and for a short time only, because nobody tells it when another
process has an answer made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cache.expiry import ExpiryQueue
from cache.lru_k import EvictionPolicy, LRUKCache

T = TypeVar("T")

MAX_STAY_S = 90.0
HALF_LIFE_S = 30.0
ENTRY_OVERHEAD_BYTES = 2048
"""Book-keeping of one entry with its four ghosts; measured: at most 1,700."""
ALIAS_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Held(Generic[T]):
    value: T
    stamp: str
    made_s: float


class HotTier(Generic[T]):
    """Bounded by bytes; victims are LRU-3's with ghosts, and with accesses that fade.

    An entry stays at most `MAX_STAY_S` since it was kept, and never past its life. A hit
    extends neither.

    Args:
        life_s: of a value, from when it was made.
        policy: makes the policy that picks who leaves when that many bytes are held.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        life_s: float,
        clock: Callable[[], float],
        policy: Callable[[int], EvictionPolicy] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._life_s = life_s
        self._clock = clock
        self._policy = (
            LRUKCache(max_bytes, k=3, half_life=HALF_LIFE_S, timer=clock)
            if policy is None
            else policy(max_bytes)
        )
        self._held: dict[str, _Held[T]] = {}
        self._aliases: dict[str, str] = {}
        self._expiry = ExpiryQueue()

    def __len__(self) -> int:
        return len(self._held) + len(self._aliases)

    @property
    def bytes(self) -> int:
        return int(self._policy.currsize)

    def find(self, key: str, stamp: str) -> tuple[T, float] | None:
        """The value of `key` or of what it stands for, and its age in seconds.

        None unless it was kept with the same stamp.
        """
        now = self._expire()
        target = self._aliases.get(key, key)
        held = self._held.get(target)
        if held is None or held.stamp != stamp:
            return None
        # Reading is what the policy counts as an access.
        self._policy[target]
        if target != key:
            self._policy[key]
        return held.value, now - held.made_s

    def keep(self, key: str, stamp: str, value: T, size_bytes: int, age_s: float = 0.0) -> bool:
        """Holds a value that was made `age_s` ago, in place of one that is there.

        False when it is too large or its life is over; then nothing is held for `key`.
        """
        now = self._expire()
        self._remove(key)
        made_s = now - age_s
        ends_s = min(now + MAX_STAY_S, made_s + self._life_s)
        if not self._make_room(size_bytes + ENTRY_OVERHEAD_BYTES) or ends_s <= now:
            return False
        self._policy[key] = size_bytes + ENTRY_OVERHEAD_BYTES
        self._held[key] = _Held(value, stamp, made_s)
        self._expiry.add(key, ends_s)
        return True

    def alias(self, key: str, target: str) -> bool:
        """Lets `key`, verified to ask the same, be answered as `target`; False if it cannot.

        It ends with its target at the latest, and stays no longer than a value does.
        """
        now = self._expire()
        if target not in self._held or key == target:
            return False
        self._remove(key)
        if not self._make_room(ALIAS_BYTES) or target not in self._held:
            return False
        self._policy[key] = ALIAS_BYTES
        self._aliases[key] = target
        self._expiry.add(key, now + MAX_STAY_S)
        return True

    def forget(self, key: str) -> None:
        """Removes what is held for `key`, if anything."""
        self._remove(key)

    def clear(self) -> None:
        """Forgets everything."""
        for key in [*self._held, *self._aliases]:
            self._remove(key)

    def _expire(self) -> float:
        now = self._clock()
        for key in self._expiry.take_due(now):
            del self._policy[key]
            self._drop(key)
        return now

    def _make_room(self, size: int) -> bool:
        if size > self._max_bytes:
            return False
        while self._policy.currsize + size > self._max_bytes:
            victim, _ = self._policy.popitem()
            self._expiry.remove(victim)
            self._drop(victim)
        return True

    def _remove(self, key: str) -> None:
        if key in self._held or key in self._aliases:
            self._expiry.remove(key)
            del self._policy[key]
            self._drop(key)

    def _drop(self, key: str) -> None:
        # An alias of a value that left is found to be one when it is asked for, or expires.
        self._held.pop(key, None)
        self._aliases.pop(key, None)
