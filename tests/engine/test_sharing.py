"""Prompts that begin alike and come together: what they share is computed once, and holds up nobody."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner
from deployments.engine.scheduler import OLDEST_FIRST_EVERY, StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence, SequenceState
from protocol.errors import Overloaded
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, Collector, FakeClock, run_to_end, sequence

BLOCK = 8
"""Tokens, of `SMALL`."""
ROOMY = replace(
    SMALL, max_num_seqs=8, max_num_batched_tokens=40, max_waiting=40, prefill_slowdown=0
)
LARGE = EngineConfig(max_num_seqs=16, max_model_len=512, max_num_batched_tokens=2048, device="cpu")


def script(seq: Sequence) -> list[int]:
    start = sum(seq.prompt_token_ids)
    return [(start + i) % 250 for i in range(LARGE.max_model_len)]


class CountingRunner(ScriptedRunner):
    """Counts how often each block of a prompt was computed, by all tokens up to its end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def run(self, plan: StepPlan) -> torch.Tensor:
        for row in plan.rows:
            seq, num_prompt = row.seq, len(row.seq.prompt_token_ids)
            for end in range(BLOCK, num_prompt + 1, BLOCK):
                if row.start < end <= row.end:
                    self.times[seq.tenant, tuple(seq.prompt_token_ids[:end])] += 1
        return super().run(plan)


def scripted(config: EngineConfig = ROOMY) -> tuple[Engine, CountingRunner]:
    runner = CountingRunner(script, TOKENIZER, config)
    return Engine(runner, TOKENIZER, config, clock=FakeClock()), runner


def asked(prompt: list[int], tenant: str = "t", priority: int = 0, **sampling: Any) -> Sequence:
    seq = sequence(prompt, **({"max_tokens": 8, "ignore_eos": True} | sampling))
    seq.tenant = seq.share = tenant
    seq.priority = priority
    return seq


@pytest.mark.parametrize("n", [4, 8])
def test_choices_of_one_prompt_compute_it_once_and_each_its_tail(n: int) -> None:
    engine, _ = scripted(LARGE)
    choices = [asked([i % 200 for i in range(200)], seed=i, temperature=1.0) for i in range(n)]
    run_to_end(engine, *choices)
    assert engine.stats().prompt_tokens_total == 200 + (n - 1) * 8
    assert [seq.num_cached_tokens for seq in choices] == [0, *[192] * (n - 1)]


