"""Streams that outlive their replica and their ingress, on the real engine with scripted tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import app.takeover
from app.generation import Generation
from app.graph import Graph
from app.model_bus import MAX_REOPENS, TICK_S
from app.resume import ResumeTokens
from app.serving import Stream
from app.takeover import FIND_GRACE_S
from deployments.engine.scheduler import StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.model_service import BusLeases
from protocol.errors import Overloaded, ResumeExpired
from protocol.request import InferenceRequest
from protocol.token_log import Terminal, TokenLog
from tests.app.stack import (
    PATIENCE_S,
    InProcessReplica,
    Stack,
    ask,
    echo,
    eventually,
    graph_over,
    running_stack,
    talks_on,
    terminal_of,
)
from tests.protocol.fakes import FakeClock

WATCHDOG_S = 5.0
ANSWER = "Né 🙂 STO SToP STOP no"
"""Half characters and half stop strings at many of its places; the script echoes the prompt."""
POSITIONS = range(len(ANSWER[: ANSWER.index("STOP")].encode()) + 4)
"""Before every token of the answer up to the stop string."""
SHORT_LEASES = BusLeases(orphan_s=0.3, keep_s=0.3, renew_s=PATIENCE_S)


@pytest.fixture(autouse=True, scope="module")
def _short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.model_bus.REOPEN_BACKOFF_S", 0.0)
        patch.setattr("app.generation.RETRY_PAUSE_S", 0.01)
        yield


class NoiseRunner(ScriptedRunner):
    """Logits that hang on all tokens before and favour none, so that the seed alone decides."""

    def run(self, plan: StepPlan) -> torch.Tensor:
        logits = super().run(plan)
        for row, planned in zip(logits, plan.sampled_rows, strict=True):
            seq = planned.seq
            noise = torch.Generator()
            noise.manual_seed(hash((*seq.prompt_token_ids, *seq.output_token_ids)))
            row[:256] = torch.randn(256, generator=noise)
        return logits


def question(**fields: Any) -> InferenceRequest:
    return ask(prompt=ANSWER, cache="bypass", **{"stop": ("STOP",), **fields})


def long_question(**fields: Any) -> InferenceRequest:
    """Its answer, by `talks_on`, ends at its limit."""
    return ask("Talk.", **{"cache": "bypass", "max_tokens": 24, **fields})


def told(log: TokenLog) -> tuple[Any, ...]:
    """All that a client can see of an answer, but the time and what the replica had computed before."""
    terminal = log.terminal
    assert terminal is not None
    usage = msgspec.structs.replace(terminal.usage, cached_tokens=0)
    tokens = [token for delta in log.deltas for token in delta.token_ids]
    seqs = [delta.seq for delta in log.deltas]
    return log.text, tokens, seqs, terminal.finish_reason, usage, terminal.error


def num_told(log: TokenLog) -> int:
    return sum(len(delta.token_ids) for delta in log.deltas)


async def undisturbed(request: InferenceRequest, **stack: Any) -> TokenLog:
    async with running_stack(with_cache=False, **stack) as running:
        stream = await running.graph.open_stream(request)
        await terminal_of(stream.log)
        return stream.log


def brake_all(stack: Stack, position: int) -> None:
    for replica in stack.replicas:
        if not replica.is_dead:
            replica.brake.stop_before(position)


def release_others(stack: Stack, *held: InProcessReplica) -> None:
    for replica in stack.replicas:
        if replica not in held and not replica.is_dead:
            replica.brake.release()


def generation_of(graph: Graph, stream: Stream) -> Generation:
    generation = graph._live.find(stream.request.request_id)
    assert generation is not None
    return generation


def home_of(stack: Stack, stream: Stream, graph: Graph | None = None) -> InProcessReplica:
    return stack.model.replicas[generation_of(graph or stack.graph, stream).replica]


async def until_at(stack: Stack, stream: Stream, position: int, expected: TokenLog) -> None:
    """Waits until the braked engine has told all that it can tell before that token."""
    next_seq = max((d.seq + 1 for d in expected.deltas if d.seq < position), default=0)
    home = home_of(stack, stream)
    await eventually(lambda: home.num_live == 1 and stream.log.next_seq >= next_seq)


async def park(stack: Stack, stream: Stream) -> None:
    """Has nobody wait for a stream, and waits until nothing computes it."""
    stream.park()
    release_others(stack)
    await stack.until_idle()


async def parked_at(stack: Stack, position: int, expected: TokenLog) -> Stream:
    """The stream of a long question that rests before that token."""
    brake_all(stack, position)
    stream = await stack.graph.open_stream(long_question())
    await until_at(stack, stream, position, expected)
    await park(stack, stream)
    return stream


async def until_live(replica: InProcessReplica) -> None:
    await eventually(lambda: replica.num_live == 1)


async def until_moved(stack: Stack, stream: Stream, home: InProcessReplica) -> None:
    await eventually(lambda: stream.log.terminal or home_of(stack, stream) is not home)


def watch(stack: Stack, clock: FakeClock, seconds: float = WATCHDOG_S + 2 * TICK_S) -> None:
    """Lets time pass for the watchdog, while nothing else happens."""
    for _ in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        stack.graph._bus.tick(clock.now)


def only_one_end(log: TokenLog) -> Callable[[], int]:
    """Counts how often a log wakes its readers after its end."""
    ends: list[Terminal] = []
    log.subscribe(lambda: ends.append(log.terminal) if log.terminal else None)
    return lambda: len(ends)


# ------------------------------------------------------------------ at every position


@pytest.mark.parametrize("fault", ["kill", "hang", "cut"])
async def test_an_answer_survives_a_fault_at_any_of_its_tokens(fault: str) -> None:
    expected = await undisturbed(question())
    assert expected.text == "Né 🙂 STO SToP "
    clock = FakeClock()
    async with running_stack(
        num_replicas=len(POSITIONS) + 1,
        with_cache=False,
        limits={"clock": clock, "watchdog_s": WATCHDOG_S},
    ) as stack:
        for position in POSITIONS:
            before = stack.graph.own_stats().failovers_total
            brake_all(stack, position)
            stream = await stack.graph.open_stream(question())
            num_ends = only_one_end(stream.log)
            home = home_of(stack, stream)
            await until_at(stack, stream, position, expected)
            if fault == "kill":
                home.kill()
            elif fault == "hang":
                home.hang()
                watch(stack, clock)
            else:
                home.cut()
                home.brake.release()
            release_others(stack, home)
            await terminal_of(stream.log)
            assert told(stream.log) == told(expected), position
            assert stack.graph.own_stats().failovers_total - before == (fault != "cut"), position
            assert num_ends() == 1
            if fault != "cut":
                # Only what was not told yet is computed once more.
                (submit,) = (
                    submit
                    for replica in stack.replicas
                    for submit in replica.submits
                    if replica is not home
                    and submit.request.request_id == stream.request.request_id
                )
                assert submit.answered == tuple(d for d in expected.deltas if d.seq < position)
            if fault == "hang":
                # Nobody asks it any more, as if it had been killed at last.
                home.kill()
                stack.model.board.set_replicas(stack.model.board.replicas - {home.name})


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "drawn"])
async def test_an_answer_of_guessed_tokens_survives_a_kill_at_any_step(
    sampling: dict[str, Any],
) -> None:
    verse = "row row row your boat. "
    request = ask(prompt=verse * 3, cache="bypass", max_tokens=60, **sampling)
    expected = await undisturbed(request)
    positions = range(0, 60, 6)
    async with running_stack(
        num_replicas=len(positions) + 1, with_cache=False, speculative_tokens=5
    ) as stack:
        for position in positions:
            brake_all(stack, position)
            own = msgspec.structs.replace(request, request_id=f"g{position}")
            stream = await stack.graph.open_stream(own)
            home = home_of(stack, stream)
            await until_live(home)
            # A step gives several tokens, so it may stand further on than it was told to.
            await eventually(lambda s=stream, p=position: num_told(s.log) >= p)
            home.kill()
            release_others(stack)
            await terminal_of(stream.log)
            assert told(stream.log) == told(expected), position
        accepted = [replica.engine.stats().accepted_tokens_total for replica in stack.replicas]
        assert sum(accepted) > 100


async def test_a_sampled_answer_goes_on_with_the_draws_of_its_seed() -> None:
    request = question(temperature=1.0, stop=(), max_tokens=12)
    async with running_stack(num_replicas=14, with_cache=False, runner_type=NoiseRunner) as stack:
        for position in range(1, 12, 2):
            brake_all(stack, position)
            own = msgspec.structs.replace(request, request_id=f"s{position}")
            stream = await stack.graph.open_stream(own)
            home = home_of(stack, stream)
            await until_live(home)
            home.kill()
            release_others(stack)
            await terminal_of(stream.log)
            submits = [
                submit
                for replica in stack.replicas
                for submit in replica.submits
                if submit.request.request_id == own.request_id
            ]
            assert len(submits) == 2
            seeds = {submit.request.sampling.seed for submit in submits}
            assert len(seeds) == 1
            (seed,) = seeds
            assert seed is not None
            assert stream.request.sampling.seed is None
            same = question(temperature=1.0, stop=(), max_tokens=12, seed=seed)
            expected = await undisturbed(same, runner_type=NoiseRunner)
            assert told(stream.log) == told(expected)


async def test_two_sampled_requests_without_a_seed_get_two_answers() -> None:
    async with running_stack(with_cache=False, runner_type=NoiseRunner) as stack:
        texts = set()
        for _ in range(2):
            stream = await stack.graph.open_stream(question(temperature=1.0, max_tokens=12))
            await terminal_of(stream.log)
            texts.add(stream.log.text)
        assert len(texts) == 2


async def test_an_engine_that_makes_no_step_loses_its_streams_though_it_talks() -> None:
    expected = await undisturbed(question())
    async with running_stack(num_replicas=2, with_cache=False, limits={"watchdog_s": 1.0}) as stack:
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(question())
        home = home_of(stack, stream)
        release_others(stack, home)
        await terminal_of(stream.log)
        assert told(stream.log) == told(expected)
        assert stack.graph.own_stats().failovers_total == 1


async def test_a_stream_whose_bus_cannot_be_opened_comes_back_to_its_only_replica() -> None:
    expected = await undisturbed(question())
    async with running_stack(with_cache=False) as stack:
        (replica,) = stack.replicas
        brake_all(stack, 5)
        stream = await stack.graph.open_stream(question())
        await until_at(stack, stream, 5, expected)
        refusals = [True] * MAX_REOPENS
        replica.refuses_bus = lambda ingress: bool(refusals) and refusals.pop()
        replica.cut()
        await eventually(lambda: len(replica.submits) == 2)
        replica.brake.release()
        await terminal_of(stream.log)
        assert told(stream.log) == told(expected)
        await stack.until_idle()


# ------------------------------------------------------------------ many losses


async def test_any_number_of_losses_is_survived_while_there_is_progress() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with running_stack(talks_on, num_replicas=7, with_cache=False) as stack:
        brake_all(stack, 0)
        stream = await stack.graph.open_stream(long_question())
        for position in range(2, 14, 2):
            brake_all(stack, position)
            await until_at(stack, stream, position, expected)
            home_of(stack, stream).kill()
        release_others(stack)
        await terminal_of(stream.log)
        assert told(stream.log) == told(expected)
        assert stack.graph.own_stats().failovers_total == 6


async def test_too_many_losses_without_a_token_between_are_one_error() -> None:
    async with running_stack(
        talks_on, num_replicas=5, with_cache=False, limits={"max_failovers": 2}
    ) as stack:
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(long_question())
        num_ends = only_one_end(stream.log)
        await eventually(lambda: stream.log.next_seq == 3)
        for _ in range(3):
            home = home_of(stack, stream)
            await until_live(home)
            home.kill()
            await until_moved(stack, stream, home)
        terminal = await terminal_of(stream.log)
        assert terminal.finish_reason == "error"
        assert terminal.error is not None
        assert (terminal.error.code, terminal.error.retryable) == ("internal", True)
        assert terminal.usage.completion_tokens == stream.log.next_seq == 3
        assert terminal.usage.prompt_tokens > 0
        assert num_ends() == 1
        release_others(stack)
        await stack.until_idle()
        assert stream.log.next_seq == 3


async def test_without_any_replica_left_the_end_comes_in_time() -> None:
    async with running_stack(
        talks_on, with_cache=False, limits={"failover_timeout_s": 0.1}
    ) as stack:
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(long_question())
        stack.replicas[0].kill()
        terminal = await terminal_of(stream.log)
        assert terminal.error is not None
        assert (terminal.error.code, terminal.error.retryable) == ("overloaded", True)
        assert len(stack.graph._live) == 0


async def test_a_replica_that_comes_in_time_takes_the_stream() -> None:
    expected = await undisturbed(question())
    async with running_stack(num_replicas=2, with_cache=False) as stack:
        board = stack.model.board
        board.set_replicas(["m1"])
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(question())
        await until_at(stack, stream, 3, expected)
        release_others(stack)
        stack.replicas[0].kill()
        await eventually(lambda: not board.replicas)
        board.set_replicas(["m2"])
        await terminal_of(stream.log)
        assert told(stream.log) == told(expected)


# ------------------------------------------------------------------ full houses


@asynccontextmanager
async def full_house(
    num_replicas: int = 2, num_full: int = 2, **options: Any
) -> AsyncIterator[Stack]:
    """Replicas with a place for one, the first `num_full` of which have one."""
    async with running_stack(
        talks_on,
        num_replicas=num_replicas,
        with_cache=False,
        max_num_seqs=1,
        max_waiting=0,
        token_interval_s=0.002,
        **options,
    ) as stack:
        names = list(stack.model.replicas)
        for name in names[:num_full]:
            stack.model.board.set_replicas([name])
            await stack.graph.open_stream(long_question(max_tokens=4000))
        stack.model.board.set_replicas(names)
        yield stack


async def test_what_one_replica_refuses_another_takes() -> None:
    async with full_house(num_full=1) as stack:
        # The router thinks ill of the free one.
        stack.model.board.suspect("m2", PATIENCE_S)
        stream = await stack.graph.open_stream(long_question())
        assert home_of(stack, stream).name == "m2"
        assert [len(replica.submits) for replica in stack.replicas] == [2, 1]


async def test_a_full_house_is_told_at_once() -> None:
    async with full_house() as stack:
        with pytest.raises(Overloaded) as caught:
            await stack.graph.open_stream(long_question())
        assert caught.value.retry_after_s is not None
        assert [len(replica.submits) for replica in stack.replicas] == [2, 2]
        assert len(stack.graph._live) == 2
        for replica in stack.replicas:
            with pytest.raises(ResumeExpired):
                replica.service.attach(replica.submits[-1].request.request_id, "ingress-2")


async def test_one_who_was_promised_an_answer_waits_for_a_place() -> None:
    async with full_house() as stack:
        first, second = stack.graph._live
        stack.replicas[0].kill()
        await eventually(lambda: len(stack.replicas[1].submits) >= 3)
        assert first.log.terminal is None
        second.cancel()
        await eventually(lambda: first.replica == "m2")
        assert first.log.terminal is None


async def test_the_refusals_of_one_who_waits_for_a_place_are_no_losses() -> None:
    async with running_stack(
        talks_on,
        num_replicas=2,
        with_cache=False,
        max_num_seqs=1,
        max_waiting=1,
        token_interval_s=0.002,
    ) as stack:
        generations = []
        for name in ("m1", "m1", "m2", "m2"):
            stack.model.board.set_replicas([name])
            stream = await stack.graph.open_stream(long_question(max_tokens=4000))
            generations.append(generation_of(stack.graph, stream))
        stack.model.board.set_replicas(["m1", "m2"])
        begun, queued, running, waiting = generations
        await eventually(lambda: begun.log.next_seq)
        stack.replicas[0].kill()
        m2 = stack.replicas[1]

        def num_tries() -> int:
            return sum(submit.request.request_id == queued.name for submit in m2.submits)

        await eventually(lambda: num_tries() >= 3)
        for other in (begun, running, waiting):
            other.cancel()
        await eventually(lambda: queued.replica == "m2" and queued.log.next_seq > 20)
        assert queued.log.terminal is None
        assert queued.failovers == 1


# ------------------------------------------------------------------ limits of the request


async def test_the_time_of_a_request_runs_on_through_a_failover() -> None:
    clock = FakeClock()
    async with running_stack(
        talks_on, num_replicas=2, with_cache=False, limits={"clock": clock}
    ) as stack:
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(long_question(timeout_s=500.0))
        home = home_of(stack, stream)
        clock.now += 400
        release_others(stack, home)
        home.kill()
        terminal = await terminal_of(stream.log)
        (other,) = (replica for replica in stack.replicas if replica is not home)
        assert [submit.request.timeout_s for submit in home.submits] == [500.0]
        assert [submit.request.timeout_s for submit in other.submits] == [100.0]
        assert terminal.finish_reason == "length"
        assert terminal.timing.total_ms == pytest.approx(400_000)


async def test_a_request_whose_time_is_up_is_not_moved() -> None:
    clock = FakeClock()
    async with running_stack(
        talks_on, num_replicas=2, with_cache=False, limits={"clock": clock}
    ) as stack:
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(long_question(timeout_s=500.0))
        home = home_of(stack, stream)
        clock.now += 501
        home.kill()
        terminal = await terminal_of(stream.log)
        assert terminal.error is not None
        assert (terminal.error.code, terminal.error.limit) == ("timeout", 500.0)
        assert sum(len(replica.submits) for replica in stack.replicas) == 1


async def test_a_deadline_after_a_failover_is_the_one_that_was_asked_for() -> None:
    async with running_stack(
        talks_on, num_replicas=2, with_cache=False, token_interval_s=0.002
    ) as stack:
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(long_question(timeout_s=1.0, max_tokens=4000))
        home = home_of(stack, stream)
        release_others(stack, home)
        home.kill()
        terminal = await terminal_of(stream.log)
        assert terminal.error is not None
        assert (terminal.error.code, terminal.error.limit) == ("timeout", 1.0)
        assert "1 s, its timeout_s" in terminal.error.message
        assert stack.graph.own_stats().failovers_total == 1


# ------------------------------------------------------------------ another model


def _roll_out(stack: Stack, home: InProcessReplica) -> None:
    for replica in stack.replicas:
        if replica is not home:
            service = replica.service
            service.info = msgspec.structs.replace(service.info, revision="rev-2")


async def test_an_answer_does_not_go_on_with_another_model() -> None:
    async with running_stack(talks_on, num_replicas=2, with_cache=False) as stack:
        brake_all(stack, 3)
        stream = await stack.graph.open_stream(long_question())
        home = home_of(stack, stream)
        await eventually(lambda: stream.log.next_seq == 3)
        _roll_out(stack, home)
        release_others(stack, home)
        home.kill()
        terminal = await terminal_of(stream.log)
        assert terminal.error is not None
        assert (terminal.error.code, terminal.error.retryable) == ("internal", True)
        assert stream.log.next_seq == 3
        await stack.until_idle()
        assert stream.log.next_seq == 3


async def test_an_answer_that_has_not_begun_may_come_from_another_model() -> None:
    expected = await undisturbed(question())
    async with running_stack(num_replicas=2, with_cache=False) as stack:
        brake_all(stack, 0)
        stream = await stack.graph.open_stream(question())
        home = home_of(stack, stream)
        _roll_out(stack, home)
        release_others(stack, home)
        home.kill()
        await terminal_of(stream.log)
        assert told(stream.log) == told(expected)


# ------------------------------------------------------------------ cancels


async def test_a_cancel_while_it_is_moved_leaves_nothing_running() -> None:
    async with running_stack(
        talks_on, num_replicas=20, with_cache=False, token_interval_s=0.001
    ) as stack:
        for num_turns in range(0, 36, 2):
            stream = await stack.graph.open_stream(long_question(max_tokens=4000))
            await stream.log.cursor().wait()
            home_of(stack, stream).kill()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            stream.cancel()
            assert stream.log.terminal is not None
            assert stream.log.terminal.finish_reason == "cancelled"
            await stack.until_idle()
        assert len(stack.graph._live) == 0


async def test_a_cancel_reaches_a_replica_that_accepts_late() -> None:
    async with running_stack(
        talks_on, num_replicas=2, with_cache=False, token_interval_s=0.001
    ) as stack:
        stream = await stack.graph.open_stream(long_question(max_tokens=4000))
        home = home_of(stack, stream)
        (other,) = (replica for replica in stack.replicas if replica is not home)
        other.hang()
        home.kill()
        await eventually(lambda: "submit" in other.calls)
        stream.cancel()
        other.wake_up()
        await stack.until_idle()


# ------------------------------------------------------------------ those that come back


async def test_a_hung_replica_that_comes_back_changes_nothing_and_stops() -> None:
    expected = await undisturbed(long_question(max_tokens=400), script=talks_on)
    clock = FakeClock()
    async with running_stack(
        talks_on,
        num_replicas=2,
        with_cache=False,
        token_interval_s=0.001,
        leases=SHORT_LEASES,
        limits={"clock": clock, "watchdog_s": WATCHDOG_S},
    ) as stack:
        stream = await stack.graph.open_stream(long_question(max_tokens=400))
        await stream.log.cursor().wait()
        home = home_of(stack, stream)
        (other,) = (replica for replica in stack.replicas if replica is not home)
        home.hang()
        watch(stack, clock)
        await eventually(lambda: other.num_live == 1)
        home.wake_up()
        await terminal_of(stream.log)
        assert told(stream.log) == told(expected)
        await stack.until_idle()
        assert told(stream.log) == told(expected)


async def test_the_orphan_of_a_replica_that_came_back_is_stopped_by_the_next_link() -> None:
    clock = FakeClock()
    async with running_stack(
        talks_on,
        num_replicas=2,
        with_cache=False,
        token_interval_s=0.001,
        limits={"clock": clock, "watchdog_s": WATCHDOG_S},
    ) as stack:
        moved = await stack.graph.open_stream(long_question(max_tokens=4000))
        home = home_of(stack, moved)
        (other,) = (replica for replica in stack.replicas if replica is not home)
        home.hang()
        watch(stack, clock)
        await eventually(lambda: other.num_live == 1)
        home.wake_up()
        stack.model.board.set_replicas([home.name])
        second = await stack.graph.open_stream(long_question(max_tokens=4000))
        assert home_of(stack, second) is home
        await eventually(lambda: home.num_live == 1)
        assert moved.log.terminal is second.log.terminal is None


# ------------------------------------------------------------------ on another ingress


@asynccontextmanager
async def second_ingress(stack: Stack, **options: Any) -> AsyncIterator[Graph]:
    graph = graph_over(stack.model, None, stack.model.board, ingress="ingress-2", **options)
    try:
        yield graph
    finally:
        await graph.close()


@asynccontextmanager
async def two_ingresses(**options: Any) -> AsyncIterator[tuple[Stack, Graph]]:
    settings: dict[str, Any] = {"script": talks_on, "with_cache": False, "num_replicas": 2}
    async with (
        running_stack(**{**settings, **options}) as stack,
        second_ingress(stack) as other,
    ):
        yield stack, other


async def test_another_ingress_takes_a_stream_over_from_its_beginning() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        await until_at(stack, first, 5, expected)
        second = await other.resume_stream(first.token, "red")
        assert second.log.next_seq == 5
        assert second.token == first.token
        replaced = await terminal_of(first.log)
        assert replaced.error is not None
        assert replaced.error.code == "replaced"
        release_others(stack)
        await terminal_of(second.log)
        assert told(second.log) == told(expected)
        assert len(stack.graph._live) == len(other._live) == 0
        assert (stack.graph.own_stats().resumes_total, other.own_stats().resumes_total) == (0, 1)


@pytest.mark.parametrize("what", ["tenant", "forged", "key", "never", "empty"])
async def test_who_may_not_have_a_stream_learns_nothing(what: str) -> None:
    async with two_ingresses() as (stack, other):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        tenant, token = "red", first.token
        if what == "tenant":
            tenant = "blue"
        elif what == "forged":
            token = token[:-1] + ("A" if token[-1] != "A" else "B")
        elif what == "key":
            token = ResumeTokens(b"x" * 32).sign(first.request.request_id, "m1", "red")
        elif what == "never":
            token = ResumeTokens(b"k" * 32).sign("never", "m1", "red")
        else:
            token = ""
        with pytest.raises(ResumeExpired) as caught:
            await other.resume_stream(token, tenant)
        assert str(caught.value).startswith("there is no such stream")
        assert first.log.terminal is None
        assert len(other._live) == 0


async def test_a_token_finds_its_stream_after_a_failover() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        await until_at(stack, first, 5, expected)
        home = home_of(stack, first)
        home.kill()
        await eventually(lambda: home_of(stack, first) is not home)
        second = await other.resume_stream(first.token, "red")
        assert second.log.next_seq == 5
        release_others(stack)
        await terminal_of(second.log)
        assert told(second.log) == told(expected)


async def test_a_replica_that_hangs_does_not_hide_the_stream_of_another() -> None:
    clock = FakeClock()
    async with (
        running_stack(
            talks_on,
            num_replicas=2,
            with_cache=False,
            limits={"clock": clock, "watchdog_s": WATCHDOG_S},
        ) as stack,
        second_ingress(stack) as other,
    ):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        home = home_of(stack, first)
        home.hang()
        watch(stack, clock)
        await eventually(lambda: home_of(stack, first) is not home)
        second = await other.resume_stream(first.token, "red")
        assert home_of(stack, second, other) is not home
        assert "attach" not in home.calls


async def test_a_stream_that_was_taken_over_survives_the_loss_of_its_replica_too() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        await until_at(stack, first, 5, expected)
        second = await other.resume_stream(first.token, "red")
        home = home_of(stack, second, other)
        release_others(stack, home)
        home.kill()
        await terminal_of(second.log)
        assert told(second.log) == told(expected)
        assert other.own_stats().failovers_total == 1


async def test_the_end_can_be_fetched_for_a_while() -> None:
    async with two_ingresses(leases=SHORT_LEASES) as (stack, other):
        first = await stack.graph.open_stream(long_question())
        await terminal_of(first.log)
        second = await other.resume_stream(first.token, "red")
        assert told(second.log) == told(first.log)
        assert len(other._live) == 0
        await eventually(
            lambda: (
                not any(one.service._hub.has(first.request.request_id) for one in stack.replicas)
            )
        )
        with pytest.raises(ResumeExpired):
            await other.resume_stream(first.token, "red")


async def test_the_time_of_a_request_runs_on_through_a_take_over() -> None:
    async with two_ingresses() as (stack, other):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question(timeout_s=500.0))
        second = await other.resume_stream(first.token, "red")
        home = home_of(stack, second, other)
        release_others(stack, home)
        home.kill()
        await terminal_of(second.log)
        (left_s,) = (
            submit.request.timeout_s
            for replica in stack.replicas
            for submit in replica.submits
            if submit.ingress == "ingress-2"
        )
        assert left_s is not None
        assert left_s < 500.0


async def test_two_who_fetch_a_stream_at_the_same_moment_get_the_same() -> None:
    async with two_ingresses() as (stack, other):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        both = await asyncio.gather(*(other.resume_stream(first.token, "red") for _ in range(2)))
        release_others(stack)
        for stream in both:
            assert (await terminal_of(stream.log)).finish_reason == "length"
        assert other.own_stats().resumes_total == 1


async def test_one_who_comes_back_to_the_same_ingress_gets_the_same_stream() -> None:
    async with running_stack(talks_on, with_cache=False) as stack:
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        await eventually(lambda: first.log.next_seq == 5)
        again = await stack.graph.resume_stream(first.token, "red")
        release_others(stack)
        await terminal_of(again.log)
        assert told(again.log) == told(first.log)
        assert len(stack.replicas[0].submits) == 1


async def test_a_stream_that_nobody_comes_for_stops_within_its_lease() -> None:
    async with running_stack(
        talks_on, num_replicas=2, with_cache=False, token_interval_s=0.001, leases=SHORT_LEASES
    ) as stack:
        for _ in range(3):
            await stack.graph.open_stream(long_question(max_tokens=4000))
        await eventually(lambda: stack.num_live == 3)
        await stack.graph.close()
        await stack.until_idle()


async def test_an_ingress_that_was_cut_off_does_not_take_a_stream_back() -> None:
    async with two_ingresses(
        num_replicas=1, token_interval_s=0.001, limits={"max_failovers": 10**6}
    ) as (stack, other):
        first = await stack.graph.open_stream(long_question(max_tokens=4000))
        await first.log.cursor().wait()
        (replica,) = stack.replicas
        # The cut is between this ingress and the replica; another one gets through.
        replica.refuses_bus = lambda ingress: ingress == "ingress-1"
        replica.cut()
        await eventually(lambda: len(replica.submits) >= 3)
        second = await other.resume_stream(first.token, "red")
        terminal = await terminal_of(first.log)
        assert terminal.error is not None
        assert terminal.error.code == "replaced"
        have = second.log.next_seq
        await eventually(lambda: second.log.next_seq > have + 10)
        assert replica.num_live == 1


# ------------------------------------------------------------------ equal requests


async def test_equal_requests_at_one_moment_are_one_generation() -> None:
    truth = await undisturbed(ask("Count."))
    async with running_stack() as stack:
        requests = [
            *(ask("Count.") for _ in range(20)),
            *(ask("Count.", tenant="blue") for _ in range(3)),
            *(ask("Count.", seed=7) for _ in range(3)),
        ]
        streams = await asyncio.gather(*map(stack.graph.open_stream, requests))
        for stream in streams:
            terminal = await terminal_of(stream.log)
            assert stream.log.text == truth.text
            assert terminal.finish_reason == "stop"
            assert terminal.usage == truth.terminal.usage  # type: ignore[union-attr]
        outcomes = [stream.cache.outcome for stream in streams]
        assert outcomes.count("miss") == 3
        assert outcomes.count("coalesced") == 23
        assert len({stream.request.request_id for stream in streams}) == len(streams)
        assert len({stream.token for stream in streams}) == len(streams)
        num_tokens = truth.terminal.usage.completion_tokens  # type: ignore[union-attr]
        assert stack.num_generated == 3 * num_tokens
        assert stack.graph._flights.coalesced_total == 23


async def test_one_who_joins_late_gets_the_beginning_too() -> None:
    async with running_stack(num_replicas=2) as stack:
        brake_all(stack, 6)
        first = await stack.graph.open_stream(ask("Count."))
        await eventually(lambda: first.log.next_seq == 6)
        late = await stack.graph.open_stream(ask("Count."))
        assert late.log.next_seq == 6
        # One generation, moved for both of them.
        home = next(replica for replica in stack.replicas if replica.num_live)
        release_others(stack, home)
        home.kill()
        await terminal_of(first.log)
        await terminal_of(late.log)
        assert first.log.deltas == late.log.deltas
        assert stack.graph.own_stats().failovers_total == 1


async def test_those_who_rode_along_go_on_when_the_first_moves_to_another_ingress() -> None:
    truth = await undisturbed(ask("Count."))
    async with two_ingresses(script=echo, num_replicas=1) as (stack, other):
        brake_all(stack, 6)
        first = await stack.graph.open_stream(ask("Count."))
        rider = await stack.graph.open_stream(ask("Count."))
        await eventually(lambda: rider.log.next_seq == 6)
        moved = await other.resume_stream(first.token, "red")
        await eventually(lambda: stack.num_live == 2)
        first.cancel()
        release_others(stack)
        await terminal_of(moved.log)
        await terminal_of(rider.log)
        assert moved.log.text == rider.log.text == truth.text
        assert rider.log.terminal is not None
        assert rider.log.terminal.finish_reason == "stop"


# ------------------------------------------------------------------ whatever happens

PROMPTS = ("Né 🙂 one", "two STO SToP two", "three three three")
ACTION = st.one_of(
    st.tuples(st.sampled_from(["kill", "cut", "hang", "wake"]), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("advance"), st.integers(1, 6)),
    st.tuples(st.just("watch"), st.sampled_from([1, 6])),
    st.tuples(st.just("yield"), st.integers(1, 20)),
)


def _chaotic(prompt: str) -> InferenceRequest:
    return ask(prompt=prompt, cache="bypass", stop=("STOP",))


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTION, max_size=24))
def test_every_stream_ends_once_and_as_if_nothing_had_been(
    actions: list[tuple[str, int]],
) -> None:
    asyncio.run(_run_chaos(actions))


EXPECTED: dict[str, tuple[Any, ...]] = {}


async def _run_chaos(actions: list[tuple[str, int]]) -> None:
    for prompt in PROMPTS if not EXPECTED else ():
        EXPECTED[prompt] = told(await undisturbed(_chaotic(prompt)))
    clock = FakeClock()
    limits = {"clock": clock, "watchdog_s": WATCHDOG_S, "max_failovers": 1000}
    async with running_stack(num_replicas=3, with_cache=False, limits=limits) as stack:
        position = 0
        brake_all(stack, position)
        streams = [await stack.graph.open_stream(_chaotic(prompt)) for prompt in PROMPTS]
        num_ends = [only_one_end(stream.log) for stream in streams]
        hung: set[InProcessReplica] = set()
        for what, number in actions:
            if what == "cancel":
                streams[number].cancel()
            elif what == "advance":
                position += number
            elif what == "watch":
                watch(stack, clock, number)
            elif what == "yield":
                for _ in range(number):
                    await asyncio.sleep(0)
            else:
                _harm(stack, stack.replicas[number], what, hung)
            for replica in stack.replicas:
                if not replica.is_dead and replica not in hung:
                    replica.brake.stop_before(position)
        for replica in stack.replicas:
            if not replica.is_dead:
                replica.wake_up()
        for stream in streams:
            await terminal_of(stream.log)
        for stream, prompt, count in zip(streams, PROMPTS, num_ends, strict=True):
            assert count() == 1
            seqs = [delta.seq for delta in stream.log.deltas]
            assert all(one < two for one, two in itertools.pairwise(seqs))
            terminal = stream.log.terminal
            assert terminal is not None
            if terminal.finish_reason == "cancelled":
                assert EXPECTED[prompt][0].startswith(stream.log.text)
            else:
                assert told(stream.log) == EXPECTED[prompt]
        assert len(stack.graph._live) == 0


def _harm(stack: Stack, replica: InProcessReplica, what: str, hung: set[InProcessReplica]) -> None:
    if replica.is_dead:
        return
    if what == "kill":
        if sum(not other.is_dead for other in stack.replicas) > 1:
            replica.wake_up()
            hung.discard(replica)
            replica.kill()
    elif what == "cut":
        replica.cut()
    elif what == "hang":
        replica.hang()
        hung.add(replica)
    else:
        replica.wake_up()
        hung.discard(replica)


# ------------------------------------------------------------------ nobody waits


@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_a_parked_stream_costs_nothing_and_goes_on_where_it_was(cut: int) -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, _):
        brake_all(stack, cut)
        stream = await stack.graph.open_stream(long_question())
        await until_at(stack, stream, cut, expected)
        stream.park()
        await park(stack, stream)
        assert stream.log.terminal is None
        stream.unpark()
        stream.unpark()
        await terminal_of(stream.log)
        assert told(stream.log) == told(expected)
        assert stack.graph.own_stats().failovers_total == 0
        assert len(stack.graph._live) == 0


async def test_a_parked_stream_goes_on_at_another_ingress() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        first = await parked_at(stack, 5, expected)
        second = await other.resume_stream(first.token, "red")
        await terminal_of(second.log)
        assert told(second.log) == told(expected)


async def test_a_shared_generation_rests_only_when_all_its_riders_do() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, _):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question(cache="auto"))
        second = await stack.graph.open_stream(long_question(cache="auto"))
        assert second.cache.outcome == "coalesced"
        await until_at(stack, first, 5, expected)
        first.park()
        await asyncio.sleep(0.05)
        assert sum(replica.num_live for replica in stack.replicas) == 1
        await park(stack, second)
        second.unpark()
        await terminal_of(second.log)
        assert told(second.log)[0] == told(expected)[0]


async def test_a_parked_stream_that_is_cancelled_is_over() -> None:
    async with two_ingresses() as (stack, _):
        brake_all(stack, 5)
        stream = await stack.graph.open_stream(long_question())
        stream.park()
        stream.cancel()
        stream.unpark()
        assert stream.log.terminal is not None
        assert stream.log.terminal.finish_reason == "cancelled"
        release_others(stack)
        await stack.until_idle()


async def test_the_newest_copy_of_a_stream_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may take its time to tell of the newest.
    monkeypatch.setattr(app.takeover, "FIND_GRACE_S", PATIENCE_S)
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        first = await parked_at(stack, 5, expected)
        former = home_of(stack, first)
        brake_all(stack, 12)
        # Busy as it is, it would not be chosen again; its copy stays, and the token names it.
        stack.model.board.charge(former.name, 1_000_000)
        first.unpark()
        await eventually(lambda: home_of(stack, first) is not former)
        await until_at(stack, first, 12, expected)
        second = await other.resume_stream(first.token, "red")
        assert second.log.next_seq == 12
        # Whoever followed another copy hears of it, and the old one is gone.
        assert (await terminal_of(first.log)).error is not None
        assert not former.service.find(first.request.request_id)
        release_others(stack)
        await terminal_of(second.log)
        assert told(second.log) == told(expected)


async def test_a_replica_that_does_not_answer_hardly_delays_a_resume() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        brake_all(stack, 5)
        first = await stack.graph.open_stream(long_question())
        await until_at(stack, first, 5, expected)
        home = home_of(stack, first)
        bystander = next(replica for replica in stack.replicas if replica is not home)
        bystander.hang()
        release_others(stack, bystander)
        async with asyncio.timeout(10 * FIND_GRACE_S):
            second = await other.resume_stream(first.token, "red")
        bystander.wake_up()
        await terminal_of(second.log)
        assert told(second.log) == told(expected)


@pytest.mark.parametrize("comes_back", ["here", "there"])
async def test_a_client_that_leaves_while_its_stream_is_being_moved_can_come_back(
    comes_back: str,
) -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        first = await parked_at(stack, 5, expected)
        brake_all(stack, 9)
        # The submission is on its way and nowhere yet; it must not be lost with what it replaces.
        first.unpark()
        await asyncio.sleep(0)
        first.park()
        assert first.log.terminal is None
        await eventually(lambda: sum(len(replica.submits) for replica in stack.replicas) == 2)
        await stack.until_idle()
        release_others(stack)
        graph = stack.graph if comes_back == "here" else other
        second = await graph.resume_stream(first.token, "red")
        await terminal_of(second.log)
        assert told(second.log) == told(expected)


async def test_a_parked_stream_that_another_ingress_took_is_over_here_and_can_come_back() -> None:
    expected = await undisturbed(long_question(), script=talks_on)
    async with two_ingresses() as (stack, other):
        first = await parked_at(stack, 5, expected)
        brake_all(stack, 9)
        second = await other.resume_stream(first.token, "red")
        gone = await terminal_of(first.log)
        assert gone.error is not None
        assert gone.error.code == "replaced"
        assert stack.graph._live.find(first.request.request_id) is None
        await eventually(lambda: second.log.next_seq >= 8)
        await park(stack, second)
        third = await stack.graph.resume_stream(first.token, "red")
        assert third.log.next_seq >= 8
        await terminal_of(third.log)
        assert told(third.log) == told(expected)
