"""What the cache holds, for those who look after it: find, delete, export, count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cache.aliases import AliasMap
from cache.entries import Entry, to_record
from cache.key import normalise
from cache.stats import EntryFilter, EntryInfo, TenantStats, Tier
from cache.tiers import Tiers


class Inventory:
    """Entries of both tiers by their properties. Looks at all of them: not for the path of a
    request."""

    def __init__(self, tiers: Tiers, aliases: AliasMap) -> None:
        self._tiers = tiers
        self._aliases = aliases

    def find(self, which: EntryFilter, now: float) -> list[EntryInfo]:
        return [_info(entry, tiers, now) for entry, tiers in self._meant(which, now)]

    def entries(self, which: EntryFilter, now: float) -> list[Entry]:
        """The entries that are meant; those of the cold tier only come without payloads."""
        return [entry for entry, _ in self._meant(which, now)]

    def delete(self, which: EntryFilter, now: float) -> int:
        """Removes the entries that are meant, with what stands for them; returns how many."""
        doomed = {entry.key.exact for entry in self.entries(which, now)}
        for exact in doomed:
            self._tiers.remove(exact)
        self._aliases.remove_targets(doomed)
        return len(doomed)

    def sweep(self, which: EntryFilter, now: float) -> None:
        """Deletes the records of entries that are meant, and that no tier knows of.

        Raises:
            ColdStoreError: the store failed.
        """
        self._tiers.sweep(lambda entry: is_meant(entry, which, now))

    def record(self, exact: str, now: float) -> dict[str, Any] | None:
        """A held entry as plain values; None when it is not held.

        Raises:
            ColdStoreError: the store failed.
            ValueError: the stored record is damaged; it is removed.
        """
        found = self._tiers.get(exact)
        return None if found is None else to_record(self._tiers.whole(*found), now)

    def tenant_stats(self) -> list[TenantStats]:
        """What each tenant holds in each tier."""
        warm, cold = self._tiers.warm, self._tiers.cold
        held: list[tuple[Tier, dict[str, tuple[int, int]]]] = [("L2", warm.held())]
        if cold is not None:
            held.append(("L3", cold.held()))
        return [
            TenantStats(tenant, tier, *amounts)
            for tier, tenants in held
            for tenant, amounts in sorted(tenants.items())
        ]

    def _meant(self, which: EntryFilter, now: float) -> Iterator[tuple[Entry, tuple[Tier, ...]]]:
        for entry, tiers in self._tiers.entries():
            if is_meant(entry, which, now):
                yield entry, tiers


def is_meant(entry: Entry, which: EntryFilter, now: float) -> bool:
    """Whether an entry fulfils all that the filter names."""
    age_s = now - entry.created
    return (
        which.id in (None, entry.id)
        and (which.prompt is None or normalise(which.prompt) == normalise(entry.key.text))
        and which.tenant in (None, entry.key.tenant)
        and which.partition in (None, entry.key.partition)
        and which.model in (None, entry.model, entry.answer.model_revision)
        and (which.tag is None or which.tag in entry.tags)
        and (which.older_than_s is None or age_s > which.older_than_s)
        and (which.younger_than_s is None or age_s < which.younger_than_s)
    )


def _info(entry: Entry, tiers: tuple[Tier, ...], now: float) -> EntryInfo:
    return EntryInfo(
        id=entry.id,
        tenant=entry.key.tenant,
        partition=entry.key.partition,
        text=entry.key.text,
        model=entry.model,
        model_revision=entry.answer.model_revision,
        tags=entry.tags,
        age_s=now - entry.created,
        hits=entry.hits,
        payload_bytes=len(entry.answer.payload) if "L2" in tiers else None,
        tiers=tiers,
    )
