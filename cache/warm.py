"""L2, the warm tier: entries in memory, by exact key and by meaning."""

from __future__ import annotations

from collections.abc import Iterable

from cache.clusters import Clusters
from cache.config import CacheConfig
from cache.entries import Entry
from cache.expiry import ExpiryQueue
from cache.ghosts import GhostVectors
from cache.index import Vector, VectorIndex
from cache.lru_k import EvictionPolicy
from cache.tenants import TenantLedger


class WarmTier:
    """Bounded in bytes, in all and by tenant; the bounds are never exceeded.

    Room is made before an entry comes in. What leaves, for space or for age, is handed to
    the caller, who may keep it elsewhere.
    """

    def __init__(self, config: CacheConfig, policy: EvictionPolicy) -> None:
        self._max_bytes = config.max_bytes
        self._max_size = min(
            config.max_bytes, config.max_entry_bytes, config.tenant_max_bytes or config.max_bytes
        )
        self._policy = policy
        self._entries: dict[str, Entry] = {}
        self._expiry = ExpiryQueue()
        self._index = VectorIndex()
        self._tenants = TenantLedger(config.tenant_max_bytes, config.tenant_max_entries)
        self._clusters = Clusters()
        self._ghosts = GhostVectors(config.semantic_threshold)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return int(self._policy.currsize)

    def entries(self) -> Iterable[Entry]:
        return self._entries.values()

    def held(self) -> dict[str, tuple[int, int]]:
        """Entries and bytes by tenant."""
        return self._tenants.held()

    def get(self, exact: str) -> Entry | None:
        """The entry, without counting as a use of it."""
        return self._entries.get(exact)

    def use(self, entry: Entry) -> None:
        """Counts a hit of an entry that is held."""
        # Reading is what the policy counts as an access.
        self._policy[entry.key.exact]
        self._tenants.use(entry.key.tenant, entry.key.exact)

    def fits(self, entry: Entry) -> bool:
        return entry.size_bytes <= self._max_size

    def has_room(self, entry: Entry) -> bool:
        """Whether nothing need leave for the entry."""
        size = entry.size_bytes
        return (
            self.fits(entry)
            and self._policy.currsize + size <= self._max_bytes
            and self._tenants.must_leave(entry.key.tenant, size) is None
        )

    def search(self, partition: str, vector: Vector, top: int) -> list[tuple[Entry, float]]:
        """The nearest entries of the partition with their similarities, nearest first.

        Raises:
            ValueError: the partition holds vectors of another dimension.
        """
        found = self._index.search(partition, vector, top)
        return [(self._entries[exact], similarity) for exact, similarity in found]

    def put(self, entry: Entry, deadline: float, *, equivalent: Entry | None = None) -> list[Entry]:
        """Takes in an entry that fits and is not held; returns who had to leave for it.

        `equivalent`: another held entry that may answer for it.
        """
        key, size = entry.key, entry.size_bytes
        if entry.vector is not None:
            self._remember_asking(key.partition, key.exact, entry.vector)
        left = self._make_room(key.tenant, size)
        if entry.vector is not None:
            self._index.add(key.partition, key.exact, entry.vector)
            if equivalent is not None and equivalent.vector is not None:
                other = equivalent.key.exact
                if other in self._entries:
                    self._clusters.join(key.exact, entry.vector, other, equivalent.vector)
        self._policy[key.exact] = size
        self._entries[key.exact] = entry
        self._expiry.add(key.exact, deadline)
        self._tenants.add(key.tenant, key.exact, size)
        return left

    def remove(self, exact: str) -> Entry:
        """Takes an entry out; KeyError when it is not held."""
        self._expiry.remove(exact)
        return self._forget(exact)

    def take_expired(self, now: float) -> list[Entry]:
        """Removes and returns those whose time is over."""
        return [self._forget(exact) for exact in self._expiry.take_due(now)]

    def unindex(self, entry: Entry) -> None:
        """Makes a held entry findable by its exact key only."""
        if entry.vector is not None:
            self._index.remove(entry.key.partition, entry.key.exact)
            self._clusters.remove(entry.key.exact)
            entry.vector = None

    def _make_room(self, tenant: str, size: int) -> list[Entry]:
        left = []
        while (exact := self._tenants.must_leave(tenant, size)) is not None:
            left.append(self.remove(exact))
        while self._policy.currsize + size > self._max_bytes:
            left.append(self._evict())
        return left

    def _evict(self) -> Entry:
        victim, size = self._policy.popitem()
        spare = self._clusters.spare(victim, lambda exact: self._entries[exact].hits)
        if spare != victim:
            # One of its equivalents goes: what can be answered stays the same.
            self._policy[victim] = size
            return self.remove(spare)
        self._expiry.remove(victim)
        entry = self._drop(victim)
        if entry.vector is not None:
            self._ghosts.add(entry.key.partition, victim, entry.vector)
            self._ghosts.trim(max(1, len(self._index) // 2))
        return entry

    def _forget(self, exact: str) -> Entry:
        del self._policy[exact]
        return self._drop(exact)

    def _drop(self, exact: str) -> Entry:
        entry = self._entries.pop(exact)
        self._tenants.remove(entry.key.tenant, exact)
        self._clusters.remove(exact)
        if entry.vector is not None:
            self._index.remove(entry.key.partition, exact)
        return entry

    def _remember_asking(self, partition: str, exact: str, vector: Vector) -> None:
        """Lets the policy know what was evicted under other words."""
        ghost = self._ghosts.nearest(partition, vector)
        if ghost is None:
            return
        self._ghosts.remove(ghost)
        inherit = getattr(self._policy, "inherit", None)
        if inherit is not None and ghost != exact:
            inherit(exact, ghost)
