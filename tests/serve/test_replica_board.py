"""The choice among replicas: who holds the prefix, who is busy, who failed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deployments.replica_board import CHARGE_S, SETTLE_S, ReplicaBoard, board_of
from deployments.wire import Load, Route
from tests.protocol.fakes import FakeClock

CHAIN = (1, 2, 3)


def board(*names: str, clock: FakeClock | None = None, **options: Any) -> ReplicaBoard:
    made = ReplicaBoard(
        clock=clock or FakeClock(), rng=random.Random(1), **{"margin_tokens": 100} | options
    )
    made.set_replicas(names)
    return made


def test_the_holder_of_the_longest_prefix_comes_first() -> None:
    b = board("a", "b", "c")
    b.remember("a", CHAIN[:1])
    b.remember("b", CHAIN)
    assert b.rank(b.replicas, Route(chain=(*CHAIN, 4)))[0] == "b"


def test_a_chain_that_parts_from_a_known_one_still_matches_its_beginning() -> None:
    b = board("a", "b")
    b.remember("b", CHAIN)
    assert b.rank(b.replicas, Route(chain=(1, 8, 9)))[0] == "b"


def test_equally_good_holders_go_by_load() -> None:
    b = board("a", "b", "c")
    for name, tokens in (("a", 50), ("b", 20), ("c", 0)):
        b.set_load(name, Load(tokens=tokens))
    b.remember("a", CHAIN)
    b.remember("b", CHAIN)
    assert b.rank(b.replicas, Route(chain=CHAIN)) == ["b", "c", "a"]


def test_a_holder_that_is_busier_by_more_than_the_margin_is_passed_over() -> None:
    b = board("a", "b")
    b.remember("a", CHAIN)
    b.set_load("a", Load(tokens=100))
    assert b.rank(b.replicas, Route(chain=CHAIN)) == ["a", "b"]
    b.set_load("a", Load(tokens=101))
    assert b.rank(b.replicas, Route(chain=CHAIN)) == ["b", "a"]


def test_the_next_best_holder_stands_in_for_one_that_is_too_busy() -> None:
    b = board("a", "b", "c")
    b.remember("a", CHAIN)
    b.remember("b", CHAIN[:2])
    b.set_load("a", Load(tokens=1000))
    b.set_load("b", Load(tokens=50))
    assert b.rank(b.replicas, Route(chain=CHAIN)) == ["b", "c", "a"]


def test_without_a_prefix_the_least_busy_comes_first() -> None:
    b = board("a", "b", "c")
    b.set_load("a", Load(tokens=9))
    b.set_load("b", Load(running=2, waiting=1, tokens=5))
    b.set_load("c", Load(running=2, tokens=5))
    assert b.rank(b.replicas, Route(chain=CHAIN)) == ["c", "b", "a"]


def test_equals_are_drawn_by_lot() -> None:
    b = board("a", "b", "c")
    firsts = Counter(b.rank(b.replicas, Route())[0] for _ in range(300))
    assert all(firsts[name] > 50 for name in "abc")


def test_suspects_and_those_to_avoid_come_last_but_are_not_left_out() -> None:
    clock = FakeClock()
    b = board("a", "b", "c", clock=clock)
    b.remember("a", CHAIN)
    b.set_load("c", Load(tokens=10_000))
    b.suspect("a", 2.0)
    assert b.rank(b.replicas, Route(chain=CHAIN, avoid=("b",)))[0] == "c"
    assert sorted(b.rank(b.replicas, Route(chain=CHAIN, avoid=("b",)))) == ["a", "b", "c"]
    clock.now += 2.0
    assert b.rank(b.replicas, Route(chain=CHAIN))[0] == "a"


def test_a_suspect_is_cleared_by_a_sign_of_life() -> None:
    b = board("a", "b")
    b.remember("a", CHAIN)
    b.suspect("a", 1000.0)
    b.clear("a")
    assert not b.is_suspect("a")
    assert b.rank(b.replicas, Route(chain=CHAIN))[0] == "a"


def test_a_shorter_suspicion_does_not_end_a_longer_one() -> None:
    clock = FakeClock()
    b = board("a", clock=clock)
    b.suspect("a", 30.0)
    b.suspect("a", 1.0)
    clock.now += 2.0
    assert b.is_suspect("a")


def test_a_dead_replica_that_comes_back_into_the_set_is_still_suspect() -> None:
    b = board("a", "b")
    b.suspect("a", 30.0)
    b.set_replicas({"b"})
    b.set_replicas({"a", "b"})
    assert b.rank(b.replicas, Route()) == ["b", "a"]


def test_work_that_was_just_sent_counts_before_any_report() -> None:
    b = board("a", "b")
    chosen = Counter(b.choose(Route(chain=(i,), cost=50)) for i in range(20))
    assert chosen == {"a": 10, "b": 10}


def test_a_report_replaces_the_work_that_it_contains() -> None:
    clock = FakeClock()
    b = board("a", "b", clock=clock)
    b.charge("a", 500)
    b.set_load("a", Load())
    assert b.rank(b.replicas, Route()) == ["b", "a"], "the report may be older than the work"
    clock.now += SETTLE_S
    b.set_load("a", Load())
    b.set_load("b", Load(tokens=1))
    assert b.rank(b.replicas, Route()) == ["a", "b"]


def test_work_that_nobody_confirms_is_forgotten() -> None:
    clock = FakeClock()
    b = board("a", "b", clock=clock)
    b.charge("a", 500)
    b.charge("b", 1)
    clock.now += CHARGE_S
    b.charge("b", 1)
    assert b.rank(b.replicas, Route()) == ["a", "b"]


def test_a_session_stays_where_it_is_and_a_burst_spreads() -> None:
    b = board("a", "b", margin_tokens=400)
    first = b.choose(Route(chain=CHAIN, cost=10))
    assert {b.choose(Route(chain=CHAIN, cost=10)) for _ in range(20)} == {first}
    assert b.prefix_routed_total == 20
    spread = Counter(b.choose(Route(chain=CHAIN, cost=200)) for _ in range(20))
    assert min(spread.values()) >= 8
    assert b.routed_total == 41


def test_affinity_that_is_given_up_is_counted() -> None:
    b = board("a", "b")
    b.remember("a", CHAIN)
    b.set_load("a", Load(tokens=5000))
    assert b.choose(Route(chain=CHAIN)) == "b"
    assert (b.routed_total, b.prefix_routed_total, b.overflow_total) == (1, 0, 1)
    assert b.choose(Route(chain=(7,))) == "b"
    assert (b.routed_total, b.prefix_routed_total, b.overflow_total) == (2, 0, 1)


def test_a_warm_up_draws_its_request_after_it_and_is_not_counted_as_one() -> None:
    b = board("a", "b")
    home = b.choose(Route(chain=CHAIN[:2], is_warm_up=True))
    assert b.choose(Route(chain=CHAIN, is_warm_up=True)) == home
    assert (b.routed_total, b.prefix_routed_total) == (0, 0)
    assert b.choose(Route(chain=(*CHAIN, 4), cost=10)) == home
    assert (b.routed_total, b.prefix_routed_total) == (1, 1)


def test_the_least_recently_used_prefixes_are_forgotten_the_longest_first() -> None:
    b = board("a", "b", max_hashes=4)
    b.remember("a", (1, 2, 3))
    b.remember("a", (10, 11))
    b.set_load("b", Load(tokens=-1))
    assert b.rank(b.replicas, Route(chain=(3,)))[0] == "b"
    assert b.rank(b.replicas, Route(chain=(2,)))[0] == "a"
    b.remember("a", (1, 2))
    b.remember("a", (20, 21))
    assert b.rank(b.replicas, Route(chain=(10,)))[0] == "b"
    assert b.rank(b.replicas, Route(chain=(1, 2)))[0] == "a"


def test_what_is_known_of_a_replica_leaves_with_it() -> None:
    b = board("a", "b")
    b.remember("a", CHAIN)
    b.set_load("a", Load(tokens=1))
    b.set_replicas({"b"})
    b.set_replicas({"a", "b"})
    assert b.load_of("a") is None
    b.set_load("b", Load(tokens=-1))
    assert b.rank(b.replicas, Route(chain=CHAIN)) == ["b", "a"]


def test_what_is_said_of_an_unknown_replica_is_harmless() -> None:
    b = board("a")
    b.set_load("x", Load(tokens=5))
    b.charge("x", 5)
    b.remember("x", CHAIN)
    b.clear("x")
    b.place("x", Route(chain=CHAIN, cost=5))
    assert b.load_of("x") is None
    assert not b.has_reported("x", 100.0)
    assert sorted(b.rank(("a", "x"), Route(chain=CHAIN))) == ["a", "x"]


def test_a_report_is_a_sign_of_life_for_a_while() -> None:
    clock = FakeClock()
    b = board("a", clock=clock)
    assert not b.has_reported("a", 1.0)
    b.set_load("a", Load(tokens=7))
    clock.now += 1.0
    assert b.has_reported("a", 1.0)
    assert b.load_of("a") == Load(tokens=7)
    clock.now += 0.5
    assert not b.has_reported("a", 1.0)


def test_nobody_is_chosen_where_nobody_is() -> None:
    b = board()
    assert b.choose(Route()) is None
    assert b.rank((), Route()) == []


def test_listeners_hear_changes_of_the_set_only() -> None:
    b = board("a")
    heard: list[frozenset[str]] = []

    def fail() -> None:
        raise RuntimeError

    b.subscribe(fail)
    unsubscribe = b.subscribe(lambda: heard.append(b.replicas))
    b.set_replicas(["a"])
    b.set_replicas(["a", "b"])
    b.set_load("a", Load(tokens=3))
    unsubscribe()
    unsubscribe()
    b.set_replicas([])
    assert heard == [{"a", "b"}]


def test_a_process_has_one_board_for_each_deployment() -> None:
    assert board_of("test-board-1") is board_of("test-board-1")
    assert board_of("test-board-1") is not board_of("test-board-2")


NAMES = st.sampled_from("abcd")
CHAINS = st.lists(st.integers(0, 6), max_size=5).map(tuple)
ACTIONS = st.one_of(
    st.tuples(st.just("set_replicas"), st.frozensets(NAMES)),
    st.tuples(st.just("set_load"), NAMES, st.builds(Load, tokens=st.integers(0, 300))),
    st.tuples(st.just("charge"), NAMES, st.integers(0, 300)),
    st.tuples(st.just("suspect"), NAMES, st.floats(0.0, 5.0)),
    st.tuples(st.just("clear"), NAMES),
    st.tuples(st.just("remember"), NAMES, CHAINS),
    st.tuples(st.just("place"), NAMES, st.builds(Route, chain=CHAINS, cost=st.integers(0, 300))),
    st.tuples(st.just("wait"), st.floats(0.0, 6.0)),
)


@given(st.lists(ACTIONS, max_size=30), st.builds(Route, chain=CHAINS, avoid=st.tuples(NAMES)))
def test_whatever_happened_the_ranking_names_each_once_and_the_bad_last(
    actions: list[tuple[Any, ...]], route: Route
) -> None:
    clock = FakeClock()
    b = board("a", "b", clock=clock, max_hashes=6)
    for name, *values in actions:
        if name == "wait":
            clock.now += values[0]
        else:
            getattr(b, name)(*values)
    ranked = b.rank(b.replicas, route)
    assert sorted(ranked) == sorted(b.replicas)
    is_bad = [name in route.avoid or b.is_suspect(name) for name in ranked]
    assert is_bad == sorted(is_bad)
    chosen = b.choose(route)
    assert (chosen is None) == (not b.replicas)
    assert b.prefix_routed_total + b.overflow_total <= b.routed_total


def test_threads_may_use_it_at_once() -> None:
    b = ReplicaBoard(max_hashes=50)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                b.set_replicas(rng.sample("abcd", rng.randint(0, 4)))
                b.choose(Route(chain=tuple(rng.choices(range(99), k=4)), cost=3))
                b.set_load(rng.choice("abcd"), Load(tokens=rng.randint(0, 9)))
                b.suspect(rng.choice("abcd"), 0.001)
                b.subscribe(lambda: None)()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
