"""Removals are remembered for a minute, and no longer."""

from __future__ import annotations

from cache.removals import REMEMBER_S, LateRemovals
from cache.stats import EntryFilter


def test_old_removals_are_forgotten_though_nothing_comes_in() -> None:
    now = 0.0
    removals = LateRemovals(lambda: now)
    for _ in range(1000):
        removals.add(EntryFilter(tenant="a"), now)
        now += REMEMBER_S / 10
    assert len(removals) <= 11
