"""The prompt cache as a service: whatever the embedder does, a look-up answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cache.prompt_cache import CacheConfig, PromptCache
from deployments.cache_service import HOPELESS_S, CacheService
from deployments.embedder import EmbedderBusy, Embeddings, Vector
from deployments.wire import LookupCall, LookupReply, StoreCall, StoredStream, decode_stored, encode
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import Terminal, TokenDelta
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
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.goes_on.set()

    async def __call__(self, text: str) -> Vector | None:
        self.texts.append(text)
        await self.goes_on.wait()
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


def hanging() -> FakeEmbedder:
    embedder = FakeEmbedder()
    embedder.goes_on.clear()
    return embedder


def an_answer(text: str) -> bytes:
    deltas = (TokenDelta(0, text, (0,)),)
    return encode(StoredStream(deltas=deltas, terminal=Terminal(finish_reason="stop")))


def text_of(reply: LookupReply) -> str | None:
    return None if reply.stored is None else decode_stored(reply.stored).deltas[0].text


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
            clock=self.clock,
        )

    async def lookup(
        self,
        text: str = QUESTION,
        *,
        revision: str = "rev-1",
        flight: str = "",
        ingress: str = "one",
        **fields: object,
    ) -> LookupReply:
        call = LookupCall(
            request=request(text, **fields),  # type: ignore[arg-type]
            model_revision=revision,
            flight=flight,
            ingress=ingress,
        )
        return await self.service.lookup(call)

    async def store(
        self, text: str = QUESTION, answer: str | bytes = "Paris", **fields: object
    ) -> None:
        self.service.store(
            StoreCall(
                request=request(text, **fields),  # type: ignore[arg-type]
                model_revision="rev-1",
                completion_tokens=3,
                stored=an_answer(answer) if isinstance(answer, str) else answer,
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
    assert text_of(reply) == "Paris"
    assert (reply.outcome.outcome, reply.outcome.tier) == ("exact", "L2")
    assert reply.outcome.age_s == 2.5
    assert embedder.texts == []


async def test_a_rewording_hits_by_meaning_and_tells_how_near_it_was() -> None:
    asker = Asker(FakeEmbedder({REWORDED: direction(0.99, 0.1)}))
    await asker.store()
    reply = await asker.lookup(REWORDED)
    assert text_of(reply) == "Paris"
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
    asker = Asker(hanging(), embed_timeout_s=0.01)
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
    embedder = hanging()
    asker = Asker(embedder, embed_timeout_s=0.01)
    await asker.lookup()
    embedder.goes_on.set()
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
    await asker.store(REWORDED, "Paris again")
    assert text_of(await asker.lookup(REWORDED)) == "Paris again"


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
    await asker.store(answer="x" * 2**21)
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
    stores = [asyncio.create_task(asker.store(answer=answer)) for answer in ("old", "new")]
    await asyncio.sleep(0)
    arrived.set()
    await asyncio.gather(*stores)
    assert text_of(await asker.lookup()) == "new"
    assert text_of(await asker.lookup(REWORDED)) == "new"


# ------------------------------------------------------------------ damage


async def test_an_answer_that_cannot_be_read_is_never_stored() -> None:
    asker = Asker(None)
    await asker.store(answer=b"\xc1 no record")
    assert (await asker.lookup()).stored is None
    assert (asker.service.stats()["errors"], asker.service.stats()["stores"]) == (1, 0)


@pytest.mark.parametrize("text", [QUESTION, REWORDED], ids=["exact", "semantic"])
async def test_a_damaged_answer_is_a_miss_an_error_and_gone(text: str) -> None:
    asker = Asker(FakeEmbedder())
    await asker.store()
    (entry,) = asker.service._cache._tiers.warm.entries()
    object.__setattr__(entry.answer, "payload", b"rubbish")
    reply = await asker.lookup(text)
    assert (reply.stored, reply.outcome.outcome) == (None, "miss")
    assert (asker.service.stats()["errors"], asker.service.stats()["entries"]) == (1, 0)
    await asker.store()
    assert text_of(await asker.lookup(text)) == "Paris"


# ------------------------------------------------------------------ an embedder that does not move


async def test_a_stuck_embedder_costs_its_first_askers_their_time_and_then_nothing() -> None:
    embedder = hanging()
    asker = Asker(embedder, embed_timeout_s=0.001)
    assert (await asker.lookup("a")).outcome.reason == "embedding timed out"
    asker.clock.now += 2
    asker.service._embed_timeout_s = 30.0
    async with asyncio.timeout(10):
        for number in range(1000):
            assert (await asker.lookup(f"q {number}")).outcome.reason == "embedder is busy"
    assert embedder.texts == ["a"]
    assert asker.service.stats()["errors"] == 1001


async def test_exact_hits_and_stores_go_on_while_the_embedder_is_stuck() -> None:
    asker = Asker(hanging(), embed_timeout_s=0.001)
    await asker.lookup("a")
    asker.clock.now += 2
    await asker.store()
    assert (await asker.lookup()).outcome.outcome == "exact"
    assert (await asker.lookup(REWORDED)).stored is None


async def test_hits_by_meaning_come_back_with_the_embedder() -> None:
    embedder = FakeEmbedder()
    asker = Asker(embedder, embed_timeout_s=0.001)
    await asker.store()
    embedder.goes_on.clear()
    await asker.lookup("a")
    asker.clock.now += 5
    assert (await asker.lookup(REWORDED)).outcome.reason == "embedder is busy"
    embedder.goes_on.set()
    await asyncio.sleep(0)
    asker.service._embed_timeout_s = 30.0
    assert (await asker.lookup(REWORDED)).outcome.outcome == "semantic"


async def test_a_vector_that_came_too_late_for_its_look_up_serves_the_next_one() -> None:
    embedder = hanging()
    asker = Asker(embedder, embed_timeout_s=0.001)
    await asker.lookup()
    embedder.goes_on.set()
    await asker.store()
    await asker.lookup(REWORDED)
    assert embedder.texts == [QUESTION, REWORDED]


async def test_an_embedder_that_never_comes_back_is_reported() -> None:
    asker = Asker(hanging(), embed_timeout_s=0.001)
    asker.service.check_health()
    await asker.lookup()
    asker.clock.now += HOPELESS_S
    asker.service.check_health()
    asker.clock.now += 1
    with pytest.raises(RuntimeError, match="61 s"):
        asker.service.check_health()


# Questions that are being answered


async def test_a_question_may_share_what_is_being_answered_for_the_same_ingress() -> None:
    asker = Asker(FakeEmbedder({REWORDED: direction(0.99, 0.1)}))
    first = await asker.lookup(flight="f-1")
    assert (first.flight, first.outcome.outcome) == (None, "miss")
    shared = await asker.lookup(REWORDED, flight="f-2")
    assert (shared.flight, shared.stored) == ("f-1", None)
    assert shared.outcome.outcome == "coalesced"
    assert shared.outcome.similarity == pytest.approx(0.9949, abs=1e-3)
    assert shared.outcome.id == first.outcome.id
    for other in (
        await asker.lookup(REWORDED, flight="f-3", ingress="another"),
        await asker.lookup(REWORDED),
        await asker.lookup(REWORDED, flight="f-4", max_tokens=7),
    ):
        assert (other.flight, other.outcome.outcome) == (None, "miss")
        asker.clock.now += 40


async def test_who_shares_is_no_leader_itself() -> None:
    asker = Asker(FakeEmbedder())
    await asker.lookup(flight="f-1")
    await asker.lookup(REWORDED, flight="f-2")
    assert (await asker.lookup(f"{QUESTION[:-1]}!", flight="f-3")).flight == "f-1"


async def test_what_is_answered_is_found_and_not_waited_for() -> None:
    asker = Asker(FakeEmbedder())
    await asker.lookup(flight="f-1")
    await asker.store()
    reply = await asker.lookup(REWORDED, flight="f-2")
    assert (reply.flight, reply.outcome.outcome) == (None, "semantic")


def embeddings(embedder: FakeEmbedder, clock: FakeClock, **limits: Any) -> Embeddings:
    return Embeddings(embedder, clock=clock, **limits)


async def test_equal_texts_are_embedded_once_for_all_who_ask() -> None:
    embedder = hanging()
    queue = embeddings(embedder, FakeClock())
    assert len({id(queue.begin("d", "text")) for _ in range(20)}) == 1
    embedder.goes_on.set()
    assert await queue.begin("d", "text") is not None
    assert embedder.texts == ["text"]
    assert queue.known("d") is not None


async def test_only_so_many_texts_wait() -> None:
    queue = embeddings(hanging(), FakeClock(), max_running=2)
    tasks = [queue.begin("1", "a"), queue.begin("2", "b")]
    with pytest.raises(EmbedderBusy):
        queue.begin("3", "c")
    assert queue.begin("1", "a") is tasks[0]


async def test_a_slow_embedder_is_tried_one_text_at_a_time_until_it_is_quick_again() -> None:
    embedder, clock = hanging(), FakeClock()
    queue = embeddings(embedder, clock, stuck_s=1.0)
    first = queue.begin("1", "a")
    await asyncio.sleep(0)
    clock.now += 5
    with pytest.raises(EmbedderBusy):
        queue.begin("2", "b")
    embedder.goes_on.set()
    await first
    embedder.goes_on.clear()
    second = queue.begin("2", "b")
    with pytest.raises(EmbedderBusy):
        queue.begin("3", "c")
    embedder.goes_on.set()
    await second
    embedder.goes_on.clear()
    queue.begin("3", "c")
    queue.begin("4", "d")
    assert queue.stuck_for_s == 0


async def test_a_failure_that_nobody_waits_for_is_no_trouble() -> None:
    def fail() -> None:
        raise RuntimeError("no embedder")

    queue = embeddings(FakeEmbedder(failure=fail), FakeClock())
    queue.begin("1", "a")
    for _ in range(5):
        await asyncio.sleep(0)
    assert queue.stuck_for_s == 0
    assert queue.known("1") is None