def test_a_prompt_shorter_than_a_block_is_computed_by_each_at_once() -> None:
    engine, _ = scripted()
    seqs = [asked([1] * BLOCK) for _ in range(3)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    assert all(seq.output_token_ids for seq in seqs)


def test_users_of_one_tenant_share_and_tenants_never_wait_for_each_other() -> None:
    engine, _ = scripted(replace(ROOMY, max_num_batched_tokens=72))
    first, same, other = asked([5] * 17), asked([5] * 17), asked([5] * 17, "another")
    for seq in (first, same, other):
        engine.add(seq)
    engine.step()
    assert [bool(seq.output_token_ids) for seq in (first, same, other)] == [True, False, True]
    engine.step()
    assert same.output_token_ids
    assert (same.num_cached_tokens, other.num_cached_tokens) == (16, 0)


def test_what_waits_begins_with_each_block_that_is_there_and_no_further() -> None:
    engine, runner = scripted(replace(ROOMY, max_num_batched_tokens=24))
    long, short = asked([*range(100)]), asked([*range(18), 7, 7, 7])
    engine.add(long)
    engine.step()
    run_to_end(engine, short)
    assert short.num_cached_tokens == 16
    assert runner.times["t", tuple(range(8))] == 1


def test_a_short_one_lends_its_turn_to_the_long_one_that_it_waits_for() -> None:
    engine, _ = scripted(replace(ROOMY, max_num_batched_tokens=24))
    long = asked([*range(100)])
    engine.add(long)
    engine.step()
    assert long.num_computed_tokens == 16
    # Of these the one that waits comes first, so the one it waits for does.
    short, middle = asked([*range(25)]), asked([9] * 70)
    engine.add(short)
    engine.add(middle)
    engine.step()
    assert long.num_computed_tokens == 24
    assert middle.num_computed_tokens == 16
    engine.step()
    assert short.output_token_ids
    assert short.num_cached_tokens == 24


@pytest.mark.parametrize("is_preempted", [False, True], ids=["dropped", "preempted"])
def test_who_waits_for_one_that_goes_away_computes_for_itself(is_preempted: bool) -> None:
    config = replace(ROOMY, max_num_seqs=2, max_num_batched_tokens=24)
    engine, _ = scripted(config)
    first, second = asked([*range(60)], priority=-1), asked([*range(60)])
    collector = Collector()
    engine.add(first)
    collector.take(engine.step())
    engine.add(second)
    collector.take(engine.step())
    assert (first.num_computed_tokens, second.state) == (32, SequenceState.WAITING)
    if is_preempted:
        urgent = asked([1] * 5, priority=1)
        engine.add(urgent)
    else:
        first.is_abandoned = True
    collector.take(engine.step())
    assert second.num_computed_tokens > 0
    run = run_to_end(engine)
    assert run[second].terminal.finish_reason == "length"
    assert second.output_token_ids == script(second)[:8]
    assert first.num_preemptions == int(is_preempted)


def test_what_differs_is_computed_side_by_side() -> None:
    engine, _ = scripted(replace(ROOMY, max_num_batched_tokens=72))
    seqs = [asked([3] * 8 + [i] * 40) for i in range(2)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    engine.step()
    assert [seq.num_computed_tokens for seq in seqs] == [49, 48]
    engine.step()
    assert all(seq.output_token_ids for seq in seqs)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_answers_are_the_same_alone_and_beside_those_they_shared_with(family: str) -> None:
    config = replace(ROOMY, max_num_batched_tokens=24)
    runner = ModelRunner(tiny_models.build(family), config)
    runner.warm_up()
    engine = Engine(runner, TOKENIZER, config, clock=FakeClock())
    prompts = [[*range(50)], [*range(50)], [*range(33), 9, 9], [*range(20)]]
    together = [
        asked(prompt, seed=i, temperature=0.8, logprobs=1) for i, prompt in enumerate(prompts)
    ]
    collector = run_to_end(engine, *together)
    assert engine.stats().prefix_hit_tokens_total == 48 + 32 + 16
    for i, prompt in enumerate(prompts):
        alone = asked(prompt, f"nobody {i}", seed=i, temperature=0.8, logprobs=1)
        assert run_to_end(engine, alone)[alone].deltas == collector[together[i]].deltas
    runner.close()


# Whatever comes and goes

BASES = ([1, 2, 3] * 40, [1] * 30 + [2] * 60, [4] * 90)
ASKED = st.tuples(
    st.sampled_from(BASES), st.integers(1, 80), st.integers(0, 3), st.sampled_from("ab")
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), ASKED), min_size=1, max_size=12), st.integers(16, 60))
def test_no_block_of_equal_beginnings_is_computed_twice(
    cases: list[tuple[int, Any]], budget: int
) -> None:
    config = replace(ROOMY, max_num_batched_tokens=8 + budget)
    engine, runner = scripted(config)
    seqs = []
    for num_steps, (base, length, tail, tenant) in cases:
        for _ in range(num_steps):
            engine.step()
        seqs.append(asked([*base[:length], *[200] * tail], tenant))
        engine.add(seqs[-1])
    run_to_end(engine)
    # The block of its last token each computes itself, because it wants that one's logits.
    lasts = Counter(
        (seq.tenant, tuple(seq.prompt_token_ids))
        for seq in seqs
        if len(seq.prompt_token_ids) % BLOCK == 0
    )
    for text, times in runner.times.items():
        assert times <= 1 + lasts[text]
    for seq in seqs:
        assert seq.output_token_ids == script(seq)[:8]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whoever_is_waited_for_may_go_away_at_any_time(data: st.DataObject) -> None:
    config = replace(
        ROOMY,
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=24,
        num_kv_blocks=data.draw(st.sampled_from([16, 24, 200])),
    )
    engine, runner = scripted(config)
    collector, seqs = Collector(), []
    for _ in range(data.draw(st.integers(5, 40))):
        act = data.draw(st.sampled_from(["ask", "ask", "step", "step", "drop"]))
        if act == "ask":
            base, length, tail, tenant = data.draw(ASKED)
            prompt = [*base[:length], *[200] * tail]
            seq = asked(prompt, tenant, data.draw(st.integers(-1, 1)))
            seq.prompt_logprobs = data.draw(st.sampled_from([None, None, 1]))
            try:
                engine.add(seq)
            except Overloaded:
                continue
            seqs.append(seq)
        elif act == "drop" and seqs:
            data.draw(st.sampled_from(seqs)).is_abandoned = True
        else:
            had_work = any(not (seq.is_abandoned or is_over(seq)) for seq in seqs)
            steps = engine.stats().steps_total
            collector.take(engine.step())
            assert engine.stats().steps_total == steps + had_work, "a step moves somebody"
    most_steps = sum(2 * len(seq.prompt_token_ids) + 8 for seq in seqs)
    for _ in range(most_steps):
        if not engine.has_work:
            break
        collector.take(engine.step())
    assert not engine.has_work
    assert runner.pool.num_used == 0
    left = {**runner.pool._computing, **runner.pool._keys_of}
    assert not left, "nothing is known of who is gone"
    for seq in seqs:
        assert len(collector[seq].terminals) == 1
        if not seq.is_abandoned:
            assert seq.output_token_ids == script(seq)[:8]
            told = [len(delta.prompt) for delta in collector[seq].deltas if delta.prompt]
            assert told == ([] if seq.prompt_logprobs is None else [len(seq.prompt_token_ids)])


def first_token_at(cases: list[Any], stranger: Sequence, *, shares: bool) -> int:
    """The step in which one that has nothing in common with the others has its first token."""
    engine, runner = scripted(replace(ROOMY, max_num_batched_tokens=24))
    if not shares:
        runner.pool.awaited = lambda seq: None  # type: ignore[method-assign]
        engine._scheduler = engine._new_scheduler()
    for case in cases:
        if case is None:
            engine.add(stranger)
        else:
            base, length, tail, tenant = case
            engine.add(asked([*base[:length], *[200] * tail], tenant))
    while not stranger.output_token_ids:
        engine.step()
    return engine.stats().steps_total


def test_nobody_else_waits_longer_because_some_wait_for_each_other() -> None:
    # In a single case it may: what is computed when changes whose turn is the fourth step's.
    rng = random.Random(5)
    delays = []
    for _ in range(80):
        cases: list[Any] = [
            (rng.choice(BASES), rng.randint(1, 80), rng.randint(0, 3), rng.choice("ab"))
            for _ in range(rng.randint(1, 7))
        ]
        cases.insert(rng.randint(0, len(cases)), None)
        length = rng.randint(1, 60)
        with_it, without = (
            first_token_at(cases, asked([9] * length, "c"), shares=shares)
            for shares in (True, False)
        )
        delays.append(with_it - without)
    assert sum(delays) <= 0
    assert max(delays) <= OLDEST_FIRST_EVERY


def is_over(seq: Sequence) -> bool:
    return seq.state is SequenceState.FINISHED
