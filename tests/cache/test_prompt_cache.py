import itertools

import numpy as np
import pytest
from cachetools import LRUCache

from cache.answer import StoredAnswer
from cache.key import make_key
from cache.prompt_cache import ENTRY_OVERHEAD_BYTES, CacheConfig, Hit, Miss, PromptCache

DIMENSION = 8
NEAR = np.eye(DIMENSION, dtype=np.float32)[0]
FAR = np.eye(DIMENSION, dtype=np.float32)[1]


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def cache(clock):
    return PromptCache(CacheConfig(ttl_s=60), clock=clock)


def key_of(text, *, tenant="a", max_tokens=None, allow_semantic=True, **parts):
    return make_key(
        {"tenant": tenant, "model": "m", **parts},
        text,
        max_tokens=max_tokens,
        allow_semantic=allow_semantic,
    )


def answer_of(text="answer", tokens=5):
    return StoredAnswer(text.encode(), tokens, "r1")


def near(similarity):
    vector = np.zeros(DIMENSION, dtype=np.float32)
    vector[0], vector[1] = similarity, np.sqrt(1 - similarity**2)
    return vector


FRANCE, REWORDED = "What is the capital of France?", "Tell me the capital of France."


def test_an_equal_question_is_answered_exactly(cache, clock):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    clock.now += 7
    assert cache.lookup_exact(key_of(f"  {FRANCE}\n")) == Hit(answer_of(), "exact", "L2", 1.0, 7.0)


def test_a_reworded_question_is_answered_by_meaning(cache, clock):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    clock.now += 7
    assert cache.lookup_exact(key_of(REWORDED)) is None
    hit = cache.lookup_semantic(key_of(REWORDED), near(0.96))
    assert isinstance(hit, Hit)
    assert (hit.outcome, hit.tier, hit.age_s) == ("semantic", "L2", 7.0)
    assert hit.similarity == pytest.approx(0.96)


def test_a_question_below_the_threshold_is_a_miss_that_tells_how_near_it_was(cache):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    miss = cache.lookup_semantic(key_of(REWORDED), near(0.949))
    assert miss == Miss(pytest.approx(0.949), "below threshold")


def test_a_guard_refuses_whatever_the_similarity(cache):
    cache.store(key_of("What is 17 times 23?"), answer_of(), NEAR)
    miss = cache.lookup_semantic(key_of("What is 17 times 28?"), NEAR)
    assert miss == Miss(1.0, "numbers differ: 23 / 28")


def test_a_refused_nearest_neighbour_does_not_hide_the_next(cache):
    cache.store(key_of("What is the capital of Spain?"), answer_of("Madrid"), NEAR)
    cache.store(key_of(FRANCE), answer_of("Paris"), near(0.99))
    hit = cache.lookup_semantic(key_of(REWORDED), NEAR)
    assert hit.answer.payload == b"Paris"


def test_an_empty_partition_has_no_candidate(cache):
    assert cache.lookup_semantic(key_of(FRANCE), NEAR) == Miss(None, "no candidate")


def test_a_prompt_too_long_to_embed_is_found_exactly_only(cache):
    cache.store(key_of(FRANCE), answer_of(), None)
    assert cache.lookup_exact(key_of(FRANCE)) is not None
    assert cache.lookup_semantic(key_of(REWORDED), NEAR) == Miss(None, "no candidate")
    assert cache.lookup_semantic(key_of(REWORDED), None) == Miss(None, "prompt too long to embed")


def test_a_key_that_allows_no_semantic_match_neither_gives_nor_takes_one(cache):
    cache.store(key_of(FRANCE, allow_semantic=False), answer_of(), NEAR)
    assert isinstance(cache.lookup_semantic(key_of(REWORDED), NEAR), Miss)
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    miss = cache.lookup_semantic(key_of(REWORDED, allow_semantic=False), NEAR)
    assert miss == Miss(None, "semantic matching is off")


# Opposite instructions, numbers, identifiers


