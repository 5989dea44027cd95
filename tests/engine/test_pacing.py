"""How long a running stream waits for its next token while prompts are computed beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.pacing import PrefillPace
from deployments.engine.scheduler import StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence
from tests.engine.fakes import TOKENIZER, Collector, FakeClock, run_to_end, sequence

ROOMY = EngineConfig(
    max_model_len=8192,
    max_num_seqs=8,
    max_num_batched_tokens=384,
    prefill_chunk_tokens=256,
    prefix_block_tokens=32,
    speculative_tokens=0,
    num_threads=1,
    device="cpu",
    dtype="float32",
)

StepTime = Callable[[StepPlan], float]


def slow_cpu(plan: StepPlan) -> float:
    """Seconds: 50 ms and 5 for each row that decodes; a prompt's token costs more behind others."""
    return 0.05 + sum(
        0.005 if row.end - row.start == 1 else (row.end - row.start) * (0.0003 + row.end * 5e-8)
        for row in plan.rows
    )


class TimedRunner(ScriptedRunner):
    """A scripted runner whose steps take a known time of the clock."""

    def __init__(self, clock: FakeClock, step_time: StepTime, config: EngineConfig) -> None:
        answer = TOKENIZER.encode_prompt("abcdefgh" * 200)
        super().__init__(lambda seq: answer, TOKENIZER, config)
        self._clock = clock
        self._step_time = step_time
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> Tensor:
        self._clock.advance(self._step_time(plan))
        self.plans.append(plan)
        return super().run(plan)


class Bench:
    """An engine with running streams, and when each of them got its tokens."""

    def __init__(self, config: EngineConfig = ROOMY, step_time: StepTime = slow_cpu) -> None:
        self.clock = FakeClock()
        self.runner = TimedRunner(self.clock, step_time, config)
        self.engine = Engine(self.runner, TOKENIZER, config, clock=self.clock)
        self.arrived_s: dict[Sequence, list[float]] = {}

    def add(self, length: int, max_tokens: int = 1500) -> Sequence:
        # Prompts that share nothing, so that all of them is computed.
        seq = sequence([len(self.arrived_s) + 1] * length, max_tokens=max_tokens)
        self.arrived_s[seq] = []
        self.engine.add(seq)
        return seq

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for emission in self.engine.step():
                if emission.deltas:
                    self.arrived_s[emission.seq].append(self.clock())

    def p99_s(self, seq: Sequence, since_s: float) -> float:
        times = [at_s for at_s in self.arrived_s[seq] if at_s >= since_s]
        gaps = sorted(b - a for a, b in pairwise(times))
        return gaps[int(0.99 * len(gaps))]


def with_streams(count: int, **given: float) -> tuple[Bench, list[Sequence]]:
    bench = Bench(replace(ROOMY, **given))  # type: ignore[arg-type]
    streams = [bench.add(20) for _ in range(count)]
    bench.step(60)
    return bench, streams


def compute(bench: Bench, seq: Sequence) -> None:
    while seq.first_token_s is None:
        bench.step()


@pytest.mark.parametrize("num_streams", [1, 4, 7])
@pytest.mark.parametrize("length", [4000, 8000])
def test_a_long_prompt_at_most_doubles_the_time_between_tokens(
    num_streams: int, length: int
) -> None:
    bench, streams = with_streams(num_streams)
    before_s = bench.p99_s(streams[0], bench.clock() - 2)
    since_s = bench.clock()
    compute(bench, bench.add(length))
    for stream in streams:
        assert bench.p99_s(stream, since_s) <= 2 * before_s


def test_without_the_limit_a_long_prompt_takes_the_whole_budget() -> None:
    bench, streams = with_streams(1, prefill_slowdown=0)
    before_s = bench.p99_s(streams[0], bench.clock() - 2)
    since_s = bench.clock()
    compute(bench, bench.add(4000))
    assert bench.p99_s(streams[0], since_s) > 2 * before_s


def test_a_prompt_uses_most_of_the_time_that_it_is_given() -> None:
    bench, _ = with_streams(4)
    compute(bench, bench.add(4000))
    durations = [slow_cpu(plan) for plan in bench.runner.plans[-20:-1]]
    assert min(durations) > 1.5 * slow_cpu(bench.runner.plans[59])


