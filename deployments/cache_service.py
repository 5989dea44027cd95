"""The prompt cache as a service: keys, embeds, looks up, stores. Never raises for a look-up.

Plain asyncio around `cache.PromptCache`, so that a test builds it with a fake
embedder; `prompt_cache.py` is its Serve shell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from cache.answer import StoredAnswer
from cache.entries import entry_id
from cache.key import PromptKey
from cache.prompt_cache import Hit, Miss, PromptCache
from cache.stats import EntryFilter
from cache.underway import TO_COME, Underway, as_candidate
from deployments.answer_agreement import Agreement, agreement
from deployments.cache_audit import Audit
from deployments.cache_key import cache_key
from deployments.embedder import EmbedderBusy, Embeddings, EmbedText, Vector
from deployments.wire import (
    Check,
    CheckCall,
    EmbedCall,
    EmbedReply,
    LookupCall,
    LookupReply,
    StoreCall,
    decode_stored,
)
from protocol.errors import ContextLengthExceeded, InternalError, ModelNotFound, ServingError
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome

logger = logging.getLogger(__name__)

MAX_CLIENT_TEXTS = 4
"""At the embedder at a time, of those that clients want embedded: a look-up waits behind them."""
MAX_UNDERWAY = 4
"""Questions that are being answered, of which a look-up decides beside the stored ones."""
BLIND = "answers given lately could not be checked"
HOPELESS_S = 60.0
"""An embedder that has been stuck for so long does not come back by itself."""


class CacheService:
    """Look-ups and stores of one cache replica.

    Args:
        embed: None switches the semantic path off; it may raise or be slow.
        embed_timeout_s: a slower embedding makes the look-up a miss.
        count_tokens: of a text that the embedder takes, for a client's usage.
    """

    def __init__(
        self,
        cache: PromptCache,
        *,
        embed: EmbedText | None,
        embedder_revision: str,
        epoch: int,
        embed_timeout_s: float,
        count_tokens: Callable[[str], int] = lambda text: len(text.split()),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        # A miss is followed by a store of the same prompt: its vector is remembered for that.
        self._embeddings = None if embed is None else Embeddings(embed, clock=clock)
        self._embedder_revision = embedder_revision
        self._epoch = epoch
        self._embed_timeout_s = embed_timeout_s
        self._embed = embed
        self._count_tokens = count_tokens
        self._client_turns = asyncio.Semaphore(MAX_CLIENT_TEXTS)
        self._embedding: set[asyncio.Task[None]] = set()
        self._underway = Underway(clock)
        self.audit = Audit()
        self._process = secrets.token_hex(6)

    async def lookup(self, call: LookupCall) -> LookupReply:
        """The decision for one request: exact first, then by meaning."""
        if call.over:
            self._underway.give_up(call.over, lambda by: by.startswith(f"{call.ingress}/"))
        key = self._key(call)
        hit = self._cache.lookup_exact(key)
        if hit is not None:
            return self._reply(key, hit)
        if self._embeddings is None or not key.allow_semantic:
            return _missed(key, "no equal prompt")
        known = self._cache.known_miss(key)
        if known is not None:
            return self._reply(key, known)
        try:
            vector = await self._vector(self._embeddings, key, self._embed_timeout_s)
        except EmbedderBusy:
            return self._failed("embedder is busy")
        except TimeoutError:
            return self._failed("embedding timed out")
        except Exception as error:
            logger.warning("embedding failed, the look-up is a miss: %r", error)
            return self._failed("embedding failed")
        if vector is None:
            return _missed(key, "prompt too long to embed")
        return self._decide(call, key, vector)

    def _decide(self, call: LookupCall, key: PromptKey, vector: Vector) -> LookupReply:
        """By meaning: among what is stored and what is being answered for the same ingress."""
        # What is urgent does not wait for what is not.
        by = f"{call.ingress}/{call.request.priority}"
        near = self._underway.near(key, vector, by, MAX_UNDERWAY) if call.flight else []
        found = self._cache.lookup_semantic(key, vector, [as_candidate(q, vector) for q in near])
        if isinstance(found, Miss) and found.underway is not None and not self.audit.is_blind:
            (flight,) = [q.name for q in near if q.key is found.underway]
            return self._share(found, flight)
        if isinstance(found, Miss) and call.flight:
            self._underway.begin(key, vector, call.flight, by)
        return self._reply(key, found)

    def _share(self, found: Miss, flight: str) -> LookupReply:
        """The reply to a request that may be given an answer that is still to come."""
        assert found.verdict is not None
        similarity = found.similarity or 0.0
        hit = Hit(TO_COME, "semantic", "L2", similarity, 0.0, found.id, verdict=found.verdict)
        self.audit.give(found.id, found.verdict)
        return LookupReply(
            outcome=CacheOutcome(outcome="coalesced", similarity=similarity, id=found.id),
            check=self.audit.begin(hit),
            flight=flight,
        )

    async def embed(self, call: EmbedCall) -> EmbedReply:
        """A client's texts; look-ups of the cache have precedence."""
        try:
            if self._embed is None:
                raise ModelNotFound("no embedder is loaded here", param="model")
            vectors = await asyncio.gather(
                *map(self._embed_for_client, range(len(call.texts)), call.texts)
            )
        except ServingError as error:
            return EmbedReply(refused=error.info)
        except Exception as error:
            logger.warning("texts of a client cannot be embedded: %r", error)
            return EmbedReply(refused=InternalError("the embedder failed; try again").info)
        num_tokens = sum(map(self._count_tokens, call.texts))
        return EmbedReply(vectors=tuple(vectors), num_tokens=num_tokens)

    async def _embed_for_client(self, place: int, text: str) -> bytes:
        """Raises: ContextLengthExceeded: the text is longer than the embedder's window."""
        assert self._embed is not None
        async with self._client_turns:
            vector = await self._embed(text)
        if vector is None:
            raise ContextLengthExceeded(
                f"input[{place}] is longer than the embedder takes", param=f"input[{place}]"
            )
        return vector.tobytes()

    async def check(self, call: CheckCall) -> Agreement:
        """Compares an answer with the one that was or would have been given, and learns from it.

        An entry that is proven wrong is quarantined here; other replicas have to be told.

        Raises:
            ValueError: an answer cannot be read.
        """
        stored, given = (
            "".join(delta.text for delta in decode_stored(packed).deltas)
            for packed in (call.stored, call.given)
        )
        try:
            found = await agreement(stored, given, self._embed)
        except Exception as error:
            logger.warning("answers cannot be embedded to be compared: %r", error)
            self._cache.count_error()
            found = "unclear"
        self.audit.made(call.check, found)
        # What is only unclear says nothing of the entry, but all the more of the score.
        self._cache.feedback(
            call.check.id if found != "unclear" else "",
            was_right=found == "right",
            verdict=self.audit.verdict_of(call.check),
        )
        return found

    def feedback(self, id: str, *, was_right: bool, tenant: str | None = None) -> bool:
        """Takes note of a client's judgement; False when that tenant has no such entry.

        Praise opens nothing: whoever gives it may want the answer for other reasons. Blame
        counts against the score that let the answer be given, once, and quarantines the entry.
        """
        if not self._cache.find(EntryFilter(id=id, tenant=tenant)):
            return False
        blamed = None if was_right else self.audit.take_given(id)
        return self._cache.feedback(id, was_right=was_right, verdict=blamed)

    def delete(self, which: EntryFilter) -> int:
        """Removes the answers that are meant, and returns how many."""
        return self._cache.delete(which)

    async def read(
        self, request: InferenceRequest, model_revision: str
    ) -> tuple[PromptKey, Vector | None, str | None]:
        """A request as a look-up sees it: its key, its vector, and why it has none."""
        key = self._key(LookupCall(request=request, model_revision=model_revision))
        if self._embeddings is None or not key.allow_semantic:
            return key, None, "semantic matching is off"
        try:
            vector = await self._vector(self._embeddings, key, None)
        except Exception as error:
            return key, None, f"embedding failed: {type(error).__name__}"
        return key, vector, "prompt too long to embed" if vector is None else None

    def quarantine(self, id: str) -> int:
        """Closes the neighbourhood of an entry that another replica has found to be wrong."""
        return self._cache.quarantine(id)

    def store(self, call: StoreCall) -> None:
        """Keeps an answer. It can be hit exactly at once, and by meaning once it is embedded."""
        try:
            decode_stored(call.stored)
        except ValueError as error:
            self._cache.count_error()
            logger.warning("an answer that cannot be read is not stored: %s", error)
            return
        key = self._key(call)
        self._underway.end(key)
        answer = StoredAnswer(
            payload=call.stored,
            completion_tokens=call.completion_tokens,
            model_revision=call.model_revision,
            is_truncated=call.is_truncated,
        )
        embeddings = self._embeddings
        vector = None if embeddings is None else embeddings.known(key.exact)
        self._cache.store(key, answer, vector, model=call.request.model)
        is_findable = key.allow_semantic and not answer.is_truncated
        if vector is None and embeddings is not None and is_findable:
            task = asyncio.create_task(self._embed_stored(embeddings, key, answer))
            self._embedding.add(task)
            task.add_done_callback(self._embedding.discard)

    async def settle(self) -> None:
        """Waits until every stored answer is embedded."""
        while self._embedding:
            await asyncio.wait(self._embedding)

    def check_health(self) -> None:
        """Raises where a new embedder would help.

        Raises:
            RuntimeError: the embedder is stuck for good; the answers go with it, but most
                hits are by meaning.
        """
        stuck_s = 0.0 if self._embeddings is None else self._embeddings.stuck_for_s
        if stuck_s > HOPELESS_S:
            raise RuntimeError(f"the embedder has not moved for {stuck_s:.0f} s")

    def epoch(self) -> str:
        """Another one after each removal, and in each process: copies made before are outdated."""
        return f"{self._process}.{self._cache.epoch}"

    def stats(self) -> dict[str, Any]:
        """Counters and sizes, as plain values."""
        return dataclasses.asdict(self._cache.stats()) | {"checks": self.audit.stats()}

    async def _embed_stored(
        self, embeddings: Embeddings, key: PromptKey, answer: StoredAnswer
    ) -> None:
        try:
            vector = await self._vector(embeddings, key, None)
        except Exception as error:
            self._cache.count_error()
            logger.warning("embedding failed, the answer is for exact hits only: %r", error)
            return
        if vector is not None:
            self._cache.add_embedding(key, answer, vector)

    def _reply(self, key: PromptKey, decision: Hit | Miss) -> LookupReply:
        verdict = decision.verdict
        if isinstance(decision, Hit) and verdict is not None:
            if verdict.score is not None and self.audit.is_blind:
                # Nobody has looked at what is given for too long: the request looks itself.
                shadow = dataclasses.replace(verdict, action="shadow", is_checked=True)
                decision = Miss(
                    decision.similarity,
                    BLIND,
                    shadow,
                    decision.answer,
                    decision.id,
                )
            else:
                self.audit.give(decision.id, verdict)
        if isinstance(decision, Hit):
            return _hit_reply(decision, self.audit.begin(decision), self.epoch())
        return LookupReply(
            outcome=CacheOutcome(
                similarity=decision.similarity, reason=decision.reason, id=entry_id(key)
            ),
            check=self.audit.begin(decision),
        )

    def _failed(self, reason: str) -> LookupReply:
        self._cache.count_error()
        return LookupReply(outcome=CacheOutcome(reason=reason))

    def _key(self, call: LookupCall | StoreCall) -> PromptKey:
        return cache_key(
            call.request,
            model_revision=call.model_revision,
            embedder_revision=self._embedder_revision,
            epoch=self._epoch,
        )

    async def _vector(
        self, embeddings: Embeddings, key: PromptKey, timeout_s: float | None
    ) -> Vector | None:
        known = embeddings.known(key.exact)
        if known is not None:
            return known
        computing = embeddings.begin(key.exact, key.text)
        done, _ = await asyncio.wait((computing,), timeout=timeout_s)
        if not done:
            raise TimeoutError
        return computing.result()


def _missed(key: PromptKey, reason: str) -> LookupReply:
    return LookupReply(outcome=CacheOutcome(reason=reason, id=entry_id(key)))


def _hit_reply(hit: Hit, check: Check | None, epoch: str) -> LookupReply:
    # What the verifier let pass is decided anew each time, and counted: it stays here.
    is_certain = hit.verdict is None or hit.verdict.score is None
    return LookupReply(
        outcome=CacheOutcome(
            outcome=hit.outcome,
            tier=hit.tier,
            similarity=hit.similarity,
            age_s=round(hit.age_s, 3),
            id=hit.id,
        ),
        stored=hit.answer.payload,
        promote=hit.outcome == "exact" or (hit.promote and is_certain),
        check=check,
        epoch=epoch,
    )