ON, OFF = "How do I turn on automatic backups?", "How do I turn off automatic backups?"
ENABLE, DISABLE = "How do I enable automatic backups?", "How do I disable automatic backups?"
NEIGHBOURS = [
    (ON, OFF),
    (ON, DISABLE),
    (ENABLE, OFF),
    (ENABLE, DISABLE),
    ("What is 17 times 23?", "What is 17 times 28?"),
    ("Convert 5 miles to kilometres", "Convert 5 metres to kilometres"),
    ("What changed in Python 3.8?", "What changed in Python 3.9?"),
    ("Remind me in 10 minutes", "Remind me in 10 hours"),
    ("Explain what `git stash pop` does", "Explain what `git stash drop` does"),
    ("Write a Python function total_cost(items)", "Write a Python function total_count(items)"),
    ("What does --max-age do in curl?", "What does --max-time do in curl?"),
]


@pytest.mark.parametrize(("one", "other"), NEIGHBOURS)
def test_near_questions_with_other_answers_never_share_one(clock, one, other):
    for stored, asked in ((one, other), (other, one)):
        cache = PromptCache(CacheConfig(), clock=clock)
        cache.store(key_of(stored), answer_of(), NEAR)
        assert cache.lookup_exact(key_of(asked)) is None
        assert isinstance(cache.lookup_semantic(key_of(asked), NEAR), Miss)
        assert cache.lookup_exact(key_of(stored)) is not None


# Partitions

