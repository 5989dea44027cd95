"""Serve shell of the engine: `@serve.batch` admits, the engine batches continuously.

The decorator batches the *admission*, never the generation: a batched generator
would hold newcomers until its longest row ended.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray import serve

from deployments import wire
from deployments.engine.async_engine import AsyncEngine
from deployments.engine.build import EngineSpec, build_engine
from deployments.engine.sequence import Sequence
from protocol.errors import ServingError
from protocol.token_log import TokenLog

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What a model replica is built from."""

    info: wire.ModelInfo
    engine: EngineSpec
    log_level: str


@dataclasses.dataclass(frozen=True)
class AdmissionWindow:
    """The part that changes while serving (`user_config`): how many requests join at once.

    Raises:
        ValueError: a value is out of range; the message names it and the limits.
    """

    max_batch_size: int = 32
    batch_wait_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch_size <= 4096:
            raise ValueError(f"max_batch_size is {self.max_batch_size}, allowed are 1 to 4096")
        if not 0 <= self.batch_wait_timeout_s <= 10:
            raise ValueError(
                f"batch_wait_timeout_s is {self.batch_wait_timeout_s}, allowed are 0 to 10"
            )


class ModelReplica:
    """One engine, and what Serve calls of it."""

    # Serve awaits an async constructor; the replica counts as started only after it.
    async def __init__(self, spec: ModelSpec) -> None:  # type: ignore[misc]
        logging.getLogger().setLevel(spec.log_level)
        self._engine: AsyncEngine = build_engine(spec.engine)
        await self._engine.start()
        self._info = msgspec.structs.replace(
            spec.info, context_length=self._engine.config.max_model_len
        )

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        window = AdmissionWindow(**user_config)
        self._admit.set_max_batch_size(window.max_batch_size)
        self._admit.set_batch_wait_timeout_s(window.batch_wait_timeout_s)

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises.

        Raises:
            RuntimeError: the engine's thread is dead, or stuck in a step.
        """
        if not self._engine.is_healthy:
            age_s = self._engine.heartbeat_age_s()
            raise RuntimeError(f"the engine has not moved for {age_s:.0f} s")

    async def info(self) -> bytes:
        return wire.encode(self._info)

    async def stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self._engine.stats())

    async def generate(self, payload: bytes) -> AsyncIterator[bytes]:
        """Packed `StreamRecord`s: `accepted` or `refused`, then deltas, then `terminal`.

        When the caller cancels, the engine drops the sequence before its next step.
        """
        sequence: Sequence | None = None
        try:
            sequence = await self._engine.prepare(wire.decode_request(payload))
            log = self._engine.follow(sequence)
            admitted: int | ServingError = await self._admit(sequence)
            if isinstance(admitted, ServingError):
                raise admitted
            accepted = wire.Accepted(
                prompt_tokens=len(sequence.prompt_token_ids), queue_position=admitted
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

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.0)
    async def _admit(self, sequences: list[Sequence]) -> list[int | ServingError]:
        """Hands newcomers to the running engine and returns at once.

        Returns:
            For each its place in the queue, or why it was refused.
        """
        refusals = self._engine.admit(sequences)
        waiting = self._engine.stats().waiting
        return [waiting if refusal is None else refusal for refusal in refusals]


async def _records(log: TokenLog) -> AsyncIterator[wire.StreamRecord]:
    """A log as messages: whatever is new at a time, the end with the last of it."""
    cursor = log.cursor()
    while True:
        deltas = tuple(await cursor.wait())
        terminal = log.terminal if cursor.is_at_end else None
        yield wire.StreamRecord(deltas=deltas, terminal=terminal)
        if terminal is not None:
            return


ModelDeployment = serve.deployment(
    name="Model", max_ongoing_requests=4096, health_check_period_s=5
)(ModelReplica)
