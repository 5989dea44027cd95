"""A prompt computed while it is being written: the same answer, sooner, at nobody's cost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.async_engine import AsyncEngine
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.preparation import UNSETTLED_TOKENS, prepare, prepare_warm_up
from deployments.engine.runner import ModelRunner, Runner
from deployments.engine.scheduler import StepPlan
from deployments.engine.scripted import Fault, ScriptedRunner
from deployments.engine.sequence import Sequence, SequenceState
from deployments.engine.tokenizer import ChatTokenizer
from deployments.engine.warming import BLOCKS_ALONE, BLOCKS_BESIDE
from protocol.errors import Overloaded
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import Terminal, TokenDelta
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, Collector, FakeClock, run_to_end, sequence

BLOCK = 8
"""Of `SMALL`."""
PIECE = 16
"""The whole blocks that its budget holds."""
WAIT_S = 20.0


class SpyRunner(ScriptedRunner):
    """Notes every plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: list[list[tuple[Sequence, int, int]]] = []

    def run(self, plan: StepPlan) -> Any:
        self.plans.append([(row.seq, row.start, row.end) for row in plan.rows])
        return super().run(plan)

    @property
    def num_placed(self) -> int:
        return self.pool.num_seqs

    @property
    def num_computed(self) -> int:
        return sum(end - start for rows in self.plans for _, start, end in rows)


def script(seq: Sequence) -> list[int]:
    return [(sum(seq.prompt_token_ids) + i) % 250 for i in range(12)]


def scripted(
    config: EngineConfig = SMALL, fault: Callable[[Sequence], Fault | None] = lambda seq: None
) -> tuple[Engine, SpyRunner]:
    runner = SpyRunner(script, TOKENIZER, config, fault=fault)
    return Engine(runner, TOKENIZER, config, clock=FakeClock()), runner


