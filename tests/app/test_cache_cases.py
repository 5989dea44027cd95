"""Known ways in which caches by meaning went wrong elsewhere, on a cache that trusts its verifier.

The embeddings are all alike and the error budget lets everything be served: what is told apart
here is told apart by keys and guards alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cache.budget import BAND_FLOORS, BudgetConfig, ErrorBudget, Evidence
from cache.verifier import Verifier
from deployments.embedder import Vector
from protocol.request import InferenceRequest, Message
from tests.app.stack import (
    InProcessCache,
    answer,
    ask,
    on_air,
    running_stack,
    terminal_of,
    whole_cache,
)

TRUSTED = tuple(Evidence(right=4000, wrong=0) for _ in BAND_FLOORS)
ALIKE: Vector = np.full(384, 1 / np.sqrt(384), dtype=np.float32)


async def embed(text: str) -> Vector | None:
    return ALIKE


def trusting() -> InProcessCache:
    budget = ErrorBudget(BudgetConfig(), prior=TRUSTED)
    return whole_cache(embed, budget=budget, verifier=Verifier.load())


async def test_the_cache_here_does_serve_other_words() -> None:
    async with running_stack(cache=trusting()) as stack:
        await answer(stack.graph, ask("How do I turn on automatic backups?"))
        other = await answer(stack.graph, ask("How do I enable automatic backups?"))
        assert other.cache.outcome == "semantic"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I turn on automatic backups?", "How do I turn off automatic backups?"),
        ("How do I turn on automatic backups?", "How do I disable automatic backups?"),
        ("How do I enable automatic backups?", "How do I disable automatic backups?"),
        ("What is 17 times 23?", "What is 17 times 28?"),
        ("Convert 5 miles to kilometres", "Convert 5 metres to kilometres"),
        ("What changed in Python 3.8?", "What changed in Python 3.9?"),
        ("Remind me in 10 minutes", "Remind me in 10 hours"),
        ("Explain what `git stash pop` does", "Explain what `git stash drop` does"),
        (
            "Write a Python function total_cost(items)",
            "Write a Python function total_count(items)",
        ),
        (
            "What does the option --max-age do in curl?",
            "What does the option --max-time do in curl?",
        ),
    ],
)
async def test_one_word_that_turns_the_answer_makes_a_miss_in_both_orders(
    one: str, other: str
) -> None:
    for first, second in ((one, other), (other, one)):
        async with running_stack(cache=trusting()) as stack:
            stored = await answer(stack.graph, ask(first))
            reply = await answer(stack.graph, ask(second))
            assert reply.cache.outcome == "miss"
            assert reply.log.text != stored.log.text
            assert (await answer(stack.graph, ask(first))).cache.outcome == "exact"


SURROUNDINGS: list[dict[str, Any]] = [
    {},
    {"system": "You are a pirate."},
    {"system": "You are a lawyer."},
    {"response_format": {"type": "json_object"}},
    {"tools": [{"type": "function", "function": {"name": "ride", "parameters": {}}}]},
]
BICYCLE = "Describe a bicycle in one sentence."


def in_surroundings(text: str, place: int) -> InferenceRequest:
    fields = dict(SURROUNDINGS[place])
    system = fields.pop("system", None)
    turns = [Message(role="user", content=text)]
    if system is not None:
        turns.insert(0, Message(role="system", content=system))
    return ask(messages=turns, **fields)


async def test_no_rewording_is_answered_from_other_surroundings() -> None:
    reworded = "Please describe a bicycle in one sentence!"
    for stored in (0, 1, 4):
        async with running_stack(cache=trusting()) as stack:
            await answer(stack.graph, in_surroundings(BICYCLE, stored))
            for asked in range(len(SURROUNDINGS)):
                if asked == 3:
                    continue  # needs a grammar, which scripted tokens do not follow
                reply = await stack.graph.open_stream(in_surroundings(reworded, asked))
                assert (reply.cache.outcome == "semantic") == (asked == stored)
                reply.cancel()


async def test_another_tenant_gets_neither_the_answer_nor_a_part_of_it() -> None:
    secret = "My account code is ORCHID-77. Please repeat the code back to me."
    async with running_stack(cache=trusting()) as stack:
        await answer(stack.graph, ask(secret, tenant="a"))
        for text in (
            secret,
            "My account code is. Please repeat the code back to me.",
            "Please repeat my account code back to me.",
        ):
            reply = await answer(stack.graph, ask(text, tenant="b"))
            assert reply.cache.outcome == "miss"
            assert reply.cache.similarity is None or text != secret
            assert ("ORCHID-77" in reply.log.text) == ("ORCHID-77" in text)


async def test_a_cut_answer_is_given_in_no_other_words() -> None:
    async with running_stack(cache=trusting()) as stack:
        short = await answer(stack.graph, ask("List the months of the year.", max_tokens=5))
        for text in ("List the months of the year.", "Please list the months of the year!"):
            reply = await answer(stack.graph, ask(text))
            assert reply.cache.outcome != "exact" or reply.log.text != short.log.text
            assert reply.log.next_seq > 5


async def test_a_picture_is_refused_and_leaves_nothing() -> None:
    async with running_stack(cache=trusting()) as stack, on_air(stack.graph) as site:
        for data in ("AAAA", "BBBB"):
            content = [
                {"type": "text", "text": "What is in this picture?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            ]
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
            reply = await site.http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"
        body = {
            "messages": [{"role": "user", "content": "What is in this picture?"}],
            "temperature": 0,
        }
        reply = await site.http.post("/v1/chat/completions", json=body)
        assert reply.headers["x-seedance-cache"].startswith("miss")


async def test_names_with_signs_hit_like_others_and_cause_no_errors() -> None:
    async with running_stack(cache=trusting()) as stack:
        for expected in ("miss", "exact"):
            reply = await answer(stack.graph, ask("Name a green vegetable.", tenant="team:eu/1"))
            assert reply.cache.outcome == expected
        assert stack.cache is not None
        (stats,) = await stack.cache.stats()
        assert (stats["errors"], stats["exact_hits"]) == (0, 1)


async def test_a_burst_is_one_generation_and_merges_no_other_tenant_or_seed() -> None:
    async with running_stack(cache=trusting(), token_interval_s=0.01) as stack:
        requests = [ask("Name a river.") for _ in range(20)]
        requests += [ask("Name a river.", tenant="blue") for _ in range(3)]
        requests += [ask("Name a river.", seed=7) for _ in range(3)]
        streams = await asyncio.gather(*map(stack.graph.open_stream, requests))
        for stream in streams:
            await terminal_of(stream.log)
        assert len(stack.replicas[0].submits) == 3
        assert len({stream.log.text for stream in streams[:20]}) == 1
