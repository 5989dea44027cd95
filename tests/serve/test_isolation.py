"""Two tenants in one cache: nothing of the one reaches the other, not even by the time it takes."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from cache.budget import BAND_FLOORS, BudgetConfig, ErrorBudget, Evidence
from cache.config import CacheConfig
from cache.decision import Decider
from cache.prompt_cache import PromptCache
from cache.verifier import Verifier
from deployments.cache_service import CacheService
from deployments.embedder import Vector
from deployments.wire import LookupCall, StoreCall, StoredStream, encode
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import Terminal, TokenDelta

NUM_PROBES = 1000
TRUSTED = tuple(Evidence(right=4000, wrong=0) for _ in BAND_FLOORS)
"""All that the guards let pass may be served."""
SIZE = 384


async def embed(text: str) -> Vector | None:
    """Every text is like every other, and no text is the same as another."""
    rng = np.random.default_rng(abs(hash(text)))
    vector = np.ones(SIZE, dtype=np.float32) + rng.normal(0, 0.05, SIZE).astype(np.float32)
    return vector / np.float32(np.linalg.norm(vector))


def a_service() -> CacheService:
    decider = Decider(
        budget=ErrorBudget(BudgetConfig(), prior=TRUSTED),
        verifier=Verifier.load(),
        rng=random.Random(0),
    )
    config = CacheConfig(max_bytes=2**30, cold_max_bytes=2**28)
    cache = PromptCache(config, clock=time.monotonic, decider=decider)
    return CacheService(cache, embed=embed, embedder_revision="e", epoch=0, embed_timeout_s=30.0)


def request(text: str, tenant: str, system: str | None = None) -> InferenceRequest:
    turns = [Message(role="user", content=text)]
    if system is not None:
        turns.insert(0, Message(role="system", content=system))
    return InferenceRequest(
        request_id="r",
        tenant=tenant,
        model="m",
        messages=tuple(turns),
        sampling=SamplingParams(temperature=0.0),
    )


def call_of(asked: InferenceRequest) -> LookupCall:
    return LookupCall(request=asked, model_revision="rev-1")


async def store(service: CacheService, asked: InferenceRequest, answer: str) -> None:
    stored = StoredStream(
        deltas=(TokenDelta(0, answer, (1,)),), terminal=Terminal(finish_reason="stop")
    )
    call = StoreCall(
        request=asked, model_revision="rev-1", completion_tokens=1, stored=encode(stored)
    )
    service.store(call)
    await service.settle()


def questions() -> Iterator[tuple[str, str | None]]:
    """Plain, reworded, private and strange ones, some under a system prompt."""
    kinds = (
        "What is the capital of country {n}?",
        "My account code is ORCHID-{n}. Please repeat it.",
        "How do I turn on backup {n}?",
        "tenant:red|blue* question {n} }} @x:{{",
        "解释第{n}条规则。",
    )
    for number in range(NUM_PROBES):
        system = None if number % 3 else "You are red's own assistant."
        yield kinds[number % len(kinds)].format(n=number), system


async def test_a_thousand_probes_of_one_tenant_find_nothing_of_the_other() -> None:
    service = a_service()
    asked = list(questions())
    for text, system in asked:
        await store(service, request(text, "red", system), f"red's answer to {text}")
    hits = []
    for text, system in asked:
        for probe in (text, text.lower(), f"Please, {text}"):
            reply = await service.lookup(call_of(request(probe, "blue", system)))
            if reply.stored is not None or reply.check is not None:
                hits.append(probe)
            assert reply.outcome.similarity is None, "nor how near it is"
    assert hits == []
    again = await service.lookup(call_of(request(asked[0][0], "red", asked[0][1])))
    assert again.outcome.outcome == "exact", "there was something to find"


def auc(one: list[int], other: list[int]) -> float:
    """Probability that one of the first is greater than one of the second."""
    values = np.array([*one, *other], dtype=np.float64)
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values):
        tied = values == value
        ranks[tied] = ranks[tied].mean()
    above = ranks[: len(one)].sum() - len(one) * (len(one) + 1) / 2
    return float(above / (len(one) * len(other)))


@pytest.mark.parametrize(
    "has_own",
    [
        pytest.param(False, id="an empty tenant"),
        pytest.param(True, id="one with answers of its own"),
    ],
)
async def test_the_time_of_a_look_up_does_not_tell_what_another_tenant_asked(
    has_own: bool,
) -> None:
    """CPU time, so that nobody else's load counts; known and unknown questions take turns."""
    service = a_service()
    texts = [f"How do I {verb} backup {n}?" for n in range(400) for verb in ("begin", "end")]
    random.Random(1).shuffle(texts)
    known, unknown = texts[::2], texts[1::2]
    for text in known:
        await store(service, request(text, "red"), "x")
        # Asked in other words too, so that all that is remembered of a question is.
        await service.lookup(call_of(request(f"Please: {text}", "red")))
        await service.lookup(call_of(request(text.replace("backup", "a backup"), "red")))
    if has_own:
        for n in range(8):
            await store(service, request(f"How do I check backup number {n}?", "blue"), "y")
    took: dict[str, list[int]] = {"known": [], "unknown": []}
    gc.disable()
    try:
        for pair in zip(known, unknown, strict=True):
            for kind, text in sorted(zip(took, pair, strict=True), key=lambda _: random.random()):
                call = call_of(request(text.replace("backup", "a backup"), "blue"))
                before = time.thread_time_ns()
                await service.lookup(call)
                took[kind].append(time.thread_time_ns() - before)
    finally:
        gc.enable()
    assert abs(auc(took["known"], took["unknown"]) - 0.5) <= 0.05
