"""The warm and the cold tier as one: what leaves the one is folded into the other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from cache.aliases import AliasMap
from cache.cold import ColdStore, ColdStoreError, ColdTier
from cache.config import CacheConfig
from cache.entries import Entry
from cache.index import Vector
from cache.lru_k import EvictionPolicy
from cache.policies import make_policy
from cache.stats import Tier
from cache.warm import WarmTier

logger = logging.getLogger(__name__)

Equivalent = Callable[[Entry, Entry, float], bool]
"""Whether two entries of that similarity ask the same, so that one answer does for both."""


class Tiers:
    """Entries by exact key and by meaning, over both tiers.

    Args:
        are_equivalent: the decision; this class only knows who is near.
        counts: raised by what happens to entries.
        store: None, or a bound of 0, leaves the cold tier out.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        are_equivalent: Equivalent,
        aliases: AliasMap,
        counts: Counter[str],
        policy: Callable[[int], EvictionPolicy] | None,
        store: ColdStore | None,
        now: float,
    ) -> None:
        self._config = config
        self._are_equivalent = are_equivalent
        self._aliases = aliases
        self._counts = counts
        self.warm = WarmTier(config, self._policy(config.max_bytes, policy))
        self.cold: ColdTier | None = None
        if store is not None and config.cold_max_bytes:
            cold_policy = self._policy(config.cold_max_bytes, None)
            self.cold = ColdTier(config, cold_policy, store, now)

    def get(self, exact: str) -> tuple[Entry, Tier] | None:
        """The entry and where it is; one from the cold tier comes without its payload."""
        entry = self.warm.get(exact)
        if entry is not None:
            return entry, "L2"
        if self.cold is not None and (entry := self.cold.get(exact)) is not None:
            return entry, "L3"
        return None

    def search(self, partition: str, vector: Vector, top: int) -> list[tuple[Entry, Tier, float]]:
        """The nearest of both tiers, nearest first, each entry once.

        Raises:
            ValueError: the partition holds vectors of another dimension.
        """
        found: list[tuple[Entry, Tier, float]] = [
            (entry, "L2", similarity)
            for entry, similarity in self.warm.search(partition, vector, top)
        ]
        if self.cold is not None:
            found += [
                (entry, "L3", similarity)
                for entry, similarity in self.cold.search(partition, vector, top)
                if self.warm.get(entry.key.exact) is None
            ]
            found.sort(key=lambda item: -item[2])
        return found[:top]

    def whole(self, entry: Entry, tier: Tier) -> Entry:
        """A held entry with its payload.

        Raises:
            ColdStoreError: the store failed.
            ValueError: the stored record is damaged; it is removed.
        """
        if tier == "L2":
            return entry
        assert self.cold is not None
        return self.cold.load(entry.key.exact)

    def use(self, entry: Entry, tier: Tier, now: float) -> Entry:
        """Counts a hit and returns the whole entry, from the cold tier back in the warm one.

        Raises:
            ColdStoreError: the store failed.
            ValueError: the stored record is damaged; it is removed.
        """
        if tier == "L2":
            self.warm.use(entry)
        else:
            assert self.cold is not None
            entry = self.cold.load(entry.key.exact)
            if self.warm.fits(entry):
                self._to_warm(entry, now)
        entry.hits += 1
        entry.last_hit = now
        return entry

    def put(self, entry: Entry, now: float, *, equivalent: Entry | None = None) -> bool:
        """Takes in a new entry in place of an equal question's; False when it is too large."""
        self.remove(entry.key.exact)
        if not self.warm.fits(entry):
            return False
        self._to_warm(entry, now, equivalent)
        return True

    def remove(self, exact: str) -> bool:
        """Takes an entry out of both tiers; whether it was in one."""
        is_warm = self.warm.get(exact) is not None
        if is_warm:
            self.warm.remove(exact)
        is_cold = self.cold is not None and self.cold.get(exact) is not None
        if is_cold:
            assert self.cold is not None
            self.cold.remove(exact)
        return is_warm or is_cold

    def unindex(self, exact: str) -> None:
        """Makes an entry findable by its exact key only, in both tiers."""
        if (warm := self.warm.get(exact)) is not None:
            self.warm.unindex(warm)
        if self.cold is not None and (cold := self.cold.get(exact)) is not None:
            self.cold.unindex(cold)

    def expire(self, now: float) -> None:
        """Ends stays that are over. From the warm tier an answer that still lives goes on."""
        if self.cold is not None and (num_ended := self.cold.take_expired(now)):
            self._counts["cold_expirations"] += num_ended
        for entry in self.warm.take_expired(now):
            self._counts["expirations"] += 1
            self._demote(entry, now)

    def entries(self) -> Iterator[tuple[Entry, tuple[Tier, ...]]]:
        """All entries, each once; those of the cold tier only come without their payloads."""
        for entry in list(self.warm.entries()):
            is_cold = self.cold is not None and self.cold.get(entry.key.exact) is not None
            yield entry, ("L2", "L3") if is_cold else ("L2",)
        if self.cold is not None:
            for entry in list(self.cold.entries()):
                if self.warm.get(entry.key.exact) is None:
                    yield entry, ("L3",)

    def _to_warm(self, entry: Entry, now: float, equivalent: Entry | None = None) -> None:
        deadline = min(now + self._config.ttl_s, entry.created + self._config.life_s)
        for left in self.warm.put(entry, deadline, equivalent=equivalent):
            self._counts["evictions"] += 1
            self._demote(left, now)

    def _demote(self, entry: Entry, now: float) -> None:
        cold = self.cold
        if cold is None or now - entry.created >= self._config.cold_ttl_s:
            return
        try:
            self._fold(cold, entry)
        except ColdStoreError as exc:
            logger.warning("an answer is lost to the cold tier: %s", exc)
            self._counts["errors"] += 1

    def _fold(self, cold: ColdTier, entry: Entry) -> None:
        held = cold.get(entry.key.exact)
        if held is not None:
            # It was there before it came back; only what it was asked since is news.
            held.hits, held.last_hit = entry.hits, entry.last_hit
            return
        if not entry.answer.is_intact:
            self._counts["errors"] += 1
            return
        rep = self._representative(cold, entry)
        if rep is None:
            if entry.hits == 0 and not cold.has_room(entry):
                # Asked once, it does not push out what was asked again.
                self._counts["rejected"] += 1
                return
            self._note(cold.put(entry), "demotions")
            return
        assert entry.vector is not None
        assert rep.vector is not None
        member, other = (rep, entry) if cold.merge(entry, rep) else (entry, rep)
        if member is rep:
            self._note(cold.replace(rep, entry), "demotions")
        self._counts["folded"] += 1
        assert member.vector is not None
        self._aliases.add(member.key.exact, other.key.exact, member.vector)

    def _representative(self, cold: ColdTier, entry: Entry) -> Entry | None:
        if entry.vector is None:
            return None
        near = cold.search(entry.key.partition, entry.vector, self._config.num_candidates)
        return next((rep for rep, close in near if self._are_equivalent(rep, entry, close)), None)

    def _note(self, num_left: int | None, event: str) -> None:
        if num_left is None:
            self._counts["rejected"] += 1
        else:
            self._counts[event] += 1
            self._counts["cold_evictions"] += num_left

    def _policy(
        self, max_bytes: int, policy: Callable[[int], EvictionPolicy] | None
    ) -> EvictionPolicy:
        if policy is not None:
            return policy(max_bytes)
        return make_policy(
            self._config.policy, max_bytes, k=self._config.lru_k, ghosts=self._config.ghosts
        )
