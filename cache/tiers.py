"""The warm and the cold tier as one: what leaves the one is folded into the other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from cache.aliases import AliasMap
from cache.cold import ColdStore, ColdStoreError, ColdTier
from cache.config import CacheConfig
from cache.entries import Entry, decode_entry, encode_entry
from cache.index import Vector
from cache.lru_k import EvictionPolicy
from cache.policies import make_policy
from cache.stats import Tier
from cache.warm import WarmTier
from cache.write_behind import WriteBehindStore

logger = logging.getLogger(__name__)

Equivalent = Callable[[Entry, Entry, float], bool]
"""Whether two entries of that similarity ask the same, so that one answer does for both."""

MAX_SKEW_S = 5.0
"""Clocks of machines that share a store may differ by so much."""
TAKEN_OVER_AT_START = 20_000
"""Records read before the first look-up; the rest in slices, with look-ups between."""


class Tiers:
    """Entries by exact key and by meaning, over both tiers.

    A store that outlives the process has a record of every entry, whatever tier holds it, and
    what it held before is taken over. Any other has those of the cold tier.

    Args:
        are_equivalent: the decision; this class only knows who is near.
        counts: raised by what happens to entries.
        store: None, or a bound of 0, leaves the cold tier out.
        is_removed: whether a record that comes in was to be removed meanwhile.
        now: in the time that the records were written in.
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
        is_removed: Callable[[Entry], bool] = lambda entry: False,
        now: float,
    ) -> None:
        self._config = config
        self._is_removed = is_removed
        self._are_equivalent = are_equivalent
        self._aliases = aliases
        self._counts = counts
        self.warm = WarmTier(config, self._policy(config.max_bytes, policy))
        self.cold: ColdTier | None = None
        self.shared: WriteBehindStore | None = None
        self._store = store if config.cold_max_bytes else None
        self._on_their_way: set[str] = set()
        self._scan: Iterator[tuple[str, str, bytes]] | None = None
        self._must_scan = self._store is not None
        self.has_left_out = False
        """Whether the store has records that no tier here knows of."""
        if self._store is not None:
            self.cold = ColdTier(
                config,
                self._policy(config.cold_max_bytes, None),
                self._store,
                write=self._write,
                is_needed=self._is_needed,
            )
            self.shared = self._store if isinstance(self._store, WriteBehindStore) else None
            self.take_over(now, TAKEN_OVER_AT_START if self.shared else None)

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
        self._record(entry)
        return True

    def remove(self, exact: str) -> bool:
        """Takes an entry out of both tiers; whether it was in one."""
        warm = self.warm.get(exact)
        is_warm = warm is not None
        if warm is not None:
            self.warm.remove(exact)
            self._erase(warm)
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

    @property
    def is_unread(self) -> bool:
        """Whether there is more to take over of what the store held before."""
        return self._must_scan or self._scan is not None

    @property
    def is_behind(self) -> bool:
        """Whether there is anything to take over, or to hear of others."""
        return self.is_unread or (self.shared is not None and self.shared.has_heard)

    def take_over(self, now: float, limit: int | None) -> None:
        """Reads on, by up to `limit` records, in what the store held before; None: to the end."""
        if self._scan is None:
            if not self._must_scan or not (self.shared is None or self.shared.is_up):
                return
            assert self._store is not None
            self._scan, self._must_scan = self._store.scan(), False
        num_read = 0
        try:
            for record in islice(self._scan, limit):
                self.adopt(*record, now)
                num_read += 1
        except ColdStoreError as exc:
            logger.warning("the store cannot be read, this is tried again: %s", exc)
            self._counts["errors"] += 1
            self._scan, self._must_scan = None, True
            return
        if limit is None or num_read < limit:
            self._scan = None

    def fetch(self, partition: str, exact: str, now: float) -> bool:
        """Takes in one record ahead of the others; whether it is held now.

        Raises:
            ColdStoreError: the store failed.
        """
        data = None if self._store is None else self._store.get(partition, exact)
        if data is not None:
            self.adopt(partition, exact, data, now)
        return self.get(exact) is not None

    def adopt(
        self, partition: str, exact: str, data: bytes, now: float, *, is_news: bool = False
    ) -> None:
        """Takes in a record that is in the store, where it fits; one of no use is deleted.

        `is_news`: another process has just written it.
        """
        assert self.cold is not None
        try:
            entry = decode_entry(data)
        except ValueError as exc:
            logger.warning("a stored record is left aside: %s", exc)
            self._delete(partition, exact)
            return
        age_s = now - entry.created
        is_alive = -MAX_SKEW_S <= age_s < self._config.cold_ttl_s
        if (entry.key.partition, entry.key.exact) != (partition, exact) or not is_alive:
            self._delete(partition, exact)
            return
        held = self.get(exact)
        if held is not None:
            ours, tier = held
            if ours.created == entry.created and not is_news:
                return
            if ours.created > entry.created and tier == "L2":
                # What was written last is not what was answered last.
                self._record(ours)
                return
            self.forget(exact)
        if self._is_removed(entry):
            self._delete(partition, exact)
            return
        entry.is_recorded = self.shared is not None
        if self.cold.adopt(entry, data):
            return
        if self.shared is None:
            self._delete(partition, exact)
        elif age_s < self._config.ttl_s and self.warm.has_room(entry):
            self._to_warm(entry, now)
        else:
            # Another process may hold it. It ends by itself.
            self.has_left_out = True

    def forget(self, exact: str) -> None:
        """Takes an entry out of both tiers, and leaves the store alone."""
        if self.warm.get(exact) is not None:
            self.warm.remove(exact)
        if self.cold is not None and self.cold.get(exact) is not None:
            self.cold.forget(exact)

    def lose_record(self, exact: str) -> None:
        """Takes note that the store has an entry's record no more."""
        if (warm := self.warm.get(exact)) is not None:
            warm.is_recorded = False
        if self.cold is not None and self.cold.get(exact) is not None:
            self.cold.forget(exact)

    def record_anew(self) -> None:
        """Writes what is whole in memory into a store that has lost everything."""
        assert self.cold is not None
        for husk in list(self.cold.entries()):
            self.cold.forget(husk.key.exact)
        for entry in list(self.warm.entries()):
            self._record(entry)

    def start_anew(self) -> None:
        """Forgets everything, and takes over what the store has now."""
        for entry, _ in list(self.entries()):
            self.forget(entry.key.exact)
        self._scan, self._must_scan = None, self._store is not None

    def rewrite(self, exact: str) -> None:
        """Brings the record of an entry up to date.

        Raises:
            ColdStoreError: the store failed.
            ValueError: the stored record is damaged; it is removed.
        """
        found = self.get(exact)
        if self.shared is not None and found is not None:
            self._record(self.whole(*found))

    def sweep(self, is_meant: Callable[[Entry], bool]) -> None:
        """Deletes the records that are meant, also those that no tier knows of.

        Raises:
            ColdStoreError: the store failed.
        """
        if self.shared is None:
            return
        for partition, exact, data in self.shared.scan():
            try:
                entry = decode_entry(data)
            except ValueError:
                continue
            if is_meant(entry):
                self.shared.delete(partition, exact)

    def expire(self, now: float) -> None:
        """Ends stays that are over. From the warm tier an answer that still lives goes on."""
        if self.cold is not None and (num_ended := self.cold.take_expired(now)):
            self._counts["cold_expirations"] += num_ended
        ended = self.warm.take_expired(now)
        self._counts["expirations"] += len(ended)
        self._demote(ended, now)

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
        left = self.warm.put(entry, deadline, equivalent=equivalent)
        self._counts["evictions"] += len(left)
        self._demote(left, now)

    def _demote(self, left: list[Entry], now: float) -> None:
        cold = self.cold
        if cold is None:
            return
        # One that comes in may push the other's former stay out, but not its record.
        self._on_their_way = {entry.key.exact for entry in left if entry.is_recorded}
        for entry in left:
            if now - entry.created < self._config.cold_ttl_s:
                try:
                    self._fold(cold, entry)
                except ColdStoreError as exc:
                    logger.warning("an answer is lost to the cold tier: %s", exc)
                    self._counts["errors"] += 1
            self._on_their_way.discard(entry.key.exact)
            if cold.get(entry.key.exact) is None:
                self._erase(entry)

    def _record(self, entry: Entry) -> None:
        """Puts an entry of the warm tier into a store that outlives the process."""
        if self.shared is None:
            return
        entry.is_recorded = False
        try:
            self._write(entry, encode_entry(entry))
        except ColdStoreError as exc:
            logger.warning("an answer is kept in memory only: %s", exc)
            self._counts["errors"] += 1

    def _write(self, entry: Entry, data: bytes) -> None:
        key = entry.key
        if self.shared is None:
            assert self._store is not None
            self._store.put(key.partition, key.exact, data)
        elif not entry.is_recorded:
            expires = entry.created + self._config.life_s
            self.shared.put(key.partition, key.exact, data, expires)
            entry.is_recorded = True

    def _is_needed(self, exact: str) -> bool:
        warm = self.warm.get(exact)
        return exact in self._on_their_way or (warm is not None and warm.is_recorded)

    def _erase(self, entry: Entry) -> None:
        if entry.is_recorded:
            entry.is_recorded = False
            self._delete(entry.key.partition, entry.key.exact)

    def _delete(self, partition: str, exact: str) -> None:
        assert self._store is not None
        try:
            self._store.delete(partition, exact)
        except ColdStoreError as exc:
            logger.warning("a record could not be deleted: %s", exc)

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
