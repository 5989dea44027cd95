"""Serve shell of the engine: `@serve.batch` admits, the engine batches continuously.

The decorator batches the *admission*, never the generation: a batched generator
would hold newcomers until its longest row ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import ray
from ray import serve

from deployments import wire
from deployments.admission_window import AdmissionBounds, AdmissionWindow
from deployments.engine.build import EngineSpec, build_engine
from deployments.engine.runner import cpu_threads
from deployments.engine.sequence import Sequence
from deployments.model_service import BusLeases, ModelService
from deployments.replica_board import MODEL
from deployments.work_meter import WorkMeter
from protocol.errors import ResumeExpired, ServingError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What a model replica is built from."""

    info: wire.ModelInfo
    engine: EngineSpec
    leases: BusLeases
    log_level: str


def _num_cores(spec: EngineSpec) -> int:
    """Cores that the engine computes with: one where a GPU or the mock does the work."""
    if spec.folder is None or ray.get_gpu_ids():
        return 1
    return cpu_threads(spec.config)


class ModelReplica:
    """One engine, and what Serve calls of it.

    `route` is for the request router in the caller's process; see `routing.py`.
    """

    # Serve awaits an async constructor; the replica counts as started only after it.
    async def __init__(self, spec: ModelSpec) -> None:  # type: ignore[misc]
        logging.getLogger().setLevel(spec.log_level)
        engine = build_engine(spec.engine)
        await engine.start()
        replica = serve.get_replica_context().replica_id.unique_id
        self._service = ModelService(
            engine, spec.info, replica=replica, leases=spec.leases, clock=time.monotonic
        )
        self._window = AdmissionWindow(AdmissionBounds(), time.monotonic)
        self._apply_window()
        self._meter = WorkMeter(num_cores=_num_cores(spec.engine))
        engine.on_first_token = self._meter.first_token
        self._clockwork = asyncio.create_task(self._service.keep_time())

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self._window.set_bounds(AdmissionBounds(**user_config))
        self._apply_window()

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises."""
        self._service.check_health()

    async def info(self) -> bytes:
        return wire.encode(self._service.info)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve where the replica count moves."""
        load = self._service.load()
        return self._meter.stats(tokens=load.tokens, running=load.running, waiting=load.waiting)

    async def stats(self) -> dict[str, Any]:
        window = self._window.window
        return self._service.stats() | {
            "admission_batch_size": window.batch_size,
            "admission_wait_s": window.wait_s,
        }

    async def submit(self, payload: bytes, *, route: wire.Route) -> bytes:
        if self._window.update(self._service.load().waiting):
            self._apply_window()
        return await self._service.submit(payload, self._admit)

    async def warm(self, payload: bytes, *, route: wire.Route) -> None:
        await self._service.warm(payload)

    async def tokenize(self, payload: bytes) -> bytes:
        return await self._service.tokenize(payload)

    async def cancel(
        self, names: tuple[str, ...], ingress: str, keep: bool, *, route: wire.Route
    ) -> None:
        self._service.cancel(names, ingress, keep=keep)

    async def find(self, name: str, *, route: wire.Route) -> bytes:
        return self._service.find(name)

    async def attach(self, name: str, ingress: str, *, route: wire.Route) -> bytes:
        """A packed `Attached`, or nothing: an exception would be wrapped on its way."""
        try:
            return self._service.attach(name, ingress)
        except ResumeExpired:
            return b""

    async def renew(self, ingress: str, *, route: wire.Route) -> None:
        self._service.renew(ingress)

    async def bus(
        self, ingress: str, positions: dict[str, int], *, route: wire.Route
    ) -> AsyncIterator[bytes]:
        async with aclosing(self._service.bus(ingress, positions)) as messages:
            async for message in messages:
                yield message

    def _apply_window(self) -> None:
        window = self._window.window
        self._admit.set_max_batch_size(window.batch_size)
        self._admit.set_batch_wait_timeout_s(window.wait_s)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.0)
    async def _admit(self, sequences: list[Sequence]) -> list[int | ServingError]:
        return self._service.admit(sequences)


ModelDeployment = serve.deployment(name=MODEL, max_ongoing_requests=4096, health_check_period_s=5)(
    ModelReplica
)
