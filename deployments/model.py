"""Serve shell of the engine: `@serve.batch` admits, the engine batches continuously.

The decorator batches the *admission*, never the generation: a batched generator
would hold newcomers until its longest row ended.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ray import serve

from deployments import wire
from deployments.engine.build import EngineSpec, build_engine
from deployments.engine.sequence import Sequence
from deployments.model_service import ModelService
from protocol.errors import ServingError

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
        engine = build_engine(spec.engine)
        await engine.start()
        self._service = ModelService(engine, spec.info)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        window = AdmissionWindow(**user_config)
        self._admit.set_max_batch_size(window.max_batch_size)
        self._admit.set_batch_wait_timeout_s(window.batch_wait_timeout_s)

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises."""
        self._service.check_health()

    async def info(self) -> bytes:
        return wire.encode(self._service.info)

    async def stats(self) -> dict[str, Any]:
        return self._service.stats()

    async def generate(self, payload: bytes) -> AsyncIterator[bytes]:
        async with aclosing(self._service.generate(payload, self._admit)) as records:
            async for record in records:
                yield record

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.0)
    async def _admit(self, sequences: list[Sequence]) -> list[int | ServingError]:
        return self._service.admit(sequences)


ModelDeployment = serve.deployment(
    name="Model", max_ongoing_requests=4096, health_check_period_s=5
)(ModelReplica)
