"""The path of a look-up, on tiers: exact key, known paraphrase, meaning; and its one decision."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from cache.aliases import Alias, AliasMap
from cache.answer import StoredAnswer
from cache.budget import Action
from cache.cold import ColdStoreError, OutOfReach, RecordGone
from cache.config import CacheConfig
from cache.decision import Candidate, Decider, Verdict, refusal
from cache.entries import Entry, entry_id
from cache.equivalence import are_equivalent, refusal_of
from cache.guards import MAX_PROMPT_CHARS, compare
from cache.index import Vector
from cache.key import PromptKey, truncated_key
from cache.outcome import Hit, Miss
from cache.prompts import Prompt, PromptMemo
from cache.quarantine import Quarantine
from cache.reading import understand
from cache.stats import Explained, Foreseen, Tier
from cache.tiers import Tiers
from cache.verifier import Pair, Verifier

logger = logging.getLogger(__name__)

NORM_TOLERANCE = 1e-2

Found = tuple[Entry, Tier, float]
"""A candidate, where it is held, and how near it is."""


class Lookup:
    """Finds candidates and puts them to the decision.

    Args:
        decider: decides on the semantic path; None lets the same wording pass only.
        counts: raised by hits and faults.
    """

    def __init__(
        self,
        config: CacheConfig,
        tiers: Tiers,
        *,
        aliases: AliasMap,
        quarantine: Quarantine,
        decider: Decider | None,
        counts: Counter[str],
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._aliases = aliases
        self._quarantine = quarantine
        self._decider = decider
        self._counts = counts
        self._memo = PromptMemo()

    def exact(self, key: PromptKey, now: float) -> Hit | None:
        """The answer stored for this very question, whole or cut at this very limit."""
        return self._at(key.exact, key, now) or self._at(truncated_key(key).exact, key, now)

    def nearest(
        self,
        key: PromptKey,
        embedding: Vector | None,
        now: float,
        underway: Sequence[Candidate] = (),
    ) -> Hit | Miss:
        """The answer of a near question that the decision lets pass.

        `underway`: near questions that are being answered, for the same decision.
        """
        if not key.allow_semantic:
            return Miss(None, "semantic matching is off")
        if embedding is None:
            return Miss(None, "prompt too long to embed")
        try:
            check_unit(embedding)
            if self._quarantine.covers(key.partition, embedding):
                return Miss(None, "near an answer that was wrong")
            found = self._search(key, embedding)
            # Their answers will be closed like those that are stored.
            underway = [each for each in underway
                        if not self._quarantine.covers(key.partition, each.embedding)]  # fmt: skip
        except ValueError as exc:
            self.note_fault(exc)
            return Miss(None, f"unusable embedding: {exc}")
        return self._decide(key, embedding, found, now, underway)

    def by_alias(self, key: PromptKey, now: float) -> Hit | None:
        """The answer of the question that this one was found to paraphrase, decided anew."""
        alias = self._aliases.get(key.exact)
        if alias is None or not key.allow_semantic:
            return None
        found = self._target(key, alias)
        hit = None if found is None else self._by_alias(key, alias.vector, found, now)
        if hit is not None:
            self._counts["alias_hits"] += 1
            return hit
        self._aliases.remove(key.exact)
        return None

    def _target(self, key: PromptKey, alias: Alias) -> Found | None:
        """What an alias stands for, if it may be put to the decision."""
        found = self._tiers.get(alias.target)
        vector = None if found is None else found[0].vector
        if (
            found is None
            or vector is None
            or vector.shape != alias.vector.shape
            or self._quarantine.covers(key.partition, alias.vector)
        ):
            return None
        return (*found, float(vector @ alias.vector))

    def _by_alias(self, key: PromptKey, vector: Vector, found: Found, now: float) -> Hit | None:
        # Where it does not serve, the request goes on to be decided among all candidates: only
        # then is it counted.
        verdict = self._verdict(key, vector, self._candidates([found], now), is_preview=True)
        if verdict.action != "serve":
            return None
        entry, tier, near = found
        hit = self._give(entry, tier, now, "semantic", min(near, 1.0), verdict)
        if hit is None or self._decider is None:
            return hit
        return replace(hit, verdict=self._decider.confirm(verdict))

    def explain(
        self,
        key: PromptKey,
        embedding: Vector | None,
        now: float,
        verifier: Verifier | None = None,
    ) -> list[Explained]:
        """Every candidate with what speaks against it; changes nothing.

        Raises:
            ValueError: `embedding` is not usable.
        """
        found: list[tuple[Entry, Tier, float | None]] = []
        for exact in (key.exact, truncated_key(key).exact):
            if (held := self._tiers.get(exact)) is not None:
                found.append((*held, None))
        if embedding is not None:
            check_unit(embedding)
            found += self._search(key, embedding)
        return [self._explained(one, key, embedding, now, verifier) for one in found]

    def foresee(self, key: PromptKey, embedding: Vector | None, now: float) -> Foreseen:
        """What the whole of a look-up would come to; changes nothing."""
        for exact in (key.exact, truncated_key(key).exact):
            held = self._tiers.get(exact)
            if held is not None and refusal_of(held[0], key, now, None, self._config) is None:
                return Foreseen(
                    action="serve",
                    by="exact",
                    reason="equal question",
                    id=held[0].id,
                    similarity=1.0,
                )
        alias = self._aliases.peek(key.exact) if key.allow_semantic else None
        if alias is not None and (found := self._target(key, alias)) is not None:
            foreseen = self._foreseen(key, alias.vector, [found], now, "alias")
            if foreseen.action == "serve":
                return foreseen
        if not key.allow_semantic or embedding is None:
            why = (
                "semantic matching is off" if not key.allow_semantic else "prompt too long to embed"
            )
            return Foreseen(action="refuse", by="meaning", reason=why)
        check_unit(embedding)
        if self._quarantine.covers(key.partition, embedding):
            return Foreseen(action="refuse", by="meaning", reason="near an answer that was wrong")
        return self._foreseen(key, embedding, self._search(key, embedding), now, "meaning")

    def _foreseen(
        self,
        key: PromptKey,
        embedding: Vector,
        found: list[Found],
        now: float,
        by: Literal["alias", "meaning"],
    ) -> Foreseen:
        candidates = self._candidates(found, now)
        verdict = self._verdict(key, embedding, candidates, is_preview=True)
        choice = None if verdict.choice is None else entry_id(candidates[verdict.choice].key)
        return Foreseen(
            action=verdict.action,
            by=by,
            reason=verdict.reason or "same wording",
            id=choice,
            similarity=None if verdict.similarity is None else min(verdict.similarity, 1.0),
            score=verdict.score,
            check_rate=verdict.check_rate,
        )

    def _explained(
        self,
        found: tuple[Entry, Tier, float | None],
        key: PromptKey,
        embedding: Vector | None,
        now: float,
        verifier: Verifier | None,
    ) -> Explained:
        entry, tier, similarity = found
        refused = refusal_of(entry, key, now, similarity, self._config)
        veto, score = None, None
        action: Action = "serve" if refused is None else "refuse"
        reason = "equal question" if refused is None else refused
        if similarity is not None and embedding is not None:
            veto, score = _in_other_words(entry, key, embedding, verifier)
            alone = self._foreseen(key, embedding, [(entry, tier, similarity)], now, "meaning")
            action, reason = alone.action, alone.reason
        return Explained(
            entry.id,
            tier,
            entry.key.text,
            None if similarity is None else min(similarity, 1.0),
            refused,
            now - entry.created,
            veto,
            score,
            action,
            reason,
        )

    def _at(self, exact: str, key: PromptKey, now: float) -> Hit | None:
        found = self._tiers.get(exact)
        if found is None and self._tiers.is_unread and self._fetch(key.partition, exact, now):
            found = self._tiers.get(exact)
        if found is None or refusal_of(found[0], key, now, None, self._config) is not None:
            return None
        return self._give(*found, now, "exact", 1.0)

    def _fetch(self, partition: str, exact: str, now: float) -> bool:
        """Whether a store that is not wholly read yet has the entry."""
        try:
            return self._tiers.fetch(partition, exact, now)
        except ColdStoreError as exc:
            self.note_fault(exc)
            return False

    def _search(self, key: PromptKey, embedding: Vector) -> list[Found]:
        return self._tiers.search(key.partition, embedding, self._config.num_candidates)

    def _decide(
        self,
        key: PromptKey,
        embedding: Vector,
        found: list[Found],
        now: float,
        underway: Sequence[Candidate] = (),
        is_counted: bool = False,
    ) -> Hit | Miss:
        """Puts the candidates to the decision, again without one whose answer is damaged."""
        candidates = [*self._candidates(found, now), *underway]
        verdict = self._verdict(key, embedding, candidates, is_counted=is_counted)
        similarity = None if verdict.similarity is None else min(verdict.similarity, 1.0)
        if verdict.choice is None:
            return Miss(similarity, verdict.reason, verdict)
        if verdict.choice >= len(found):
            other = candidates[verdict.choice].key
            shared = other if verdict.action == "serve" else None
            return Miss(similarity, verdict.reason, verdict, id=entry_id(other), underway=shared)
        entry, tier, near = found[verdict.choice]
        if verdict.action != "serve":
            answer = self._answer(entry, tier) if verdict.is_checked else None
            return Miss(similarity, verdict.reason, verdict, answer, entry.id)
        # Rounding may lift the product of equal vectors above 1.
        hit = self._give(entry, tier, now, "semantic", min(near, 1.0), verdict)
        if hit is None:
            rest = [item for item in found if item[0] is not entry]
            if not rest:
                return Miss(similarity, "stored answer was damaged")
            return self._decide(key, embedding, rest, now, underway, is_counted=True)
        self._aliases.add(key.exact, entry.key.exact, embedding)
        return hit

    def _candidates(self, found: list[Found], now: float) -> list[Candidate]:
        return [
            Candidate(entry.key, entry.answer, now - entry.created, near, entry.vector)
            for entry, _, near in found
            if entry.vector is not None
        ]

    def _verdict(
        self,
        key: PromptKey,
        embedding: Vector,
        candidates: Sequence[Candidate],
        *,
        is_counted: bool = False,
        is_preview: bool = False,
    ) -> Verdict:
        """The one place where the semantic path is decided."""
        life_s, category = self._config.life_s, key.tenant
        if self._decider is not None and is_preview:
            return self._decider.preview(
                key, embedding, candidates, ttl_s=life_s, category=category
            )
        if self._decider is not None:
            return self._decider.choose(
                key,
                embedding,
                candidates,
                ttl_s=life_s,
                category=category,
                is_counted=is_counted,
            )
        reason = "no candidate"
        prompt = Prompt(key.text)
        for place, candidate in enumerate(candidates):
            refused = refusal(
                candidate.key,
                candidate.answer,
                key,
                age_s=candidate.age_s,
                ttl_s=life_s,
                similarity=candidate.similarity,
                threshold=self._config.semantic_threshold,
                prompts=(self._memo.of(candidate.key), prompt),
                is_worded=place == 0,
            )
            if refused is None:
                return Verdict(
                    action="serve", reason="", choice=place, similarity=candidate.similarity
                )
            if place == 0:
                reason = refused
        nearest = candidates[0].similarity if candidates else None
        return Verdict(action="refuse", reason=reason, similarity=nearest)

    def _give(
        self,
        entry: Entry,
        tier: Tier,
        now: float,
        outcome: Literal["exact", "semantic"],
        similarity: float,
        verdict: Verdict | None = None,
    ) -> Hit | None:
        """The hit; None when the answer turns out to be damaged or out of reach."""
        if tier == "L2" and not entry.answer.is_intact:
            # A damaged answer must not come back from the other tier either.
            self._tiers.remove(entry.key.exact)
            self.note_fault(f"a stored answer of {entry.answer.size_bytes} bytes was damaged")
            return None
        before = entry.last_hit
        try:
            entry = self._tiers.use(entry, tier, now)
        except (ColdStoreError, ValueError) as exc:
            self.note_fault(exc)
            return None
        promote = before is not None and now - before <= self._config.promote_window_s
        self._counts[f"{outcome}_hits"] += 1
        if promote:
            self._counts["promotions"] += 1
        if tier == "L3":
            self._counts["cold_hits"] += 1
        # One from another machine may be of a moment to come.
        age_s = max(0.0, now - entry.created)
        return Hit(entry.answer, outcome, tier, similarity, age_s, entry.id, promote, verdict)

    def _answer(self, entry: Entry, tier: Tier) -> StoredAnswer | None:
        """The answer to compare a new one with, if it is within reach."""
        try:
            answer = self._tiers.whole(entry, tier).answer
        except (ColdStoreError, ValueError) as exc:
            self.note_fault(exc)
            return None
        return answer if answer.is_intact else None

    def equivalent(self, entry: Entry, vector: Vector) -> Entry | None:
        """A held entry that may answer for a new one."""
        near = self._tiers.warm.search(entry.key.partition, vector, self._config.num_candidates)
        for other, similarity in near:
            if other.key != entry.key and are_equivalent(other, entry, similarity, self._config):
                return other
        return None

    def note_fault(self, fault: Exception | str) -> None:
        """Counts what went wrong inside; to the caller it is as if nothing were held."""
        if isinstance(fault, RecordGone):
            logger.info("taken as a miss: %s", fault)
            return
        if not isinstance(fault, OutOfReach):
            logger.warning("cache fault, taken as a miss: %s", fault)
        self._counts["errors"] += 1


def _in_other_words(
    entry: Entry, key: PromptKey, embedding: Vector, verifier: Verifier | None
) -> tuple[str | None, float | None]:
    """The veto of the guards and the score of the verifier on a pair."""
    longest = max(len(entry.key.text), len(key.text))
    if longest > MAX_PROMPT_CHARS:
        return f"prompt has {longest} characters, the limit is {MAX_PROMPT_CHARS}", None
    comparison = compare(understand(entry.key.text), understand(key.text))
    if comparison.veto is not None or verifier is None or entry.vector is None:
        return comparison.veto, None
    return None, float(verifier.score(embedding, [Pair(comparison, entry.vector)])[0])


def check_unit(embedding: Vector) -> None:
    """Passes what can be searched for.

    Raises:
        ValueError: `embedding` is not float32 of shape (D,) with norm 1.
    """
    if embedding.ndim != 1 or embedding.dtype != np.float32:
        raise ValueError(
            f"embedding is {embedding.dtype} of shape {embedding.shape}, not float32 (D,)"
        )
    norm = float(np.sqrt(embedding @ embedding))
    # Written so that NaN is refused.
    if not abs(norm - 1.0) <= NORM_TOLERANCE:
        raise ValueError(f"embedding has norm {norm:.4g}, not 1")