SETTINGS = [
    {},
    {"system": "You are a pirate."},
    {"system": "You are a lawyer."},
    {"response_format": {"type": "json_object"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "none"},
    {"history": "digest of earlier turns"},
    {"temperature": 1.2, "seed": 3},
    {"temperature": 1.2, "seed": 4},
    {"stop": ["."]},
    {"n": 2},
    {"frequency_penalty": 1.5},
]


@pytest.mark.parametrize(
    ("stored", "asked"),
    list(itertools.permutations(SETTINGS, 2)),
    ids=lambda parts: str(parts)[:30],
)
def test_what_changes_a_reply_keeps_answers_apart(cache, stored, asked):
    cache.store(key_of(FRANCE, **stored), answer_of(), NEAR)
    assert cache.lookup_exact(key_of(FRANCE, **asked)) is None
    assert isinstance(cache.lookup_semantic(key_of(FRANCE, **asked), NEAR), Miss)
    assert isinstance(cache.lookup_semantic(key_of(REWORDED, **asked), NEAR), Miss)
    assert isinstance(cache.lookup_semantic(key_of(REWORDED, **stored), NEAR), Hit)


@pytest.mark.parametrize("tenant", ["blue", "red|blue", "re*", "red} @x:{blue", "Red", "red ", "r"])
def test_a_tenant_never_receives_what_another_stored(cache, tenant):
    cache.store(key_of(FRANCE, tenant="red"), answer_of(), NEAR)
    assert cache.lookup_exact(key_of(FRANCE, tenant=tenant)) is None
    assert isinstance(cache.lookup_semantic(key_of(REWORDED, tenant=tenant), NEAR), Miss)
    assert cache.lookup_exact(key_of(FRANCE, tenant="red")) is not None
    assert cache.stats().errors == 0


def test_names_with_slashes_and_colons_hit_exactly(cache):
    key = key_of("Name a green vegetable.", tenant="team:eu/1", revision="HuggingFaceTB/SmolLM2@1")
    cache.store(key, answer_of(), NEAR)
    assert cache.lookup_exact(key) is not None
    assert (cache.stats().exact_hits, cache.stats().errors) == (1, 0)


# max_tokens


@pytest.mark.parametrize(("limit", "is_hit"), [(4, False), (5, True), (6, True), (None, True)])
def test_an_answer_is_reused_only_within_the_limit_of_tokens(cache, limit, is_hit):
    cache.store(key_of(FRANCE), answer_of(tokens=5), NEAR)
    assert (cache.lookup_exact(key_of(FRANCE, max_tokens=limit)) is not None) == is_hit
    found = cache.lookup_semantic(key_of(REWORDED, max_tokens=limit), NEAR)
    assert isinstance(found, Hit) == is_hit
    if not is_hit:
        assert found == Miss(1.0, "answer has 5 tokens, max_tokens is 4")


# Expiry


def test_an_entry_expires_at_its_age_however_often_it_was_hit(cache, clock):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    for _ in range(59):
        clock.now += 1
        assert cache.lookup_exact(key_of(FRANCE)) is not None
        assert isinstance(cache.lookup_semantic(key_of(REWORDED), NEAR), Hit)
    clock.now += 1
    assert cache.lookup_exact(key_of(FRANCE)) is None
    assert cache.lookup_semantic(key_of(REWORDED), NEAR) == Miss(None, "no candidate")
    assert (cache.stats().entries, cache.stats().bytes, cache.stats().expirations) == (0, 0, 1)


def test_storing_an_equal_key_replaces_the_answer_and_starts_its_age_again(cache, clock):
    cache.store(key_of(FRANCE), answer_of("old"), NEAR)
    clock.now += 50
    cache.store(key_of(FRANCE), answer_of("new"), NEAR)
    clock.now += 50
    hit = cache.lookup_exact(key_of(FRANCE))
    assert (hit.answer.payload, hit.age_s) == (b"new", 50.0)
    assert cache.stats().entries == 1


def test_expired_entries_can_be_freed_without_a_look_up(cache, clock):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    assert cache.evict_expired() == 0
    clock.now += 60
    assert cache.evict_expired() == 1
    assert cache.stats().entries == 0


# Space


def test_an_answer_over_the_size_limit_is_not_stored_and_loses_the_old_one(clock):
    cache = PromptCache(CacheConfig(max_entry_bytes=ENTRY_OVERHEAD_BYTES + 1500), clock=clock)
    assert cache.store(key_of(FRANCE), answer_of(), NEAR)
    assert not cache.store(key_of(FRANCE), answer_of("x" * 3000), NEAR)
    assert cache.lookup_exact(key_of(FRANCE)) is None
    assert cache.stats().refused_stores == 1


@pytest.mark.parametrize("policy", [None, lambda n: LRUCache(n, getsizeof=lambda size: size)])
def test_an_entry_asked_once_leaves_when_space_is_short(clock, policy):
    cache = PromptCache(
        CacheConfig(max_bytes=3 * (ENTRY_OVERHEAD_BYTES + 1400)), clock=clock, policy=policy
    )
    for text in ("one", "two", "three"):
        cache.store(key_of(text), answer_of(), NEAR)
    cache.lookup_exact(key_of("one"))
    cache.store(key_of("four"), answer_of(), FAR)
    assert cache.stats().evictions == 1
    assert all(cache.lookup_exact(key_of(text)) for text in ("one", "four"))


def test_clearing_a_tenant_leaves_the_others(cache):
    for tenant in ("a", "b"):
        cache.store(key_of(FRANCE, tenant=tenant), answer_of(), NEAR)
        cache.store(key_of(FRANCE, tenant=tenant, system="s"), answer_of(), NEAR)
    assert cache.clear(tenant="a") == 2
    assert cache.clear(partition=key_of(FRANCE, tenant="b").partition) == 1
    assert cache.stats().entries == 1
    assert cache.clear() == 1
    assert cache.stats().bytes == 0


# Failures and counts


@pytest.mark.parametrize(
    "embedding",
    [
        np.full(DIMENSION, np.nan, dtype=np.float32),
        np.zeros(DIMENSION, dtype=np.float32),
        2 * NEAR,
        NEAR.astype(np.float64),
        NEAR.reshape(1, -1),
        np.ones(1, dtype=np.float32),
    ],
    ids=["nan", "zero", "too long", "float64", "matrix", "other dimension"],
)
def test_an_unusable_embedding_is_a_counted_error_and_never_a_hit(cache, embedding):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    found = cache.lookup_semantic(key_of(REWORDED), embedding)
    assert isinstance(found, Miss)
    assert found.reason.startswith("unusable embedding")
    assert cache.store(key_of("other"), answer_of(), embedding)
    assert cache.lookup_exact(key_of("other")) is not None
    assert cache.stats().errors == 2


def test_a_question_that_is_looked_up_twice_is_missed_once(cache):
    assert cache.lookup_exact(key_of(FRANCE)) is None
    cache.lookup_semantic(key_of(FRANCE), NEAR)
    cache.lookup_exact(key_of(FRANCE, allow_semantic=False))
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    cache.lookup_exact(key_of(FRANCE))
    cache.lookup_semantic(key_of(REWORDED), NEAR)
    cache.count_error()
    stats = cache.stats()
    assert (stats.misses, stats.exact_hits, stats.semantic_hits) == (2, 1, 1)
    assert (stats.stores, stats.entries, stats.errors) == (1, 1, 1)


@pytest.mark.parametrize(
    "values",
    [{"max_bytes": 0}, {"max_entry_bytes": 0}, {"ttl_s": 0}, {"ttl_s": float("inf")},
     {"semantic_threshold": 0}, {"semantic_threshold": 1.01}, {"num_candidates": 0},
     {"lru_k": 0}, {"ghosts": -1}],
)  # fmt: skip
def test_impossible_settings_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        CacheConfig(**values)


def cut_answer(text="cut", tokens=8):
    return StoredAnswer(text.encode(), tokens, "r1", is_truncated=True)


def test_an_answer_that_was_cut_serves_only_the_same_limit(cache):
    cache.store(key_of(FRANCE, max_tokens=8), cut_answer(), NEAR)
    assert cache.lookup_exact(key_of(FRANCE, max_tokens=8)).answer == cut_answer()
    for limit in (7, 9, 64, None):
        assert cache.lookup_exact(key_of(FRANCE, max_tokens=limit)) is None


def test_an_answer_that_was_cut_is_never_found_by_meaning(cache):
    cache.store(key_of(FRANCE, max_tokens=8), cut_answer(), NEAR)
    assert cache.lookup_semantic(key_of(REWORDED, max_tokens=8), NEAR) == Miss(None, "no candidate")


def test_a_cut_answer_and_the_whole_one_keep_their_places(cache):
    cache.store(key_of(FRANCE, max_tokens=64), answer_of("whole", 20), NEAR)
    cache.store(key_of(FRANCE, max_tokens=8), cut_answer(), NEAR)
    assert cache.lookup_exact(key_of(FRANCE, max_tokens=8)).answer.payload == b"cut"
    assert cache.lookup_exact(key_of(FRANCE)).answer.payload == b"whole"
    assert cache.lookup_semantic(key_of(REWORDED), NEAR).answer.payload == b"whole"


def damage(cache, key):
    answer = cache._tiers.warm.get(key.exact).answer
    object.__setattr__(answer, "payload", answer.payload[:-1] + b"?")


def test_a_damaged_answer_is_removed_and_never_given(cache):
    for look_up in (cache.lookup_exact, lambda key: cache.lookup_semantic(key, NEAR)):
        cache.store(key_of(FRANCE), answer_of(), NEAR)
        damage(cache, key_of(FRANCE))
        assert not isinstance(look_up(key_of(FRANCE)), Hit)
        stats = cache.stats()
        assert (stats.entries, stats.bytes, len(cache._tiers.warm._index)) == (0, 0, 0)
    assert cache.stats().errors == 2


def test_a_damaged_answer_is_stored_anew(cache):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    damage(cache, key_of(FRANCE))
    assert cache.lookup_exact(key_of(FRANCE)) is None
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    assert isinstance(cache.lookup_exact(key_of(FRANCE)), Hit)


def test_the_next_candidate_is_given_in_place_of_a_damaged_one(cache):
    cache.store(key_of(FRANCE), answer_of("first"), NEAR)
    cache.store(key_of(f"{FRANCE}!"), answer_of("second"), near(0.99))
    damage(cache, key_of(FRANCE))
    hit = cache.lookup_semantic(key_of(REWORDED), NEAR)
    assert isinstance(hit, Hit)
    assert hit.answer.payload == b"second"


def test_a_damaged_only_candidate_is_told_as_the_reason(cache):
    cache.store(key_of(FRANCE), answer_of(), NEAR)
    damage(cache, key_of(FRANCE))
    miss = cache.lookup_semantic(key_of(REWORDED), NEAR)
    assert miss == Miss(pytest.approx(1.0), "stored answer was damaged")
