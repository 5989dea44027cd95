"""Who may wait, who is next: limits hold, nobody starves, and alone one may have it all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.admission import CLAIM_S, Admission, FairQueue
from deployments.engine.config import EngineConfig
from deployments.engine.sequence import Sequence
from protocol.errors import DuplicateId, Overloaded
from tests.engine.fakes import SMALL, FakeClock, sequence

FOUR = replace(SMALL, max_num_seqs=2, max_waiting=2)


def asks(tenant: str, num_tokens: int = 2, **given: int) -> Sequence:
    seq = sequence([1] * num_tokens)
    seq.share = tenant
    seq.priority = given.get("priority", 0)
    return seq


def door(config: EngineConfig = FOUR) -> tuple[Admission, FakeClock]:
    clock = FakeClock()
    return Admission(config, clock), clock


def is_accepted(admission: Admission, seq: Sequence) -> bool:
    try:
        admission.take(seq)
    except Overloaded:
        return False
    return True


# The door


def test_a_tenant_alone_takes_every_place_and_no_more() -> None:
    admission, _ = door()
    assert [is_accepted(admission, asks("a")) for _ in range(30)] == [True] * 4 + [False] * 26


def test_a_place_is_free_again_at_once() -> None:
    admission, _ = door()
    seqs = [asks("a") for _ in range(4)]
    for seq in seqs:
        admission.take(seq)
    admission.release(seqs[1])
    assert is_accepted(admission, asks("a"))
    assert not is_accepted(admission, asks("a"))


def test_taking_starting_and_releasing_twice_is_harmless() -> None:
    admission, _ = door()
    seq = asks("a")
    admission.start(seq)
    admission.release(seq)
    for _ in range(2):
        admission.take(seq)
        admission.start(seq)
        admission.start(seq)
    assert (admission.num_held, admission.num_waiting_tokens) == (1, 0)
    admission.release(seq)
    admission.release(seq)
    assert admission.num_held == 0


def test_a_live_request_id_is_refused() -> None:
    admission, _ = door()
    first, second = asks("a"), asks("a")
    second.request_id = first.request_id
    admission.take(first)
    with pytest.raises(DuplicateId):
        admission.take(second)
    admission.release(second)
    assert admission.num_held == 1, "only the one that was accepted ends"


def test_queued_prompt_tokens_are_bounded() -> None:
    admission, _ = door(replace(FOUR, max_waiting=50, max_waiting_tokens=100))
    running = [asks("a", 90), asks("a", 90)]
    for seq in running:
        assert is_accepted(admission, seq), "a place is free: nothing waits"
        admission.start(seq)
    assert is_accepted(admission, asks("a", 60))
    with pytest.raises(Overloaded, match=r"60 prompt tokens are waiting.* 41, the limit is 100"):
        admission.take(asks("a", 41))
    assert is_accepted(admission, asks("a", 40))


def test_a_prompt_longer_than_the_queue_runs_when_a_place_is_free() -> None:
    admission, _ = door(replace(FOUR, max_waiting_tokens=10))
    assert is_accepted(admission, asks("a", 60))


def test_the_default_queue_holds_sixteen_of_the_longest_prompts() -> None:
    assert replace(SMALL, max_model_len=100).queue_tokens == 1600
    assert replace(SMALL, max_waiting_tokens=7).queue_tokens == 7


def test_a_second_tenant_halves_what_the_first_may_hold() -> None:
    admission, _ = door(replace(SMALL, max_num_seqs=2, max_waiting=6))
    first = [asks("a") for _ in range(8)]
    for seq in first:
        admission.take(seq)
    assert not is_accepted(admission, asks("b"))
    for seq in first[:5]:
        admission.release(seq)
    assert is_accepted(admission, asks("a"))
    with pytest.raises(Overloaded, match=r"4 requests .* among 2 tenants is 4") as refusal:
        admission.take(asks("a"))
    assert refusal.value.limit == 4
    assert [is_accepted(admission, asks("b")) for _ in range(5)] == [True] * 4 + [False]


def test_the_queued_tokens_are_shared_too_but_one_prompt_may_always_wait() -> None:
    config = replace(FOUR, max_waiting=50, max_waiting_tokens=100)
    admission, _ = door(config)
    for tenant in "ab":
        seq = asks(tenant)
        admission.take(seq)
        admission.start(seq)
    assert is_accepted(admission, asks("a", 70))
    with pytest.raises(Overloaded, match="its share among 2 tenants is 50"):
        admission.take(asks("a", 1))
    assert is_accepted(admission, asks("b", 30))


def test_an_answer_begun_elsewhere_is_taken_in_beyond_the_limits_but_not_without_end() -> None:
    admission, _ = door()
    for _ in range(4):
        admission.take(asks("a"))

    def begun() -> Sequence:
        seq = asks("a")
        seq.output_token_ids = [5]
        return seq

    assert [is_accepted(admission, begun()) for _ in range(6)] == [True] * 4 + [False] * 2
    assert not is_accepted(admission, asks("a"))


def test_a_claim_ends_after_ten_seconds() -> None:
    admission, clock = door()
    first = [asks("a") for _ in range(4)]
    for seq in first:
        admission.take(seq)
    assert not is_accepted(admission, asks("b"))
    for seq in first:
        admission.release(seq)
    assert [is_accepted(admission, asks("a")) for _ in range(3)] == [True, True, False]
    clock.advance(CLAIM_S)
    assert [is_accepted(admission, asks("a")) for _ in range(3)] == [True, True, False]


def test_an_idle_place_is_never_refused_because_of_tenants_that_ask_for_nothing_more() -> None:
    admission, _ = door(replace(SMALL, max_num_batched_tokens=40, max_num_seqs=8, max_waiting=0))
    for tenant in "bcd":
        admission.take(asks(tenant))
    assert [is_accepted(admission, asks("a")) for _ in range(6)] == [True] * 5 + [False]


def test_with_more_tenants_than_places_the_one_refused_first_is_next() -> None:
    admission, _ = door(replace(SMALL, max_num_seqs=1, max_waiting=1))
    held = [asks("a"), asks("b")]
    for seq in held:
        admission.take(seq)
    assert not is_accepted(admission, asks("c"))
    assert not is_accepted(admission, asks("d"))
    admission.release(held[0])
    for tenant in "ad":
        with pytest.raises(Overloaded, match="asked before"):
            admission.take(asks(tenant))
    assert is_accepted(admission, asks("c"))


@pytest.mark.parametrize(
    ("end_every_s", "wait_s"), [(0.5, 0.5), (0.001, 0.1), (100.0, 30.0)], ids=str
)
def test_retry_after_follows_the_measured_rate_within_bounds(
    end_every_s: float, wait_s: float
) -> None:
    admission, clock = door()
    assert admission.retry_after_s() == 1.0
    for _ in range(50):
        seq = asks("a")
        admission.take(seq)
        admission.start(seq)
        admission.release(seq)
        clock.advance(end_every_s)
    waiting = [asks("a") for _ in range(4)]
    for seq in waiting:
        admission.take(seq)
    admission.start(waiting[0])
    admission.start(waiting[1])
    with pytest.raises(Overloaded) as refusal:
        admission.take(asks("a"))
    assert refusal.value.retry_after_s == pytest.approx(wait_s, rel=0.1)


def test_an_engine_that_stopped_moving_tells_longer_waits() -> None:
    admission, clock = door()
    for _ in range(4):
        seq = asks("a")
        admission.take(seq)
        admission.start(seq)
        clock.advance(0.5)
        admission.release(seq)
    before = admission.retry_after_s()
    clock.advance(20)
    assert admission.retry_after_s() > 4 * before


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcde"),
        st.integers(1, 40),
        st.sampled_from(["ask", "start", "end", "wait"]),
    ),
    max_size=120,
)


@given(steps=STEPS, places=st.integers(1, 4), waiting=st.integers(0, 5), tokens=st.integers(1, 90))
def test_whatever_happens_the_limits_hold_and_the_ledger_is_empty_at_the_end(
    steps: list[tuple[str, int, str]], places: int, waiting: int, tokens: int
) -> None:
    config = replace(SMALL, max_num_seqs=places, max_waiting=waiting, max_waiting_tokens=tokens)
    admission, clock = door(config)
    queued: list[Sequence] = []
    running: list[Sequence] = []
    for tenant, number, what in steps:
        if what == "ask":
            seq = asks(tenant, number)
            tenants = {s.share for s in queued + running}
            could_start = len(queued) + len(running) < places
            before = Counter(s.share for s in queued + running)[tenant]
            if is_accepted(admission, seq):
                queued.append(seq)
                if not could_start and tenants - {tenant}:
                    share = max(1, config.capacity // len(tenants | {tenant}))
                    assert before < share
                if not could_start:
                    waiting_tokens = sum(len(s.prompt_token_ids) for s in queued)
                    assert waiting_tokens <= tokens
            elif tenants <= {tenant}:
                full = len(queued) + len(running) == config.capacity
                clock.advance(CLAIM_S)  # no one else claims anything
                too_long = not could_start and not is_accepted(admission, seq)
                if not (full or too_long or could_start):
                    queued.append(seq)
        elif what == "start" and queued and len(running) < places:
            running.append(queued.pop(number % len(queued)))
            admission.start(running[-1])
        elif what == "end" and running:
            admission.release(running.pop(number % len(running)))
        elif what == "wait":
            clock.advance(number / 4)
        assert admission.num_held == len(queued) + len(running) <= config.capacity
        assert admission.num_waiting_tokens == sum(len(s.prompt_token_ids) for s in queued)
    for seq in queued + running:
        admission.release(seq)
    assert (admission.num_held, admission.num_waiting_tokens) == (0, 0)


@given(
    greedy=st.integers(1, 6),
    places=st.integers(1, 3),
    waiting=st.integers(0, 3),
    leaver=st.integers(0, 9),
)
def test_a_tenant_that_keeps_asking_is_accepted_whatever_the_others_do(
    greedy: int, places: int, waiting: int, leaver: int
) -> None:
    config = replace(SMALL, max_num_seqs=places, max_waiting=waiting)
    admission, clock = door(config)
    held: list[Sequence] = []
    tenants = [f"greedy {i}" for i in range(greedy)]
    for round_ in range(3 * (config.capacity + greedy)):
        for tenant in tenants:
            while is_accepted(admission, seq := asks(tenant)):
                held.append(seq)
        if is_accepted(admission, asks("modest")):
            return
        clock.advance(1.0)
        if held:
            admission.release(held.pop((round_ * leaver) % len(held)))
    raise AssertionError("starved")


# The queue


def order(queue: FairQueue) -> list[Sequence]:
    served = []
    while (seq := queue.head) is not None:
        queue.remove(seq)
        served.append(seq)
    return served


def test_tenants_take_turns_and_each_is_served_in_order() -> None:
    queue = FairQueue()
    a, b, c = ([asks(tenant) for _ in range(n)] for tenant, n in (("a", 4), ("b", 1), ("c", 2)))
    for seq in (*a, *b, *c):
        queue.push(seq)
    assert order(queue) == [a[0], b[0], c[0], a[1], c[1], a[2], a[3]]


def test_a_backlog_delays_a_newcomers_first_request_by_one() -> None:
    queue = FairQueue()
    backlog = [asks("a") for _ in range(50)]
    for seq in backlog:
        queue.push(seq)
    for seq in backlog[:3]:
        assert queue.head is seq
        queue.remove(seq)
    newcomer = asks("b")
    queue.push(newcomer)
    assert order(queue)[1] is newcomer


def test_a_priority_counts_within_its_tenant_only() -> None:
    queue = FairQueue()
    low, high, other, begun = asks("a"), asks("a", priority=9), asks("b"), asks("a")
    begun.output_token_ids = [5]
    for seq in (other, low, high, begun):
        queue.push(seq)
    assert order(queue) == [other, begun, high, low]


def test_removing_from_the_middle_keeps_the_turns() -> None:
    queue = FairQueue()
    a = [asks("a") for _ in range(3)]
    b = asks("b")
    for seq in (*a, b):
        queue.push(seq)
    queue.remove(a[1])
    assert len(queue) == 3
    assert order(queue) == [a[0], b, a[2]]
    assert len(queue) == 0
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(b)


@given(arrivals=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2)), max_size=40))
def test_between_two_turns_of_a_tenant_every_other_one_that_waits_has_one(
    arrivals: list[tuple[str, int]],
) -> None:
    queue = FairQueue()
    waiting: Counter[str] = Counter()
    since: dict[str, Counter[str]] = {}
    served = 0
    for tenant, takes in [*arrivals, ("a", 100)]:
        queue.push(asks(tenant))
        if not waiting[tenant]:
            since[tenant] = Counter()
        waiting[tenant] += 1
        for _ in range(takes):
            head = queue.head
            if head is None:
                break
            queue.remove(head)
            served += 1
            waiting[head.share] -= 1
            for other, turns in since.items():
                if waiting[other] and other != head.share:
                    turns[head.share] += 1
                    assert turns[head.share] <= 1, f"{head.share} twice before {other}"
            since[head.share] = Counter()
    assert served == len(arrivals) + 1