@pytest.fixture(params=["scripted", "model"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner: Runner = (
        ScriptedRunner(script, TOKENIZER, SMALL)
        if request.param == "scripted"
        else ModelRunner(tiny_models.build("llama"), SMALL)
    )
    runner.warm_up()
    yield runner
    runner.close()


@pytest.fixture
def engine(runner: Runner) -> Engine:
    return Engine(runner, TOKENIZER, SMALL, clock=FakeClock())


def asked(prompt: list[int], tenant: str = "t", **sampling: Any) -> Sequence:
    seq = sequence(prompt, **({"max_tokens": 8, "logprobs": 1} | sampling))
    seq.tenant = seq.share = tenant
    return seq


def warm_up(prompt: list[int], tenant: str = "t") -> Sequence:
    """As `prepare_warm_up` makes it: in whole blocks."""
    seq = asked(prompt[: len(prompt) // BLOCK * BLOCK], tenant)
    seq.is_warm_up = True
    return seq


def deltas(engine: Engine, seq: Sequence) -> list[TokenDelta]:
    return run_to_end(engine, seq)[seq].deltas


def drain(engine: Engine, collector: Collector | None = None) -> Collector:
    collector = collector or Collector()
    for _ in range(1000):
        if not engine.has_work:
            return collector
        collector.take(engine.step())
    raise AssertionError("still at work")


# What it saves, and that it changes nothing


def test_a_request_finds_its_beginning_computed(engine: Engine) -> None:
    prompt = [i % 200 for i in range(45)]
    warmed = run_to_end(engine, seq := warm_up(prompt[:30]))[seq]
    assert warmed.deltas == []
    assert warmed.terminal.finish_reason == "stop"
    assert engine.stats().warm_up_tokens_total == 24
    final = asked(prompt)
    terminal = run_to_end(engine, final)[final].terminal
    assert terminal.usage.cached_tokens == 24
    stats = engine.stats()
    assert stats.prompt_tokens_total == 45 - 24
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (45, 24)


def test_a_warm_up_is_no_request_in_any_other_figure(engine: Engine) -> None:
    engine.add(warm_up(list(range(60))))
    while engine.has_work:
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.tokens, stats.waiting_tokens) == (0, 0, 0, 0)
        engine.step()
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.generated_tokens_total) == (0, 0)
    assert (stats.finished_total, stats.refused_total) == ({}, 0)
    assert engine.admission.num_held == 0


def test_answers_are_the_same_whatever_was_computed_ahead(engine: Engine) -> None:
    rng = random.Random(5)
    for round in range(12):
        prompt = [rng.randrange(200) for _ in range(rng.randint(20, 100))]
        expected = deltas(engine, asked(prompt, tenant=f"nobody {round}"))
        for cut in sorted(rng.randint(1, len(prompt)) for _ in range(4)):
            engine.add(warm_up(prompt[:cut]))
            for _ in range(rng.randint(0, 4)):
                engine.step()
        assert deltas(engine, asked(prompt)) == expected


def test_each_piece_is_computed_once() -> None:
    engine, runner = scripted()
    prompt = [i % 200 for i in range(100)]
    for end in range(10, 101, 10):
        run_to_end(engine, warm_up(prompt[:end]))
    assert runner.num_computed == 96
    final = asked(prompt, max_tokens=1)
    run_to_end(engine, final)
    assert final.num_cached_tokens == 96
    assert runner.num_computed == 100
    assert runner.num_placed == 0


def test_what_an_earlier_request_left_is_not_computed_again() -> None:
    engine, runner = scripted()
    prompt = [i % 200 for i in range(100)]
    run_to_end(engine, asked(prompt, max_tokens=1))
    computed = runner.num_computed
    for end in range(10, 101, 10):
        run_to_end(engine, warm_up(prompt[:end]))
    assert runner.num_computed == computed
    final = asked([*prompt, 1, 2, 3], max_tokens=1)
    run_to_end(engine, final)
    assert final.num_cached_tokens == 96, "and it was not cut down either"


def test_tenants_do_not_warm_for_each_other(engine: Engine) -> None:
    run_to_end(engine, warm_up(list(range(40)), "a"))
    other = asked(list(range(40)), "b")
    run_to_end(engine, other)
    assert other.num_cached_tokens == 0


# Taking over


@pytest.mark.parametrize("num_steps", range(5))
def test_a_request_takes_over_what_its_warm_up_has_reached(num_steps: int) -> None:
    engine, runner = scripted()
    prompt = [i % 200 for i in range(70)]
    ahead = warm_up(prompt)
    engine.add(ahead)
    for _ in range(num_steps):
        engine.step()
    final = asked(prompt, max_tokens=1)
    collector = run_to_end(engine, final)
    assert len(collector[ahead].terminals) == (num_steps < 4)
    assert final.num_cached_tokens == PIECE * num_steps
    assert runner.num_computed == 70, "nothing was computed twice"
    assert all(len(rows) == 1 for rows in runner.plans)
    assert runner.num_placed == 0


def test_a_longer_warm_up_takes_a_running_shorter_one_over() -> None:
    engine, runner = scripted()
    prompt = [i % 200 for i in range(96)]
    first, second = warm_up(prompt[:48]), warm_up(prompt)
    engine.add(first)
    engine.step()
    engine.add(second)
    assert first.state is SequenceState.FINISHED
    collector = drain(engine)
    assert collector[first].terminal.finish_reason == "cancelled"
    assert collector[second].terminal.finish_reason == "stop"
    assert second.num_cached_tokens == 16
    assert runner.num_computed == 96


def test_a_guess_that_was_wrong_in_its_last_block_is_given_up_all_the_same() -> None:
    engine, runner = scripted()
    prompt = [i % 200 for i in range(64)]
    ahead = warm_up([*prompt[:63], 201])
    engine.add(ahead)
    engine.step()
    final = asked(prompt, max_tokens=1)
    run_to_end(engine, final)
    assert final.num_cached_tokens == 16
    assert runner.num_computed == 64


def test_a_request_that_only_begins_alike_leaves_a_warm_up_alone() -> None:
    engine, _ = scripted()
    system = [7] * 24
    ahead = warm_up([*system, *range(40)])
    engine.add(ahead)
    for _ in range(2):
        engine.step()
    neighbour = asked([*system, 1, 2, 3], max_tokens=1)
    collector = run_to_end(engine, neighbour)
    assert neighbour.num_cached_tokens == 24, "the shared part is used"
    assert collector[ahead].terminal.finish_reason == "stop"
    assert ahead.num_computed_tokens == ahead.num_tokens


# Whoever asks goes first


def talk(engine: Engine, *seqs: Sequence) -> None:
    for seq in seqs:
        engine.add(seq)
    while any(not seq.output_token_ids for seq in seqs):
        engine.step()


def test_a_running_stream_gets_a_token_in_every_step_beside_at_most_a_block() -> None:
    engine, runner = scripted()
    stream = asked([1, 2, 3], max_tokens=12, ignore_eos=True)
    talk(engine, stream)
    runner.plans.clear()
    engine.add(warm_up([5] * 120))
    drain(engine)
    beside = [rows for rows in runner.plans if any(seq is stream for seq, _, _ in rows)]
    assert len(beside) == 11, "as many steps as without a warm-up"
    assert all(rows[0][0] is stream for rows in beside)
    assert {end - start for rows in beside for _, start, end in rows[1:]} == {BLOCKS_BESIDE * BLOCK}


def test_no_warm_up_is_computed_in_a_step_with_another_prompt_or_while_one_waits() -> None:
    engine, runner = scripted(replace(SMALL, max_num_seqs=2))
    engine.add(warm_up([5] * 120))
    engine.step()
    seqs = [asked([i] * 50, max_tokens=3, ignore_eos=True) for i in range(5)]
    for seq in seqs:
        engine.add(seq)
    runner.plans.clear()
    while not all(seq.state is SequenceState.FINISHED for seq in seqs):
        engine.step()
        is_waiting = bool(engine.stats().waiting)
        rows = runner.plans[-1]
        if rows[-1][0].is_warm_up:
            assert not is_waiting
            assert all(end - start == 1 for _, start, end in rows[:-1])
    drain(engine)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_requests_take_as_many_steps_as_without_warm_ups(max_num_seqs: int) -> None:
    def steps(is_warmed: bool) -> list[int]:
        # Steps that hold a warm-up are not measured, so the pace would be learnt later.
        config = replace(SMALL, max_num_seqs=max_num_seqs, prefill_slowdown=0)
        engine, _ = scripted(config)
        if is_warmed:
            for i in range(6):
                with contextlib.suppress(Overloaded):
                    engine.add(warm_up([100 + i] * 120, f"w{i}"))
            engine.step()
        rng = random.Random(max_num_seqs)
        seqs = [asked([i] * rng.randint(1, 60), max_tokens=6, ignore_eos=True) for i in range(8)]
        ended: dict[int, int] = {}
        for step in range(400):
            if step % 3 == 0 and step // 3 < len(seqs):
                engine.add(seqs[step // 3])
            for emission in engine.step():
                if not emission.seq.is_warm_up and emission.terminal is not None:
                    ended[emission.seq.prompt_token_ids[0]] = step
        return [ended[i] for i in range(8)]

    assert steps(is_warmed=True) == steps(is_warmed=False)


def test_a_request_that_needs_a_place_gets_the_one_of_the_warm_up_that_loses_least() -> None:
    config = replace(SMALL, max_num_seqs=8, max_num_batched_tokens=24)
    engine, runner = scripted(config)
    further, behind = warm_up([1] * 64, "a"), warm_up([2] * 64, "b")
    engine.add(further)
    engine.step()
    engine.add(behind)
    engine.step()
    talk(engine, *(asked([10 + i] * 3, max_tokens=40, ignore_eos=True) for i in range(7)))
    assert behind.state is SequenceState.FINISHED
    assert further.state is SequenceState.RUNNING
    talk(engine, asked([30] * 3, max_tokens=40, ignore_eos=True))
    assert further.state is SequenceState.FINISHED
    assert runner.num_placed == 8
    drain(engine)
    assert runner.num_placed == 0


def test_at_most_a_quarter_of_the_places_compute_ahead_by_turns() -> None:
    config = replace(SMALL, max_num_seqs=8, max_num_batched_tokens=100)
    engine, runner = scripted(config)
    seqs = [warm_up([i] * 64, f"t{i}") for i in range(5)]
    for seq in seqs:
        engine.add(seq)
    used = set()
    while engine.has_work:
        engine.step()
        used.add(runner.num_placed)
    assert max(used) == 2
    order = [seqs.index(rows[0][0]) for rows in runner.plans]
    assert order[:4] == [0, 1, 0, 1]
    assert {end - start for rows in runner.plans for _, start, end in rows} == {
        BLOCKS_ALONE * BLOCK
    }


def test_one_more_than_may_wait_is_refused_and_tenants_take_turns() -> None:
    engine, runner = scripted()
    many = [warm_up([i] * 16, "many") for i in range(3)]
    one = warm_up([99] * 16, "one")
    for seq in (*many, one):
        engine.add(seq)
    with pytest.raises(Overloaded, match="4 prompts wait to be computed ahead, the limit is 4"):
        engine.add(warm_up([50] * 16))
    drain(engine)
    assert [rows[0][0] for rows in runner.plans] == [many[0], one, many[1], many[2]]


def test_unused_warm_ups_hold_at_most_half_of_the_memory() -> None:
    engine, runner = scripted()
    chats = [[i] * 32 for i in (1, 2)]
    for chat in chats:
        run_to_end(engine, asked(chat, max_tokens=1))
    for i in range(10, 20):
        run_to_end(engine, warm_up([i] * 32))
    for chat in chats:
        again = asked([*chat, 1], max_tokens=1)
        run_to_end(engine, again)
        assert again.num_cached_tokens == 32
    assert runner.num_placed == 0


def test_with_one_place_a_warm_up_works_and_gives_way() -> None:
    config = replace(SMALL, max_num_seqs=1)
    engine, runner = scripted(config)
    ahead = warm_up([5] * 64)
    engine.add(ahead)
    engine.step()
    other = asked([9] * 10, max_tokens=2, ignore_eos=True)
    engine.add(other)
    engine.step()
    assert ahead.state is SequenceState.FINISHED
    drain(engine)
    assert len(other.output_token_ids) == 2
    assert runner.num_placed == 0


def test_a_block_larger_than_the_budget_does_not_stop_it() -> None:
    config = replace(SMALL, prefix_block_tokens=48)
    engine, _ = scripted(config)
    stream = asked([1, 2, 3], max_tokens=20, ignore_eos=True)
    talk(engine, stream)
    seq = asked([5] * 96)
    seq.is_warm_up = True
    engine.add(seq)
    drain(engine)
    assert seq.num_computed_tokens == 96


# Ends


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abandoned_warm_up_is_dropped_before_the_next_step_and_leaves_what_it_has(
    num_steps: int,
) -> None:
    engine, runner = scripted()
    prompt = [i % 200 for i in range(64)]
    seq = warm_up(prompt)
    engine.add(seq)
    for _ in range(num_steps):
        engine.step()
    seq.is_abandoned = True
    num_plans = len(runner.plans)
    drain(engine)
    assert len(runner.plans) == num_plans
    assert (runner.num_placed, runner.held) == (0, set())
    final = asked(prompt)
    run_to_end(engine, final)
    assert final.num_cached_tokens == min(PIECE * num_steps, 56)


def test_one_that_is_abandoned_in_the_queue_never_runs() -> None:
    engine, runner = scripted()
    seqs = [warm_up([i] * 32) for i in range(2)]
    for seq in seqs:
        engine.add(seq)
    seqs[0].is_abandoned = True
    drain(engine)
    assert {seq for rows in runner.plans for seq, _, _ in rows} == {seqs[1]}


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_an_unsound_warm_up_leaves_nothing_and_a_failed_step_ends_it(fault: Fault) -> None:
    faults = iter([None, fault])
    engine, runner = scripted(
        fault=lambda seq: next(faults, None) if seq.is_warm_up else None,
    )
    prompt = [i % 200 for i in range(64)]
    seq = warm_up(prompt)
    collector = run_to_end(engine, seq)
    assert collector[seq].terminal.finish_reason == "cancelled"
    assert (runner.num_placed, runner.held) == (0, set())
    final = asked(prompt)
    terminal = run_to_end(engine, final)[final].terminal
    assert (terminal.error, final.num_cached_tokens) == (None, 0)


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_what_goes_wrong_with_a_warm_up_does_not_harm_the_stream_beside_it(fault: Fault) -> None:
    engine, _ = scripted(fault=lambda seq: fault if seq.is_warm_up else None)
    stream = asked([1, 2, 3], max_tokens=10, ignore_eos=True)
    talk(engine, stream)
    collector = Collector()
    engine.add(warm_up([5] * 64))
    drain(engine, collector)
    assert collector[stream].terminal.finish_reason == "length"
    assert stream.output_token_ids == script(stream)[:10]


def test_everything_ends_when_the_engine_gives_up_on_all() -> None:
    engine, runner = scripted()
    seqs = [warm_up([i] * 64) for i in range(3)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    collector = Collector()
    collector.take(engine.fail_all(Overloaded("closing")))
    assert all(collector[seq].terminals for seq in seqs)
    assert not engine.has_work
    assert (runner.num_placed, runner.held) == (0, set())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_comes_and_goes_all_end_once_and_no_place_is_lost(data: st.DataObject) -> None:
    places = data.draw(st.sampled_from([1, 2, 4, 8]))
    config = replace(SMALL, max_num_seqs=places, max_num_batched_tokens=places + 16)
    engine, runner = scripted(config)
    base = [data.draw(st.lists(st.integers(0, 2), min_size=100, max_size=100)) for _ in range(2)]
    collector, live = Collector(), []
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["warm", "ask", "drop", "step", "step"]))
        if act in ("warm", "ask"):
            prompt = data.draw(st.sampled_from(base))[: data.draw(st.integers(BLOCK, 100))]
            tenant = data.draw(st.sampled_from("ab"))
            seq = warm_up(prompt, tenant) if act == "warm" else asked(prompt, tenant)
            try:
                engine.add(seq)
            except Overloaded:
                continue
            live.append(seq)
        elif act == "drop" and live:
            data.draw(st.sampled_from(live)).is_abandoned = True
        else:
            collector.take(engine.step())
        assert runner.num_placed <= places
    drain(engine, collector)
    for seq in live:
        assert len(collector[seq].terminals) == 1
        if not seq.is_warm_up and not seq.is_abandoned:
            assert seq.output_token_ids == script(seq)[:8]
    assert (runner.num_placed, runner.held) == (0, set())


# From text to tokens


def text_request(text: str, **fields: Any) -> InferenceRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    made = {"request_id": "r", "tenant": "t", "model": "m", "sampling": sampling, **fields}
    if "prompt" not in made:
        made["messages"] = (
            Message(role="system", content="Be brief, be kind."),
            Message(role="user", content=text),
        )
    return InferenceRequest(**made)


def ahead_of(
    request: InferenceRequest, tokenizer: ChatTokenizer = TOKENIZER, config: EngineConfig = SMALL
) -> Sequence | None:
    return prepare_warm_up(request, tokenizer, config, BLOCK, FakeClock())


def whole(
    request: InferenceRequest, tokenizer: ChatTokenizer = TOKENIZER, config: EngineConfig = SMALL
) -> Sequence:
    return prepare(request, tokenizer, config, FakeClock(), random.Random(1))


def test_the_end_of_the_template_is_left_out_and_so_is_half_a_block() -> None:
    seq = ahead_of(text_request("What is the capital"))
    final = whole(text_request("What is the capital of France?"))
    assert seq is not None
    assert seq.is_warm_up
    assert seq.tenant == "t"
    shared = len(seq.prompt_token_ids)
    assert seq.prompt_token_ids == final.prompt_token_ids[:shared]
    until_here = TOKENIZER.encode_chat(text_request("What is the capital").messages or ())
    num_settled = until_here.index(TOKENIZER.hf.eos_token_id, 40) - UNSETTLED_TOKENS
    assert shared == num_settled // BLOCK * BLOCK


def test_a_prompt_of_ids_is_known_as_it_stands() -> None:
    seq = ahead_of(text_request("", prompt=tuple(range(20)), messages=None))
    assert seq is not None
    assert seq.prompt_token_ids == list(range(16))


def test_there_is_nothing_to_do_for_less_than_a_block() -> None:
    assert ahead_of(text_request("", prompt="short", messages=None)) is None


WORDS = st.text(
    alphabet=st.sampled_from("ab é\u0301🙂 \n.,'’<|im_end|>漢字0１"), min_size=1, max_size=40
)


@settings(max_examples=40, deadline=None)
@given(text=WORDS, cut=st.floats(0, 1), is_chat=st.booleans())
def test_with_bytes_for_tokens_what_is_computed_ahead_is_always_of_use(
    text: str, cut: float, is_chat: bool
) -> None:
    fields: dict[str, Any] = {} if is_chat else {"prompt": text, "messages": None}
    part = text[: int(cut * len(text))] or text[:1]
    known = fields and {**fields, "prompt": part}
    config = replace(SMALL, max_model_len=1024)
    seq = ahead_of(text_request(part, **known), config=config)
    final = whole(text_request(text, **fields), config=config)
    if seq is not None:
        assert seq.prompt_token_ids == final.prompt_token_ids[: seq.num_tokens]


# The asyncio front


class Gate:
    """Stops the engine's thread inside a step until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, seq: Sequence) -> Fault | None:
        self.entered.set()
        assert self._opened.wait(WAIT_S)
        return None

    def open(self) -> None:
        self._opened.set()


LONG = "A rather long text that a client is still writing, piece by piece. " * 4
ROOMY = replace(SMALL, max_model_len=1024)


@asynccontextmanager
async def running(
    fault: Callable[[Sequence], Fault | None] = lambda seq: None,
) -> AsyncIterator[tuple[AsyncEngine, SpyRunner]]:
    engine, runner = scripted(ROOMY, fault=fault)
    front = AsyncEngine(engine, rng=random.Random(1))
    await front.start()
    try:
        yield front, runner
    finally:
        if isinstance(fault, Gate):
            fault.open()
        await front.close()


async def answer(front: AsyncEngine, request: InferenceRequest) -> tuple[list[int], Terminal]:
    seq = await front.prepare(request)
    log = front.follow(seq)
    assert front.admit([seq]) == [None]
    cursor = log.cursor()
    while await cursor.wait():
        pass
    assert log.terminal is not None
    return [token for delta in log.deltas for token in delta.token_ids], log.terminal


async def test_a_warm_up_returns_once_it_is_computed() -> None:
    async with running() as (front, runner):
        await front.warm(text_request(LONG))
        warmed = front.stats().warm_up_tokens_total
        assert warmed > len(LONG)
        assert runner.num_placed == 0
        tokens, terminal = await answer(front, text_request(LONG + "Done."))
        assert terminal.usage.cached_tokens == warmed
        assert len(tokens) == 6
        assert front.stats().finished_total == {"length": 1}


async def test_it_returns_at_once_where_the_request_cannot_run() -> None:
    async with running() as (front, runner):
        await front.warm(text_request("x" * 2000))
        await front.warm(text_request("", prompt="", messages=None))
        await front.warm(text_request("", prompt=(10**6,), messages=None))
        assert runner.plans == []
        assert front.stats().refused_total == 0


async def test_a_cancelled_caller_stops_the_work_and_what_is_done_stays() -> None:
    gate = Gate()
    async with running(gate) as (front, runner):
        warming = asyncio.create_task(front.warm(text_request(LONG)))
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        gate.open()
        _, terminal = await answer(front, text_request(LONG, request_id="final"))
        assert terminal.usage.cached_tokens == PIECE
        ahead = [rows for rows in runner.plans if rows[0][0].is_warm_up]
        assert len(ahead) == 1, "the step that ran when it was cancelled was the last"


async def test_it_returns_when_its_request_takes_over() -> None:
    gate = Gate()
    async with running(gate) as (front, _):
        warming = asyncio.create_task(front.warm(text_request(LONG)))
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        final = asyncio.create_task(answer(front, text_request(LONG, request_id="final")))
        while front.stats().waiting == 0:  # noqa: ASYNC110 (another thread counts it)
            await asyncio.sleep(0)
        gate.open()
        await warming
        _, terminal = await final
        assert terminal.usage.cached_tokens == PIECE


async def test_too_many_at_once_give_up_quietly() -> None:
    gate = Gate()
    async with running(gate) as (front, runner):
        calls = [
            asyncio.create_task(front.warm(text_request(f"{i}" * 200, request_id=f"w{i}")))
            for i in range(20)
        ]
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        gate.open()
        await asyncio.gather(*calls)
        assert runner.num_placed == 0


async def test_whoever_waits_for_one_is_let_go_when_the_engine_closes() -> None:
    gate = Gate()
    async with running(gate) as (front, _):
        warming = asyncio.create_task(front.warm(text_request(LONG)))
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        closing = asyncio.create_task(front.close())
        gate.open()
        await closing
        await warming


# The default model


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_model_answers_the_same_to_a_prompt_that_came_in_pieces(
    dtype: Any, chat_model_folder: Path, chat_tokenizer: ChatTokenizer
) -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=1024, num_threads=1, dtype=dtype)
    runner = ModelRunner.load(chat_model_folder, config)
    runner.warm_up()
    engine = Engine(runner, chat_tokenizer, config, clock=FakeClock())
    text = (
        "Die Brücke über den Fluss – 🙂 is old.  It was built in 1889, they say;\n\nfew cross it. "
    )
    text = text * 4 + "How old is the bridge?"
    rng = random.Random(2)
    cuts = sorted(rng.randrange(1, len(text)) for _ in range(5))
    expected = deltas(
        engine, alone := whole(text_request(text, tenant="x"), chat_tokenizer, config)
    )
    for cut in cuts:
        known = text_request(text[:cut])
        seq = prepare_warm_up(
            known, chat_tokenizer, config, engine.prefix_block_tokens, FakeClock()
        )
        if seq is not None:
            assert seq.prompt_token_ids == alone.prompt_token_ids[: seq.num_tokens]
            engine.add(seq)
            for _ in range(rng.randint(0, 2)):
                engine.step()
    final = whole(text_request(text), chat_tokenizer, config)
    assert deltas(engine, final) == expected
    assert final.num_cached_tokens > 0
    runner.close()
