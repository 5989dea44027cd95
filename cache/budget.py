"""The error budget: how far a score may be trusted, by evidence, per category of partition.

Wrong answers served stay under `max_wrong_rate` of the requests that found no equal question.
Two independent means hold that:

1. **Evidence opens.** Scores are sorted into bands. Those from a floor up may be served when an
   upper confidence bound of the mistakes among them, as a share of requests, lies under the limit.
   Evidence is what was checked lately, above a shipped calibration that counts less. The bound is
   Chernoff's in its Kullback-Leibler form; its level is divided among the bands and among the
   looks, which lie on a geometric grid.
2. **A ledger closes.** Each served answer is checked with a known probability p, by a coin of
   ours that nothing in the stream can foresee. So a proven mistake stands for 1/p mistakes, in
   whatever order requests come. Requests earn credit up to a cap and mistakes spend it; without
   credit nothing is served, and requests only check, until credit is back. p is 1 at first and
   after a mistake, and falls as checks go well.

Knows nothing of prompts, and holds only numbers.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cache.budget_news import News

BAND_FLOORS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998)
"""Least score of each band. Under the first nothing is served or checked."""
MAX_CATEGORIES = 1024
MAX_OVERDRAFT = 2.0
"""Credit never falls further below zero than this many caps, so that a category can recover."""
MAX_BAND_RATE = 0.05
"""A band's own rate of mistakes, by Laplace's rule, must not be higher than this: about twenty checks
without a mistake. Else good bands would vouch for one that requests may flock to tomorrow."""
MIN_WRONG = 0.4
"""Mistakes that show a band to be bad, rather than little known: one of the calibration's does."""
EARNED_SHARE = 0.6
"""Share of the limit that requests earn; the rest covers the cap and the luck of the coin."""
REQUESTS_BETWEEN_LOOKS = 128
LOOK_GROWTH = 1.3
SHARE_MEMORY = 1000.0
"""Requests over which the share of candidates in each band is averaged."""
PRIOR_SHARE = 0.3
PRIOR_SHARE_REQUESTS = 50.0
"""Until requests tell: the share of them that has a candidate from any floor up."""

Action = Literal["serve", "shadow", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """How much may be wrong, and how much is spent on knowing it.

    Args:
        max_wrong_rate: wrong answers by non-exact requests.
        confidence: of the bound that opens a band.
        check_rate: share of served answers that are generated too, at the least.
        trial_checks: checks gone well, since the start or the last mistake, after which half of
            the served answers are generated too.
        window: checks that are remembered in each category.
        prior_weight: what a check of the shipped calibration counts.
        credit_requests: a category may be ahead by the mistakes that so many requests allow.

    Raises:
        ValueError: a value is out of range.
    """

    max_wrong_rate: float = 0.01
    confidence: float = 0.95
    check_rate: float = 0.1
    trial_checks: int = 20
    window: int = 2000
    prior_weight: float = 0.5
    credit_requests: int = 1200

    def __post_init__(self) -> None:
        for name in ("max_wrong_rate", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not between 0 and 1")
        if not 0 < self.check_rate <= 1:
            raise ValueError(f"check_rate is {self.check_rate}, not in (0, 1]")
        if not 0 <= self.prior_weight <= 1:
            raise ValueError(f"prior_weight is {self.prior_weight}, not in [0, 1]")
        for name in ("trial_checks", "window", "credit_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, the least is 1")


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a candidate.

    `serve`: give the stored answer. `shadow`: do not. `refuse`: do not, and nothing is to be
    learnt. With `is_checked` the request's own answer is generated (for a shadow it is anyway),
    compared with the stored one, and the result recorded; `check_rate` is the probability that
    this was decided with.
    """

    action: Action
    is_checked: bool
    check_rate: float
    why: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Checks of one band: how many of them were right and wrong."""

    right: float = 0.0
    wrong: float = 0.0


@dataclass(slots=True)
class _Category:
    """What is known of one category; `counts` sums up `checks`: (wrong, right) by band."""

    credit: float
    requests: float = 0.0
    seen: list[float] = field(default_factory=lambda: [0.0] * len(BAND_FLOORS))
    checks: deque[tuple[int, bool]] = field(default_factory=deque)
    counts: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in BAND_FLOORS])
    num_checks: int = 0
    streak: int = 0
    looks: int = 0
    floor: int | None = None
    requests_until_look: int = 0
    checks_at_next_look: float = 0.0


