"""May this request be given that stored answer? One decision, whatever path or tier asks.

`refusal` is what holds for every hit: partition, age, length, completeness. `Decider` adds the
semantic path: which of the nearest stored questions asks the same, and whether the error budget
lets its answer be given. Holds no entries: it gets candidates, and gives a verdict on them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cache.answer import StoredAnswer
from cache.budget import Action, Decision, ErrorBudget
from cache.guards import (
    MAX_PROMPT_CHARS,
    Comparison,
    compare_unless_vetoed,
    wording_differs,
)
from cache.index import Vector
from cache.key import PromptKey
from cache.prompts import Prompt, PromptMemo
from cache.verifier import Pair, Verifier

logger = logging.getLogger(__name__)

QUARANTINE_RADIUS = 0.97
"""Cosine: neighbours as near as this to a question whose answer was wrong are taken out with it."""


def refusal(
    stored: PromptKey,
    answer: StoredAnswer,
    asked: PromptKey,
    *,
    age_s: float,
    ttl_s: float,
    similarity: float | None,
    threshold: float,
    prompts: tuple[Prompt, Prompt] | None = None,
    is_worded: bool = True,
) -> str | None:
    """Why `asked` must not get `answer`, which was stored for `stored`; None means it may.

    `similarity` None asks for the exact path, where the texts must be equal;
    else the texts must be as near as `threshold` and have the same wording. `prompts` are the two
    texts as far as they have been read; where the reason is not `is_worded`, only whether there is
    one counts.
    """
    if (reason := _refusal(stored, answer, asked, age_s=age_s, ttl_s=ttl_s)) is not None:
        return reason
    if similarity is None:
        return None if stored.text == asked.text else "other text"
    if (reason := _semantic_refusal(stored, answer, asked, similarity, threshold)) is not None:
        return reason
    one, other = prompts or (Prompt(stored.text), Prompt(asked.text))
    return wording_differs(one, other, is_worded=is_worded)


def _refusal(
    stored: PromptKey, answer: StoredAnswer, asked: PromptKey, *, age_s: float, ttl_s: float
) -> str | None:
    if stored.partition != asked.partition:
        return "other partition"
    if age_s >= ttl_s:
        return "expired"
    if asked.max_tokens is not None and answer.completion_tokens > asked.max_tokens:
        return f"answer has {answer.completion_tokens} tokens, max_tokens is {asked.max_tokens}"
    if answer.is_truncated and stored.max_tokens != asked.max_tokens:
        return "answer was cut at another limit"
    return None


def _semantic_refusal(
    stored: PromptKey, answer: StoredAnswer, asked: PromptKey, similarity: float, threshold: float
) -> str | None:
    if answer.is_truncated:
        return "answer was cut"
    if not (stored.allow_semantic and asked.allow_semantic):
        return "semantic matching is off"
    # Written so that NaN is refused.
    if not similarity >= threshold:
        return "below threshold"
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored question near the asked one. `embedding` is its index row, (D,) of unit norm."""

    key: PromptKey
    answer: StoredAnswer
    age_s: float
    similarity: float
    embedding: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do for a request, given its candidates.

    `serve`: give the answer of `candidates[choice]`. `shadow`: give none; were an answer given, it
    would be that one. `refuse`: none is near enough. With `is_checked` the request's own answer is
    generated too, compared with that of the choice, and the result told to `Decider.record`.
    `score` is None where the wording is the same.
    """

    action: Action
    reason: str
    choice: int | None = None
    similarity: float | None = None
    score: float | None = None
    is_checked: bool = False
    check_rate: float = 0.0
    category: str = ""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """An entry gave, or would have given, a wrong answer: it leaves the semantic path.

    So do entries of its partition whose embeddings are as near to its own as `radius`, and it and
    they may not come back to the semantic path before they would have expired.
    """

    radius: float


class Decider:
    """Decides for the semantic path. Belongs to one thread, as the cache that asks it.

    Args:
        mode: "strict" serves the same wording only; "verified" also what verifier and budget
            let pass.
        same_wording_similarity: least cosine where the wording is the same.
        min_similarity: least cosine of a candidate that the verifier is asked about.
        verifier: None where embeddings of its length cannot be had; then strict.
    """

    def __init__(
        self,
        *,
        budget: ErrorBudget,
        verifier: Verifier | None,
        rng: random.Random,
        mode: Literal["strict", "verified"] = "verified",
        same_wording_similarity: float = 0.95,
        min_similarity: float = 0.55,
    ) -> None:
        for name, value in (
            ("same_wording_similarity", same_wording_similarity),
            ("min_similarity", min_similarity),
        ):
            if not 0 < value <= 1:
                raise ValueError(f"{name} is {value}, not in (0, 1]")
        self._budget = budget
        self._verifier = verifier if mode == "verified" else None
        self._rng = rng
        self._same_wording_similarity = same_wording_similarity
        self._min_similarity = min_similarity
        self._memo = PromptMemo()

    @property
    def budget(self) -> ErrorBudget:
        """What the decider has learnt."""
        return self._budget

    def choose(
        self,
        asked: PromptKey,
        embedding: Vector,
        candidates: Sequence[Candidate],
        *,
        ttl_s: float,
        category: str,
        is_counted: bool = False,
    ) -> Verdict:
        """The verdict on the candidates of a request, the nearest first.

        To be called once for each request that found no equal question, also when there are no
        candidates: the error budget counts requests. `is_counted` says that this one was.
        """
        if not is_counted:
            self._budget.count_request(category)
        verdict = self._judge(asked, embedding, candidates, ttl_s, category)
        return verdict if verdict.score is None else self._under_budget(verdict)

    def preview(
        self,
        asked: PromptKey,
        embedding: Vector,
        candidates: Sequence[Candidate],
        *,
        ttl_s: float,
        category: str,
    ) -> Verdict:
        """What `choose` would say now, but for its coin: nothing is counted or learnt."""
        verdict = self._judge(asked, embedding, candidates, ttl_s, category)
        if verdict.score is None:
            return verdict
        return _as_decided(verdict, self._budget.preview(category, verdict.score))

    def confirm(self, verdict: Verdict) -> Verdict:
        """The verdict of `choose` in the place of a `preview` that serves; counts the request."""
        confirmed = verdict if verdict.score is None else self._under_budget(verdict)
        self._budget.count_request(verdict.category)
        return confirmed

    def _under_budget(self, verdict: Verdict) -> Verdict:
        assert verdict.score is not None
        return _as_decided(verdict, self._budget.decide(verdict.category, verdict.score, self._rng))

    def _judge(
        self,
        asked: PromptKey,
        embedding: Vector,
        candidates: Sequence[Candidate],
        ttl_s: float,
        category: str,
    ) -> Verdict:
        """The verdict but for the budget, which has the last word where there is a score."""
        prompt = Prompt(asked.text)
        pairs: list[tuple[int, Pair]] = []
        reason, similarity = "no candidate", None
        for place, candidate in enumerate(candidates):
            refused = self._refusal(candidate, asked, ttl_s)
            if refused is None:
                stored = self._memo.of(candidate.key)
                # Worded only where this will be the reason that is given.
                is_last_word = place == 0 and not self._may_compare(stored, prompt)
                refused = self._same_wording(candidate, stored, prompt, is_worded=is_last_word)
                if refused is None:
                    return Verdict(
                        action="serve",
                        reason="same wording",
                        choice=place,
                        similarity=candidate.similarity,
                        category=category,
                    )
                if self._may_compare(stored, prompt):
                    compared = compare_unless_vetoed(stored.reading, prompt.reading)
                    refused = compared if isinstance(compared, str) else None
                    if isinstance(compared, Comparison):
                        pairs.append((place, Pair(compared, candidate.embedding)))
            if place == 0:
                reason, similarity = refused or reason, candidate.similarity
        if not pairs or self._verifier is None:
            return Verdict(action="refuse", reason=reason, similarity=similarity, category=category)
        return self._weigh(self._verifier, embedding, pairs, candidates, category)

    def record(self, verdict: Verdict, *, was_right: bool) -> Quarantine | None:
        """Takes note of what a check of `verdict` found, or of feedback on it."""
        if verdict.score is not None:
            self._budget.record(
                verdict.category,
                verdict.score,
                was_right,
                was_served=verdict.action == "serve",
                check_rate=verdict.check_rate if verdict.is_checked else 1.0,
            )
        elif not was_right:
            self._budget.spend(verdict.category)
        return None if was_right else Quarantine(QUARANTINE_RADIUS)

    def _refusal(self, candidate: Candidate, asked: PromptKey, ttl_s: float) -> str | None:
        return _refusal(
            candidate.key, candidate.answer, asked, age_s=candidate.age_s, ttl_s=ttl_s
        ) or _semantic_refusal(
            candidate.key,
            candidate.answer,
            asked,
            candidate.similarity,
            self._same_wording_similarity if self._verifier is None else self._min_similarity,
        )

    def _same_wording(
        self, candidate: Candidate, stored: Prompt, asked: Prompt, *, is_worded: bool
    ) -> str | None:
        reason = wording_differs(stored, asked, is_worded=is_worded)
        if reason is None and not candidate.similarity >= self._same_wording_similarity:
            return "below threshold"
        return reason

    def _may_compare(self, stored: Prompt, asked: Prompt) -> bool:
        longest = max(len(stored.text), len(asked.text))
        return self._verifier is not None and longest <= MAX_PROMPT_CHARS

    def _weigh(
        self,
        verifier: Verifier,
        embedding: Vector,
        pairs: Sequence[tuple[int, Pair]],
        candidates: Sequence[Candidate],
        category: str,
    ) -> Verdict:
        try:
            scores = verifier.score(embedding, [pair for _, pair in pairs])
        except ValueError as exc:
            logger.warning("pair not scored: %s", exc)
            return Verdict(action="refuse", reason=str(exc), category=category)
        best = int(scores.argmax())
        place, score = pairs[best][0], float(scores[best])
        return Verdict(
            action="refuse",
            reason="",
            choice=place,
            similarity=candidates[place].similarity,
            score=score,
            category=category,
        )


def _as_decided(verdict: Verdict, decision: Decision) -> Verdict:
    return replace(
        verdict,
        action=decision.action,
        reason=decision.why,
        is_checked=decision.is_checked,
        check_rate=decision.check_rate,
    )
