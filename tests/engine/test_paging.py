"""Sequences in less memory than they could need: somebody waits, and every answer is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner
from deployments.engine.scheduler import StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence, SequenceState
from protocol.errors import Overloaded
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, Collector, FakeClock, run_to_end, sequence

BLOCK = 8
"""Tokens, of `SMALL`."""
ROOMY = replace(SMALL, max_waiting=40, prefill_slowdown=0)


def blocks(number: int, **fields: Any) -> Any:
    return replace(ROOMY, num_kv_blocks=number, **fields)


class NotingRunner(ScriptedRunner):
    """Notes in each location of its memory what was computed there, and reads it as attention does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory: dict[int, tuple[str, tuple[int, ...]]] = {}

    def run(self, plan: StepPlan) -> torch.Tensor:
        for row in plan.rows:
            seq, held = row.seq, self.pool.blocks(row.seq)
            tokens = (*seq.token_ids(0, row.start), *row.token_ids)
            for position in range(row.end):
                location = held[position // BLOCK] * BLOCK + position % BLOCK
                if position >= row.start:
                    self._memory[location] = (seq.tenant, tokens[: position + 1])
                assert self._memory[location] == (seq.tenant, tokens[: position + 1])
        return super().run(plan)


def script(seq: Sequence) -> list[int]:
    """Repeats itself, so that drafts are right now and then."""
    start = sum(seq.prompt_token_ids)
    return [(start + i % 5) % 250 for i in range(SMALL.max_model_len)]


def scripted(config: Any) -> tuple[Engine, NotingRunner]:
    runner = NotingRunner(script, TOKENIZER, config)
    return Engine(runner, TOKENIZER, config, clock=FakeClock()), runner


def asked(prompt: list[int], priority: int = 0, tenant: str = "t", max_tokens: int = 8) -> Sequence:
    seq = sequence(prompt, max_tokens=max_tokens, ignore_eos=True)
    seq.priority, seq.tenant, seq.share = priority, tenant, tenant
    return seq


def drain(engine: Engine, collector: Collector, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        if not engine.has_work:
            return
        collector.take(engine.step())
    raise AssertionError("still at work")


def states(*seqs: Sequence) -> list[str]:
    return [seq.state.value for seq in seqs]


def step_until(engine: Engine, condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        engine.step()
    raise AssertionError("it never came to that")


def check(runner: ScriptedRunner, live: list[Sequence]) -> None:
    """No block is lost, and none is given to two that might write to it."""
    pool = runner.pool
    placed = [seq for seq in live if seq.state is SequenceState.RUNNING]
    assert pool.num_seqs == len(placed)
    used = {block for seq in placed for block in pool.blocks(seq)}
    assert pool.num_used == len(used)
    assert pool.num_free + len(used) == pool.num_blocks
    for seq in placed:
        for block in pool.blocks(seq)[seq.num_computed_tokens // BLOCK :]:
            assert not any(block in pool.blocks(other) for other in placed if other is not seq)


# Who makes way


def test_more_sequences_than_the_longest_would_leave_room_for_run_together() -> None:
    engine, _ = scripted(blocks(16))
    seqs = [asked([i] * 20) for i in range(4)]
    for seq in seqs:
        engine.add(seq)
    step_until(engine, lambda: engine.stats().running == 4)
    collector = Collector()
    drain(engine, collector)
    assert engine.stats().preemptions_total == 0


def test_where_memory_is_short_the_last_that_came_makes_way_and_goes_on_later() -> None:
    engine, _ = scripted(blocks(8))
    first, last = asked([1] * 20, max_tokens=40), asked([2] * 20, max_tokens=40)
    collector = Collector()
    for seq in (first, last):
        engine.add(seq)
    while last.num_preemptions == 0:
        collector.take(engine.step())
    assert states(first, last) == ["running", "waiting"]
    assert 0 < len(last.output_token_ids) < 40
    drain(engine, collector)
    for seq in (first, last):
        assert collector[seq].token_ids == script(seq)[:40]
        assert collector[seq].terminal.usage.completion_tokens == 40
    assert first.num_preemptions == 0
    assert engine.stats().preemptions_total == 1


def test_a_lower_priority_makes_way_before_the_last_that_came() -> None:
    engine, _ = scripted(blocks(8))
    low, usual = asked([1] * 20, -1, max_tokens=40), asked([2] * 20, max_tokens=40)
    for seq in (low, usual):
        engine.add(seq)
    step_until(engine, lambda: bool(low.num_preemptions or usual.num_preemptions))
    assert states(low, usual) == ["waiting", "running"]


def test_another_tenants_higher_priority_keeps_no_memory() -> None:
    engine, _ = scripted(blocks(8))
    first = asked([1] * 20, 0, "a", max_tokens=40)
    last = asked([2] * 20, 100, "b", max_tokens=40)
    for seq in (first, last):
        engine.add(seq)
    step_until(engine, lambda: bool(first.num_preemptions or last.num_preemptions))
    assert states(first, last) == ["running", "waiting"]


def test_a_higher_priority_takes_memory_though_a_place_is_free() -> None:
    engine, _ = scripted(blocks(8))
    low = asked([1] * 50, max_tokens=10)
    engine.add(low)
    step_until(engine, lambda: bool(low.output_token_ids))
    equal, urgent = asked([2] * 20), asked([3] * 20, 1)
    engine.add(equal)
    engine.step()
    assert states(low, equal) == ["running", "waiting"]
    engine.add(urgent)
    engine.step()
    assert states(low, equal, urgent) == ["waiting", "waiting", "running"]
    collector = Collector()
    drain(engine, collector)
    assert low.output_token_ids == script(low)[:10]


def test_a_newcomer_waits_until_its_whole_prompt_finds_memory() -> None:
    engine, runner = scripted(blocks(8))
    stream = asked([1] * 40, max_tokens=12)
    engine.add(stream)
    step_until(engine, lambda: bool(stream.output_token_ids))
    large = asked([2] * 30)
    engine.add(large)
    while stream.state is SequenceState.RUNNING:
        assert engine.stats().waiting == 1
        assert runner.held == {stream}
        engine.step()
    drain(engine, Collector())
    assert (stream.num_preemptions, large.num_preemptions) == (0, 0)


def test_small_ones_do_not_overtake_a_large_one_for_ever() -> None:
    engine, _ = scripted(blocks(8))
    engine.add(asked([1] * 30, max_tokens=4))
    engine.step()
    large = asked([2] * 50, max_tokens=4)
    engine.add(large)
    for number in range(60):
        if large.state is SequenceState.FINISHED:
            break
        if number % 3 == 0:
            engine.add(asked([number] * 10, max_tokens=4))
        engine.step()
    assert large.state is SequenceState.FINISHED


def test_drafts_take_memory_from_nobody() -> None:
    engine, _ = scripted(blocks(8, speculative_tokens=7))
    # Both end within their blocks; drafts would reach beyond them.
    seqs = [asked([number] * 8, max_tokens=24) for number in (1, 2)]
    collector = run_to_end(engine, *seqs)
    assert engine.stats().accepted_tokens_total > 0
    assert engine.stats().preemptions_total == 0
    for seq in seqs:
        assert collector[seq].token_ids == script(seq)[:24]


def test_warm_ups_make_way_before_any_request_does() -> None:
    engine, runner = scripted(blocks(8, max_num_seqs=8, max_num_batched_tokens=24))
    ahead = asked([5] * 32)
    ahead.is_warm_up = True
    engine.add(ahead)
    engine.step()
    assert runner.pool.num_used > 0
    stream = asked([1] * 56, max_tokens=8)
    run_to_end(engine, stream)
    assert stream.num_preemptions == 0
    assert ahead.state is SequenceState.FINISHED
    assert runner.pool.num_used == 0


def test_a_sequence_that_fills_the_memory_alone_comes_to_its_end() -> None:
    engine, _ = scripted(blocks(4))
    assert engine.config.max_model_len == 32
    seq = asked([1] * 20, max_tokens=12)
    run_to_end(engine, seq)
    assert len(seq.output_token_ids) == 12


def test_those_that_cannot_run_together_run_one_after_the_other() -> None:
    engine, _ = scripted(blocks(4))
    seqs = [asked([number] * 9, number % 2, max_tokens=23) for number in range(4)]
    collector = Collector()
    for seq in seqs:
        engine.add(seq)
    most_steps = sum(seq.max_tokens + 40 for seq in seqs)
    drain(engine, collector, most_steps)
    for seq in seqs:
        assert collector[seq].token_ids == script(seq)[:23]


def test_gauges_tell_how_the_memory_is_used() -> None:
    engine, _ = scripted(blocks(16))
    seq = asked([1] * 20)
    engine.add(seq)
    step_until(engine, lambda: bool(seq.output_token_ids))
    stats = engine.stats()
    assert (stats.kv_blocks_total, stats.kv_blocks_used, stats.kv_blocks_cached) == (16, 3, 0)
    run_to_end(engine)
    stats = engine.stats()
    assert (stats.kv_blocks_total, stats.kv_blocks_used, stats.kv_blocks_cached) == (16, 0, 3)


def test_the_next_turn_of_a_conversation_computes_no_answer_again() -> None:
    engine, _ = scripted(blocks(64))
    history = list(range(10))
    for _ in range(3):
        seq = asked(history, max_tokens=17)
        run_to_end(engine, seq)
        # But for the last token, which was never computed, and what fills no block.
        history = history + seq.output_token_ids
        following = asked([*history, 7, 7])
        run_to_end(engine, following)
        assert following.num_cached_tokens == (len(history) - 1) // BLOCK * BLOCK
        assert following.usage().cached_tokens == following.num_cached_tokens


# Whatever comes and goes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_comes_and_goes_no_block_is_lost_and_answers_are_the_same(
    data: st.DataObject,
) -> None:
    config = blocks(
        data.draw(st.integers(6, 24)),
        speculative_tokens=data.draw(st.sampled_from([0, 5])),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=24,
    )
    engine, runner = scripted(config)
    longest = engine.config.max_model_len
    base = [[1, 2, 3] * 40, [1] * 60 + [2] * 60]
    collector, seqs = Collector(), []
    for _ in range(data.draw(st.integers(5, 40))):
        act = data.draw(st.sampled_from(["ask", "ask", "warm", "drop", "step", "step", "step"]))
        if act in ("ask", "warm"):
            length = data.draw(st.integers(1, longest - 1))
            seq = asked(
                data.draw(st.sampled_from(base))[:length],
                data.draw(st.integers(-1, 1)),
                data.draw(st.sampled_from("ab")),
                data.draw(st.integers(1, longest - length)),
            )
            if act == "warm":
                seq.is_warm_up = True
                del seq.prompt_token_ids[max(1, length // BLOCK) * BLOCK :]
            try:
                engine.add(seq)
            except Overloaded:
                continue
            seqs.append(seq)
        elif act == "drop" and seqs:
            data.draw(st.sampled_from(seqs)).is_abandoned = True
        else:
            collector.take(engine.step())
        check(runner, seqs)
    for _ in range(5000):
        if not engine.has_work:
            break
        collector.take(engine.step())
        check(runner, seqs)
    assert not engine.has_work
    assert (runner.pool.num_used, runner.pool.num_free) == (0, config.num_kv_blocks)
    assert not runner.held
    stats = engine.stats()
    assert (stats.tokens, stats.waiting_tokens, engine.admission.num_held) == (0, 0, 0)
    assert stats.preemptions_total <= stats.generated_tokens_total + len(seqs)
    for seq in seqs:
        terminal = collector[seq].terminal
        assert terminal.usage.cached_tokens <= terminal.usage.prompt_tokens
        expected = script(seq)[: seq.max_tokens]
        if not seq.is_warm_up and not seq.is_abandoned:
            assert collector[seq].token_ids == expected
        elif not seq.is_warm_up:
            assert collector[seq].token_ids == expected[: len(collector[seq].token_ids)]


@pytest.mark.parametrize("is_decode_batched", [False, True], ids=["by row", "batched"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_answers_alike_in_memory_that_is_short_and_full_of_prefixes(
    family: str, is_decode_batched: bool
) -> None:
    rng = random.Random(family)
    base = [rng.randrange(200) for _ in range(60)]
    cases = [
        (base[: rng.randrange(60)] + [rng.randrange(200) for _ in range(rng.randint(1, 20))],
         rng.randint(1, 30))
        for _ in range(14)
    ]  # fmt: skip
    roomy = ModelRunner(tiny_models.build(family), ROOMY)
    roomy.warm_up()
    alone = Engine(roomy, TOKENIZER, ROOMY, clock=FakeClock())
    expected = []
    for number, (prompt, max_tokens) in enumerate(cases):
        seq = sequence(prompt, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        seq.tenant = f"nobody {number}"
        expected.append(run_to_end(alone, seq)[seq])
    roomy.close()

    config = blocks(16)
    runner = ModelRunner(tiny_models.build(family), config)
    runner.warm_up()
    runner.attention.is_decode_batched = is_decode_batched
    engine = Engine(runner, TOKENIZER, config, clock=FakeClock())
    collector, seqs = Collector(), []
    for prompt, max_tokens in cases:
        seq = sequence(prompt, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        seqs.append(seq)
        engine.add(seq)
        for _ in range(rng.randint(0, 8)):
            collector.take(engine.step())
    drain(engine, collector)
    assert engine.stats().preemptions_total > 0
    assert engine.stats().prefix_hit_tokens_total > 0
    for seq, answer in zip(seqs, expected, strict=True):
        if is_decode_batched:
            assert collector[seq].token_ids == answer.token_ids
        else:
            assert collector[seq].deltas == answer.deltas
    assert runner.pool.num_used == 0
    runner.close()
