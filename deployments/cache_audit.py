"""What became of the checks that the error budget asked for.

A served answer is checked with a probability that the budget takes a mistake's weight from. The
check needs the model, which may have no time for it: so this counts how many were made of those
that were asked for, corrects the probability, and says when nobody has looked for too long.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from cachetools import LRUCache

from cache.budget import upper_bound
from cache.decision import Verdict
from cache.outcome import Hit, Miss
from deployments.answer_agreement import Agreement
from deployments.wire import Check

MAX_GIVEN = 4096
"""Verdicts of answers given lately, for feedback on them."""
MAX_UNSEEN = 50
"""Checks in a row that may come to nothing before what needs them is given no more."""
BLIND_S = 30.0
"""A check that was asked for so recently may still be on its way."""
MEMORY = 200.0
"""Checks over which the share of those that were made is averaged."""
LEAST_SHARE = 0.02
WINDOW = 2000
MAX_CATEGORIES = 1024
BOUND_LEVEL = 0.05


class Audit:
    """The counts of one cache replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given: LRUCache[str, Verdict] = LRUCache(MAX_GIVEN)
        self._asked = self._seen = 0.0
        self._unseen = 0
        self._unseen_since_s = 0.0
        self._found: Counter[Agreement] = Counter()
        self._windows: OrderedDict[str, deque[bool]] = OrderedDict()
        self._asked_total = 0

    @property
    def is_blind(self) -> bool:
        """Whether the checks of answers that were given have come to nothing lately."""
        return self._unseen > MAX_UNSEEN and self._clock() - self._unseen_since_s > BLIND_S

    def begin(self, decision: Hit | Miss) -> Check | None:
        """The check that a decision asks for, if any."""
        verdict = decision.verdict
        if verdict is None or not verdict.is_checked or verdict.action == "refuse":
            return None
        stored = None
        if isinstance(decision, Miss):
            if decision.candidate is None:
                return None
            stored = decision.candidate.payload
        else:
            fading = 1.0 - 1.0 / MEMORY
            self._asked = self._asked * fading + 1.0
            self._seen *= fading
            if not self._unseen:
                self._unseen_since_s = self._clock()
            self._unseen += 1
        self._asked_total += 1
        return Check(
            id=decision.id,
            action=verdict.action,
            score=verdict.score,
            check_rate=verdict.check_rate,
            category=verdict.category,
            stored=stored,
        )

    def made(self, check: Check, found: Agreement) -> None:
        """Takes note of what a check has found."""
        self._found[found] += 1
        window = self._windows.setdefault(check.category, deque(maxlen=WINDOW))
        window.append(found == "right")
        self._windows.move_to_end(check.category)
        while len(self._windows) > MAX_CATEGORIES:
            self._windows.popitem(last=False)
        # One of a shadow looks at the same scores.
        self._unseen = 0
        if check.action == "serve":
            self._seen += 1.0

    def verdict_of(self, check: Check) -> Verdict:
        """The verdict that asked for a check, with the probability that it was made."""
        rate = check.check_rate
        if check.action == "serve" and self._asked > 0:
            rate *= max(min(self._seen / self._asked, 1.0), LEAST_SHARE)
        return Verdict(
            action=check.action,
            reason="",
            score=check.score,
            is_checked=True,
            check_rate=rate,
            category=check.category,
        )

    def give(self, entry_id: str, verdict: Verdict) -> None:
        """Keeps in mind why an answer was given."""
        self._given[entry_id] = verdict

    def take_given(self, entry_id: str) -> Verdict | None:
        """Why that answer was given last; the next time None."""
        return self._given.pop(entry_id, None)

    def windows(self, limit: int | None = None) -> dict[str, dict[str, Any]]:
        """The latest checks by category: how many, how many wrong, and what rate that bounds.

        The categories that were checked last, at most `limit`.
        """
        told = {}
        for category in list(reversed(self._windows))[:limit]:
            window = self._windows[category]
            wrong = window.count(False)
            bound = upper_bound(wrong, len(window), BOUND_LEVEL)
            told[category] = {"window": len(window), "wrong": wrong, "bound": bound}
        return told

    def stats(self) -> dict[str, Any]:
        """Checks by what they found, and how many were asked for."""
        found = {name: self._found[name] for name in ("right", "wrong", "unclear")}
        return {"asked": self._asked_total, "is_blind": self.is_blind, **found}
