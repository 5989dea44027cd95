"""The prompt cache as a service: whatever the embedder does, a look-up answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from cache.prompt_cache import CacheConfig, PromptCache
from deployments.cache_service import CacheService
from deployments.embedder import Vector
from deployments.wire import LookupCall, LookupReply, StoreCall
from protocol.request import InferenceRequest, Message, SamplingParams
from tests.protocol.fakes import FakeClock

QUESTION = "What is the capital of France?"
REWORDED = "Tell me the capital of France."


def direction(x: float, y: float) -> Vector:
    vector = np.array([x, y], dtype=np.float32)
    return vector / np.float32(np.linalg.norm(vector))


@dataclass
class FakeEmbedder:
    """Gives each text its vector, (1, 0) by default, and notes what it embedded."""

    vectors: dict[str, Vector | None] = field(default_factory=dict)
    failure: Callable[[], None] | None = None
    hangs: bool = False
    texts: list[str] = field(default_factory=list)

    async def __call__(self, text: str) -> Vector | None:
        self.texts.append(text)
        if self.hangs:
            await asyncio.Event().wait()
        if self.failure is not None:
            self.failure()
        return self.vectors.get(text, direction(1, 0))


def request(
    text: str = QUESTION, *, prompt: str | None = None, **sampling: float
) -> InferenceRequest:
    return InferenceRequest(
        request_id="r",
        tenant="red",
        model="m",
        messages=None if prompt else (Message(role="user", content=text),),
        prompt=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),  # type: ignore[arg-type]
    )


class Asker:
    """A service and short ways to use it."""

    def __init__(
        self,
        embed: FakeEmbedder | None,
        *,
        epoch: int = 0,
        embed_timeout_s: float = 30.0,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.service = CacheService(
            PromptCache(CacheConfig(ttl_s=60), clock=self.clock),
            embed=embed,
            embedder_revision="e-1",
            epoch=epoch,
            embed_timeout_s=embed_timeout_s,
        )

    async def lookup(
        self, text: str = QUESTION, *, revision: str = "rev-1", **fields: object
    ) -> LookupReply:
        call = LookupCall(request=request(text, **fields), model_revision=revision)  # type: ignore[arg-type]
        return await self.service.lookup(call)

    async def store(self, text: str = QUESTION, stored: bytes = b"Paris", **fields: object) -> None:
        self.service.store(
            StoreCall(
                request=request(text, **fields),  # type: ignore[arg-type]
                model_revision="rev-1",
                completion_tokens=3,
                stored=stored,
            )
        )
        await self.service.settle()


async def test_an_equal_question_hits_without_an_embedding() -> None:
    embedder = FakeEmbedder()
    asker = Asker(embedder)
    await asker.store()
    embedder.texts.clear()
    asker.clock.now += 2.5
    reply = await asker.lookup(f"  {QUESTION}\n")
    assert reply.stored == b"Paris"
    assert (reply.outcome.outcome, reply.outcome.tier) == ("exact", "L2")
    assert reply.outcome.age_s == 2.5
    assert embedder.texts == []


async def test_a_rewording_hits_by_meaning_and_tells_how_near_it_was() -> None:
    asker = Asker(FakeEmbedder({REWORDED: direction(0.99, 0.1)}))
    await asker.store()
    reply = await asker.lookup(REWORDED)
    assert reply.stored == b"Paris"
    assert reply.outcome.outcome == "semantic"
    assert reply.outcome.similarity == pytest.approx(0.9949, abs=1e-3)


async def test_a_miss_tells_of_the_best_candidate() -> None:
    asker = Asker(FakeEmbedder({REWORDED: direction(1, 1)}))
    await asker.store()
    reply = await asker.lookup(REWORDED)
    assert reply.stored is None
    assert reply.outcome.outcome == "miss"
    assert reply.outcome.reason == "below threshold"
    assert reply.outcome.similarity == pytest.approx(0.7071, abs=1e-3)


async def test_a_miss_and_its_store_embed_once() -> None:
    embedder = FakeEmbedder()
    asker = Asker(embedder)
    await asker.lookup()
    await asker.store()
    assert embedder.texts == [QUESTION]


async def test_an_embedder_that_hangs_is_a_miss_in_time() -> None:
    asker = Asker(FakeEmbedder(hangs=True), embed_timeout_s=0.01)
    async with asyncio.timeout(30):
        reply = await asker.lookup()
    assert reply == LookupReply(outcome=reply.outcome)
    assert reply.outcome.reason == "embedding timed out"
    assert asker.service.stats()["errors"] == 1


async def test_an_embedder_that_fails_is_a_miss_and_exact_hits_go_on() -> None:
    def fail() -> None:
        raise RuntimeError("no embedder")

    asker = Asker(FakeEmbedder(failure=fail))
    assert (await asker.lookup()).outcome.reason == "embedding failed"
    await asker.store()
    assert (await asker.lookup()).outcome.outcome == "exact"
    assert (await asker.lookup(REWORDED)).outcome.outcome == "miss"
    assert asker.service.stats()["errors"] == 3


async def test_an_embedder_that_recovers_gives_semantic_hits_again() -> None:
    embedder = FakeEmbedder(hangs=True)
    asker = Asker(embedder, embed_timeout_s=0.01)
    await asker.lookup()
    embedder.hangs = False
    await asker.store()
    assert (await asker.lookup(REWORDED)).outcome.outcome == "semantic"


@pytest.mark.parametrize(
    "vector",
    [np.array([np.nan, 0], dtype=np.float32), np.array([3, 4], dtype=np.float32)],
    ids=["NaN", "not of unit length"],
)
async def test_an_unusable_vector_is_a_miss_and_is_stored_for_exact_hits(vector: Vector) -> None:
    asker = Asker(FakeEmbedder({QUESTION: vector}))
    assert (await asker.lookup()).stored is None
    await asker.store()
    assert (await asker.lookup()).outcome.outcome == "exact"
    assert (await asker.lookup(REWORDED)).stored is None


async def test_a_vector_of_another_size_harms_nothing() -> None:
    asker = Asker(FakeEmbedder({REWORDED: np.array([1, 0, 0], dtype=np.float32)}))
    await asker.store()
    assert (await asker.lookup(REWORDED)).stored is None
    await asker.store(REWORDED, b"Paris again")
    assert (await asker.lookup(REWORDED)).stored == b"Paris again"


async def test_a_prompt_too_long_to_embed_hits_exactly_only() -> None:
    asker = Asker(FakeEmbedder({QUESTION: None}))
    assert (await asker.lookup()).outcome.reason == "prompt too long to embed"
    await asker.store()
    assert (await asker.lookup()).outcome.outcome == "exact"
    assert (await asker.lookup(REWORDED)).stored is None


async def test_a_raw_prompt_is_never_embedded() -> None:
    embedder = FakeEmbedder()
    asker = Asker(embedder)
    await asker.lookup(prompt="Once upon")
    await asker.store(prompt="Once upon")
    assert (await asker.lookup(prompt="Once upon")).outcome.outcome == "exact"
    assert embedder.texts == []


async def test_without_an_embedder_only_equal_questions_hit() -> None:
    asker = Asker(None)
    await asker.store()
    assert (await asker.lookup()).outcome.outcome == "exact"
    assert (await asker.lookup(REWORDED)).outcome.reason == "no equal prompt"


async def test_a_longer_answer_than_asked_for_is_not_given() -> None:
    asker = Asker(None)
    await asker.store()
    assert (await asker.lookup(max_tokens=2)).stored is None
    assert (await asker.lookup(max_tokens=3)).outcome.outcome == "exact"


async def test_another_revision_or_epoch_knows_nothing_of_the_old_answers() -> None:
    asker = Asker(None)
    await asker.store()
    assert (await asker.lookup(revision="rev-2")).stored is None
    asker.service._epoch = 1
    assert (await asker.lookup()).stored is None


async def test_an_answer_expires() -> None:
    asker = Asker(FakeEmbedder())
    await asker.store()
    asker.clock.now += 60
    assert (await asker.lookup()).stored is None
    assert asker.service.stats()["entries"] == 0


async def test_an_answer_that_is_too_large_is_not_kept_and_nothing_fails() -> None:
    asker = Asker(None)
    await asker.store(stored=b"x" * 2**21)
    assert (await asker.lookup()).stored is None
    assert asker.service.stats()["refused_stores"] == 1


async def test_an_answer_is_found_before_it_is_embedded() -> None:
    arrived = asyncio.Event()

    async def embed(text: str) -> Vector | None:
        await arrived.wait()
        return np.array([1, 0], dtype=np.float32)

    asker = Asker(embed)
    storing = asyncio.create_task(asker.store())
    await asyncio.sleep(0)
    assert (await asker.lookup()).outcome.outcome == "exact"
    arrived.set()
    await storing
    assert (await asker.lookup(REWORDED)).outcome.outcome == "semantic"
    assert asker.service.stats()["stores"] == 1


async def test_an_embedding_that_comes_late_does_not_bring_an_old_answer_back() -> None:
    arrived = asyncio.Event()

    async def embed(text: str) -> Vector | None:
        await arrived.wait()
        return np.array([1, 0], dtype=np.float32)

    asker = Asker(embed)
    stores = [asyncio.create_task(asker.store(stored=stored)) for stored in (b"old", b"new")]
    await asyncio.sleep(0)
    arrived.set()
    await asyncio.gather(*stores)
    assert (await asker.lookup()).stored == b"new"
    assert (await asker.lookup(REWORDED)).stored == b"new"
