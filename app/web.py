"""The FastAPI application around a graph: probes, the page, the OpenAI API, the WebSocket.

Built with plain constructors, so that a test runs it under uvicorn or httpx on
any graph; `ingress.py` is its Serve shell.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, Response

from app.accounts import Accounts
from app.gateway import Gateway
from app.graph import Graph
from app.openai_errors import install_error_handlers
from app.openai_exchange import Exchange
from app.openai_routes import build_router
from app.outcomes import RequestOutcomes
from app.settings import Settings
from deployments.metrics import GraphStats, IngressStats, render_metrics
from protocol.errors import ServingError
from protocol.session import SessionLimits

PAGE = Path(__file__).parent / "static" / "index.html"


Peers = list[dict[str, Any]]


async def _no_peers() -> Peers:
    return []


class Web:
    """All routes of one ingress replica, and its way out.

    Args:
        peers: the `stats` of the other ingress replicas, as mappings.

    Attributes:
        app: to be served.
    """

    def __init__(
        self, graph: Graph, settings: Settings, peers: Callable[[], Awaitable[Peers]] = _no_peers
    ) -> None:
        self._graph = graph
        self._peers = peers
        self.app = FastAPI(title="Seedance", docs_url="/docs", redoc_url=None)
        self._exchanges: set[Exchange] = set()
        self._outcomes = RequestOutcomes()
        accounts = Accounts(settings.auth)
        limits = settings.limits
        self._gateway = Gateway(
            graph,
            accounts,
            limits=SessionLimits(
                max_live_requests=limits.max_live_requests,
                max_message_bytes=limits.max_body_bytes,
                heartbeat_s=limits.heartbeat_s,
            ),
            max_connections=limits.max_connections,
            outcomes=self._outcomes,
            resume_window_s=limits.resume_window_s,
        )
        install_error_handlers(self.app)
        self.app.include_router(
            build_router(
                graph,
                lambda request: accounts.tenant_of(request.headers.get("authorization")),
                max_body_bytes=limits.max_body_bytes,
                heartbeat_s=limits.heartbeat_s,
                exchanges=self._exchanges,
                outcomes=self._outcomes,
            )
        )
        self.app.add_api_websocket_route("/v1/infer", self._gateway.serve)
        self.app.add_api_route("/", _page, methods=["GET"], include_in_schema=False)
        _add_probes(self.app, graph)

        @self.app.get("/metrics")
        async def metrics() -> Response:
            """Gauges and counters of every replica, in Prometheus' text format."""
            content, content_type = render_metrics(await self._all_stats())
            return Response(content, media_type=content_type)

    def stats(self) -> IngressStats:
        """What this ingress counts."""
        stats = self._graph.own_stats()
        stats.open_connections = self._gateway.open_connections
        stats.requests = self._outcomes.stats()
        return stats

    async def _all_stats(self) -> GraphStats:
        stats = await self._graph.stats()
        own = self.stats()
        others = [one for one in await self._peers() if one["ingress"] != own.ingress]
        stats.ingresses = [dataclasses.asdict(own), *others]
        return stats

    async def drain(self, deadline_s: float) -> None:
        """Lets what runs come to its end, and cuts what is left at the deadline.

        WebSockets are told at once; their streams can be resumed on another ingress.
        """
        await asyncio.gather(self._gateway.drain(deadline_s), self._cut_exchanges(deadline_s))

    async def _cut_exchanges(self, deadline_s: float) -> None:
        await asyncio.sleep(deadline_s)
        for exchange in tuple(self._exchanges):
            exchange.cut()


def build_web(graph: Graph, settings: Settings) -> FastAPI:
    """The application of a `Web` that is never drained."""
    return Web(graph, settings).app


async def _page() -> Response:
    return FileResponse(PAGE, headers={"Cache-Control": "no-cache"})


def _add_probes(web: FastAPI, graph: Graph) -> None:
    @web.get("/healthz")
    async def healthz() -> Response:
        """Alive: this process answers."""
        return JSONResponse({"status": "alive"})

    @web.get("/readyz")
    async def readyz() -> Response:
        """Ready: a completion would work now."""
        try:
            await graph.check_ready()
        except ServingError as error:
            return JSONResponse(
                {"status": "not ready", "reason": error.message},
                status_code=503,
                headers={"Retry-After": "1"},
            )
        return JSONResponse({"status": "ready"})
