import random

import numpy as np
import pytest

from cache.aliases import AliasMap
from cache.clusters import Clusters
from cache.config import CacheConfig
from cache.ghosts import GhostVectors
from cache.outcome import Miss
from cache.probation import NEGATIVE_TTL_S, KnownMisses, MissBuckets
from cache.quarantine import Quarantine
from cache.tenants import TenantLedger

WHY = Miss(0.5, "why")
X, Y = np.eye(2, dtype=np.float32)


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_bucket_allows_its_burst_and_then_its_rate():
    buckets = MissBuckets(0.5, 3)
    assert [buckets.take("a", 0) for _ in range(4)] == [True, True, True, False]
    assert buckets.take("b", 0)
    assert [buckets.take("a", 2), buckets.take("a", 2)] == [True, False]
    assert [buckets.take("a", 1000) for _ in range(4)] == [True, True, True, False]


def test_without_a_rate_everything_is_allowed():
    assert all(MissBuckets(None, 1).take("a", 0) for _ in range(100))


def test_misses_are_known_for_a_time_that_varies():
    clock = FakeClock()
    misses = KnownMisses(clock, random.Random(1))
    for number in range(50):
        misses.add("p", str(number), Miss(None, "no candidate"))
    ends = []
    while len(misses):
        ends += [clock.now] * len(misses)
        clock.now += 1
    lasts = [ends.count(time) for time in range(int(NEGATIVE_TTL_S[1]))]
    assert lasts[:5] == [50] * 5
    assert len(set(lasts)) > 10
    assert clock.now <= NEGATIVE_TTL_S[1] + 1


def test_a_new_entry_ends_the_known_misses_of_its_partition_only():
    misses = KnownMisses(FakeClock(), random.Random(1))
    misses.add("p", "1", WHY)
    misses.add("q", "2", WHY)
    misses.forget("p")
    assert misses.get("p", "1") is None
    assert misses.get("q", "2") == WHY


def test_a_zone_covers_its_neighbourhood_until_it_opens():
    quarantine = Quarantine(0.9, 10)
    quarantine.add("p", "1", X, now=0)
    quarantine.add("p", "1", X, now=5)
    near = np.array([0.95, np.sqrt(1 - 0.95**2)], dtype=np.float32)
    assert quarantine.covers("p", near)
    assert not quarantine.covers("p", Y)
    assert not quarantine.covers("q", X)
    quarantine.expire(14)
    assert quarantine.covers("p", X)
    quarantine.expire(15)
    assert not quarantine.covers("p", X)
    assert len(quarantine) == 0


def test_aliases_are_bounded_in_bytes():
    aliases = AliasMap(2000)
    for exact in "abc":
        aliases.add(exact, "target", X)
    assert aliases.bytes <= 2000
    assert len(aliases) == 2
    assert aliases.get("a") is None
    aliases.add("target", "target", X)
    assert aliases.get("target") is None
    aliases.remove_targets({"target"})
    assert (len(aliases), aliases.bytes) == (0, 0)


def test_aliases_may_be_switched_off():
    aliases = AliasMap(0)
    aliases.add("a", "b", X)
    assert len(aliases) == 0


def test_a_cluster_spares_the_member_far_from_its_centre():
    clusters = Clusters()
    middle = (X + Y) / np.float32(np.sqrt(2))
    clusters.join("m", middle, "x", X)
    clusters.join("y", Y, "m", middle)
    clusters.join("x2", X, "x", X)
    assert clusters.members("m") == {"m", "x", "y", "x2"}
    hits = {"m": 0, "x": 0, "y": 0, "x2": 0}
    assert clusters.spare("m", hits.__getitem__) == "y"
    hits["y"] = 3
    assert clusters.spare("m", hits.__getitem__) != "y"
    for key in ("y", "x2", "m"):
        clusters.remove(key)
    assert len(clusters) == 0
    assert clusters.spare("x", hits.__getitem__) == "x"


def test_ghosts_are_found_by_nearness_and_forgotten_oldest_first():
    ghosts = GhostVectors(0.95)
    ghosts.add("p", "x", X)
    ghosts.add("p", "y", Y)
    assert ghosts.nearest("p", X) == "x"
    assert ghosts.nearest("q", X) is None
    ghosts.trim(1)
    assert ghosts.nearest("p", X) is None
    assert ghosts.nearest("p", Y) == "y"
    ghosts.add("p", "other dimension", np.ones(3, dtype=np.float32))
    assert ghosts.nearest("p", np.ones(3, dtype=np.float32)) is None
    assert len(ghosts) == 1


def test_a_tenant_at_its_bounds_gives_up_what_it_used_longest_ago():
    ledger = TenantLedger(100, 3)
    assert ledger.must_leave("a", 1000) is None
    for key in "xyz":
        ledger.add("a", key, 10)
    assert ledger.must_leave("a", 1) == "x"
    ledger.use("a", "x")
    assert ledger.must_leave("a", 1) == "y"
    ledger.remove("a", "y")
    assert ledger.must_leave("a", 80) is None
    assert ledger.must_leave("a", 81) == "z"
    assert ledger.held() == {"a": (2, 20)}


@pytest.mark.parametrize(
    "values",
    [{"max_bytes": 0}, {"tenant_max_bytes": 0}, {"tenant_max_entries": 0}, {"ttl_s": 0},
     {"cold_max_bytes": -1}, {"cold_ttl_s": float("nan")}, {"miss_rate_per_s": 0},
     {"miss_burst": 0}, {"quarantine_similarity": 1.1}, {"promote_window_s": -1}],
)  # fmt: skip
def test_impossible_bounds_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        CacheConfig(**values)


def test_a_life_is_the_cold_tiers_where_there_is_one():
    assert CacheConfig().life_s == 900
    assert CacheConfig(cold_max_bytes=1).life_s == 3600