def test_a_prompt_alone_has_the_whole_budget() -> None:
    bench = Bench()
    bench.add(4000)
    bench.step()
    assert bench.runner.plans[0].num_tokens == 256


def test_a_short_prompt_has_its_first_token_before_a_long_one_is_finished() -> None:
    bench, _ = with_streams(4)
    long = bench.add(4000)
    bench.step(10)
    since = len(bench.runner.plans)
    short = bench.add(60)
    compute(bench, short)
    assert long.num_computed_tokens < 2000
    assert len(bench.runner.plans) - since <= 3


def test_short_prompts_without_end_do_not_hold_up_a_long_one_for_ever() -> None:
    bench, _ = with_streams(2)
    long = bench.add(2000, max_tokens=4)
    steps = 0
    while long.first_token_s is None:
        bench.add(150, max_tokens=1)
        bench.step()
        steps += 1
        assert steps < 400
    # A fourth of the steps is its own, of at least a block.
    assert steps <= 4 * (2000 // 32 + 1)


def test_a_step_holds_a_block_however_slow_prompts_are() -> None:
    bench = Bench(step_time=lambda plan: 0.01 * plan.num_tokens)
    bench.add(20)
    bench.step(30)
    compute(bench, bench.add(200))
    assert {plan.num_tokens for plan in bench.runner.plans[30:36]} == {33}


def test_prompts_that_cost_no_time_soon_have_the_whole_budget() -> None:
    bench = Bench(step_time=lambda plan: 0.1)
    bench.add(20)
    bench.step(30)
    compute(bench, bench.add(4000))
    assert len(bench.runner.plans) - 30 <= 5 + 4000 // 256


def test_a_token_that_seems_to_cost_nothing_divides_nothing_by_zero() -> None:
    pace = PrefillPace(1.0, 8)
    pace.observe(1, 0, 0.1)
    pace.observe(1, 8, 0.05)
    assert pace.limit(1) == 16


def test_nothing_measured_means_a_block() -> None:
    pace = PrefillPace(2.0, 32)
    assert pace.limit(4) == 32
    pace.observe(4, 100, 1.0)
    assert pace.limit(4) == 32


def test_one_slow_step_changes_nothing() -> None:
    pace = PrefillPace(2.0, 32)
    for _ in range(20):
        pace.observe(4, 0, 0.1)
        pace.observe(4, 64, 0.164)
    before = pace.limit(4)
    pace.observe(4, 0, 9.0)
    pace.observe(4, 64, 9.0)
    assert before == 80
    assert pace.limit(4) == before


def test_the_time_of_rows_never_measured_lies_between_the_nearest() -> None:
    pace = PrefillPace(2.0, 1)
    for _ in range(8):
        pace.observe(2, 0, 0.1)
        pace.observe(6, 0, 0.3)
        pace.observe(2, 1000, 1.1)
    limits = [pace.limit(rows) for rows in (1, 2, 4, 6, 9)]
    assert limits == [80, 80, 160, 240, 240]


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan"), float("inf")])
def test_a_slowdown_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="prefill_slowdown"):
        replace(ROOMY, prefill_slowdown=value)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=7),
    slowdown=st.sampled_from([0.0, 1.0, 2.0]),
    token_ms=st.integers(0, 20),
)
def test_answers_are_those_of_the_plain_schedule(
    lengths: list[int], slowdown: float, token_ms: int
) -> None:
    def answers(config: EngineConfig, *, is_together: bool) -> list[object]:
        bench = Bench(config, lambda plan: 0.01 + plan.num_tokens * token_ms / 1000)
        seqs = [
            sequence([5] * length, seed=i, temperature=1.0, max_tokens=6)
            for i, length in enumerate(lengths)
        ]
        collected: list[Collector] = []
        if is_together:
            collected = [run_to_end(bench.engine, *seqs)] * len(seqs)
        else:
            collected = [run_to_end(bench.engine, seq) for seq in seqs]
        assert not bench.runner.held
        assert bench.engine.stats().tokens == 0
        return [
            (got[seq].text, got[seq].token_ids) for got, seq in zip(collected, seqs, strict=True)
        ]

    small = replace(
        ROOMY,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        prefill_chunk_tokens=16,
        prefix_block_tokens=8,
    )
    paced = answers(replace(small, prefill_slowdown=slowdown), is_together=True)
    assert paced == answers(replace(small, prefill_slowdown=0), is_together=False)
