"""L3, the cold tier: one representative of each cluster of verified equivalents, in a store.

What a look-up needs to decide is in memory; payloads are in the store, which may be a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from cache.answer import StoredAnswer
from cache.config import CacheConfig
from cache.entries import Entry, decode_entry, encode_entry
from cache.expiry import ExpiryQueue
from cache.index import Vector, VectorIndex
from cache.lru_k import EvictionPolicy
from cache.tenants import TenantLedger

logger = logging.getLogger(__name__)

Record = bytes


class ColdStoreError(OSError):
    """The store failed. To the cache it is as if the record were not there."""


class RecordGone(ValueError):
    """Another process that shares the store has deleted the record."""


class OutOfReach(ColdStoreError):
    """The store has failed for a while, and has said so."""


class ColdStore(Protocol):
    """Records by partition and id, both hex digests. Bytes go in and come out unchanged.

    Writes may be deferred, as long as the store itself reads what it was given. Every
    method may raise ColdStoreError.
    """

    def get(self, partition: str, record_id: str) -> bytes | None: ...

    def put(self, partition: str, record_id: str, data: bytes) -> None:
        """Writes a record, in place of one that is there."""

    def delete(self, partition: str, record_id: str) -> None:
        """Removes a record; nothing when it is not there."""

    def scan(self, partition: str | None = None) -> Iterator[tuple[str, str, bytes]]:
        """All records as (partition, id, data), of one partition or of all, in any order."""


class MemoryColdStore:
    """A store that ends with its process."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, bytes]] = {}

    def get(self, partition: str, record_id: str) -> bytes | None:
        return self._partitions.get(partition, {}).get(record_id)

    def put(self, partition: str, record_id: str, data: bytes) -> None:
        self._partitions.setdefault(partition, {})[record_id] = data

    def delete(self, partition: str, record_id: str) -> None:
        records = self._partitions.get(partition, {})
        records.pop(record_id, None)
        if not records:
            self._partitions.pop(partition, None)

    def scan(self, partition: str | None = None) -> Iterator[tuple[str, str, bytes]]:
        partitions = list(self._partitions) if partition is None else [partition]
        for name in partitions:
            for record_id, data in list(self._partitions.get(name, {}).items()):
                yield name, record_id, data


@dataclass(slots=True)
class _Held:
    """`husk` is the entry without its payload; `centre` sums the members' vectors by hits."""

    husk: Entry
    size: int
    centre: Vector | None


