"""The model as a service: requests in, their streams out on the buses of the ingresses.

Plain asyncio around an `EngineFront`, so that a test builds it without Serve;
`model.py` is its Serve shell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from typing import Any

import msgspec

from deployments import wire
from deployments.bus import BusHub, BusStream
from deployments.engine.front import EngineFront
from deployments.engine.sequence import Sequence
from deployments.tool_prompt import tell_tools
from protocol.errors import InvalidRequest, ServingError

Admit = Callable[[Sequence], Awaitable[int | ServingError]]
"""Brings one sequence to `ModelService.admit`, alone or with others."""
TICK_S = 0.25
LIKELY_ANSWER_TOKENS = 512
"""Of one request, where its limit is higher; the router takes as much for a new one."""


@dataclasses.dataclass(frozen=True)
class BusLeases:
    """How long things live without their ingress, in seconds; see `BusHub`."""

    orphan_s: float
    keep_s: float
    renew_s: float


class ModelService:
    """One engine, and what the graph asks of it.

    Args:
        info: of the model; its context length is lowered to what the engine holds.
        replica: this replica's name.
    """

    def __init__(
        self,
        engine: EngineFront,
        info: wire.ModelInfo,
        *,
        replica: str,
        leases: BusLeases,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._numbers = itertools.count(1)
        self._hub = BusHub(
            self.load,
            clock,
            lease_s=leases.orphan_s,
            keep_s=leases.keep_s,
            renew_s=leases.renew_s,
        )
        self._template = str(engine.tokenizer.hf.chat_template or "")
        self.info = msgspec.structs.replace(info, context_length=engine.config.max_model_len)

    async def submit(self, payload: bytes, admit: Admit) -> bytes:
        """Packed `Submit` in, packed `SubmitReply` out; the answer comes on the bus.

        When the caller cancels meanwhile, the engine drops the sequence before its next step.
        """
        submit = wire.decode_submit(payload)
        try:
            accepted = await self._accept(submit, admit)
        except ServingError as error:
            return wire.encode(wire.SubmitReply(replica=self._replica, refused=error.info))
        return wire.encode(wire.SubmitReply(replica=self._replica, accepted=accepted))

    async def warm(self, payload: bytes) -> None:
        """Packed `InferenceRequest` that is still being written; see `EngineFront.warm`."""
        request = tell_tools(wire.decode_request(payload), self._template)
        name = f"{request.request_id}.{next(self._numbers)}"
        await self._engine.warm(msgspec.structs.replace(request, request_id=name))

    async def tokenize(self, payload: bytes) -> bytes:
        """Packed `TokenizeCall` in, packed `TokenizeReply` out."""
        call = wire.decode_tokenize_call(payload)
        try:
            reply = await self._tokenize(call)
        except ServingError as error:
            reply = wire.TokenizeReply(refused=error.info)
        return wire.encode(reply)

    def cancel(self, names: tuple[str, ...], ingress: str, *, keep: bool = False) -> None:
        """Gives streams up; unknown ones are nothing new."""
        self._hub.cancel(names, ingress, keep=keep)

    def find(self, name: str) -> bytes:
        """A packed `Found`, or nothing."""
        found = self._hub.find(name)
        return b"" if found is None else wire.encode(found)

    def attach(self, name: str, ingress: str) -> bytes:
        """A packed `Attached`: the stream goes on on the bus of that ingress.

        Raises:
            ResumeExpired: there is no such stream, or none any more.
        """
        return wire.encode(self._hub.attach(name, ingress))

    def renew(self, ingress: str) -> None:
        """A sign of life of an ingress."""
        self._hub.renew(ingress)

    async def bus(self, ingress: str, positions: Mapping[str, int]) -> AsyncGenerator[bytes]:
        """Packed `BusMessage`s for one ingress; see `BusHub.messages`."""
        async with aclosing(self._hub.messages(ingress, positions)) as messages:
            async for message in messages:
                yield wire.encode(message)

    async def keep_time(self) -> None:
        """Runs for ever: signs of life on the buses, and an end to orphans."""
        while True:
            await asyncio.sleep(TICK_S)
            self._hub.tick()

    def admit(self, sequences: list[Sequence]) -> list[int | ServingError]:
        """Hands newcomers to the running engine and returns at once.

        Returns:
            For each its place in the queue, or why it was refused.
        """
        refusals = self._engine.admit(sequences)
        waiting = self._engine.stats().waiting
        return [waiting if refusal is None else refusal for refusal in refusals]

    def check_health(self) -> None:
        """Raises where a new engine would help.

        Raises:
            RuntimeError: the engine's thread is dead, or stuck in a step.
        """
        if not self._engine.is_healthy:
            age_s = self._engine.heartbeat_age_s()
            raise RuntimeError(f"the engine has not moved for {age_s:.0f} s")

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, as plain values."""
        return {"replica": self._replica, **dataclasses.asdict(self._engine.stats())}

    async def _tokenize(self, call: wire.TokenizeCall) -> wire.TokenizeReply:
        tokenizer = self._engine.tokenizer
        token_ids: SequenceOf[int] = call.token_ids
        if call.request is None:
            for token_id in token_ids:
                if not 0 <= token_id < tokenizer.vocab_size:
                    raise InvalidRequest(
                        f"tokens holds {token_id}, the vocabulary has {tokenizer.vocab_size}",
                        param="tokens",
                        limit=tokenizer.vocab_size - 1,
                    )
        else:
            request = tell_tools(call.request, self._template)
            token_ids = (await self._engine.prepare(request)).prompt_token_ids
            if not call.has_special_tokens:
                token_ids = token_ids[len(tokenizer.encode_prompt("")) :]
        return wire.TokenizeReply(
            token_ids=tuple(token_ids),
            token_texts=tuple(map(tokenizer.token_text, token_ids)),
            text=await asyncio.to_thread(tokenizer.decode, token_ids),
        )

    async def _accept(self, submit: wire.Submit, admit: Admit) -> wire.Accepted:
        name = submit.request.request_id
        # A former one of this name may still be in the engine.
        request = msgspec.structs.replace(
            submit.request, request_id=f"{name}.{next(self._numbers)}"
        )
        output = tuple(token for delta in submit.answered for token in delta.token_ids)
        request = tell_tools(request, self._template)
        sequence = await self._engine.prepare(request, output_token_ids=output)
        log = self._engine.follow(sequence)
        log.append(*submit.answered)
        accepted = wire.Accepted(
            revision=self.info.revision,
            prompt_tokens=len(sequence.prompt_token_ids),
            queue_position=0,
        )
        # Known before it is admitted, so that a cancel can never miss it.
        stream = BusStream(
            submit, accepted, log, lambda: self._engine.abort(sequence), is_admitted=False
        )
        self._hub.add(stream)
        try:
            admitted = await admit(sequence)
            if isinstance(admitted, ServingError):
                raise admitted
        except BaseException:
            self._hub.refused(stream)
            raise
        self._hub.admitted(stream)
        return msgspec.structs.replace(accepted, queue_position=admitted)

    def load(self) -> wire.Load:
        """How busy this replica is."""
        stats = self._engine.stats()
        # Who names no limit may fill the context, and hardly anyone does.
        likely = stats.waiting_tokens + LIKELY_ANSWER_TOKENS * (stats.running + stats.waiting)
        return wire.Load(
            running=stats.running,
            waiting=stats.waiting,
            tokens=min(stats.tokens, likely),
            stalled_s=stats.stalled_s,
        )
