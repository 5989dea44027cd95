"""The FastAPI application around a graph: probes, the page, the OpenAI API, the WebSocket.

Built with plain constructors, so that a test runs it under uvicorn or httpx on
any graph; `ingress.py` is its Serve shell.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import FileResponse, JSONResponse, Response

from app.accounts import Accounts
from app.gateway import Gateway
from app.graph import Graph
from app.openai_errors import install_error_handlers
from app.openai_routes import build_router
from app.settings import Settings
from deployments.metrics import render_metrics
from protocol.errors import ServingError
from protocol.session import SessionLimits

PAGE = Path(__file__).parent / "static" / "index.html"


def build_web(graph: Graph, settings: Settings) -> FastAPI:
    """All routes of one ingress replica."""
    web = FastAPI(title="Seedance", docs_url="/docs", redoc_url=None)
    accounts = Accounts(settings.auth)
    limits = settings.limits
    gateway = Gateway(
        graph,
        accounts,
        limits=SessionLimits(
            max_live_requests=limits.max_live_requests,
            max_message_bytes=limits.max_body_bytes,
            heartbeat_s=limits.heartbeat_s,
        ),
        max_connections=limits.max_connections,
    )
    install_error_handlers(web)
    web.include_router(
        build_router(
            graph,
            lambda request: accounts.tenant_of(request.headers.get("authorization")),
            max_body_bytes=limits.max_body_bytes,
            heartbeat_s=limits.heartbeat_s,
        )
    )

    @web.websocket("/v1/infer")
    async def infer(socket: WebSocket) -> None:
        await gateway.serve(socket)

    @web.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE, headers={"Cache-Control": "no-cache"})

    _add_probes(web, graph, gateway)
    return web


def _add_probes(web: FastAPI, graph: Graph, gateway: Gateway) -> None:
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

    @web.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Gauges and counters of every replica, in Prometheus' text format."""
        stats = await graph.stats()
        stats.open_connections = gateway.open_connections
        content, content_type = render_metrics(stats)
        return Response(content, media_type=content_type)
