"""Who is computed in a step, and how much of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.config import EngineConfig
from deployments.engine.scheduler import Scheduler, StepPlan
from deployments.engine.sequence import Sequence, SequenceState
from tests.engine.fakes import SMALL, sequence


def advance(plan: StepPlan, scheduler: Scheduler) -> None:
    """What an engine does after a step: count progress, append a token where one was sampled."""
    sampled = plan.sampled_rows
    for row in plan.rows:
        row.seq.num_computed_tokens = row.end
    for row in sampled:
        row.seq.output_token_ids.append(1)
        if len(row.seq.output_token_ids) == row.seq.max_tokens:
            scheduler.remove(row.seq)


def tokens(length: int, max_tokens: int = 4) -> Sequence:
    return sequence([7] * length, max_tokens=max_tokens)


def spans(plan: StepPlan) -> list[tuple[Sequence, int, int]]:
    return [(row.seq, row.start, row.end) for row in plan.rows]


def test_a_short_prompt_is_computed_whole_and_sampled() -> None:
    scheduler = Scheduler(SMALL)
    seq = tokens(5)
    scheduler.add(seq)
    plan = scheduler.schedule()
    assert spans(plan) == [(seq, 0, 5)]
    assert plan.sampled_rows == plan.rows
    assert seq.state is SequenceState.RUNNING


def test_a_long_prompt_is_cut_on_the_chunk_grid_and_sampled_at_its_end_only() -> None:
    scheduler = Scheduler(SMALL)
    seq = tokens(40)
    scheduler.add(seq)
    ends = []
    while seq.num_computed_tokens < 40:
        plan = scheduler.schedule()
        ends.append((plan.rows[0].end, bool(plan.sampled_rows)))
        advance(plan, scheduler)
    assert ends == [(16, False), (32, False), (40, True)]


def test_decodes_go_first_and_prompts_fill_the_rest() -> None:
    scheduler = Scheduler(SMALL)
    running, newcomer = tokens(3), tokens(30)
    scheduler.add(running)
    advance(scheduler.schedule(), scheduler)
    scheduler.add(newcomer)
    assert spans(scheduler.schedule()) == [(running, 3, 4), (newcomer, 0, 16)]


def test_a_decode_that_joined_late_still_goes_before_an_unfinished_prompt() -> None:
    scheduler = Scheduler(replace(SMALL, max_num_batched_tokens=40))
    long, short = tokens(60), tokens(4)
    scheduler.add(long)
    scheduler.add(short)
    advance(scheduler.schedule(), scheduler)
    assert [row.seq for row in scheduler.schedule().rows] == [short, long]


def test_newcomers_wait_while_all_places_are_taken() -> None:
    scheduler = Scheduler(SMALL)
    first, late = [tokens(2) for _ in range(4)], tokens(2)
    for seq in (*first, late):
        scheduler.add(seq)
    assert [row.seq for row in scheduler.schedule().rows] == first
    scheduler.remove(first[2])
    assert scheduler.schedule().rows[-1].seq is late


def test_the_prompt_with_the_least_left_goes_first_and_holds_up_none_behind_it() -> None:
    scheduler = Scheduler(SMALL)
    long, middle, short = tokens(40), tokens(16), tokens(2)
    for seq in (long, middle, short):
        scheduler.add(seq)
    assert spans(scheduler.schedule()) == [(short, 0, 2), (middle, 0, 16)]


def test_a_prompt_that_others_overtake_begins_every_fourth_step() -> None:
    scheduler = Scheduler(SMALL)
    long = tokens(96)
    scheduler.add(long)
    steps = []
    for _ in range(12):
        scheduler.add(tokens(16, max_tokens=1))
        plan = scheduler.schedule()
        steps.append(plan.rows[0].seq is long)
        advance(plan, scheduler)
    assert steps == [False, False, False, True] * 3


def test_whoever_has_no_memory_yet_waits() -> None:
    placed: list[Sequence] = []

    def place(seq: Sequence) -> int:
        placed.append(seq)
        return 0

    scheduler = Scheduler(SMALL, place)
    seqs = [tokens(16), tokens(16)]
    for seq in seqs:
        scheduler.add(seq)
    scheduler.schedule()
    assert placed == seqs[:1]
    assert [seq.state for seq in seqs] == [SequenceState.RUNNING, SequenceState.WAITING]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    for seq in seqs:
        scheduler.remove(seq)
    assert not scheduler.has_work
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_removed_sequence_is_in_no_later_plan() -> None:
    scheduler = Scheduler(SMALL)
    running, queued = tokens(2), tokens(2)
    scheduler.add(running)
    advance(scheduler.schedule(), scheduler)
    scheduler.add(queued)
    scheduler.remove(running)
    scheduler.remove(queued)
    assert scheduler.schedule().rows == ()
    assert not scheduler.has_work


@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 6)), min_size=1, max_size=12),
    chunk=st.integers(1, 24),
    spare=st.integers(0, 20),
    places=st.integers(1, 5),
)
def test_every_sequence_ends_within_budget_and_decodes_in_every_step(
    lengths: list[tuple[int, int]], chunk: int, spare: int, places: int
) -> None:
    config = EngineConfig(
        max_num_seqs=places,
        prefill_chunk_tokens=chunk,
        max_num_batched_tokens=places + chunk + spare,
    )
    scheduler = Scheduler(config)
    seqs = [tokens(length, max_tokens) for length, max_tokens in lengths]
    for seq in seqs:
        scheduler.add(seq)
    # A step with prompts computes a token of one at least, and decodes are answered in it.
    most_steps = sum(length + max_tokens for length, max_tokens in lengths)
    for _ in range(most_steps):
        if not scheduler.has_work:
            break
        before = [seq for seq in scheduler.running if seq.output_token_ids]
        plan = scheduler.schedule()
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert len(scheduler.running) <= places
        planned = [row.seq for row in plan.rows]
        assert len(set(planned)) == len(planned)
        assert set(before) <= set(planned), "whoever decodes gets a token in every step"
        for row in plan.rows:
            assert row.start == row.seq.num_computed_tokens < row.end
            assert row.is_sampled or row.end % chunk == 0
        advance(plan, scheduler)
    assert not scheduler.has_work
    assert all(len(seq.output_token_ids) == seq.max_tokens for seq in seqs)


def test_a_budget_too_small_for_a_full_batch_and_one_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 19, the least is .* = 20"):
        replace(SMALL, max_num_batched_tokens=19)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_model_len", 1),
        ("max_waiting", -1),
        ("num_threads", 0),
        ("kv_cache_gib", 0.0),
        ("stall_after_s", float("nan")),
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})  # type: ignore[arg-type]
