"""The model as a service: requests in, packed records of their streams out.

Plain asyncio around `AsyncEngine`, so that a test builds it without Serve;
`model.py` is its Serve shell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from deployments import wire
from deployments.engine.async_engine import AsyncEngine
from deployments.engine.sequence import Sequence
from protocol.errors import ServingError
from protocol.token_log import TokenLog

Admit = Callable[[Sequence], Awaitable[int | ServingError]]
"""Brings one sequence to `ModelService.admit`, alone or with others."""


class ModelService:
    """One engine, and what the graph asks of it.

    Args:
        info: of the model; its context length is lowered to what the engine holds.
    """

    def __init__(self, engine: AsyncEngine, info: wire.ModelInfo) -> None:
        self._engine = engine
        self.info = msgspec.structs.replace(info, context_length=engine.config.max_model_len)

    async def generate(self, payload: bytes, admit: Admit) -> AsyncGenerator[bytes]:
        """Packed `StreamRecord`s: `accepted` or `refused`, then deltas, then `terminal`.

        When the caller cancels, the engine drops the sequence before its next step.
        """
        sequence: Sequence | None = None
        try:
            sequence = await self._engine.prepare(wire.decode_request(payload))
            log = self._engine.follow(sequence)
            admitted = await admit(sequence)
            if isinstance(admitted, ServingError):
                raise admitted
            accepted = wire.Accepted(
                revision=self.info.revision,
                prompt_tokens=len(sequence.prompt_token_ids),
                queue_position=admitted,
            )
            yield wire.encode(wire.StreamRecord(accepted=accepted))
            async for record in _records(log):
                yield wire.encode(record)
        except ServingError as error:
            yield wire.encode(wire.StreamRecord(refused=error.info))
        finally:
            # Sequences are made before they are admitted, so a cancel can never miss one.
            if sequence is not None:
                self._engine.abort(sequence)

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
        return dataclasses.asdict(self._engine.stats())


async def _records(log: TokenLog) -> AsyncIterator[wire.StreamRecord]:
    """A log as messages: whatever is new at a time, the end with the last of it."""
    cursor = log.cursor()
    while True:
        deltas = tuple(await cursor.wait())
        terminal = log.terminal if cursor.is_at_end else None
        yield wire.StreamRecord(deltas=deltas, terminal=terminal)
        if terminal is not None:
            return
