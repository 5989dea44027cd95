"""The composition: any series of calls against a slow model, and what each tier does in turn."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.answer import StoredAnswer
from cache.cold import ColdStoreError, MemoryColdStore
from cache.entries import ENTRY_OVERHEAD_BYTES
from cache.key import make_key
from cache.prompt_cache import CacheConfig, Hit, Miss, PromptCache
from cache.stats import EntryFilter, TenantStats

DIMENSION = 8
TTL_S, COLD_TTL_S = 60, 240
ROOM = ENTRY_OVERHEAD_BYTES + 1700

TEXTS = ["What is the capital of France?", "what is the capital of france", "What is the price?",
         "How do I go?", "How can I go?", "how to go"]  # fmt: skip
MEANINGS = [0, 0, 1, 2, 2, 2]


def vector_of(number):
    vector = np.zeros(DIMENSION, dtype=np.float32)
    vector[MEANINGS[number]], vector[5] = 1, 0.02 * number
    return vector / np.linalg.norm(vector)


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def key_of(number, *, tenant="a", max_tokens=None, **parts):
    return make_key(
        {"tenant": tenant, **parts}, TEXTS[number], max_tokens=max_tokens, allow_semantic=True
    )


def answer_of(text="answer", tokens=5):
    return StoredAnswer(text.encode(), tokens, "r1")


def cache_of(clock, store=None, **values):
    defaults = {
        "max_bytes": 4 * ROOM,
        "ttl_s": TTL_S,
        "cold_max_bytes": 6 * ROOM,
        "cold_ttl_s": COLD_TTL_S,
    }
    config = CacheConfig(**{**defaults, **values})
    return PromptCache(config, clock=clock, store=store, rng=random.Random(1))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def cache(clock):
    return cache_of(clock)


def ask(cache, number, **parts):
    """As the service does: exactly first, then by meaning."""
    key = key_of(number, **parts)
    return cache.lookup_exact(key) or cache.lookup_semantic(key, vector_of(number))


def put(cache, number, text="answer", **parts):
    return cache.store(key_of(number, **parts), answer_of(text), vector_of(number))


# Any series of calls

ACTIONS = ["store", "store", "store", "ask", "ask", "exact", "advance", "clear", "quarantine",
           "delete", "expire", "restart"]  # fmt: skip

series = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS), st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 40)
    ),
    max_size=80,
)

CONFIGS = {
    policy: {"policy": policy, "tenant_max_bytes": 3 * ROOM, "tenant_max_entries": 3}
    for policy in ("windowed", "lru-k", "s3-fifo", "lru")
} | {"warm only": {"cold_max_bytes": 0}, "small aliases": {"max_alias_bytes": 2000}}


class SlowModel:
    """Everything that was ever said, and what may be answered: nothing is evicted here."""

    def __init__(self, life_s):
        self.life_s = life_s
        self.latest, self.closed = {}, {}

    def store(self, tenant, number, answer, now):
        self.latest[tenant, number] = (answer, now)

    def allowed(self, tenant, number, now, *, by_meaning):
        """The answers that may be given for a question, as (answer, created)."""
        same = [n for n in range(len(TEXTS)) if MEANINGS[n] == MEANINGS[number]]
        if not by_meaning or self.closed.get((tenant, MEANINGS[number]), 0) > now:
            same = [number]
        held = [self.latest[tenant, n] for n in same if (tenant, n) in self.latest]
        return [(answer, made) for answer, made in held if now - made < self.life_s]

    def forget(self, tenant, number=None):
        for place in list(self.latest):
            if place[0] == tenant and number in (None, place[1]):
                del self.latest[place]


def check_books(cache, config):
    tiers, stats = cache._tiers, cache.stats()
    warm, cold = tiers.warm, tiers.cold
    # An entry that was taken out of the index still counts its vector.
    assert sum(entry.size_bytes for entry in warm.entries()) <= stats.bytes <= config.max_bytes
    assert set(warm._policy) == set(warm._entries) == set(warm._expiry._deadlines)
    indexed = [entry for entry in warm.entries() if entry.vector is not None]
    assert len(warm._index) == len(indexed)
    assert stats.alias_bytes <= config.max_alias_bytes
    if cold is not None:
        records = {exact for _, exact, _ in cold._store.scan()}
        assert stats.cold_bytes == sum(held.size for held in cold._held.values())
        assert stats.cold_bytes <= config.cold_max_bytes
        assert records == set(cold._held) == set(cold._policy) == set(cold._expiry._deadlines)
        assert len(cold._index) == sum(husk.vector is not None for husk in cold.entries())
    by_tenant = Counter()
    for held in cache.tenant_stats():
        by_tenant[held.tier, "entries"] += held.entries
        by_tenant[held.tier, "bytes"] += held.bytes
        assert held.bytes <= (config.tenant_max_bytes or held.bytes)
        assert held.entries <= (config.tenant_max_entries or held.entries)
    assert by_tenant["L2", "entries"] == stats.entries
    assert by_tenant["L2", "bytes"] == stats.bytes
    assert by_tenant["L3", "entries"] == stats.cold_entries
    assert by_tenant["L3", "bytes"] == stats.cold_bytes


@settings(max_examples=150, deadline=None)
@given(series=series)
@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_any_series_of_calls_keeps_life_meaning_tenants_and_bounds(values, series):
    clock, store = FakeClock(), MemoryColdStore()
    cache = cache_of(clock, store, **values)
    config = cache._config
    model = SlowModel(config.life_s)
    for step, (action, number, tenant, amount) in enumerate(series):
        match action:
            case "store":
                answer = answer_of(f"{step} {tenant} {'x' * amount}", tokens=amount)
                key = key_of(number, tenant=tenant)
                assert cache.store(key, answer, vector_of(number))
                model.store(tenant, number, answer, clock.now)
            case "ask" | "exact":
                limit = 20 if amount % 2 else None
                key = key_of(number, tenant=tenant, max_tokens=limit)
                hit = cache.lookup_exact(key)
                if hit is None and action == "ask":
                    hit = cache.lookup_semantic(key, vector_of(number))
                if isinstance(hit, Hit):
                    by_meaning = hit.outcome == "semantic"
                    allowed = model.allowed(tenant, number, clock.now, by_meaning=by_meaning)
                    assert (hit.answer, clock.now - hit.age_s) in allowed
                    assert limit is None or hit.answer.completion_tokens <= limit
            case "advance":
                clock.now += amount
            case "expire":
                cache.evict_expired()
            case "clear":
                cache.clear(tenant=tenant)
                model.forget(tenant)
            case "delete":
                cache.delete(EntryFilter(tenant=tenant, prompt=TEXTS[number]))
                model.forget(tenant, number)
            case "quarantine":
                entry_id = key_of(number, tenant=tenant).exact[:16]
                if cache.find(EntryFilter(id=entry_id)):
                    cache.feedback(entry_id, was_right=False)
                    model.forget(tenant, number)
                    meaning = MEANINGS[number]
                    model.closed[tenant, meaning] = clock.now + config.quarantine_s
            case "restart" if config.cold_max_bytes and not model.closed:
                cache = cache_of(clock, store, **values)
        check_books(cache, config)


# Between the tiers


def test_an_answer_goes_cold_when_its_stay_ends_and_comes_back_when_asked(cache, clock):
    put(cache, 2, "42")
    clock.now += TTL_S
    hit = ask(cache, 2)
    assert (hit.answer.payload, hit.outcome, hit.tier, hit.age_s) == (b"42", "exact", "L3", TTL_S)
    clock.now += 1
    assert ask(cache, 2).tier == "L2"
    stats = cache.stats()
    assert (stats.demotions, stats.cold_hits, stats.expirations) == (1, 1, 1)


def test_no_hit_in_any_tier_makes_an_answer_live_longer(cache, clock):
    put(cache, 2)
    for _ in range(COLD_TTL_S // 10 - 1):
        clock.now += 10
        assert isinstance(ask(cache, 2), Hit)
    clock.now += 10
    assert isinstance(ask(cache, 2), Miss)
    stats = cache.stats()
    assert (stats.entries, stats.cold_entries, stats.bytes, stats.cold_bytes) == (0, 0, 0, 0)


def test_a_new_answer_replaces_the_old_one_in_every_tier(cache, clock):
    put(cache, 2, "old")
    clock.now += TTL_S
    cache.evict_expired()
    put(cache, 2, "new")
    assert ask(cache, 2).answer.payload == b"new"
    clock.now += TTL_S
    assert ask(cache, 2).answer.payload == b"new"


def test_an_answer_that_space_drives_out_goes_cold_too(clock):
    cache = cache_of(clock, max_bytes=ROOM)
    put(cache, 2, "price")
    put(cache, 3, "go")
    assert cache.stats().evictions == 1
    assert ask(cache, 2).tier == "L3"


def test_equivalents_fold_into_the_one_that_was_asked_most(cache, clock):
    put(cache, 3, "first")
    put(cache, 4, "second")
    for _ in range(5):
        cache.lookup_exact(key_of(4))
    clock.now += TTL_S
    cache.evict_expired()
    assert cache.stats().cold_entries == 1
    assert cache.stats().folded == 1
    hits = [cache.lookup_exact(key_of(number)) for number in (4, 3)]
    assert [hit.answer.payload for hit in hits] == [b"second", b"second"]
    assert [hit.outcome for hit in hits] == ["exact", "semantic"]


def test_a_paraphrase_that_was_answered_needs_no_embedding_again(cache, clock):
    put(cache, 3)
    assert ask(cache, 4).outcome == "semantic"
    again = cache.lookup_exact(key_of(4))
    assert (again.outcome, cache.stats().alias_hits) == ("semantic", 1)
    clock.now += TTL_S
    assert cache.lookup_exact(key_of(4)).tier == "L3"


def test_an_alias_is_put_to_the_decision_each_time(cache):
    put(cache, 3)
    assert ask(cache, 4).outcome == "semantic"
    assert cache.lookup_exact(key_of(4, max_tokens=2)) is None
    assert isinstance(ask(cache, 4, tenant="b"), Miss)


def test_a_second_hit_within_the_window_is_worth_promoting(clock):
    cache = cache_of(clock, promote_window_s=10)
    put(cache, 2)
    promoted = []
    for wait_s in (1, 9, 10, 11):
        clock.now += wait_s
        promoted.append(ask(cache, 2).promote)
    assert promoted == [False, True, True, False]


def test_what_was_asked_once_does_not_push_out_of_the_cold_tier(clock):
    cache = cache_of(clock, cold_max_bytes=ROOM)
    put(cache, 2, "asked again")
    assert isinstance(ask(cache, 2), Hit)
    clock.now += TTL_S
    cache.evict_expired()
    put(cache, 3, "asked once")
    clock.now += TTL_S
    cache.evict_expired()
    assert cache.stats().rejected == 1
    assert ask(cache, 2).tier == "L3"


def test_an_equivalent_leaves_before_what_nothing_else_answers(clock):
    cache = cache_of(clock, max_bytes=3 * ROOM, cold_max_bytes=0, policy="lru")
    put(cache, 2, "alone")
    put(cache, 3, "one")
    put(cache, 4, "other")
    cache.lookup_exact(key_of(2))
    put(cache, 0, "new")
    assert isinstance(cache.lookup_exact(key_of(2)), Hit)
    assert sum(cache.lookup_exact(key_of(number)) is not None for number in (3, 4)) == 1


# A store that fails


class BrokenStore(MemoryColdStore):
    def __init__(self):
        super().__init__()
        self.fails = False

    def get(self, partition, record_id):
        if self.fails:
            raise ColdStoreError("disk is gone")
        return super().get(partition, record_id)

    def put(self, partition, record_id, data):
        if self.fails:
            raise ColdStoreError("disk is full")
        super().put(partition, record_id, data)

    def delete(self, partition, record_id):
        if self.fails:
            raise ColdStoreError("disk is gone")
        super().delete(partition, record_id)


def test_a_store_that_fails_costs_hits_and_counts_errors(clock):
    store = BrokenStore()
    cache = cache_of(clock, store)
    put(cache, 2)
    put(cache, 3)
    clock.now += TTL_S
    cache.evict_expired()
    store.fails = True
    assert isinstance(ask(cache, 2), Miss)
    put(cache, 0)
    clock.now += TTL_S
    assert isinstance(ask(cache, 0), Miss)
    assert cache.stats().errors >= 2
    cache.delete(EntryFilter(prompt=TEXTS[3]))
    store.fails = False
    assert isinstance(ask(cache, 3), Miss)


def test_a_damaged_record_is_a_miss_and_gone(clock):
    store = MemoryColdStore()
    cache = cache_of(clock, store)
    put(cache, 2)
    clock.now += TTL_S
    cache.evict_expired()
    ((partition, exact, data),) = store.scan()
    store.put(partition, exact, data[:-1] + b"?")
    assert isinstance(ask(cache, 2), Miss)
    assert list(store.scan()) == []
    assert (cache.stats().errors, cache.stats().cold_entries) == (1, 0)


def test_a_new_process_finds_what_the_store_kept(clock):
    store = MemoryColdStore()
    cache = cache_of(clock, store)
    put(cache, 2, "kept")
    put(cache, 3, "also")
    clock.now += TTL_S
    cache.evict_expired()
    store.put("p", "e", b"rubbish")
    clock.now += 30
    again = cache_of(clock, store)
    hit = ask(again, 2)
    assert (hit.answer.payload, hit.tier, hit.age_s) == (b"kept", "L3", TTL_S + 30)
    assert ask(again, 4).answer.payload == b"also"
    assert again.stats().cold_entries == len(list(store.scan())) == 2


# Tenants and floods


def test_a_tenant_over_its_quota_loses_its_own(clock):
    cache = cache_of(clock, tenant_max_entries=2, cold_max_bytes=0)
    put(cache, 0, tenant="b")
    for number in (0, 2, 3):
        put(cache, number, tenant="a")
    assert cache.lookup_exact(key_of(0, tenant="a")) is None
    assert isinstance(ask(cache, 0, tenant="b"), Hit)
    assert {(held.tenant, held.entries) for held in cache.tenant_stats()} == {("a", 2), ("b", 1)}


def test_a_flood_of_new_questions_is_not_stored(clock):
    cache = cache_of(clock, miss_rate_per_s=0.1, miss_burst=2)
    assert [put(cache, number, tenant="a") for number in (0, 2, 3)] == [True, True, False]
    assert put(cache, 0, tenant="b")
    clock.now += 10
    assert put(cache, 3, tenant="a")
    assert cache.stats().refused_stores == 1


def test_a_miss_is_known_for_a_while_and_until_something_new_is_stored(cache, clock):
    assert isinstance(ask(cache, 2), Miss)
    assert cache.known_miss(key_of(2)) == Miss(None, "no candidate")
    assert cache.known_miss(key_of(3)) is None
    clock.now += 4.9
    assert cache.known_miss(key_of(2)) is not None
    put(cache, 3)
    assert cache.known_miss(key_of(2)) is None
    assert isinstance(ask(cache, 2), Miss)
    clock.now += 30
    assert cache.known_miss(key_of(2)) is None
    assert cache.stats().misses == 4


# Wrong answers


def test_a_wrong_answer_leaves_with_its_neighbourhood(cache, clock):
    put(cache, 3, "wrong")
    put(cache, 4, "near")
    put(cache, 2, "far")
    assert ask(cache, 5).outcome == "semantic"
    (info,) = cache.find(EntryFilter(prompt=TEXTS[3]))
    assert cache.feedback(info.id, was_right=False)
    assert isinstance(ask(cache, 3), Miss)
    assert isinstance(ask(cache, 5), Miss)
    assert ask(cache, 4).outcome == "exact"
    assert isinstance(ask(cache, 2), Hit)
    put(cache, 3, "right")
    assert isinstance(ask(cache, 5), Miss)
    assert cache.stats().quarantined == 2
    assert not cache.feedback("0" * 16, was_right=False)


def test_a_neighbourhood_opens_again(clock):
    cache = cache_of(clock, quarantine_s=30, ttl_s=100)
    put(cache, 3, "wrong")
    cache.quarantine(key_of(3).exact[:16])
    clock.now += 30
    put(cache, 3, "right")
    assert ask(cache, 4).answer.payload == b"right"


def test_right_answers_stay(cache):
    put(cache, 3)
    (info,) = cache.find(EntryFilter())
    assert cache.feedback(info.id, was_right=True)
    assert isinstance(ask(cache, 4), Hit)


# Looking after it


def test_entries_are_found_by_each_property(cache, clock):
    cache.store(key_of(0), answer_of(), vector_of(0), model="m1", tags=("t",))
    clock.now += 10
    put(cache, 2, tenant="b")
    by = {
        "id": EntryFilter(id=key_of(0).exact[:16]),
        "prompt": EntryFilter(prompt=f" {TEXTS[0]}\n"),
        "tenant": EntryFilter(tenant="a"),
        "partition": EntryFilter(partition=key_of(0).partition),
        "model": EntryFilter(model="m1"),
        "tag": EntryFilter(tag="t"),
        "age": EntryFilter(older_than_s=5),
    }
    for name, which in by.items():
        assert [info.text for info in cache.find(which)] == [TEXTS[0]], name
    assert [info.tenant for info in cache.find(EntryFilter(younger_than_s=5))] == ["b"]
    assert len(cache.find(EntryFilter(model="r1"))) == 2
    assert cache.find(EntryFilter(tenant="a", tag="other")) == []
    assert cache.delete(EntryFilter(tag="t")) == 1
    assert [info.tenant for info in cache.find(EntryFilter())] == ["b"]


def test_a_deleted_entry_is_gone_from_every_tier(cache, clock):
    put(cache, 2)
    clock.now += TTL_S
    assert ask(cache, 2).tier == "L3"
    (info,) = cache.find(EntryFilter(prompt=TEXTS[2]))
    assert info.tiers == ("L2", "L3")
    assert cache.delete(EntryFilter(id=info.id)) == 1
    clock.now += TTL_S
    assert isinstance(ask(cache, 2), Miss)
    assert cache.tenant_stats() == []


def test_tenants_are_told_by_tier(cache, clock):
    put(cache, 2, tenant="b")
    clock.now += TTL_S
    cache.evict_expired()
    put(cache, 2, tenant="a")
    warm, cold = cache.tenant_stats()
    assert (warm.tenant, warm.tier, warm.entries) == ("a", "L2", 1)
    assert cold == TenantStats("b", "L3", 1, cache.stats().cold_bytes)


def test_a_decision_is_explained_candidate_by_candidate(cache, clock):
    put(cache, 3)
    put(cache, 2)
    before = cache.stats()
    told = cache.explain(key_of(4), vector_of(4))
    assert [(item.text, item.refusal) for item in told] == [
        (TEXTS[3], None),
        (TEXTS[2], "below threshold"),
    ]
    assert cache.explain(key_of(2), None)[0].similarity is None
    assert cache.stats() == before
    with pytest.raises(ValueError, match="norm"):
        cache.explain(key_of(2), 2 * vector_of(2))


def test_records_go_from_one_cache_to_another_with_their_ages(cache, clock):
    put(cache, 2, "cold", tenant="b")
    clock.now += TTL_S
    cache.evict_expired()
    cache.store(key_of(3), answer_of("warm"), vector_of(3), model="m", tags=("t",))
    records = list(cache.export())
    later = FakeClock()
    later.now = 5.0
    other = cache_of(later)
    put(other, 2, "newer", tenant="b")
    assert other.import_records(records) == 1
    assert ask(other, 2, tenant="b").answer.payload == b"newer"
    later.now += 1
    hit = ask(other, 4)
    assert (hit.answer, hit.age_s) == (answer_of("warm"), 1.0)
    (info,) = other.find(EntryFilter(tag="t"))
    assert (info.model, info.id) == ("m", key_of(3).exact[:16])
    assert other.import_records([{**records[0], "age_s": COLD_TTL_S}]) == 0
    with pytest.raises(ValueError, match="record"):
        other.import_records([{"age_s": 1}])


def test_no_question_near_a_wrong_answer_is_answered_by_meaning(cache):
    def at(angle):
        vector = np.zeros(DIMENSION, dtype=np.float32)
        vector[0], vector[1] = np.cos(angle), np.sin(angle)
        return vector

    cache.store(key_of(3), answer_of("wrong"), at(0))
    cache.store(key_of(4), answer_of("other"), at(0.28))
    assert isinstance(cache.lookup_semantic(key_of(5), at(0.2)), Hit)
    cache.quarantine(key_of(3).exact[:16])
    assert isinstance(cache.lookup_semantic(key_of(5), at(0.3)), Hit)
    miss = cache.lookup_semantic(key_of(5), at(0.12))
    assert miss == Miss(None, "near an answer that was wrong")
