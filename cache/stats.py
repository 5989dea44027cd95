"""What the cache tells of itself, and of what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["L2", "L3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counts since the start, and what is held now.

    `misses` counts questions, not calls: an exact look-up that finds nothing
    counts only when its key allows no semantic one. `errors` counts failures of
    any look-up or store, apart from misses. `refused_stores` were too large, or one too
    many of their tenant. `entries` and `bytes` are of the warm tier, `cold_…` of the cold one.

    Attributes:
        alias_hits: semantic hits without a search, among `semantic_hits`.
        cold_hits: hits that brought an answer back from the cold tier.
        promotions: hits that were told to be worth keeping in the hot tier.
        demotions: entries that went on from the warm tier to the cold one.
        folded: entries that a representative in the cold tier answers for since.
        rejected: entries that the cold tier had no room for, as nobody had asked again.
        quarantined: entries that were left out after a wrong answer.
    """

    exact_hits: int = 0
    semantic_hits: int = 0
    alias_hits: int = 0
    cold_hits: int = 0
    misses: int = 0
    stores: int = 0
    refused_stores: int = 0
    evictions: int = 0
    expirations: int = 0
    promotions: int = 0
    demotions: int = 0
    folded: int = 0
    rejected: int = 0
    cold_evictions: int = 0
    cold_expirations: int = 0
    quarantined: int = 0
    errors: int = 0
    entries: int = 0
    bytes: int = 0
    cold_entries: int = 0
    cold_bytes: int = 0
    aliases: int = 0
    alias_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant holds in one tier."""

    tenant: str
    tier: Tier
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A held entry, without its answer. `tiers` names where it is held."""

    id: str
    tenant: str
    partition: str
    text: str
    model: str
    model_revision: str
    tags: tuple[str, ...]
    age_s: float
    hits: int
    payload_bytes: int | None
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """A candidate for a question, and why it may not be given as the same wording; None: it may.

    Attributes:
        veto: of the guards, against its being asked in other words.
        score: the verifier's, where no veto stands against it and there is a verifier.
        action: what the live decision would do with it if there were no other candidate, by
            guards, verifier and the error budget as it is now; `reason` is what it says.
    """

    id: str
    tier: Tier
    text: str
    similarity: float | None
    refusal: str | None
    age_s: float
    veto: str | None = None
    score: float | None = None
    action: Literal["serve", "shadow", "refuse"] = "refuse"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What a look-up would do now with what is stored.

    Attributes:
        action: give the answer (`serve`); give none, but compare it with the model's (`shadow`);
            or give none, and learn nothing (`refuse`).
        by: the equal question, one that is known to mean the same, or the search by meaning.
        id: of the entry that would be given or compared.
        reason: what the decision says.
        score: the verifier's.
        check_rate: how likely a given answer would be checked.
    """

    action: Literal["serve", "shadow", "refuse"]
    by: Literal["exact", "alias", "meaning"]
    reason: str
    id: str | None = None
    similarity: float | None = None
    score: float | None = None
    check_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFilter:
    """Which entries are meant: those that fulfil all that is not None.

    `prompt` is compared as a question is, in NFC and without outer white space. Ages are in
    seconds, `older_than_s` and `younger_than_s` both exclusive.
    """

    id: str | None = None
    prompt: str | None = None
    tenant: str | None = None
    partition: str | None = None
    model: str | None = None
    tag: str | None = None
    older_than_s: float | None = None
    younger_than_s: float | None = None
