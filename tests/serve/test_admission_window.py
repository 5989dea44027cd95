"""The window of `@serve.batch`: shut while nobody waits, open when many do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.admission_window import AdmissionBounds, AdmissionWindow, Window
from tests.engine.fakes import FakeClock

WIDE = AdmissionBounds(
    min_batch_size=2, max_batch_size=34, batch_wait_timeout_s=0.08, full_backlog=64
)


def moving(bounds: AdmissionBounds = WIDE) -> tuple[AdmissionWindow, FakeClock]:
    clock = FakeClock()
    return AdmissionWindow(bounds, clock), clock


def test_an_idle_replica_waits_for_nobody() -> None:
    window, _ = moving()
    assert window.window == Window(2, 0.0)
    assert not window.update(0)
    assert window.window == Window(2, 0.0)


@pytest.mark.parametrize(
    ("backlog", "size", "wait_s"), [(16, 10, 0.02), (32, 18, 0.04), (64, 34, 0.08), (999, 34, 0.08)]
)
def test_size_and_wait_lie_between_the_bounds_as_the_backlog_does(
    backlog: int, size: int, wait_s: float
) -> None:
    window, _ = moving()
    assert window.update(backlog)
    assert window.window.batch_size == size
    assert window.window.wait_s == pytest.approx(wait_s)


def test_it_is_shut_again_when_the_backlog_is_gone() -> None:
    window, clock = moving()
    window.update(64)
    clock.advance(0.01)
    assert not window.update(32)
    assert window.update(0)
    assert window.window == Window(2, 0.0)


def test_it_changes_a_few_times_a_second_at_most() -> None:
    window, clock = moving()
    changes = 0
    for i in range(1000):
        changes += window.update(1 + i % 50)
        clock.advance(0.01)
    assert 30 <= changes <= 40


def test_the_first_backlog_opens_it_at_once() -> None:
    window, clock = moving()
    clock.advance(0.01)
    window.update(0)
    assert window.update(64)


def test_new_bounds_hold_at_once() -> None:
    window, _ = moving()
    window.update(64)
    window.set_bounds(AdmissionBounds(max_batch_size=4, batch_wait_timeout_s=0.5))
    assert window.window == Window(1, 0.0)
    assert window.update(4)
    assert window.window == Window(4, 0.5)


def test_without_a_bound_of_its_own_a_full_batch_that_waits_opens_it() -> None:
    window, _ = moving(AdmissionBounds(max_batch_size=16))
    window.update(16)
    assert window.window == Window(16, 0.0)


@given(st.lists(st.integers(0, 200), min_size=2, max_size=20))
def test_more_backlog_never_means_a_smaller_window(backlogs: list[int]) -> None:
    windows = []
    for backlog in sorted(backlogs):
        window, _ = moving()
        window.update(backlog)
        windows.append(window.window)
    for one, other in itertools.pairwise(windows):
        assert one.batch_size <= other.batch_size
        assert one.wait_s <= other.wait_s
    assert all(2 <= window.batch_size <= 34 and 0 <= window.wait_s <= 0.08 for window in windows)


@pytest.mark.parametrize(
    "given",
    [
        {"max_batch_size": 0},
        {"max_batch_size": 4097},
        {"batch_wait_timeout_s": -0.1},
        {"batch_wait_timeout_s": float("nan")},
        {"min_batch_size": 0},
        {"min_batch_size": 33},
        {"full_backlog": 0},
    ],
)
def test_bounds_out_of_range_are_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} is"):
        AdmissionBounds(**given)
