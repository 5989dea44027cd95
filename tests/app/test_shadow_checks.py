"""Shadow checks in the real graph: what is learnt of would-be hits, and that no user waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from app.front_cache import FrontCache
from cache.answer import StoredAnswer
from cache.budget import BAND_FLOORS, BudgetConfig, ErrorBudget, Evidence
from cache.decision import Verdict
from cache.outcome import Hit
from cache.verifier import NUM_WORDING_FEATURES, Verifier, Weights
from deployments import wire
from deployments.cache_audit import BLIND_S, MAX_UNSEEN, Audit
from deployments.embedder import Vector
from deployments.engine.sequence import Sequence
from tests.app.stack import (
    InProcessCache,
    Stack,
    answer,
    ask,
    echo,
    eventually,
    graph_over,
    running_stack,
    whole_cache,
)
from tests.protocol.fakes import FakeClock

ON, ENABLE = "How do I turn on logs?", "How do I enable logs?"
TRUSTED = tuple(Evidence(right=4000, wrong=0) for _ in BAND_FLOORS)
CHECKED = Verdict(
    action="serve", reason="", choice=0, score=0.99, is_checked=True, check_rate=1.0, category="red"
)
SIZE = 4
NEAR = {ON: (1.0, 0.0), ENABLE: (0.99, 0.1411)}


def verifier() -> Verifier:
    """Trusts whatever the guards let pass."""
    width = 2 * SIZE + NUM_WORDING_FEATURES
    return Verifier(
        Weights(
            mean=np.zeros(width, dtype=np.float32),
            scale=np.ones(width, dtype=np.float32),
            hidden=np.zeros((width, 1), dtype=np.float32),
            hidden_bias=np.zeros(1, dtype=np.float32),
            output=np.zeros(1, dtype=np.float32),
            output_bias=9.0,
            likeness=np.zeros(NUM_WORDING_FEATURES, dtype=np.float32),
            likeness_bias=0.0,
        )
    )


async def embed(text: str) -> Vector | None:
    """The two questions are near each other; all else, answers too, lies alike."""
    x, y = NEAR.get(text, (1.0, 0.0))
    return np.array([x, y, 0, 0], dtype=np.float32)


def a_cache(prior: Any = TRUSTED) -> InProcessCache:
    budget = ErrorBudget(BudgetConfig(), prior=prior)
    return whole_cache(embed, budget=budget, verifier=verifier())


def says(*answers: str) -> Callable[[Sequence], list[int]]:
    """The script that gives these answers, the last one for ever."""
    left = list(answers)
    known: dict[str, list[int]] = {}

    def script(seq: Sequence) -> list[int]:
        if seq.request_id not in known:
            known[seq.request_id] = list((left.pop(0) if len(left) > 1 else left[0]).encode())
        return known[seq.request_id]

    return script


async def checks_of(stack: Stack, count: int = 1) -> list[str]:
    assert stack.cache is not None
    cache = stack.cache
    await eventually(lambda: len(cache.checks) >= count, "the check was not made")
    return [found for _, found in cache.checks]


async def test_a_would_be_hit_is_checked_by_the_answer_that_the_model_gives_anyway() -> None:
    async with running_stack(says("Use the menu."), cache=a_cache(prior=())) as stack:
        await answer(stack.graph, ask(ON))
        shadow = await answer(stack.graph, ask(ENABLE))
        assert (shadow.cache.outcome, shadow.cache.reason is None) == ("miss", False)
        assert await checks_of(stack) == ["right"]
        assert stack.graph.own_stats().checks == {"free": 1}
        assert len(stack.replicas[0].submits) == 2, "it cost no generation"


async def test_a_served_hit_is_generated_too_at_the_lowest_priority_once_the_model_is_idle() -> (
    None
):
    async with running_stack(says("Use the menu."), cache=a_cache()) as stack:
        await answer(stack.graph, ask(ON))
        hit = await answer(stack.graph, ask(ENABLE))
        assert (hit.cache.outcome, hit.log.text) == ("semantic", "Use the menu.")
        assert await checks_of(stack) == ["right"]
        check = stack.replicas[0].submits[-1].request
        assert (check.priority, check.cache) == (-100, "bypass")
        assert stack.graph.own_stats().checks == {"run": 1}
        again = await answer(stack.graph, ask(ENABLE))
        assert again.cache.outcome == "semantic"


async def test_an_entry_that_is_proven_wrong_is_given_to_no_other_question() -> None:
    script = says("Takes 3 minutes.", "Takes 40 minutes.")
    async with running_stack(script, cache=a_cache()) as stack:
        await answer(stack.graph, ask(ON))
        wrong = await answer(stack.graph, ask(ENABLE))
        assert wrong.log.text == "Takes 3 minutes."
        assert await checks_of(stack) == ["wrong"]
        after = await answer(stack.graph, ask(ENABLE))
        assert (after.cache.outcome, after.log.text) == ("miss", "Takes 40 minutes.")


async def test_a_check_ends_when_a_request_comes() -> None:
    is_stored = False

    def script(seq: Sequence) -> list[int]:
        return list(b"~" * 3000) if is_stored else list(b"Use it.")

    async with running_stack(script, cache=a_cache(), token_interval_s=0.01) as stack:
        await answer(stack.graph, ask(ON))
        is_stored = True
        assert (await answer(stack.graph, ask(ENABLE))).cache.outcome == "semantic"
        await eventually(lambda: len(stack.replicas[0].submits) == 2, "the check did not start")
        user = await stack.graph.open_stream(ask("Who wrote Faust?"))
        await eventually(lambda: stack.graph.own_stats().checks.get("dropped_interrupted") == 1)
        user.cancel()
        await stack.until_idle()


async def test_a_busy_model_makes_no_checks_and_the_hit_does_not_wait() -> None:
    busy = False

    def script(seq: Sequence) -> list[int]:
        return list(b"~" * 3000) if busy else list(b"Use it.")

    async with running_stack(script, cache=a_cache(), token_interval_s=0.01) as stack:
        stack.graph._checks._patience_s = 0.3
        await answer(stack.graph, ask(ON))
        busy = True
        user = await stack.graph.open_stream(ask("Who wrote Faust?"))
        hits = [await answer(stack.graph, ask(ENABLE, timeout_s=60 + n)) for n in range(4)]
        assert {hit.cache.outcome for hit in hits} == {"semantic"}
        await eventually(lambda: stack.graph.own_stats().checks.get("dropped_busy") == 4)
        assert len(stack.replicas[0].submits) == 2
        user.cancel()


async def test_a_failing_cache_loses_the_check_and_nothing_else() -> None:
    class Deaf(InProcessCache):
        async def check(self, payload: bytes) -> bytes:
            raise ConnectionError("gone")

    whole = a_cache(prior=())
    cache = Deaf(whole._service, whole._admin)
    async with running_stack(echo, cache=cache) as stack:
        await answer(stack.graph, ask(ON))
        await answer(stack.graph, ask(ENABLE))
        await eventually(lambda: stack.graph.own_stats().checks.get("dropped_failed") == 1)


def test_a_check_survives_its_way_over_the_wire() -> None:
    check = wire.Check(id="a", action="serve", score=0.9, check_rate=0.5, category="c")
    call = wire.CheckCall(check=check, stored=b"1", given=b"2")
    assert wire.decode_check_call(wire.encode(call)) == call


async def test_while_no_check_can_be_made_what_needs_them_is_withheld() -> None:
    clock = FakeClock()
    cache = a_cache()
    cache._service.audit = audit = Audit(clock)
    async with running_stack(says("Use the menu."), cache=cache) as stack:
        await answer(stack.graph, ask(ON))
        for _ in range(MAX_UNSEEN + 1):
            audit.begin(
                Hit(StoredAnswer(b"", 0, ""), "semantic", "L2", 1.0, 0.0, "a", False, CHECKED)
            )
        clock.now += BLIND_S + 1
        withheld = await answer(stack.graph, ask(ENABLE))
        assert withheld.cache.reason == "answers given lately could not be checked"
        assert await checks_of(stack) == ["right"], "the request was the check"
        assert (await answer(stack.graph, ask("Please: " + ON))).cache.outcome != "exact"
        assert (await answer(stack.graph, ask(ON, max_tokens=99))).cache.outcome == "exact"
        assert not audit.is_blind


async def test_what_is_asked_often_in_the_same_wording_is_answered_by_the_ingress() -> None:
    front = FrontCache(2**20, 900, time.monotonic)
    async with running_stack(says("Use the menu."), cache=a_cache()) as stack:
        graph = graph_over(stack.model, stack.cache, stack.model.board, front=front)
        await answer(graph, ask(ON))
        tiers = []
        for _ in range(6):
            await asyncio.sleep(0.05)
            reply = await answer(graph, ask("how do i turn on logs"))
            tiers.append(reply.cache.tier)
            assert (reply.cache.outcome, bool(reply.cache.id)) == ("semantic", True)
        assert tiers[0] == "L2"
        assert tiers[-1] == "L1"
        for _ in range(4):
            assert (await answer(graph, ask(ENABLE))).cache.tier == "L2", "it is counted each time"
        await graph.close()
