"""What was learnt beside the answers: paraphrases and the error budget, in this process and others."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.aliases import ALIAS_BYTES, AliasMap
from cache.answer import StoredAnswer
from cache.budget import BAND_FLOORS, ErrorBudget, Evidence
from cache.budget_news import News, strictest
from cache.decision import Decider
from cache.key import PromptKey, make_key
from cache.learnt import MAX_SKEW_S, TELL_S, TOGETHER_S, Learnt
from cache.prompt_cache import CacheConfig, Hit, Miss, PromptCache
from cache.stats import EntryFilter
from cache.write_behind import ALIASES, BUDGET, Change, WriteBehindStore
from tests.cache.test_decision import ROW, TRUSTED, verifier
from tests.cache.test_sharing import Clock, by_redis, by_sqlite, eventually

TURN_ON, ENABLE = "How do I turn on logs?", "How do I enable logs?"


def key_of(text: str, tenant: str = "a") -> PromptKey:
    return make_key({"tenant": tenant}, text, max_tokens=None, allow_semantic=True)


def answer_of(text: str = "answer") -> StoredAnswer:
    return StoredAnswer(text.encode(), 5, "r1")


def budget_of() -> ErrorBudget:
    return ErrorBudget(prior=TRUSTED)


def decider_of(budget: ErrorBudget) -> Decider:
    return Decider(budget=budget, verifier=verifier(), rng=random.Random(0))


def look_up(cache: PromptCache, text: str, tenant: str = "a") -> Hit | Miss:
    key = key_of(text, tenant)
    return cache.lookup_exact(key) or cache.lookup_semantic(key, ROW)


# Paraphrases and the count of requests


def test_a_request_is_counted_once_whether_or_not_its_alias_serves() -> None:
    budget = budget_of()
    cache = PromptCache(CacheConfig(), clock=lambda: 0.0, decider=decider_of(budget))
    cache.store(key_of(TURN_ON), answer_of(), ROW)

    def counted() -> tuple[int, int]:
        news = budget.take_news()["a"]
        return news.requests, sum(news.seen)

    budget.keep_news()
    assert isinstance(look_up(cache, ENABLE), Hit)
    assert counted() == (1, 1)
    assert isinstance(look_up(cache, ENABLE), Hit)
    assert cache.stats().alias_hits == 1
    assert counted() == (1, 1)
    for _ in range(13):
        budget.spend("a")
    assert budget.take_news()["a"].spent == 13
    miss = look_up(cache, ENABLE)
    assert isinstance(miss, Miss)
    assert miss.reason == "error budget is spent"
    assert counted() == (1, 1)


def test_a_request_whose_first_candidate_is_damaged_is_counted_once() -> None:
    budget = budget_of()
    cache = PromptCache(CacheConfig(), clock=lambda: 0.0, decider=decider_of(budget))
    damaged = answer_of()
    cache.store(key_of(TURN_ON), damaged, ROW)
    cache.store(key_of("how do i turn on the logs"), answer_of("sound"), ROW)
    object.__setattr__(damaged, "payload", b"other")
    budget.keep_news()
    look_up(cache, ENABLE)
    look_up(cache, ENABLE)
    assert budget.take_news()["a"].requests == 2


# Over stores that outlive the process, by one process after another and by two at once


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[by_sqlite, by_redis], ids=["sqlite", "redis"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], WriteBehindStore]:
    return request.param(request, tmp_path)


@dataclass
class Replica:
    cache: PromptCache
    budget: ErrorBudget
    store: WriteBehindStore

    def tell(self) -> None:
        """A second passes, and something is asked."""
        Clock.now += TELL_S
        self.cache.evict_expired()
        assert self.cache.flush()

    def hears(self, holds: Callable[[], Any]) -> None:
        eventually(lambda: (self.cache.evict_expired(), holds())[1])

    def credit(self) -> float:
        return self.budget.credit("a")

    def checks(self) -> int:
        state = self.budget.export_state().get("a")
        return 0 if state is None else len(state["checks"])

    def kill(self) -> None:
        """Nothing that waits is written any more."""
        self.store._backend.commit = lambda notices, writes: None
        self.store.close()


OpenReplica = Callable[..., Replica]


@pytest.fixture
def replica(open_store: Callable[[], WriteBehindStore], clock: Clock) -> Iterator[OpenReplica]:
    opened: list[Replica] = []

    def build(prior: Any = TRUSTED) -> Replica:
        budget, store = ErrorBudget(prior=prior), open_store()
        config = CacheConfig(cold_max_bytes=2**24)
        cache = PromptCache(config, clock=clock, store=store, decider=decider_of(budget))
        opened.append(Replica(cache, budget, store))
        return opened[-1]

    yield build
    for one in opened:
        one.cache.close()


def learn_alias(one: Replica) -> None:
    one.cache.store(key_of(TURN_ON), answer_of(), ROW)
    assert isinstance(look_up(one.cache, ENABLE), Hit)
    assert one.cache.stats().aliases == 1
    one.cache.flush()


def test_a_paraphrase_is_known_after_a_restart(replica: OpenReplica) -> None:
    one = replica()
    learn_alias(one)
    one.cache.close()
    again = replica()
    assert again.cache.stats().aliases == 1
    hit = again.cache.lookup_exact(key_of(ENABLE))
    assert hit is not None
    assert again.cache.stats().alias_hits == 1


def test_a_paraphrase_that_one_has_learnt_is_used_by_the_other(replica: OpenReplica) -> None:
    one, other = replica(), replica()
    learn_alias(one)
    other.hears(lambda: other.cache.stats().aliases == 1)
    assert other.cache.lookup_exact(key_of(ENABLE)) is not None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_deleted_question_takes_its_paraphrases_along_everywhere(
    is_wrong: bool, replica: OpenReplica
) -> None:
    one, other = replica(), replica()
    learn_alias(one)
    other.hears(lambda: other.cache.stats().aliases == 1)
    if is_wrong:
        other.cache.quarantine(key_of(TURN_ON).exact[:16])
    else:
        other.cache.delete(EntryFilter(prompt=TURN_ON))
    assert other.cache.stats().aliases == 0
    one.hears(lambda: one.cache.stats().aliases == 0)
    assert one.cache.flush()
    assert other.cache.flush()
    assert list(one.store.scan(ALIASES)) == []
    one.cache.close()
    other.cache.close()
    assert replica().cache.stats().aliases == 0


def test_what_was_learnt_is_no_answer(replica: OpenReplica) -> None:
    one = replica()
    learn_alias(one)
    one.budget.spend("a")
    one.tell()
    assert len(list(one.store.scan())) == 1
    assert len(list(one.store.scan(BUDGET))) == 1
    one.cache.close()
    assert len(list(replica().store.scan())) == 1


def test_an_alias_that_lacks_room_leaves_the_store_too(
    open_store: Callable[[], WriteBehindStore], clock: Clock
) -> None:
    with closing(open_store()) as store:
        aliases = AliasMap(2 * (ALIAS_BYTES + ROW.nbytes))
        Learnt(store, aliases, None, life_s=60.0, clock=clock)
        for name in "abc":
            aliases.add(name, "target", ROW)
        assert {exact for _, exact, _ in store.scan(ALIASES)} == {"b", "c"}


def test_the_budget_goes_on_where_it_was(replica: OpenReplica) -> None:
    one = replica(prior=())
    for _ in range(300):
        one.budget.count_request("a")
        one.budget.record("a", 0.96, True, was_served=False)
    one.budget.spend("a")
    before = one.budget.export_state()["a"]
    one.cache.close()
    again = replica(prior=())
    after = again.budget.export_state()["a"]
    assert after == {**before, "streak": 0}
    assert again.budget.preview("a", 0.96) == one.budget.preview("a", 0.96)
    assert again.budget.preview("a", 0.96).action == "serve"


def test_after_a_kill_no_credit_is_left_that_was_not_earned_since(replica: OpenReplica) -> None:
    one = replica()
    one.budget.count_request("a")
    one.budget.spend("a")
    one.tell()
    assert one.credit() > 0
    one.budget.spend("a")
    one.kill()
    again = replica()
    assert again.credit() == 0
    assert again.budget.preview("a", 0.99).action == "shadow"


def test_mistakes_of_one_spend_the_credit_of_the_other_too(replica: OpenReplica) -> None:
    one, other = replica(), replica()
    for spender in (one, other):
        for _ in range(7):
            spender.budget.spend("a")
        spender.cache.evict_expired()
    for each in (one, other):
        each.hears(lambda each=each: each.credit() == pytest.approx(12.0 - 14.0))
    assert one.budget.preview("a", 0.99).why == "error budget is spent"


def test_what_one_has_checked_is_evidence_for_the_other(replica: OpenReplica) -> None:
    one, other = replica(prior=()), replica(prior=())
    # What was told just before somebody has read is told twice: it counts for caution only.
    Clock.now += MAX_SKEW_S
    for each in (one, other):
        for _ in range(150):
            each.budget.count_request("a")
            each.budget.record("a", 0.96, True, was_served=False)
        each.tell()
    for each in (one, other):
        each.hears(lambda each=each: each.checks() == 300)
        assert each.budget.export_state()["a"]["requests"] == pytest.approx(260, abs=1)
        assert each.budget.preview("a", 0.96).action == "serve"
    other.budget.record("a", 0.96, False)
    other.cache.evict_expired()
    one.hears(lambda: one.credit() < 12)
    assert one.credit() == other.credit()


def test_news_from_before_the_start_count_for_caution_only(replica: OpenReplica) -> None:
    one = replica()
    for _ in range(40):
        one.budget.count_request("a")
        one.budget.record("a", 0.96, True)
    one.budget.record("a", 0.96, False, check_rate=1.0)
    other = replica()
    one.tell()
    other.hears(lambda: other.credit() == 11.0)
    state = other.budget.export_state()["a"]
    assert state["checks"] == [[BAND_FLOORS.index(0.95), False]]


def test_who_has_missed_what_was_told_takes_the_stricter_of_both(replica: OpenReplica) -> None:
    one, other = replica(), replica()
    for _ in range(9):
        one.budget.record("a", 0.96, False, check_rate=1.0)
    one.tell()
    # As if it had come by another way than the log, from which too much was gone.
    other.store._heard.clear()
    other.store._hear([Change("reset")])
    other.hears(lambda: other.credit() <= 3.0)
    assert [was_right for _, was_right in other.budget.export_state()["a"]["checks"]].count(
        False
    ) == 9


def test_on_another_scale_only_the_credit_is_taken_over(replica: OpenReplica) -> None:
    one = replica()
    one.budget.record("a", 0.96, False, check_rate=1.0)
    one.cache.close()
    again = replica(prior=[Evidence(right=5) for _ in BAND_FLOORS])
    assert again.checks() == 0
    assert again.credit() == 11.0


def checked(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text) + text


UNKNOWN_STATE = (
    b'{"category": "a", "origin": "o", "written": 1, "is_closed": true, "scale": "s", "state": {}}'
)


@pytest.mark.parametrize(
    "rubbish",
    [b"", b"x", b"00000000", b"deadbeef{}", checked(b"{}"), checked(b"[1]"),
     checked(UNKNOWN_STATE)],
)  # fmt: skip
def test_a_damaged_copy_is_left_aside_and_removed(rubbish: bytes, replica: OpenReplica) -> None:
    one = replica()
    one.budget.spend("a")
    one.cache.close()
    with closing(replica().store) as store:
        store.put(BUDGET, "other", rubbish)
        store.put(ALIASES, "other", rubbish)
        store.flush()
    again = replica()
    assert again.credit() <= 11.0
    assert again.cache.flush()
    assert [record_id for _, record_id, _ in again.store.scan(BUDGET)] != ["other"]
    assert list(again.store.scan(ALIASES)) == []


def test_copies_of_long_ago_go_when_a_newer_one_is_there(replica: OpenReplica) -> None:
    for _ in range(4):
        one = replica()
        one.budget.spend("a")
        one.tell()
        one.cache.close()
        Clock.now += 2 * TOGETHER_S
    last = replica()
    assert last.credit() == 8.0
    last.cache.flush()
    assert len(list(last.store.scan(BUDGET))) == 1


# How copies are put together


@given(st.lists(st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=30), min_size=1,
                max_size=4), st.data())  # fmt: skip
def test_copies_put_together_are_never_looser_than_one_of_them(
    told: list[list[tuple[int, bool]]], data: st.DataObject
) -> None:
    budgets = []
    for checks in told:
        budget = ErrorBudget(prior=TRUSTED)
        for _ in range(data.draw(st.integers(0, 300))):
            budget.count_request("a")
        budget.spend("a")
        for band, was_right in checks:
            budget.record("a", BAND_FLOORS[band], was_right, check_rate=1.0)
        budgets.append(budget)
    first, *others = [budget.export_state()["a"] for budget in budgets]
    merged = ErrorBudget(prior=TRUSTED)
    merged.import_state({"a": strictest(first, others)})
    assert merged.credit("a") <= min(budget.credit("a") for budget in budgets)
    wrongs = [Counter(band for band, was_right in state["checks"] if not was_right)
              for state in (first, *others)]  # fmt: skip
    known = merged.export_state()["a"]["checks"]
    assert all(Counter(band for band, right in known if not right) >= each for each in wrongs)
    # Whatever the first one would not give for its evidence, the merged one does not either.
    for floor in BAND_FLOORS:
        if budgets[0].preview("a", floor).action == "shadow":
            assert merged.preview("a", floor).action == "shadow"


@pytest.mark.parametrize("seed", range(4))
def test_two_that_share_a_budget_stay_under_the_limit_together(seed: int) -> None:
    rng = random.Random(seed)
    budgets = [ErrorBudget(prior=TRUSTED), ErrorBudget(prior=TRUSTED)]
    for budget in budgets:
        budget.keep_news()
    served = wrong = 0
    requests = 6000
    for number in range(requests):
        budget = rng.choice(budgets)
        budget.count_request("a")
        was_right = rng.random() < (0.6 if number > 2000 else 0.999)
        decision = budget.decide("a", 0.97, rng)
        if decision.action == "serve":
            served += 1
            wrong += not was_right
        if decision.is_checked:
            budget.record("a", 0.97, was_right, was_served=decision.action == "serve",
                          check_rate=decision.check_rate)  # fmt: skip
        if number % 25 == 0:
            for one, other in (budgets, budgets[::-1]):
                for category, news in one.take_news().items():
                    other.hear(category, News(**asdict(news)))
    assert served > 1000
    # One credit for both, what requests have earned, and the luck of the coin.
    assert wrong <= 0.01 * requests
