"""Questions that mean the same at one time are computed once, on the real engine and cache."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from app.serving import Stream
from cache.budget import BudgetConfig, ErrorBudget
from deployments import wire
from deployments.embedder import Vector
from deployments.engine.sequence import Sequence
from protocol.request import InferenceRequest
from tests.app.stack import (
    InProcessCache,
    Stack,
    ask,
    echo,
    eventually,
    running_stack,
    terminal_of,
    whole_cache,
)
from tests.cache.test_decision import TRUSTED, verifier

TURN_ON, ENABLE, DISABLE = (f"How do I {verb} logs?" for verb in ("turn on", "enable", "disable"))
SAME = "how do i turn on logs"
VECTOR: Vector = np.eye(8, dtype=np.float32)[0]


async def embed(text: str) -> Vector | None:
    return VECTOR


class CountingCache:
    """A cache that gives paraphrases, and counts what was looked up."""

    def __init__(self, whole: InProcessCache) -> None:
        self._whole = whole
        self.replies: list[wire.LookupReply] = []

    async def lookup(self, payload: bytes) -> bytes:
        reply = await self._whole.lookup(payload)
        self.replies.append(wire.decode_lookup_reply(reply))
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def trusting() -> CountingCache:
    budget = ErrorBudget(BudgetConfig(check_rate=1.0), prior=TRUSTED)
    return CountingCache(whole_cache(embed, budget=budget, verifier=verifier()))


def hold(stack: Stack) -> None:
    """The model says nothing until it is let go."""
    stack.replicas[0].brake.stop_before(0)


def release(stack: Stack) -> None:
    stack.replicas[0].brake.release()


async def begin(stack: Stack, *requests: InferenceRequest) -> list[asyncio.Task[Stream]]:
    """Asks one after the other, each when the last one's look-up is over."""
    cache: Any = stack.cache
    opened = []
    for request in requests:
        num_before = len(cache.replies)
        opened.append(asyncio.create_task(stack.graph.open_stream(request)))
        await eventually(lambda before=num_before: len(cache.replies) > before)
    return opened


async def ends(opened: list[asyncio.Task[Stream]]) -> list[Stream]:
    streams = list(await asyncio.gather(*opened))
    for stream in streams:
        await terminal_of(stream.log)
    return streams


async def test_a_question_waits_for_the_answer_to_one_that_means_the_same() -> None:
    cache = trusting()
    async with running_stack(cache=cache) as stack:
        hold(stack)
        opened = await begin(stack, ask(TURN_ON), ask(ENABLE), ask(SAME), ask(DISABLE))
        assert not opened[1].done()
        release(stack)
        leader, reworded, same, other = await ends(opened)
        assert len(stack.replicas[0].submits) == 2
        assert reworded.log.text == same.log.text == leader.log.text
        assert other.log.text != leader.log.text
        assert [each.cache.outcome for each in (leader, reworded, same, other)] == [
            "miss", "coalesced", "coalesced", "miss"
        ]  # fmt: skip
        assert reworded.cache.similarity == 1.0
        assert reworded.cache.id == leader.cache.id
        assert stack.graph.own_stats().coalesced_total == 2
        # What the budget let pass is compared with an answer of its own, when there is time.
        await eventually(lambda: len(cache.checks) == 1)
        assert cache.checks[0][0].id == leader.cache.id


@pytest.mark.parametrize(
    "other",
    [
        ask(ENABLE, tenant="blue"),
        ask(ENABLE, max_tokens=9),
        ask(ENABLE, seed=3),
        ask(ENABLE, timeout_s=20.0),
        ask(ENABLE, priority=-5),
        ask(ENABLE, cache="bypass"),
        ask(ENABLE, cache="refresh"),
        ask(ENABLE, tools=[{"type": "function", "function": {"name": "f"}}]),
    ],
    ids=["tenant", "max_tokens", "seed", "timeout", "priority", "bypass", "refresh", "tools"],
)
async def test_whoever_differs_in_anything_else_is_computed(other: InferenceRequest) -> None:
    async with running_stack(cache=trusting()) as stack:
        hold(stack)
        (leader,) = await begin(stack, ask(TURN_ON))
        opened = asyncio.create_task(stack.graph.open_stream(other))
        await eventually(lambda: len(stack.replicas[0].submits) == 2)
        release(stack)
        await ends([leader, opened])


async def test_it_can_be_switched_off() -> None:
    async with running_stack(cache=trusting(), limits={"shares_by_meaning": False}) as stack:
        hold(stack)
        opened = await begin(stack, ask(TURN_ON), ask(SAME))
        await eventually(lambda: len(stack.replicas[0].submits) == 2)
        release(stack)
        assert [each.cache.outcome for each in await ends(opened)] == ["miss", "miss"]


async def test_a_leader_that_leaves_takes_nobodys_answer_along() -> None:
    async with running_stack(cache=trusting()) as stack:
        hold(stack)
        leading, following = await begin(stack, ask(TURN_ON), ask(ENABLE))
        (await leading).cancel()
        release(stack)
        (follower,) = await ends([following])
        assert follower.log.terminal is not None
        assert follower.log.terminal.finish_reason == "stop"
        assert follower.cache.outcome == "coalesced"
        assert len(stack.replicas[0].submits) == 1


async def test_who_waited_for_an_answer_that_fails_is_computed() -> None:
    def fault(seq: Sequence) -> Any:
        return "nan" if "turn on" in bytes(echo(seq)).decode() else None

    async with running_stack(cache=trusting(), fault=fault) as stack:
        hold(stack)
        opened = await begin(stack, ask(TURN_ON), ask(ENABLE))
        release(stack)
        leader, follower = await ends(opened)
        assert leader.log.terminal is not None
        assert leader.log.terminal.finish_reason == "error"
        assert follower.log.terminal is not None
        assert follower.log.terminal.finish_reason == "stop"
        assert "enable" in follower.log.text
        assert follower.cache.outcome == "miss"
        assert follower.cache.reason == "an answer that was waited for did not come"


async def test_equal_followers_share_too() -> None:
    async with running_stack(cache=trusting()) as stack:
        hold(stack)
        opened = await begin(stack, ask(TURN_ON), ask(ENABLE))
        opened.append(asyncio.create_task(stack.graph.open_stream(ask(ENABLE))))
        release(stack)
        streams = await ends(opened)
        assert len({stream.log.text for stream in streams}) == 1
        assert [stream.cache.outcome for stream in streams] == ["miss", "coalesced", "coalesced"]
        assert len(stack.replicas[0].submits) == 1


async def test_nobody_is_sent_to_an_answer_that_was_given_up() -> None:
    async with running_stack(cache=trusting()) as stack:
        hold(stack)
        (leading,) = await begin(stack, ask(TURN_ON))
        (await leading).cancel()
        opened = await begin(stack, ask(ENABLE), ask(SAME))
        release(stack)
        first, second = await ends(opened)
        cache: Any = stack.cache
        assert [reply.flight is not None for reply in cache.replies] == [False, False, True]
        assert [each.cache.outcome for each in (first, second)] == ["miss", "coalesced"]
        assert second.log.text == first.log.text
