"""What became of the checks that the error budget asked for."""

from __future__ import annotations

import pytest

from cache.answer import StoredAnswer
from cache.decision import Verdict
from cache.outcome import Hit, Miss
from deployments.cache_audit import BLIND_S, MAX_UNSEEN, Audit
from deployments.wire import Check
from tests.protocol.fakes import FakeClock

ANSWER = StoredAnswer(b"packed", 3, "rev-1")


def verdict(action: str = "serve", *, is_checked: bool = True, score: float = 0.97) -> Verdict:
    return Verdict(
        action=action,  # type: ignore[arg-type]
        reason="",
        choice=0,
        score=score,
        is_checked=is_checked,
        check_rate=0.5,
        category="red",
    )


def a_hit(**fields: object) -> Hit:
    return Hit(ANSWER, "semantic", "L2", 0.97, 1.0, "id-1", False, verdict(**fields))  # type: ignore[arg-type]


def asked(audit: Audit) -> Check:
    check = audit.begin(a_hit())
    assert check is not None
    return check


def test_a_check_is_due_only_where_the_decision_asks_for_one() -> None:
    audit = Audit(FakeClock())
    assert audit.begin(a_hit(is_checked=False)) is None
    assert audit.begin(Miss(None, "no candidate")) is None
    assert audit.begin(Miss(0.9, "", verdict("refuse"), ANSWER, "id-1")) is None
    assert audit.begin(Miss(0.9, "", verdict("shadow"), None, "id-1")) is None, "it is damaged"
    assert asked(audit).stored is None, "the client has it"
    shadow = audit.begin(Miss(0.9, "", verdict("shadow"), ANSWER, "id-1"))
    assert shadow is not None
    assert (shadow.action, shadow.stored, shadow.id) == ("shadow", b"packed", "id-1")


def test_a_mistake_counts_more_where_few_of_the_checks_were_made() -> None:
    audit = Audit(FakeClock())
    checks = [asked(audit) for _ in range(10)]
    for check in checks[:2]:
        audit.made(check, "right")
    rate = audit.verdict_of(checks[0]).check_rate
    assert rate == pytest.approx(0.5 * 2 / 10, rel=0.1), "it was asked for and made"
    for check in checks[2:]:
        audit.made(check, "right")
    assert audit.verdict_of(checks[0]).check_rate == pytest.approx(0.5, rel=0.1)


def test_checks_that_come_to_nothing_for_long_make_it_blind_until_one_is_made() -> None:
    clock = FakeClock()
    audit = Audit(clock)
    check = asked(audit)
    for _ in range(MAX_UNSEEN):
        asked(audit)
    assert not audit.is_blind, "they may be on their way"
    clock.now += BLIND_S + 1
    assert audit.is_blind
    audit.made(check, "right")
    assert not audit.is_blind


def test_a_verdict_is_blamed_once() -> None:
    audit = Audit(FakeClock())
    audit.give("id-1", verdict())
    assert audit.take_given("id-1") == verdict()
    assert audit.take_given("id-1") is None


def test_the_window_of_each_category_bounds_its_rate_of_mistakes() -> None:
    audit = Audit(FakeClock())
    for _ in range(99):
        audit.made(asked(audit), "right")
    audit.made(asked(audit), "unclear")
    (red,) = audit.windows().values()
    assert (red["window"], red["wrong"]) == (100, 1)
    assert 0.01 < red["bound"] < 0.1
    assert audit.stats() == {"asked": 100, "is_blind": False, "right": 99, "wrong": 0, "unclear": 1}
    assert audit.windows(limit=0) == {}
