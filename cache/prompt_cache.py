"""The prompt cache: exact look-up, look-up by meaning, expiry and bounded memory over its tiers.

Belongs to one thread. Never embeds, never waits, never reads the clock itself.
A caller looks up exactly first, and semantically only when that found nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cache.aliases import AliasMap
from cache.answer import StoredAnswer
from cache.cold import ColdStore, ColdStoreError, MemoryColdStore
from cache.config import CacheConfig
from cache.decision import Candidate, Decider, Verdict
from cache.entries import ENTRY_OVERHEAD_BYTES, ID_CHARS, Entry, from_record
from cache.equivalence import are_equivalent
from cache.index import Vector
from cache.inventory import Inventory
from cache.key import PromptKey, truncated_key
from cache.learnt import Learnt
from cache.lookup import Lookup, check_unit
from cache.lru_k import EvictionPolicy
from cache.outcome import Hit, Miss
from cache.probation import KnownMisses, MissBuckets
from cache.quarantine import Quarantine
from cache.removals import LateRemovals
from cache.sharing import Condemned, Learning, Notice, Removal, pack, unpack
from cache.stats import CacheStats, EntryFilter, EntryInfo, Explained, Foreseen, TenantStats
from cache.tiers import Tiers
from cache.verifier import Verifier
from cache.write_behind import LEARNT

MAX_TAKEN_IN = 32
"""Records or changes of others that one look-up takes in: a few milliseconds at most."""

__all__ = ["ENTRY_OVERHEAD_BYTES", "CacheConfig", "CacheStats", "Hit", "Miss", "PromptCache"]


class PromptCache:
    """Stored answers by question.

    Args:
        clock: seconds, never backwards. Records of a store that outlives the process need
            one that goes on between processes (`cache.wall_clock`).
        policy: makes the policy that picks who leaves the warm tier when that many bytes
            are held; None is the one that the config names.
        store: of the cold tier; None is one in memory. One that outlives the process, or that
            others share, keeps what is in the warm tier too.
        decider: decides on the semantic path; None lets the same wording pass only.
        rng: jitters what is remembered of misses.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        clock: Callable[[], float],
        policy: Callable[[int], EvictionPolicy] | None = None,
        store: ColdStore | None = None,
        decider: Decider | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._decider = decider
        self._counts: Counter[str] = Counter()
        self._num_removals = 0
        self._owed: list[tuple[EntryFilter, float]] = []
        self._late = LateRemovals(clock)
        self._aliases = AliasMap(config.max_alias_bytes)
        self._known_misses = KnownMisses(clock, rng or random.Random())
        self._buckets = MissBuckets(config.miss_rate_per_s, config.miss_burst)
        self._quarantine = Quarantine(config.quarantine_similarity, config.quarantine_s)
        self._tiers = Tiers(
            config,
            are_equivalent=partial(are_equivalent, config=config),
            aliases=self._aliases,
            counts=self._counts,
            policy=policy,
            store=MemoryColdStore() if store is None else store,
            is_removed=self._late.cover,
            now=clock(),
        )
        self._learnt: Learnt | None = None
        if self._tiers.shared is not None:
            self._learnt = Learnt(
                self._tiers.shared,
                self._aliases,
                None if decider is None else decider.budget,
                life_s=config.life_s,
                clock=clock,
            )
        self._inventory = Inventory(self._tiers, self._aliases)
        self._lookup = Lookup(
            config,
            self._tiers,
            aliases=self._aliases,
            quarantine=self._quarantine,
            decider=decider,
            counts=self._counts,
        )

    def lookup_exact(self, key: PromptKey) -> Hit | None:
        """The answer stored for this very question, or for a paraphrase it is known to be."""
        now = self._expire()
        hit = self._lookup.exact(key, now) or self._lookup.by_alias(key, now)
        if hit is None and not key.allow_semantic:
            self._counts["misses"] += 1
        return hit

    def known_miss(self, key: PromptKey) -> Miss | None:
        """A miss of a moment ago that would be one again: no need to embed the question.

        Counts as the look-up that it stands for.
        """
        self._expire()
        miss = self._known_misses.get(key.partition, key.exact)
        if miss is not None:
            self._counts["misses"] += 1
        return miss

    def lookup_semantic(
        self, key: PromptKey, embedding: Vector | None, underway: Sequence[Candidate] = ()
    ) -> Hit | Miss:
        """The answer of a near question in the partition that the decision lets pass.

        `embedding`: (D,) float32, unit norm; None when the text does not fit the
        embedder. An unusable embedding is a miss and counts as an error. `underway` are
        questions that are being answered; one that is chosen is told in the miss.
        """
        now = self._expire()
        found = self._lookup.nearest(key, embedding, now, underway)
        if isinstance(found, Miss):
            self._counts["misses"] += 1
            self._remember(key, embedding, found)
        return found

    def store(
        self,
        key: PromptKey,
        answer: StoredAnswer,
        embedding: Vector | None,
        *,
        model: str = "",
        tags: tuple[str, ...] = (),
    ) -> bool:
        """Keeps `answer` for `key`, in place of an equal key's; False when it is not kept.

        That is when it is too large, or one too many new answers of its tenant. Only
        answers that ended by themselves, or at the limit (`is_truncated`), may be
        stored. Without a usable `embedding`, or truncated, the entry is found exactly
        only; an unusable one counts as an error.
        """
        now = self._expire()
        if answer.is_truncated:
            key, embedding = truncated_key(key), None
        is_kept = self._buckets.take(key.tenant, now) and self._put(
            Entry(key, answer, now, embedding, model, tags), now
        )
        if not is_kept:
            # A newer answer was given: the one before must not be given any more.
            self._tiers.remove(key.exact)
        self._counts["stores" if is_kept else "refused_stores"] += 1
        return is_kept

    def add_embedding(self, key: PromptKey, answer: StoredAnswer, embedding: Vector) -> bool:
        """Makes a stored answer findable by meaning; False when it is not held any more."""
        now = self._expire()
        found = self._tiers.get(key.exact)
        if found is None or found[0].answer is not answer:
            return False
        return self._put(replace(found[0], vector=embedding), now)

    def evict_expired(self) -> int:
        """Frees what has expired and returns how many; every look-up and store does so too."""
        before = self._counts["expirations"]
        self._expire()
        return self._counts["expirations"] - before

    def clear(self, *, tenant: str | None = None, partition: str | None = None) -> int:
        """Removes the entries of a tenant, of a partition, or all; returns how many."""
        return self.delete(EntryFilter(tenant=tenant, partition=partition))

    def find(self, which: EntryFilter) -> list[EntryInfo]:
        """The entries that are meant, without their answers."""
        return self._inventory.find(which, self._expire_all())

    def delete(self, which: EntryFilter) -> int:
        """Removes the entries that are meant, and returns how many."""
        now = self._expire_all()
        num_removed = self._remove(which, now)
        self._late.add(which, now)
        self._announce(Removal(which, now))
        if self._tiers.is_unread or not self._sweep(which, now):
            self._owed.append((which, now))
        return num_removed

    @property
    def epoch(self) -> int:
        """Raised with each removal that was asked for, here or where the store is shared.

        Whoever holds copies of answers forgets them when it changes.
        """
        self._expire()
        return self._num_removals

    def explain(
        self, key: PromptKey, embedding: Vector | None, verifier: Verifier | None = None
    ) -> list[Explained]:
        """Every candidate for a question with what speaks against it; changes nothing.

        Raises:
            ValueError: `embedding` is not usable.
        """
        return self._lookup.explain(key, embedding, self._expire(), verifier)

    def foresee(self, key: PromptKey, embedding: Vector | None) -> Foreseen:
        """What a look-up would do now, by the live decision; changes nothing.

        Raises:
            ValueError: `embedding` is not usable.
        """
        return self._lookup.foresee(key, embedding, self._expire())

    def feedback(self, entry_id: str, *, was_right: bool, verdict: Verdict | None = None) -> bool:
        """Takes note of whether an answer was right; False when the entry is not held any more.

        A wrong one is quarantined. `verdict` is that of the hit, for the error budget.
        """
        if verdict is not None and self._decider is not None:
            self._decider.record(verdict, was_right=was_right)
        is_held = bool(self._inventory.entries(EntryFilter(id=entry_id), self._expire_all()))
        if is_held and not was_right:
            self.quarantine(entry_id)
        return is_held

    def quarantine(self, entry_id: str) -> int:
        """Removes an entry that was proven wrong, and closes its neighbourhood for a while.

        Near entries stay, for equal questions only. Returns how many were concerned.
        """
        now = self._expire_all()
        concerned = set()
        for wrong in self._inventory.entries(EntryFilter(id=entry_id), now):
            condemned = Condemned(wrong.key.partition, wrong.key.exact, wrong.vector)
            self._late.add(EntryFilter(id=wrong.id), now)
            self._announce(condemned)
            self._tiers.remove(wrong.key.exact)
            near = self._close(condemned, now)
            concerned |= {wrong.key.exact, *near}
            for exact in near:
                try:
                    self._tiers.rewrite(exact)
                except (ColdStoreError, ValueError) as exc:
                    self._lookup.note_fault(exc)
        self._aliases.remove_targets(concerned)
        self._num_removals += 1
        self._counts["quarantined"] += len(concerned)
        return len(concerned)

    def export(self, which: EntryFilter | None = None) -> Iterator[dict[str, Any]]:
        """Entries as records of plain values; what changes meanwhile may be in or not."""
        yield from self.records(self.exact_keys(which or EntryFilter()))

    def exact_keys(self, which: EntryFilter) -> list[str]:
        """The exact keys of the entries that are meant."""
        return [entry.key.exact for entry in self._inventory.entries(which, self._expire_all())]

    def records(self, exact_keys: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The entries of these keys that are held, as records."""
        for exact in exact_keys:
            try:
                record = self._inventory.record(exact, self._expire())
            except (ColdStoreError, ValueError) as exc:
                self._lookup.note_fault(exc)
                continue
            if record is not None:
                yield record

    def import_records(self, records: Iterable[dict[str, Any]]) -> int:
        """Takes exported records in, with the ages they had; returns how many were kept.

        A record too old or too large is left out, as is one that is older than what is held.

        Raises:
            ValueError: a record is damaged; those before it are kept.
        """
        num_kept = 0
        for record in records:
            now = self._expire()
            entry = from_record(record, now)
            held = self._tiers.get(entry.key.exact)
            is_news = held is None or held[0].created < entry.created
            if is_news and now - entry.created < self._config.life_s and self._put(entry, now):
                num_kept += 1
        return num_kept

    def count_error(self) -> None:
        """Counts a failure outside, such as of the embedder, or a time-out."""
        self._counts["errors"] += 1

    def stats(self) -> CacheStats:
        warm, cold, shared = self._tiers.warm, self._tiers.cold, self._tiers.shared
        store_errors = 0 if shared is None else shared.errors_total
        return CacheStats(
            **(self._counts | {"errors": self._counts["errors"] + store_errors}),
            entries=len(warm),
            bytes=warm.bytes,
            cold_entries=0 if cold is None else len(cold),
            cold_bytes=0 if cold is None else cold.bytes,
            aliases=len(self._aliases),
            alias_bytes=self._aliases.bytes,
        )

    def tenant_stats(self) -> list[TenantStats]:
        """What each tenant holds in each tier."""
        return self._inventory.tenant_stats()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Waits until a store that outlives the process has all that was written; whether it has."""
        shared = self._tiers.shared
        return shared is None or shared.flush(timeout_s)

    def close(self) -> None:
        """Lets such a store write what waits, and ends it."""
        if self._learnt is not None:
            self._learnt.close()
        if self._tiers.shared is not None:
            self._tiers.shared.close()

    def _remove(self, which: EntryFilter, now: float) -> int:
        self._num_removals += 1
        return self._inventory.delete(which, now)

    def _sweep(self, which: EntryFilter, now: float) -> bool:
        """Deletes what is meant and only the store knows of; whether it could."""
        try:
            if self._tiers.has_left_out:
                self._inventory.sweep(which, now)
        except ColdStoreError as exc:
            self._lookup.note_fault(exc)
            return False
        return True

    def _close(self, condemned: Condemned, now: float) -> set[str]:
        """Closes the neighbourhood of a wrong answer; returns the keys of those that are in it."""
        partition, vector = condemned.partition, condemned.vector
        near: set[str] = set()
        if vector is not None:
            self._quarantine.add(partition, condemned.exact, vector, now)
            for entry in self._inventory.entries(EntryFilter(partition=partition), now):
                if entry.vector is not None and self._quarantine.covers(partition, entry.vector):
                    near.add(entry.key.exact)
                    self._tiers.unindex(entry.key.exact)
        return near

    def _announce(self, notice: Notice) -> None:
        if self._tiers.shared is not None:
            self._tiers.shared.announce(pack(notice))

    def _take_in(self, limit: int | None, now: float) -> None:
        """Goes on with what the store held before, and hears what others did to it."""
        self._tiers.take_over(now, limit)
        if self._owed and not self._tiers.is_unread:
            # Those, too, that were out of reach when it was asked for.
            owed, self._owed = self._owed, []
            for which, asked in owed:
                self._remove(_as_of(which, asked, now), now)
                if not self._sweep(_as_of(which, asked, now), now):
                    self._owed.append((which, asked))
        shared, learnt = self._tiers.shared, self._learnt
        while shared is not None and learnt is not None and (limit is None or limit > 0):
            change = shared.take_change()
            if change is None:
                return
            limit = None if limit is None else limit - 1
            match change.kind:
                case "put" | "gone" if change.partition in LEARNT:
                    learnt.hear(change)
                case "put":
                    self._known_misses.forget(change.partition)
                    self._tiers.adopt(
                        change.partition, change.record_id, change.data, now, is_news=True
                    )
                case "gone":
                    self._tiers.lose_record(change.record_id)
                case "notice":
                    self._obey(unpack(change.data), now)
                case "emptied":
                    self._tiers.record_anew()
                    learnt.record_anew()
                case "reset":
                    self._tiers.start_anew()
                    learnt.start_anew()
                    self._num_removals += 1

    def _obey(self, notice: Notice | None, now: float) -> None:
        """Does what another process did."""
        match notice:
            case Removal(which, asked):
                self._late.add(which, now if asked is None else asked)
                self._remove(which, now)
            case Condemned(exact=exact):
                self._late.add(EntryFilter(id=exact[:ID_CHARS]), now)
                self._num_removals += 1
                # Also in the store: it may have been written here after it was condemned there.
                self._tiers.remove(exact)
                self._aliases.remove_targets({exact, *self._close(notice, now)})
            case Learning() if self._learnt is not None:
                self._learnt.obey(notice)

    def _put(self, entry: Entry, now: float) -> bool:
        key = entry.key
        equivalent: Entry | None = None
        if not key.allow_semantic:
            entry.vector = None
        if entry.vector is not None:
            try:
                check_unit(entry.vector)
                if self._quarantine.covers(key.partition, entry.vector):
                    entry.vector = None
                else:
                    equivalent = self._lookup.equivalent(entry, entry.vector)
            except ValueError as exc:
                self._lookup.note_fault(exc)
                entry.vector = None
        self._aliases.remove(key.exact)
        self._known_misses.forget(key.partition)
        return self._tiers.put(entry, now, equivalent=equivalent)

    def _remember(self, key: PromptKey, embedding: Vector | None, miss: Miss) -> None:
        """Keeps a miss in mind that only a new entry would change."""
        is_decided = miss.verdict is not None and miss.verdict.action == "refuse"
        if embedding is not None and is_decided:
            self._known_misses.add(
                key.partition, key.exact, Miss(miss.similarity, miss.reason, id=miss.id)
            )

    def _expire_all(self) -> float:
        """As `_expire`, for those who must see everything that the store holds."""
        self._take_in(None, self._clock())
        return self._expire()

    def _expire(self) -> float:
        now = self._clock()
        if self._tiers.is_behind or self._owed:
            self._take_in(MAX_TAKEN_IN, now)
        self._quarantine.expire(now)
        self._tiers.expire(now)
        if self._learnt is not None:
            self._learnt.keep(now)
        return now


def _as_of(which: EntryFilter, asked: float, now: float) -> EntryFilter:
    """The filter for what it meant when it was asked for, and for nothing newer."""
    passed_s, younger_s = now - asked, which.younger_than_s
    # What was stored at that very moment is meant too.
    older_s = -0.001 if which.older_than_s is None else which.older_than_s
    return replace(
        which,
        older_than_s=older_s + passed_s,
        younger_than_s=None if younger_s is None else younger_s + passed_s,
    )
