"""What processes that share an error budget tell each other, and how what they kept is put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class News:
    """What happened to a category that other processes have not been told yet.

    Attributes:
        seen: candidates by band; `checks` are (band, was right).
        streak: served answers found right since the start, or since the last mistake if there
            `was_wrong` one.
        spent: credit.
    """

    seen: list[int]
    requests: int = 0
    checks: list[tuple[int, bool]] = field(default_factory=list)
    streak: int = 0
    was_wrong: bool = False
    spent: float = 0.0
    looks: int = 0


def to_plain(news: News) -> dict[str, Any]:
    """The news as JSON can hold it."""
    return asdict(news)


def from_plain(told: dict[str, Any], num_bands: int) -> News:
    """The news that another process has told.

    Raises:
        ValueError: they are none; KeyError and TypeError likewise.
    """
    news = News(
        seen=[int(count) for count in told["seen"]],
        requests=int(told["requests"]),
        checks=[(int(band), bool(was_right)) for band, was_right in told["checks"]],
        streak=int(told["streak"]),
        was_wrong=bool(told["was_wrong"]),
        spent=float(told["spent"]),
        looks=int(told["looks"]),
    )
    is_sound = (
        len(news.seen) == num_bands
        and all(0 <= band < num_bands for band, _ in news.checks)
        and min(news.requests, news.streak, news.looks, *news.seen) >= 0
        # Written so that NaN is refused.
        and 0 <= news.spent < float("inf")
    )
    if not is_sound:
        raise ValueError("news of an error budget have a value out of range")
    return news


def strictest(base: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`base`, a category of `ErrorBudget.export_state`, with all that speaks for caution elsewhere.

    Nothing that it lets be given would any of the others not let be given for lack of credit,
    and no mistake that one of them knows is forgotten.
    """
    merged = {**base, "checks": list(base["checks"])}
    mistakes = Counter(band for band, was_right in base["checks"] if not was_right)
    for other in others:
        merged["credit"] = min(merged["credit"], other["credit"])
        merged["streak"] = min(merged["streak"], other["streak"])
        merged["looks"] = max(merged["looks"], other["looks"])
        theirs = Counter(band for band, was_right in other["checks"] if not was_right)
        for band, count in (theirs - mistakes).items():
            merged["checks"] += [[band, False]] * count
            mistakes[band] += count
    return merged
