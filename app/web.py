"""The FastAPI application around a graph: probes, the page, the OpenAI API, tickets, the WebSocket.

Built with plain constructors, so that a test runs it under uvicorn or httpx on
any graph; `ingress.py` is its Serve shell.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from app.accounts import Accounts, hide_credentials
from app.gateway import Gateway
from app.graph import Graph
from app.openai_errors import install_error_handlers
from app.openai_exchange import Exchange
from app.openai_routes import build_router
from app.outcomes import RequestOutcomes
from app.settings import Settings
from app.tickets import LIFE_S, TicketReply, Tickets
from deployments.metrics import GraphStats, IngressStats, render_metrics
from protocol.errors import ServingError
from protocol.session import SessionLimits

PAGE = Path(__file__).parent / "static" / "index.html"
CLIENT = Path(__file__).parents[1] / "clients" / "js"
CLIENT_MODULES = frozenset({"seedance.js", "stream.js", "connection.js"})
"""The page speaks to the server through the published client."""

Peers = list[dict[str, Any]]


async def _no_peers() -> Peers:
    return []


class Web:
    """All routes of one ingress replica, and its way out.

    Args:
        peers: the `stats` of the other ingress replicas, as mappings.
        tickets: those of this ingress; without, they are good here only.

    Attributes:
        app: to be served.
    """

    def __init__(
        self,
        graph: Graph,
        settings: Settings,
        peers: Callable[[], Awaitable[Peers]] = _no_peers,
        tickets: Tickets | None = None,
    ) -> None:
        hide_credentials()
        self._graph = graph
        self._peers = peers
        self.app = FastAPI(title="Seedance", docs_url="/docs", redoc_url=None)
        self._exchanges: set[Exchange] = set()
        self._outcomes = RequestOutcomes()
        accounts = Accounts(settings.auth)
        tickets = tickets or Tickets()
        limits = settings.limits
        self._gateway = Gateway(
            graph,
            accounts,
            limits=SessionLimits(
                max_live_requests=limits.max_live_requests,
                max_message_bytes=limits.max_body_bytes,
                heartbeat_s=limits.heartbeat_s,
                window_tokens=limits.window_tokens,
                input_buffer_bytes=limits.input_buffer_bytes,
                max_input_bytes=limits.max_input_bytes,
            ),
            max_connections=limits.max_connections,
            unread_timeout_s=limits.unread_timeout_s,
            tickets=tickets,
            outcomes=self._outcomes,
            resume_window_s=limits.resume_window_s,
        )
        install_error_handlers(self.app)

        def tenant_of(request: Request) -> str:
            return accounts.tenant_of(request.headers.get("authorization"))

        self.app.include_router(
            build_router(
                graph,
                tenant_of,
                max_body_bytes=limits.max_body_bytes,
                heartbeat_s=limits.heartbeat_s,
                unread_timeout_s=limits.unread_timeout_s,
                exchanges=self._exchanges,
                outcomes=self._outcomes,
            )
        )
        self.app.add_api_websocket_route("/v1/infer", self._gateway.serve)
        _add_tickets(self.app, tickets, tenant_of)
        _add_page(self.app)
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


def _add_page(web: FastAPI) -> None:
    @web.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE, headers={"Cache-Control": "no-cache"})

    @web.get("/static/{name}", include_in_schema=False)
    async def client(name: str) -> Response:
        if name not in CLIENT_MODULES:
            raise HTTPException(404)
        headers = {"Cache-Control": "no-cache"}
        return FileResponse(CLIENT / name, media_type="text/javascript", headers=headers)


def _add_tickets(web: FastAPI, tickets: Tickets, tenant_of: Callable[[Request], str]) -> None:
    @web.post("/v1/tickets", response_model=TicketReply, tags=["WebSocket"])
    async def create_ticket(request: Request) -> Response:
        """A ticket that opens one WebSocket within 30 s, where no header can carry the key."""
        reply = TicketReply(ticket=tickets.issue(tenant_of(request)), expires_in_s=LIFE_S)
        return JSONResponse(reply.model_dump(), headers={"Cache-Control": "no-store"})


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
