"""Serve shell of the ingress: hands the graph's handles to `web.build_web`."""

from __future__ import annotations

import logging
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.graph import Graph, RecordStream
from app.settings import Settings
from app.web import build_web

MAX_ONGOING_REQUESTS = 100_000
"""Far above our own caps: past Serve's limit a handshake hangs and a probe is refused."""
STATS_TIMEOUT_S = 2.0


class WithoutRequestId:
    """Drops our `x-request-id`: Serve appends the same header to every reply by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    header for header in message["headers"] if header[0].lower() != b"x-request-id"
                ]
            await send(message)

        await self._app(scope, receive, send_without)


class ModelHandle:
    """`graph.ModelPort` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(_by_reference=False)
        self._streams = handle.options(stream=True, _by_reference=False)

    def generate(self, payload: bytes) -> RecordStream:
        return cast(RecordStream, self._streams.generate.remote(payload))

    async def info(self) -> bytes:
        return cast(bytes, await self._handle.info.remote())

    async def stats(self) -> list[dict[str, Any]]:
        return await _every_replica(self._handle, "stats")


class CacheHandle:
    """`graph.CachePort` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(_by_reference=False)

    async def lookup(self, payload: bytes) -> bytes:
        return cast(bytes, await self._handle.lookup.remote(payload))

    async def store(self, payload: bytes) -> None:
        await self._handle.store.remote(payload)

    async def stats(self) -> list[dict[str, Any]]:
        return await _every_replica(self._handle, "stats")


async def _every_replica(handle: DeploymentHandle, method: str) -> list[dict[str, Any]]:
    return list(await handle.broadcast(method).results_async(timeout_s=STATS_TIMEOUT_S))


class IngressReplica:
    """One ingress process."""

    def __init__(
        self, settings: Settings, model: DeploymentHandle, cache: DeploymentHandle | None
    ) -> None:
        logging.getLogger().setLevel(settings.log_level)
        self._settings = settings
        self._graph = Graph(
            ModelHandle(model),
            None if cache is None else CacheHandle(cache),
            lookup_timeout_s=settings.cache.embed_timeout_s + settings.cache.lookup_timeout_s,
            accept_timeout_s=settings.limits.accept_timeout_s,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        web = build_web(self._graph, self._settings)
        web.add_middleware(WithoutRequestId)
        return web


IngressDeployment = serve.deployment(
    name="Ingress", max_ongoing_requests=MAX_ONGOING_REQUESTS, health_check_period_s=5
)(serve.ingress()(IngressReplica))