class ErrorBudget:
    """Decides by score what may be served, and learns from what was checked.

    The caller counts each non-exact request once, decides on at most one candidate of it, and
    records each check that was made. A check that could not be made is simply not recorded, as
    long as that does not depend on what it would have found.

    Args:
        prior: the shipped calibration: checks by band, from the lowest band up.

    Raises:
        ValueError: `prior` does not have one entry a band.
    """

    def __init__(
        self, config: BudgetConfig | None = None, *, prior: Sequence[Evidence] = ()
    ) -> None:
        self._config = config or BudgetConfig()
        if prior and len(prior) != len(BAND_FLOORS):
            raise ValueError(f"prior has {len(prior)} bands, there are {len(BAND_FLOORS)}")
        self._prior = tuple(prior) or tuple(Evidence() for _ in BAND_FLOORS)
        self._cap = self._config.max_wrong_rate * self._config.credit_requests
        self._categories: OrderedDict[str, _Category] = OrderedDict()
        self._news: dict[str, News] | None = None
        self.has_bad_news = False
        """Whether a mistake is among the news."""

    def count_request(self, category: str) -> None:
        """Counts a request that found no equal question; each earns credit."""
        self._count(self._category(category), 1)
        if (news := self._news_of(category)) is not None:
            news.requests += 1

    def decide(self, category: str, score: float, rng: random.Random) -> Decision:
        """What to do with a candidate of this score; a NaN is refused."""
        band = _band(score)
        if band is None:
            return Decision("refuse", False, 0.0, f"score {score:.3f} is under {BAND_FLOORS[0]}")
        known = self._category(category)
        looks_before = known.looks
        decision = self._decide(known, band, score, rng)
        if (news := self._news_of(category)) is not None:
            news.seen[band] += 1
            news.looks += known.looks - looks_before
        return decision

    def preview(self, category: str, score: float) -> Decision:
        """What `decide` would say now, but for its coin; nothing is counted."""
        band = _band(score)
        if band is None:
            return Decision("refuse", False, 0.0, f"score {score:.3f} is under {BAND_FLOORS[0]}")
        known = self._categories.get(category) or _Category(credit=self._cap)
        return self._decide(replace(known, seen=list(known.seen)), band, score, random.Random(0))

    def credit(self, category: str) -> float:
        """Mistakes that the category may still make."""
        known = self._categories.get(category)
        return self._cap if known is None else known.credit

    def _decide(self, known: _Category, band: int, score: float, rng: random.Random) -> Decision:
        known.seen[band] += 1.0
        floor = self._floor(known)
        if floor is None or band < floor:
            least = (
                "nothing may be served yet" if floor is None else f"least is {BAND_FLOORS[floor]}"
            )
            return Decision("shadow", True, 1.0, f"score {score:.3f}, {least}")
        if known.credit <= 0:
            return Decision("shadow", True, 1.0, "error budget is spent")
        rate = self._check_rate(known)
        return Decision("serve", rng.random() < rate, rate, f"score {score:.3f}")

    def record(
        self,
        category: str,
        score: float,
        was_right: bool,
        *,
        was_served: bool = True,
        check_rate: float | None = None,
    ) -> None:
        """Takes note of what a check found.

        `check_rate` is the decision's; None stands for the rate of now. Feedback that came
        without being asked for has a rate of 1.
        """
        band = _band(score)
        if band is None:
            return
        known = self._category(category)
        news = self._news_of(category)
        self._remember(known, band, was_right)
        known.num_checks += 1
        if news is not None:
            news.checks.append((band, was_right))
            del news.checks[: -self._config.window]
            self.has_bad_news |= not was_right
        if not was_served:
            return
        if was_right:
            known.streak += 1
            if news is not None:
                news.streak += 1
            return
        weight = 1.0 / (check_rate or self._check_rate(known))
        self._spend(known, weight)
        known.streak = 0
        known.requests_until_look = 0
        if news is not None:
            news.spent += weight
            news.streak, news.was_wrong = 0, True

    def spend(self, category: str) -> None:
        """Takes note of a mistake that carries no score."""
        self._spend(self._category(category), 1.0)
        if (news := self._news_of(category)) is not None:
            news.spent += 1.0
            self.has_bad_news = True

    def keep_news(self) -> None:
        """From now on `take_news` tells what was learnt here."""
        self._news = {} if self._news is None else self._news

    def take_news(self) -> dict[str, News]:
        """What was learnt here by category since the last call."""
        news, self.has_bad_news = self._news or {}, False
        if self._news is not None:
            self._news = {}
        return news

    def untold(self, category: str) -> News | None:
        """The news of one category, which stay news."""
        return None if self._news is None else self._news.get(category)

    def hear(self, category: str, news: News) -> None:
        """Takes over what another process has learnt: all share one ledger and one evidence.

        So there is one credit however many they are, and each mistake spends everyone's.
        """
        known = self._category(category)
        self._count(known, news.requests)
        known.seen = [ours + theirs for ours, theirs in zip(known.seen, news.seen, strict=True)]
        for band, was_right in news.checks:
            self._remember(known, band, was_right)
        known.num_checks += len(news.checks)
        # Each looks by itself: the level is divided among the looks of all.
        known.looks += news.looks
        self._spend(known, news.spent)
        known.streak = news.streak + (0 if news.was_wrong else known.streak)
        if news.was_wrong:
            known.requests_until_look = 0

    @property
    def scale(self) -> str:
        """Names what scores mean: what was learnt on another scale tells nothing on this one."""
        told = repr((BAND_FLOORS, [(each.right, each.wrong) for each in self._prior]))
        return f"{zlib.crc32(told.encode()):08x}"

    def least_score(self, category: str) -> float | None:
        """The least score that is served now; None when nothing is. Asking changes nothing."""
        known = replace(self._categories.get(category) or _Category(credit=self._cap))
        floor = self._floor(known)
        return None if floor is None or known.credit <= 0 else BAND_FLOORS[floor]

    def export_state(self, categories: Container[str] | None = None) -> dict[str, Any]:
        """What was learnt, of all categories or of these, as plain data: JSON can hold it."""
        return {
            name: {
                "credit": known.credit,
                "requests": known.requests,
                "seen": list(known.seen),
                "checks": [[band, was_right] for band, was_right in known.checks],
                "num_checks": known.num_checks,
                "streak": known.streak,
                "looks": known.looks,
            }
            for name, known in self._categories.items()
            if categories is None or name in categories
        }

    def import_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `export_state` gave, in place of what is known of these categories.

        Raises:
            ValueError: it is not that; then nothing is taken over.
        """
        try:
            read = {name: self._category_of(data) for name, data in state.items()}
        except (KeyError, TypeError, IndexError, AttributeError) as exc:
            raise ValueError(f"not the state of an error budget: {exc!r}") from exc
        for name, known in read.items():
            self._categories[name] = known
            self._categories.move_to_end(name)
        self._forget_old()

    def _category_of(self, data: Mapping[str, Any]) -> _Category:
        seen = [float(count) for count in data["seen"]]
        if len(seen) != len(BAND_FLOORS):
            raise ValueError(f"state has {len(seen)} bands, there are {len(BAND_FLOORS)}")
        known = _Category(
            credit=min(float(data["credit"]), self._cap),
            requests=float(data["requests"]),
            seen=seen,
            num_checks=int(data["num_checks"]),
            streak=int(data["streak"]),
            looks=int(data["looks"]),
        )
        if not all(map(math.isfinite, (known.credit, known.requests, *known.seen))):
            raise ValueError("state has a number that is not finite")
        for band, was_right in data["checks"]:
            if not 0 <= int(band) < len(BAND_FLOORS):
                raise ValueError(f"state has band {band}, there are {len(BAND_FLOORS)}")
            self._remember(known, int(band), bool(was_right))
        return known

    def _news_of(self, category: str) -> News | None:
        return (
            None
            if self._news is None
            else self._news.setdefault(category, News(seen=[0] * len(BAND_FLOORS)))
        )

    def _count(self, known: _Category, requests: int) -> None:
        earned = EARNED_SHARE * self._config.max_wrong_rate * requests
        known.credit = min(known.credit + earned, self._cap)
        fading = (1.0 - 1.0 / SHARE_MEMORY) ** requests
        known.requests = SHARE_MEMORY - (SHARE_MEMORY - known.requests) * fading
        known.seen = [count * fading for count in known.seen]
        known.requests_until_look -= requests

    def _category(self, name: str) -> _Category:
        known = self._categories.get(name)
        if known is None:
            known = self._categories[name] = _Category(credit=self._cap)
            self._forget_old()
        else:
            self._categories.move_to_end(name)
        return known

    def _forget_old(self) -> None:
        while len(self._categories) > MAX_CATEGORIES:
            self._categories.popitem(last=False)

    def _remember(self, known: _Category, band: int, was_right: bool) -> None:
        known.checks.append((band, was_right))
        known.counts[band][was_right] += 1
        if len(known.checks) > self._config.window:
            gone, gone_right = known.checks.popleft()
            known.counts[gone][gone_right] -= 1

    def _spend(self, known: _Category, mistakes: float) -> None:
        known.credit = max(known.credit - mistakes, -MAX_OVERDRAFT * self._cap)

    def _check_rate(self, known: _Category) -> float:
        trial = self._config.trial_checks
        return max(self._config.check_rate, trial / (trial + known.streak))

    def _floor(self, known: _Category) -> int | None:
        """The lowest band that may be served, looked at anew from time to time."""
        is_due = known.num_checks >= known.checks_at_next_look
        if is_due or known.requests_until_look <= 0:
            if is_due:
                known.looks += 1
                known.checks_at_next_look = max(
                    known.num_checks + 1, known.num_checks * LOOK_GROWTH
                )
            known.requests_until_look = REQUESTS_BETWEEN_LOOKS
            known.floor = self._lowest_safe_band(known)
        return known.floor

    def _lowest_safe_band(self, known: _Category) -> int | None:
        # Sums over all looks to less than 1 - confidence.
        level = (1 - self._config.confidence) / (
            len(BAND_FLOORS) * (known.looks + 1) * (known.looks + 2)
        )
        right = wrong = seen = 0.0
        lowest = None
        for band in reversed(range(len(BAND_FLOORS))):
            prior, weight = self._prior[band], self._config.prior_weight
            band_right = known.counts[band][True] + weight * prior.right
            band_wrong = known.counts[band][False] + weight * prior.wrong
            is_sound = (band_wrong + 1) / (band_right + band_wrong + 2) <= MAX_BAND_RATE
            if not is_sound and band_wrong >= MIN_WRONG:
                break
            right, wrong = right + band_right, wrong + band_wrong
            seen += known.seen[band]
            share = (seen + PRIOR_SHARE * PRIOR_SHARE_REQUESTS) / (
                known.requests + PRIOR_SHARE_REQUESTS
            )
            worst = upper_bound(wrong, right + wrong, level)
            if is_sound and worst * min(share, 1.0) <= self._config.max_wrong_rate:
                lowest = band
        return lowest


def upper_bound(wrong: float, checks: float, level: float) -> float:
    """A rate that the true one exceeds with probability `level` at most, having seen `wrong`.

    The largest q with `checks * KL(wrong / checks, q) <= log(1 / level)`.
    """
    if checks <= 0:
        return 1.0
    rate = wrong / checks
    allowed = math.log(1 / level) / checks
    low, high = rate, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(rate, middle) <= allowed else (low, middle)
    return high


def _divergence(p: float, q: float) -> float:
    """Kullback and Leibler's, of a coin of rate `p` from one of rate `q`, for p <= q < 1."""
    if p == q:
        return 0.0
    if q >= 1:
        return math.inf
    ones = p * math.log(p / q) if p > 0 else 0.0
    zeros = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return ones + zeros


def _band(score: float) -> int | None:
    # Written so that NaN has none.
    return next(
        (band for band in reversed(range(len(BAND_FLOORS))) if score >= BAND_FLOORS[band]), None
    )
