"""A prompt that is still being written goes ahead to the replica that its request will go to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments import wire
from deployments.prompt_chain import BLOCK_CHARS
from protocol.request import InferenceRequest
from tests.app.stack import (
    PATIENCE_S,
    InProcessReplica,
    Stack,
    ask,
    eventually,
    graph_over,
    running_stack,
    talks_on,
    terminal_of,
)

TEXT = "A question that takes its author some time to write, with all that belongs to it. " * 8
CUTS = (150, 260, 420, 600)


def question(text: str = TEXT, **fields: Any) -> InferenceRequest:
    return ask(prompt=text, **{"max_tokens": 4, "cache": "bypass", **fields})


def warmed(stack: Stack) -> list[InProcessReplica]:
    """Those that were asked to compute ahead."""
    return [replica for replica in stack.replicas if replica.warm_ups]


def num_ahead(replica: InProcessReplica) -> int:
    return replica.engine.stats().warm_up_tokens_total


async def test_all_pieces_and_the_request_itself_go_to_one_replica() -> None:
    async with running_stack(num_replicas=3) as stack:
        for cut in CUTS:
            await stack.graph.warm(question(TEXT[:cut]))
        stream = await stack.graph.open_stream(question())
        terminal = await terminal_of(stream.log)
        (home,) = warmed(stack)
        assert len(home.warm_ups) == len(CUTS)
        assert len(home.submits) == 1
        assert terminal.usage.cached_tokens == num_ahead(home) > CUTS[-1] - 40


async def test_a_chat_is_warmed_with_all_that_was_said_before() -> None:
    async with running_stack(max_model_len=8192) as stack:
        await stack.graph.warm(ask(TEXT[:500], cache="bypass"))
        stream = await stack.graph.open_stream(ask(TEXT, cache="bypass", max_tokens=4))
        terminal = await terminal_of(stream.log)
        assert terminal.usage.cached_tokens == num_ahead(stack.replicas[0]) > 450


async def test_the_answer_is_the_same_as_without() -> None:
    answers = []
    for cuts in ((), CUTS):
        async with running_stack() as stack:
            for cut in cuts:
                await stack.graph.warm(question(TEXT[:cut]))
            stream = await stack.graph.open_stream(question(max_tokens=900))
            terminal = await terminal_of(stream.log)
            assert terminal.finish_reason == "stop"
            answers.append([stream.log.text, stream.log.deltas])
    assert answers[0] == answers[1]


async def test_a_much_busier_replica_is_left() -> None:
    async with running_stack(num_replicas=2) as stack:
        await stack.graph.warm(question(TEXT[:300]))
        (home,) = warmed(stack)
        stack.model.board.set_load(home.name, wire.Load(running=1, tokens=10**6))
        await stack.graph.warm(question(TEXT[:600]))
        assert len(warmed(stack)) == 2


async def test_it_is_no_request_for_the_cache_the_counters_or_the_bus() -> None:
    async with running_stack() as stack:
        await stack.graph.warm(ask(TEXT))
        assert stack.cache is not None
        assert (await stack.cache.stats())[0]["misses"] == 0
        assert set(stack.replicas[0].calls) == {"warm"}
        assert stack.graph.own_stats().routing == {"prefix": 0, "overflow": 0, "other": 0}
        stats = stack.engine.stats()
        assert (stats.running, stats.waiting, stats.finished_total) == (0, 0, {})
        await stack.until_idle()


@pytest.mark.parametrize(
    "request_", [question(model="maker/other"), question(cache="only")], ids=["model", "cache"]
)
async def test_what_no_replica_will_answer_is_not_computed(request_: InferenceRequest) -> None:
    async with running_stack() as stack:
        await stack.graph.model_info()
        await stack.graph.warm(request_)
        assert warmed(stack) == []


@pytest.mark.parametrize(
    "text", ["", "x" * 10_000, "half a pair \ud800"], ids=["empty", "too long", "no Unicode"]
)
async def test_a_prompt_that_cannot_run_is_no_error_yet(text: str) -> None:
    async with running_stack() as stack:
        await stack.graph.warm(question(text))
        assert num_ahead(stack.replicas[0]) == 0


async def test_a_dead_replica_is_passed_over_and_none_at_all_is_no_error() -> None:
    async with running_stack(num_replicas=2) as stack:
        await stack.graph.warm(question(TEXT[:300]))
        (first,) = warmed(stack)
        first.kill()
        await stack.graph.warm(question(TEXT[:600]))
        (second,) = (replica for replica in warmed(stack) if replica is not first)
        assert num_ahead(second) > 560
        second.kill()
        await stack.graph.warm(question())


async def test_a_replica_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.model_desk.WARM_TIMEOUT_S", 0.05)
    async with running_stack() as stack:
        stack.replicas[0].hang()
        await stack.graph.warm(question())
        stack.replicas[0].wake_up()
        await stack.graph.warm(question())


async def test_whatever_the_call_raises_is_no_error() -> None:
    class Broken:
        async def warm(self, payload: bytes, route: wire.Route) -> None:
            raise ValueError("whatever")

    await graph_over(Broken(), None).warm(question())  # type: ignore[arg-type]


async def test_a_cancelled_call_stops_the_work() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        replica.brake.stop_before(0)
        warming = asyncio.create_task(stack.graph.warm(question()))
        await eventually(lambda: stack.runner.held)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        replica.brake.release()
        await stack.until_idle()
        assert num_ahead(replica) < 200, "of over 600"


async def test_the_request_does_not_wait_for_its_own_warm_up() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        replica.brake.stop_before(0)
        warming = asyncio.create_task(stack.graph.warm(question(TEXT[:600])))
        await eventually(lambda: stack.runner.held)
        opening = asyncio.create_task(stack.graph.open_stream(question()))
        await eventually(lambda: replica.num_live == 1)
        replica.brake.release()
        async with asyncio.timeout(PATIENCE_S):
            await warming
        terminal = await terminal_of((await opening).log)
        assert terminal.usage.cached_tokens == num_ahead(replica) < 200
        await stack.until_idle()


async def test_a_stream_goes_on_beside_many_that_write() -> None:
    async with running_stack(talks_on, max_num_seqs=4) as stack:
        stream = await stack.graph.open_stream(question("Talk.", max_tokens=200))
        writers = [
            stack.graph.warm(question(f"{number}" * (5 * BLOCK_CHARS))) for number in range(8)
        ]
        await asyncio.gather(*writers)
        terminal = await terminal_of(stream.log)
        assert (terminal.finish_reason, terminal.usage.completion_tokens) == ("length", 200)
        await stack.until_idle()