class ColdTier:
    """Bounded in bytes, in all and by tenant; an answer lives `cold_ttl_s` from its making.

    Args:
        write: puts an entry into the store, unless it is there.
        is_needed: whether the record of an entry that leaves must stay all the same.
    """

    def __init__(
        self,
        config: CacheConfig,
        policy: EvictionPolicy,
        store: ColdStore,
        *,
        write: Callable[[Entry, bytes], None],
        is_needed: Callable[[str], bool],
    ) -> None:
        self._max_bytes = config.cold_max_bytes
        self._max_size = min(
            config.cold_max_bytes, config.tenant_max_bytes or config.cold_max_bytes
        )
        self._ttl_s = config.cold_ttl_s
        self._policy = policy
        self._store = store
        self._write = write
        self._is_needed = is_needed
        self._held: dict[str, _Held] = {}
        self._expiry = ExpiryQueue()
        self._index = VectorIndex()
        self._tenants = TenantLedger(config.tenant_max_bytes, config.tenant_max_entries)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def bytes(self) -> int:
        return int(self._policy.currsize)

    def entries(self) -> Iterable[Entry]:
        """All entries without their payloads."""
        return (held.husk for held in self._held.values())

    def held(self) -> dict[str, tuple[int, int]]:
        """Entries and bytes by tenant."""
        return self._tenants.held()

    def get(self, exact: str) -> Entry | None:
        """The entry without its payload."""
        held = self._held.get(exact)
        return None if held is None else held.husk

    def load(self, exact: str) -> Entry:
        """The whole entry, as a use of it.

        Raises:
            ColdStoreError: the store failed.
            ValueError: the record is gone or damaged; it is removed.
        """
        husk = self._held[exact].husk
        data = self._store.get(husk.key.partition, exact)
        try:
            if data is None:
                raise RecordGone(f"record {husk.id} is gone")
            entry = decode_entry(data)
            if entry.key != husk.key or entry.created != husk.created:
                raise ValueError(f"record {husk.id} is another one's")
        except ValueError:
            self.remove(exact)
            raise
        self._policy[exact]
        self._tenants.use(husk.key.tenant, exact)
        return replace(
            entry,
            hits=husk.hits,
            last_hit=husk.last_hit,
            vector=husk.vector,
            is_recorded=husk.is_recorded,
        )

    def search(self, partition: str, vector: Vector, top: int) -> list[tuple[Entry, float]]:
        """The nearest entries, without their payloads, nearest first.

        Raises:
            ValueError: the partition holds vectors of another dimension.
        """
        found = self._index.search(partition, vector, top)
        return [(self._held[exact].husk, similarity) for exact, similarity in found]

    def has_room(self, entry: Entry) -> bool:
        """Whether nothing need leave for the entry."""
        return self._has_room(entry, _size(entry, encode_entry(entry)))

    def put(self, entry: Entry, *, centre: Vector | None = None) -> int | None:
        """Keeps an entry that is not held; returns how many had to leave, None when it cannot.

        Raises:
            ColdStoreError: the store failed; the entry is not held.
        """
        data = encode_entry(entry)
        key, size = entry.key, _size(entry, data)
        if size > self._max_size:
            return None
        num_left = 0
        while (exact := self._tenants.must_leave(key.tenant, size)) is not None:
            self.remove(exact)
            num_left += 1
        while self._policy.currsize + size > self._max_bytes:
            self._drop(self._policy.popitem()[0])
            num_left += 1
        self._write(entry, data)
        self._hold(entry, size, centre)
        return num_left

    def adopt(self, entry: Entry, data: Record) -> bool:
        """Holds an entry whose record `data` is in the store, if nothing need leave for it."""
        size = _size(entry, data)
        if not self._has_room(entry, size):
            return False
        self._hold(entry, size, None)
        return True

    def merge(self, entry: Entry, rep: Entry) -> bool:
        """Counts `entry` as a member of the cluster of `rep`; whether it is its new medoid.

        The medoid is nearest to all members, each weighted by its hits.
        """
        held = self._held[rep.key.exact]
        assert entry.vector is not None
        assert held.husk.vector is not None
        assert held.centre is not None
        held.centre = held.centre + (entry.hits + 1) * entry.vector
        return float(entry.vector @ held.centre) > float(held.husk.vector @ held.centre)

    def replace(self, rep: Entry, entry: Entry) -> int | None:
        """Puts a cluster's new medoid in the place of its former one; as `put`."""
        centre = self._held[rep.key.exact].centre
        self.remove(rep.key.exact)
        return self.put(entry, centre=centre)

    def remove(self, exact: str) -> None:
        """Takes an entry out; KeyError when it is not held."""
        del self._policy[exact]
        self._drop(exact)

    def forget(self, exact: str) -> None:
        """Takes an entry out, and leaves its record alone; KeyError when it is not held."""
        del self._policy[exact]
        self._drop(exact, has_record=False)

    def take_expired(self, now: float) -> int:
        """Removes those whose life is over and returns how many."""
        due = self._expiry.take_due(now)
        for exact in due:
            del self._policy[exact]
            self._drop(exact, has_deadline=False)
        return len(due)

    def unindex(self, entry: Entry) -> None:
        """Makes a held entry findable by its exact key only."""
        if entry.vector is not None:
            self._index.remove(entry.key.partition, entry.key.exact)
            entry.vector = None

    def _hold(self, entry: Entry, size: int, centre: Vector | None) -> None:
        exact, answer = entry.key.exact, entry.answer
        husk = replace(
            entry,
            answer=StoredAnswer(
                b"", answer.completion_tokens, answer.model_revision, answer.is_truncated
            ),
        )
        if husk.vector is not None:
            try:
                self._index.add(husk.key.partition, exact, husk.vector)
            except ValueError:
                husk.vector = None
        if centre is None and husk.vector is not None:
            centre = (husk.hits + 1) * husk.vector
        self._policy[exact] = size
        self._held[exact] = _Held(husk, size, centre)
        self._expiry.add(exact, husk.created + self._ttl_s)
        self._tenants.add(husk.key.tenant, exact, size)

    def _has_room(self, entry: Entry, size: int) -> bool:
        return (
            size <= self._max_size
            and self._policy.currsize + size <= self._max_bytes
            and self._tenants.must_leave(entry.key.tenant, size) is None
        )

    def _drop(self, exact: str, *, has_deadline: bool = True, has_record: bool = True) -> None:
        husk = self._held.pop(exact).husk
        if has_deadline:
            self._expiry.remove(exact)
        self._tenants.remove(husk.key.tenant, exact)
        if husk.vector is not None:
            self._index.remove(husk.key.partition, exact)
        if not has_record or self._is_needed(exact):
            return
        try:
            self._store.delete(husk.key.partition, exact)
        except ColdStoreError as exc:
            # It is not found any more; a later start drops it by its age.
            logger.warning("a record could not be deleted: %s", exc)


def _size(entry: Entry, data: bytes) -> int:
    return max(entry.size_bytes, len(data))
