"""The engine's thread, and the asyncio front: nothing hangs, nothing is lost, nothing leaks."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from deployments.engine.async_engine import AsyncEngine
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Emission, Engine
from deployments.engine.loop import EngineLoop
from deployments.engine.scripted import Fault, ScriptedRunner
from deployments.engine.sequence import Sequence
from protocol.errors import DuplicateId, InternalError, InvalidRequest, Overloaded
from protocol.request import InferenceRequest, SamplingParams
from protocol.token_log import Terminal, TokenDelta
from tests.engine.fakes import SMALL, TOKENIZER, Collector, FakeClock, scripted_engine, sequence

WAIT_S = 20.0


class Reader:
    """Takes one stream on the loop's thread; others wait for it."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.terminals: list[Terminal] = []
        self._changed = threading.Condition()

    def __call__(self, deltas: list[TokenDelta], terminal: Terminal | None) -> None:
        with self._changed:
            self.deltas += deltas
            self.terminals += [terminal] if terminal is not None else []
            self._changed.notify_all()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def wait_for_text(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.deltas), WAIT_S)

    def terminal(self) -> Terminal:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.terminals), WAIT_S)
        (terminal,) = self.terminals
        return terminal


class Gate:
    """A fault hook that stops the engine's thread inside a step until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, seq: Sequence) -> Fault | None:
        self.entered.set()
        assert self._opened.wait(WAIT_S)
        return None

    def open(self) -> None:
        self._opened.set()


@contextmanager
def running(
    answers: Callable[[Sequence], str] | str = "hello", **given: Any
) -> Iterator[tuple[EngineLoop, ScriptedRunner]]:
    on_step = given.pop("on_step", None)
    engine, runner = scripted_engine(answers, **given)
    loop = EngineLoop(engine, on_step)
    loop.start()
    loop.wait_until_ready(WAIT_S)
    try:
        yield loop, runner
    finally:
        loop.close(WAIT_S)


def submit(loop: EngineLoop, seq: Sequence) -> Reader:
    reader = Reader()
    loop.submit(seq, reader)
    return reader


def test_a_stream_is_delivered_and_all_gauges_are_zero_at_its_end() -> None:
    with running() as (loop, runner):
        reader = submit(loop, sequence())
        assert reader.terminal().finish_reason == "stop"
        assert reader.text == "hello"
        stats = loop.stats()
        assert (stats.running, stats.waiting, loop.num_live) == (0, 0, 0)
        assert runner.held == set()


def test_many_threads_may_submit_at_once() -> None:
    config = replace(SMALL, max_waiting=100)
    with running(lambda seq: seq.request_id, config=config) as (loop, _):
        readers: dict[str, Reader] = {}

        def client(name: int) -> None:
            for i in range(10):
                seq = sequence(request_id=f"{name}-{i}")
                readers[seq.request_id] = submit(loop, seq)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(readers) == 60
        for request_id, reader in readers.items():
            reader.terminal()
            assert reader.text == request_id


def test_the_emissions_of_a_step_come_in_one_call() -> None:
    calls: list[list[Emission]] = []
    gate = Gate()
    with running("ab", on_step=calls.append, fault=gate) as (loop, _):
        first = submit(loop, sequence())
        assert gate.entered.wait(WAIT_S)
        others = [submit(loop, sequence()) for _ in range(3)]
        gate.open()
        for reader in (first, *others):
            reader.terminal()
    assert max(len(call) for call in calls) >= 3
    collector = Collector()
    for call in calls:
        collector.take(call)


def test_a_cancel_from_another_thread_ends_the_stream_and_frees_the_place() -> None:
    with running("x" * 100_000, config=replace(SMALL, max_model_len=100_100)) as (loop, runner):
        seq = sequence(max_tokens=100_000)
        reader = submit(loop, seq)
        reader.wait_for_text()
        loop.abort(seq)
        assert reader.terminal().finish_reason == "cancelled"
        assert runner.held == set()
        loop.abort(seq)
        assert submit(loop, sequence(max_tokens=2)).terminal().finish_reason == "length"


def test_a_request_cancelled_in_the_inbox_is_never_computed() -> None:
    gate = Gate()
    with running(fault=gate) as (loop, _):
        submit(loop, sequence())
        assert gate.entered.wait(WAIT_S)
        seq = sequence()
        reader = submit(loop, seq)
        assert loop.stats().waiting == 1
        loop.abort(seq)
        gate.open()
        assert reader.terminal().finish_reason == "cancelled"
        assert seq.first_scheduled_s is None


def test_the_bound_counts_what_is_still_in_the_inbox() -> None:
    gate = Gate()
    with running(config=replace(SMALL, max_num_seqs=1, max_waiting=2), fault=gate) as (loop, _):
        accepted = [submit(loop, sequence())]
        assert gate.entered.wait(WAIT_S)
        accepted += [submit(loop, sequence()) for _ in range(2)]
        with pytest.raises(Overloaded):
            submit(loop, sequence())
        assert loop.stats().refused_total == 1
        gate.open()
        assert all(reader.terminal().finish_reason == "stop" for reader in accepted)
        assert submit(loop, sequence()).terminal().finish_reason == "stop"


def test_a_live_request_id_is_refused_and_leaves_the_first_alone() -> None:
    gate = Gate()
    with running(fault=gate) as (loop, _):
        first = submit(loop, sequence(request_id="x"))
        with pytest.raises(DuplicateId):
            submit(loop, sequence(request_id="x"))
        gate.open()
        first.terminal()
        assert first.text == "hello"
        submit(loop, sequence(request_id="x")).terminal()


def test_an_exception_in_a_step_ends_the_affected_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = scripted_engine("hello")
    step = engine.step
    faults = iter([RuntimeError("scheduler is broken")])

    def flaky_step() -> list[Emission]:
        for fault in faults:
            raise fault
        return step()

    engine.step = flaky_step  # type: ignore[method-assign]
    loop = EngineLoop(engine)
    loop.start()
    error = submit(loop, sequence()).terminal().error
    assert error is not None
    assert error.code == "internal"
    assert "scheduler is broken" not in error.message
    assert error.message.rpartition(" ")[2] in caplog.text
    assert submit(loop, sequence()).terminal().finish_reason == "stop"
    assert loop.is_healthy
    loop.close(WAIT_S)


def test_a_failing_reader_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("client is gone")

    with running(on_step=broken) as (loop, _):
        loop.submit(sequence(), broken)
        reader = submit(loop, sequence())
        assert reader.terminal().finish_reason == "stop"
        assert reader.text == "hello"
    assert "client is gone" in caplog.text


def test_the_heartbeat_ages_only_while_a_step_hangs() -> None:
    clock = FakeClock()
    gate = Gate()
    with running(fault=gate, clock=clock) as (loop, _):
        clock.advance(1000)
        assert loop.is_healthy, "sleeping without work is no fault"
        reader = submit(loop, sequence())
        assert gate.entered.wait(WAIT_S)
        assert loop.is_healthy
        clock.advance(SMALL.stall_after_s + 1)
        assert loop.heartbeat_age_s() == SMALL.stall_after_s + 1
        assert loop.stats().stalled_s == SMALL.stall_after_s + 1
        assert not loop.is_healthy
        gate.open()
        reader.terminal()
        assert loop.is_healthy
        clock.advance(1000)
        assert loop.stats().stalled_s == 0


def test_all_gauges_fall_to_zero_when_everyone_leaves_and_nobody_comes() -> None:
    config = replace(SMALL, max_model_len=100_100, max_waiting=40)
    with running("x" * 100_000, config=config) as (loop, runner):
        seqs = [sequence("p" * 50, max_tokens=100_000) for _ in range(30)]
        readers = [submit(loop, seq) for seq in seqs]
        readers[0].wait_for_text()
        before = loop.stats()
        assert before.running + before.waiting == 30
        assert before.tokens > 29 * 100_000
        assert before.waiting_tokens == 50 * before.waiting
        for seq in seqs:
            loop.abort(seq)
        assert all(reader.terminal().finish_reason == "cancelled" for reader in readers)
        after = loop.stats()
        assert (after.running, after.waiting, after.tokens, after.waiting_tokens) == (0, 0, 0, 0)
        assert after.stalled_s == 0
        assert after.finished_total == {"cancelled": 30}
        assert runner.held == set()


def test_work_in_the_inbox_is_counted() -> None:
    gate = Gate()
    with running(fault=gate) as (loop, _):
        first = submit(loop, sequence("abc", max_tokens=5))
        assert gate.entered.wait(WAIT_S)
        second = submit(loop, sequence("defg", max_tokens=6))
        stats = loop.stats()
        assert (stats.running, stats.waiting, stats.waiting_tokens) == (1, 1, 4)
        assert stats.tokens == 3 + 5 + 4 + 6
        gate.open()
        first.terminal()
        second.terminal()
        assert loop.stats().tokens == 0


def test_close_ends_what_is_live_and_joins_the_thread() -> None:
    before = threading.active_count()
    gate = Gate()
    with running(fault=gate, config=replace(SMALL, max_num_seqs=1)) as (loop, _):
        first = submit(loop, sequence())
        assert gate.entered.wait(WAIT_S)
        queued = submit(loop, sequence())
        closing = threading.Thread(target=loop.close)
        closing.start()
        gate.open()
        closing.join(WAIT_S)
        for reader in (first, queued):
            error = reader.terminal().error
            assert error is not None
            assert error.code == "overloaded"
        assert not loop.is_healthy
        with pytest.raises(Overloaded):
            submit(loop, sequence())
    assert threading.active_count() == before


def test_a_loop_that_cannot_warm_up_says_so_and_refuses() -> None:
    engine, runner = scripted_engine("hello")

    def warm_up() -> None:
        raise ValueError("no such model")

    runner.warm_up = warm_up  # type: ignore[method-assign]
    loop = EngineLoop(engine)
    loop.start()
    with pytest.raises(ValueError, match="no such model"):
        loop.wait_until_ready(WAIT_S)
    assert not loop.is_healthy
    with pytest.raises(Overloaded):
        loop.submit(sequence())
    loop.close(WAIT_S)


def test_a_request_submitted_before_the_warm_up_ends_is_served() -> None:
    engine, runner = scripted_engine("hello")
    warm = threading.Event()
    runner.warm_up = lambda: bool(warm.wait(WAIT_S))  # type: ignore[method-assign,assignment]
    loop = EngineLoop(engine)
    loop.start()
    assert not loop.is_healthy
    reader = submit(loop, sequence())
    warm.set()
    assert reader.terminal().finish_reason == "stop"
    loop.close(WAIT_S)


# The asyncio front


@asynccontextmanager
async def started(
    answers: Callable[[Sequence], str] | str = "hello", **given: Any
) -> AsyncIterator[AsyncEngine]:
    engine, _ = scripted_engine(answers, **given)
    front = AsyncEngine(engine, rng=random.Random(1))
    await front.start()
    try:
        yield front
    finally:
        await front.close()


def request(request_id: str = "r", **given: Any) -> InferenceRequest:
    return InferenceRequest(
        **({"request_id": request_id, "tenant": "t", "model": "m", "prompt": "hi"} | given)
    )


async def read(front: AsyncEngine, seq: Sequence) -> str:
    log = front.follow(seq)
    cursor = log.cursor()
    async with asyncio.timeout(WAIT_S):
        while not cursor.is_at_end:
            await cursor.wait()
    return log.text


async def test_requests_are_prepared_admitted_and_followed() -> None:
    async with started(lambda seq: f"answer {seq.request_id}") as front:
        seqs = [await front.prepare(request(f"r{i}")) for i in range(6)]
        assert front.admit(seqs) == [None] * 6
        texts = await asyncio.gather(*(read(front, seq) for seq in seqs))
        assert texts == [f"answer r{i}" for i in range(6)]
        stats = front.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.finished_total == {"stop": 6}


async def test_a_log_can_be_followed_again_after_its_end() -> None:
    async with started() as front:
        seq = await front.prepare(request())
        front.admit([seq])
        await read(front, seq)
        assert front.follow(seq).cursor(next_seq=3).take()[0].text == "l"
        assert await read(front, seq) == "hello"


async def test_a_sequence_abandoned_before_admission_is_dropped() -> None:
    async with started() as front:
        dead, alive = [await front.prepare(request(name)) for name in ("dead", "alive")]
        front.abort(dead)
        assert front.admit([dead, alive]) == [None, None]
        terminal = front.follow(dead).terminal
        assert terminal is not None
        assert terminal.finish_reason == "cancelled"
        assert await read(front, alive) == "hello"
        assert front.stats().finished_total == {"cancelled": 1, "stop": 1}


async def test_abort_ends_a_running_stream_once_and_is_harmless_after() -> None:
    config = replace(SMALL, max_model_len=100_100)
    async with started("x" * 100_000, config=config) as front:
        seq = await front.prepare(request())
        front.admit([seq])
        async with asyncio.timeout(WAIT_S):
            await front.follow(seq).cursor().wait()
            front.abort(seq)
            await read(front, seq)
        terminal = front.follow(seq).terminal
        assert terminal is not None
        assert terminal.finish_reason == "cancelled"
        front.abort(seq)


async def test_a_refused_sequence_ends_its_log_and_its_batch_mates_run() -> None:
    gate = Gate()
    config = replace(SMALL, max_num_seqs=1, max_waiting=1)
    async with started(config=config, fault=gate) as front:
        seqs = [await front.prepare(request(f"r{i}")) for i in range(3)]
        refusals = front.admit(seqs)
        assert [type(refusal) for refusal in refusals] == [type(None), type(None), Overloaded]
        terminal = front.follow(seqs[2]).terminal
        assert terminal is not None
        assert terminal.error is not None
        assert terminal.error.code == "overloaded"
        gate.open()
        assert [await read(front, seq) for seq in seqs[:2]] == ["hello", "hello"]


async def test_a_bad_request_is_refused_when_it_is_prepared() -> None:
    async with started() as front:
        with pytest.raises(InvalidRequest):
            await front.prepare(request(prompt=""))
        with pytest.raises(InvalidRequest):
            await front.prepare(request(sampling=SamplingParams(stop_token_ids=(10**6,))))
        with pytest.raises(InvalidRequest):
            await front.prepare(request(), output_token_ids=[10**6])
        assert front.stats().refused_total == 3


async def test_a_request_is_continued_behind_what_was_answered_elsewhere() -> None:
    async with started() as front:
        seq = await front.prepare(request(), TOKENIZER.encode_prompt("hel"))
        assert front.admit([seq]) == [None]
        assert await read(front, seq) == "lo"
        assert front.follow(seq).deltas[0].seq == 3


async def test_a_fault_while_preparing_shows_an_incident_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> list[int]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(TOKENIZER, "encode_prompt", broken)
    async with started(lambda seq: "") as front:
        with pytest.raises(InternalError) as failure:
            await front.prepare(request())
    assert "secret" not in failure.value.message
    assert "secret detail" in caplog.text


async def test_the_event_loop_stays_free_while_the_engine_computes() -> None:
    gate = Gate()
    async with started(fault=gate) as front:
        seq = await front.prepare(request())
        front.admit([seq])
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        # The engine is inside a step, and this still runs.
        front.stats()
        gate.open()
        assert await read(front, seq) == "hello"


async def test_close_ends_the_logs_that_are_still_open() -> None:
    gate = Gate()
    async with started(fault=gate) as front:
        seq = await front.prepare(request())
        front.admit([seq])
        reading = asyncio.create_task(read(front, seq))
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        gate.open()
        await front.close()
        await reading
        assert front.follow(seq).terminal is not None


async def test_a_mock_answers_at_its_interval() -> None:
    slept: list[float] = []
    runner = ScriptedRunner(
        lambda seq: TOKENIZER.encode_prompt("hey"),
        TOKENIZER,
        EngineConfig(),
        token_interval_s=0.1,
        sleep=slept.append,
    )
    front = AsyncEngine(Engine(runner, TOKENIZER, EngineConfig()))
    await front.start()
    seq = await front.prepare(request())
    front.admit([seq])
    assert await read(front, seq) == "hey"
    await front.close()
    assert slept == [0.1] * 4
