"""A higher priority takes a place where none is free, and nobody's answer is another one for it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner
from deployments.engine.scheduler import LEAST_TOKENS_BETWEEN_PREEMPTIONS
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence, SequenceState
from tests.engine import tiny_models
from tests.engine.fakes import (
    SMALL,
    TOKENIZER,
    Collector,
    FakeClock,
    run_to_end,
    scripted_engine,
    sequence,
)

TWO = replace(SMALL, max_num_seqs=2, max_waiting=40)
ANSWER = "the quick brown fox jumps over the lazy dog"


def asked(
    priority: int = 0, share: str = "", prompt: str | list[int] = "hi", **given: Any
) -> Sequence:
    seq = sequence(prompt, **given)
    seq.priority, seq.share = priority, share
    return seq


def busy(*priorities: int, share: str = "") -> tuple[Engine, ScriptedRunner, list[Sequence]]:
    """An engine all of whose places are taken, by streams that have given some tokens."""
    engine, runner = scripted_engine(ANSWER, config=replace(TWO, max_num_seqs=len(priorities)))
    seqs = [asked(priority, share, max_tokens=64) for priority in priorities]
    for seq in seqs:
        engine.add(seq)
    for _ in range(5):
        engine.step()
    return engine, runner, seqs


def states(*seqs: Sequence) -> list[str]:
    return [seq.state.value for seq in seqs]


def test_a_higher_priority_takes_the_place_of_the_lowest_at_once() -> None:
    engine, runner, (low, middle) = busy(-5, 0)
    urgent = asked(5)
    engine.add(urgent)
    engine.step()
    assert states(low, middle, urgent) == ["waiting", "running", "running"]
    assert len(urgent.output_token_ids) == 1
    assert runner.held == {middle, urgent}
    assert engine.stats().preemptions_total == 1


def test_among_equals_the_last_that_came_makes_way() -> None:
    engine, _, seqs = busy(0, 0, 0)
    engine.add(asked(1))
    engine.step()
    assert states(*seqs) == ["running", "running", "waiting"]


def test_an_equal_priority_waits() -> None:
    engine, _, seqs = busy(3, 3)
    engine.add(asked(3))
    engine.step()
    assert states(*seqs) == ["running", "running"]
    assert engine.stats().preemptions_total == 0


def test_nobody_makes_way_while_a_place_is_free() -> None:
    engine, _ = scripted_engine(ANSWER, config=TWO)
    low, urgent = asked(-5), asked(5)
    engine.add(low)
    engine.step()
    engine.add(urgent)
    engine.step()
    assert states(low, urgent) == ["running", "running"]


def test_a_preempted_answer_goes_on_where_it_was() -> None:
    engine, runner, (low,) = busy(0)
    collector = Collector()
    given_before = len(low.output_token_ids)
    urgent = asked(1, max_tokens=3)
    engine.add(urgent)
    for _ in range(200):
        collector.take(engine.step())
        if not engine.has_work:
            break
    assert collector[urgent].text == ANSWER[:3]
    assert collector[low].text == ANSWER[given_before:]
    terminal = collector[low].terminal
    assert terminal.finish_reason == "stop"
    assert terminal.usage.completion_tokens == len(ANSWER) + 1
    assert not runner.held
    stats = engine.stats()
    assert (stats.tokens, stats.running, stats.waiting, engine.admission.num_held) == (0, 0, 0, 0)


def test_a_preempted_request_is_before_its_equals_and_behind_those_above() -> None:
    engine, _, (low,) = busy(0)
    engine.add(asked(9))
    engine.step()
    later, above = asked(0), asked(1)
    engine.add(later)
    engine.add(above)
    order = []
    for _ in range(300):
        for emission in engine.step():
            if emission.terminal is not None:
                order.append(emission.seq)
    assert order[1:] == [above, low, later]


def test_who_has_been_preempted_gives_tokens_before_it_happens_again() -> None:
    engine, _, (low,) = busy(0)
    given: list[int] = []
    for _ in range(400):
        if low.state is SequenceState.FINISHED:
            break
        engine.add(asked(1, max_tokens=1, request_id=f"u{len(given)}-{engine.stats().steps_total}"))
        before = low.num_preemptions
        engine.step()
        if low.num_preemptions > before:
            given.append(len(low.output_token_ids))
    gaps = [b - a for a, b in itertools.pairwise(given)]
    assert given
    assert all(gap >= LEAST_TOKENS_BETWEEN_PREEMPTIONS for gap in gaps)


def test_a_request_preempts_once_at_most() -> None:
    engine, _, (low, other) = busy(0, 0)
    middle, high = asked(5), asked(9)
    engine.add(middle)
    engine.step()
    assert states(low, other, middle) == ["running", "waiting", "running"]
    # Two more above it take both places: it waits, and takes none back.
    for seq in (high, asked(9)):
        engine.add(seq)
        engine.step()
    assert middle.state is SequenceState.WAITING
    engine.step()
    assert engine.stats().preemptions_total == 3


def test_a_tenant_preempts_only_its_own_above_the_usual_priority() -> None:
    engine, _, seqs = busy(0, 0, share="a")
    engine.add(asked(100, "b"))
    engine.step()
    assert states(*seqs) == ["running", "running"]


def test_who_asked_for_less_than_usual_makes_way_for_any_tenant() -> None:
    engine, _, (usual, idle) = busy(0, -100, share="a")
    newcomer = asked(0, "b")
    engine.add(newcomer)
    engine.step()
    assert states(usual, idle, newcomer) == ["running", "waiting", "running"]


def test_a_prompt_that_is_not_computed_yet_makes_way_too() -> None:
    engine, runner, (stream, _) = busy(5, 5)
    engine.abort(_.request_id)
    long, urgent = asked(0, prompt=[7] * 100), asked(1)
    engine.add(long)
    engine.step()
    assert 0 < long.num_computed_tokens < 100
    engine.add(urgent)
    engine.step()
    assert runner.held == {stream, urgent}
    # All of it is to be computed again.
    assert engine.stats().tokens == sum(s.num_tokens_left for s in (stream, long, urgent))
    run_to_end(engine)
    assert long.num_preemptions == 1
    assert engine.stats().tokens == 0


def test_what_the_prompt_leaves_is_used_again() -> None:
    engine, _ = scripted_engine(ANSWER, config=TWO)
    low, other = asked(0, prompt=[7] * 24), asked(3, max_tokens=8)
    engine.add(low)
    engine.add(other)
    for _ in range(5):
        engine.step()
    engine.add(asked(1, max_tokens=1, prompt=[7] * 24))
    engine.step()
    assert low.state is SequenceState.WAITING
    computed = engine.stats().prompt_tokens_total
    run_to_end(engine)
    # Its first two blocks of 8; the third one ends with the prompt, whose answer follows.
    assert engine.stats().prompt_tokens_total - computed <= 8
    assert low.usage().cached_tokens == 0


def test_a_preempted_request_may_be_cancelled_or_run_late_while_it_waits() -> None:
    clock = FakeClock()
    engine, runner = scripted_engine(ANSWER, config=TWO, clock=clock)
    late = asked(deadline_s=clock() + 5)
    gone, urgent = asked(), [asked(1), asked(1)]
    collector = Collector()
    for seq in (late, gone):
        engine.add(seq)
    collector.take(engine.step())
    for seq in urgent:
        engine.add(seq)
    collector.take(engine.step())
    assert states(late, gone) == ["waiting", "waiting"]
    gone.is_abandoned = True
    clock.advance(6)
    collector.take(engine.step())
    assert collector[gone].terminal.finish_reason == "cancelled"
    error = collector[late].terminal.error
    assert error is not None
    assert error.code == "timeout"
    assert runner.held == set(urgent)


def test_a_queued_request_that_is_too_late_costs_no_step() -> None:
    clock = FakeClock()
    engine, runner = scripted_engine(ANSWER, config=replace(TWO, max_num_seqs=1), clock=clock)
    stream, late = asked(), asked(5, share="other", deadline_s=clock() + 1)
    engine.add(stream)
    engine.step()
    engine.add(late)
    clock.advance(2)
    engine.abort(stream.request_id)
    outcomes = {emission.seq: emission.terminal for emission in engine.step()}
    terminal = outcomes[late]
    assert terminal is not None
    assert terminal.error is not None
    assert terminal.error.code == "timeout"
    assert (late.num_computed_tokens, late.first_scheduled_s) == (0, None)
    assert not runner.held
    assert engine.stats().steps_total == 1


def test_a_model_answers_alike_with_and_without_preemption() -> None:
    runner = ModelRunner(tiny_models.build("llama"), TWO)
    runner.warm_up()
    engine = Engine(runner, TOKENIZER, TWO, clock=FakeClock())
    prompt = list(range(20, 60))
    given: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    undisturbed = asked(prompt=prompt, **given)
    expected = run_to_end(engine, undisturbed)[undisturbed].deltas
    seq = asked(prompt=prompt, **given)
    seq.tenant = "another"
    collector = Collector()
    engine.add(seq)
    engine.add(asked(prompt=[9] * 30, **given))
    for _ in range(20):
        collector.take(engine.step())
    for number in range(2):
        engine.add(asked(1, prompt=[number + 3] * 30, max_tokens=4))
    while engine.has_work:
        collector.take(engine.step())
    assert seq.num_preemptions == 1
    assert collector[seq].deltas == expected
    runner.close()


@settings(max_examples=50)
@given(
    moves=st.lists(
        st.tuples(
            st.integers(1, 60),  # tokens of the prompt
            st.integers(1, 40),  # of the answer
            st.integers(-2, 2),  # priority
            st.sampled_from("ab"),  # share
            st.integers(0, 6),  # steps until the next one comes
        ),
        min_size=1,
        max_size=12,
    ),
    places=st.integers(1, 3),
    slowdown=st.sampled_from([0.0, 2.0]),
)
def test_answers_are_those_without_company_and_nothing_is_left(
    moves: list[tuple[int, int, int, str, int]], places: int, slowdown: float
) -> None:
    config = replace(TWO, max_num_seqs=places, prefill_slowdown=slowdown)

    def script(seq: Sequence) -> str:
        return f"{seq.prompt_token_ids[0]}: {ANSWER}"

    engine, runner = scripted_engine(script, config=config)
    alone, _ = scripted_engine(script, config=config)
    collector = Collector()
    seqs = []
    for number, (length, limit, priority, share, steps) in enumerate(moves):
        seq = asked(priority, share, prompt=[number % 3 + 60] * length, max_tokens=limit)
        engine.add(seq)
        seqs.append(seq)
        for _ in range(steps):
            collector.take(engine.step())
            live = [seq for seq in seqs if seq.state is not SequenceState.FINISHED]
            stats = engine.stats()
            assert stats.running + stats.waiting == len(live)
            assert stats.tokens == sum(seq.num_tokens_left for seq in live)
            assert len(runner.held) <= places
    for _ in range(3000):
        if not engine.has_work:
            break
        collector.take(engine.step())
    assert not engine.has_work
    assert not runner.held
    assert engine.admission.num_held == engine.stats().tokens == 0
    assert engine.stats().preemptions_total <= len(seqs)
    for seq in seqs:
        twin = sequence(seq.prompt_token_ids, max_tokens=seq.max_tokens)
        expected = run_to_end(alone, twin)[twin]
        assert collector[seq].text == expected.text == TOKENIZER.decode(collector[seq].token_ids)
        assert collector[seq].terminal.finish_reason == expected.terminal.finish_reason
        usage = collector[seq].terminal.usage
        assert usage.completion_tokens == expected.terminal.usage.completion_tokens
