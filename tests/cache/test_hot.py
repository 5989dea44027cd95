"""L1: what was given for the very same request, for 90 s and never past its life."""

import pytest
from cachetools import LRUCache
from hypothesis import given
from hypothesis import strategies as st

from cache.hot import ALIAS_BYTES, ENTRY_OVERHEAD_BYTES, MAX_STAY_S, HotTier

LIFE_S = 200
ROOM = ENTRY_OVERHEAD_BYTES + 100


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def tier(clock):
    return HotTier(3 * ROOM, life_s=LIFE_S, clock=clock)


def test_a_value_is_found_under_its_key_and_stamp_only(tier, clock):
    assert tier.keep("k", "r1", "value", 100, age_s=5)
    clock.now += 1
    assert tier.find("k", "r1") == ("value", 6.0)
    assert tier.find("k", "r2") is None
    assert tier.find("other", "r1") is None


def test_no_hit_extends_a_stay(tier, clock):
    tier.keep("k", "r", "value", 100)
    for _ in range(int(MAX_STAY_S) - 1):
        clock.now += 1
        assert tier.find("k", "r")
    clock.now += 1
    assert tier.find("k", "r") is None
    assert tier.bytes == 0


def test_a_value_kept_again_stays_anew_but_lives_no_longer(tier, clock):
    tier.keep("k", "r", "value", 100)
    clock.now += 80
    tier.keep("k", "r", "value", 100, age_s=80)
    clock.now += 80
    tier.keep("k", "r", "value", 100, age_s=160)
    clock.now += 39
    assert tier.find("k", "r") == ("value", 199.0)
    clock.now += 1
    assert tier.find("k", "r") is None
    assert not tier.keep("k", "r", "value", 100, age_s=200)


def test_a_value_too_large_is_not_held_and_ends_the_one_before(tier):
    tier.keep("k", "r", "old", 100)
    assert not tier.keep("k", "r", "new", 4 * ROOM)
    assert tier.find("k", "r") is None


def test_an_alias_gives_its_targets_value_and_ends_with_it(tier, clock):
    tier.keep("k", "r", "value", 100)
    assert tier.alias("reworded", "k")
    clock.now += 2
    assert tier.find("reworded", "r") == ("value", 2.0)
    tier.forget("k")
    assert tier.find("reworded", "r") is None
    assert not tier.alias("again", "k")
    tier.forget("unknown")


def test_a_cleared_tier_holds_nothing(tier):
    tier.keep("k", "r", "value", 100)
    tier.alias("reworded", "k")
    tier.clear()
    assert tier.find("k", "r") is None
    assert (len(tier), tier.bytes) == (0, 0)


def test_what_was_asked_more_and_lately_stays(tier, clock):
    for key in "abc":
        tier.keep(key, "r", key, 100)
    for _ in range(2):
        tier.find("a", "r")
    clock.now += 60
    tier.find("c", "r")
    tier.keep("d", "r", "d", 100)
    assert tier.find("b", "r") is None
    tier.keep("e", "r", "e", 100)
    # Three accesses protect "a"; of the others "c" had one more than "d".
    assert [key for key in "abcde" if tier.find(key, "r")] == ["a", "c", "e"]


def test_an_access_fades(tier, clock):
    for key in "abc":
        tier.keep(key, "r", key, 100)
    tier.find("a", "r")
    clock.now += 60
    tier.find("b", "r")
    tier.find("c", "r")
    tier.keep("d", "r", "d", 100)
    # Two long ago are worth less than one now and one long ago.
    assert tier.find("a", "r") is None


calls = st.lists(
    st.tuples(
        st.sampled_from(["keep", "find", "alias", "forget", "advance", "clear"]),
        st.sampled_from("abcdef"),
        st.sampled_from("abcdef"),
        st.integers(0, 60),
    ),
    max_size=100,
)


@given(calls)
@pytest.mark.parametrize("policy", [None, lambda n: LRUCache(n, getsizeof=lambda size: size)])
def test_any_series_of_calls_keeps_stays_lives_and_bounds(policy, series):
    clock = FakeClock()
    tier = HotTier(3 * ROOM, life_s=LIFE_S, clock=clock, policy=policy)
    kept, aliases = {}, {}
    for step, (action, key, other, amount) in enumerate(series):
        match action:
            case "keep":
                aliases.pop(key, None)
                kept.pop(key, None)
                if tier.keep(key, "r", step, amount, age_s=3 * amount):
                    kept[key] = step, clock.now - 3 * amount, clock.now
            case "find":
                found = tier.find(key, "r")
                if found is not None:
                    value, made, since = kept[aliases.get(key, key)]
                    assert found == (value, clock.now - made)
                    assert clock.now - made < LIFE_S
                    assert clock.now - since < MAX_STAY_S
            case "alias":
                if tier.alias(key, other):
                    kept.pop(key, None)
                    aliases[key] = other
                    assert tier.find(key, "r") == tier.find(other, "r")
            case "forget":
                tier.forget(key)
                kept.pop(key, None)
                aliases.pop(key, None)
                assert tier.find(key, "r") is None
            case "advance":
                clock.now += amount
            case "clear":
                tier.clear()
                kept.clear()
                aliases.clear()
        sizes = len(tier._held) * ENTRY_OVERHEAD_BYTES + len(tier._aliases) * ALIAS_BYTES
        assert sizes <= tier.bytes <= 3 * ROOM
        assert len(tier) == len(tier._policy) == len(tier._expiry)
