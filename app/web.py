"""The FastAPI application around a graph: probes, the page, the OpenAI API, tickets, the WebSocket.

Built with plain constructors, so that a test runs it under uvicorn or httpx on
any graph; `ingress.py` is its Serve shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.account_store import AccountStore
from app.accounts import Accounts, Holder, hide_credentials
from app.cache_routes import build_cache_router
from app.gateway import Gateway
from app.graph import Graph
from app.openai_document import describe_errors, errors
from app.openai_errors import install_error_handlers
from app.openai_exchange import Exchange
from app.openai_response_socket import ResponseSockets
from app.openai_routes import build_router
from app.outcomes import RequestOutcomes
from app.rate_limits import Limits, RateLimits
from app.settings import Settings
from app.tickets import LIFE_S, TicketReply, Tickets
from app.usage_ledger import UsageLedger, Used
from app.usage_routes import build_usage_router
from deployments.metrics import GraphStats, IngressStats, render_metrics
from protocol.errors import ServingError
from protocol.session import SessionLimits

PAGE = Path(__file__).parent / "static" / "index.html"
CLIENT = Path(__file__).parents[1] / "clients" / "js"
CLIENT_MODULES = frozenset({"seedance.js", "stream.js", "connection.js"})
"""The page speaks to the server through the published client."""

Peers = list[dict[str, Any]]


class RateLimitHeaders:
    """ASGI middleware: a reply to a known tenant tells how much it may still ask for."""

    def __init__(self, app: ASGIApp, headers: Callable[[str], dict[str, str]]) -> None:
        self._app = app
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with(message: Message) -> None:
            tenant = scope.get("state", {}).get("tenant")
            if message["type"] == "http.response.start" and tenant is not None:
                told = self._headers(tenant).items()
                raw = [(name.encode(), value.encode()) for name, value in told]
                message["headers"] = [*message["headers"], *raw]
            await send(message)

        await self._app(scope, receive, send_with)


async def _no_peers() -> Peers:
    return []


class Web:
    """All routes of one ingress replica, and its way out.

    Args:
        peers: the `stats` of the other ingress replicas, as mappings.
        tickets: those of this ingress; without, they are good here only.
        is_on_loopback: whether nobody but this machine can reach the server.
        store: of accounts, closed by us; without, there are the keys of the settings only, and
            no ledger.

    Attributes:
        app: to be served.
    """

    def __init__(
        self,
        graph: Graph,
        settings: Settings,
        peers: Callable[[], Awaitable[Peers]] = _no_peers,
        tickets: Tickets | None = None,
        is_on_loopback: bool = True,
        store: AccountStore | None = None,
    ) -> None:
        hide_credentials()
        self._graph = graph
        self._peers = peers
        self._settings = settings
        self._store = store
        self.app = FastAPI(
            title="Seedance", docs_url="/docs", redoc_url=None, lifespan=self._until_closed
        )
        self._exchanges: set[Exchange] = set()
        accounts = self._accounts = Accounts(
            settings.auth,
            store,
            limits=_default_limits(settings),
            is_on_loopback=is_on_loopback,
            timeout_s=settings.accounts.timeout_s,
        )
        self._rate_limits = RateLimits(accounts.limits_of)
        self._ledger = None if store is None else UsageLedger(store.add_usage)
        self._outcomes = RequestOutcomes(limits=self._rate_limits, on_use=self._note_use)
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
        self.app.add_middleware(RateLimitHeaders, headers=self._rate_limits.headers)
        install_error_handlers(self.app)

        def holder_of(request: Request) -> Holder:
            holder = accounts.holder_of(request.headers.get("authorization"))
            request.state.tenant = holder.tenant
            return holder

        def tenant_of(request: Request) -> str:
            return holder_of(request).tenant

        self.app.include_router(
            build_router(
                graph,
                tenant_of,
                max_body_bytes=limits.max_body_bytes,
                heartbeat_s=limits.heartbeat_s,
                unread_timeout_s=limits.unread_timeout_s,
                exchanges=self._exchanges,
                outcomes=self._outcomes,
                keeper=self._gateway.keeper,
                embedder=_embedder_id(settings),
            )
        )
        self._response_sockets = ResponseSockets(
            graph,
            accounts,
            max_connections=limits.max_connections,
            max_live_requests=limits.max_live_requests,
            max_message_bytes=limits.max_body_bytes,
            unread_timeout_s=limits.unread_timeout_s,
            outcomes=self._outcomes,
        )
        self.app.add_api_websocket_route("/v1/responses", self._response_sockets.serve)
        self.app.add_api_websocket_route("/v1/infer", self._gateway.serve)
        self.app.include_router(
            build_cache_router(
                graph,
                accounts,
                is_on_loopback=is_on_loopback,
                max_body_bytes=limits.max_body_bytes,
            )
        )
        if store is not None:

            def is_admin(request: Request) -> bool:
                key = request.headers.get("authorization")
                return accounts.is_admin(key, is_local=False)

            self.app.include_router(build_usage_router(store, tenant_of, is_admin))
        _add_tickets(self.app, tickets, holder_of)
        _add_page(self.app)
        _add_probes(self.app, graph)

        @self.app.get("/metrics", response_class=PlainTextResponse)
        async def metrics() -> Response:
            """Gauges and counters of every replica, in Prometheus' text format."""
            content, content_type = render_metrics(await self._all_stats())
            return Response(content, media_type=content_type)

        describe_errors(self.app, takes_anonymous=settings.auth.allow_anonymous is not False)

    async def start(self) -> None:
        """Reads the accounts, and goes on doing so.

        Raises:
            SettingsError: no key is needed, though other machines reach the server.
        """
        try:
            await self._accounts.start(self._settings.accounts.refresh_s)
        except BaseException:
            await self.close()
            raise
        if self._ledger is not None:
            self._ledger.start(self._settings.accounts.flush_s)

    async def close(self) -> None:
        """Writes the last usage, and lets go of the store."""
        await self._accounts.close()
        if self._ledger is not None:
            await self._ledger.close()
        if self._store is not None:
            await self._store.close()

    @contextlib.asynccontextmanager
    async def _until_closed(self, app: FastAPI) -> AsyncIterator[None]:
        """The lifespan of the app; whoever serves it has started us, and heard of a refusal."""
        yield
        await self.close()

    def _note_use(self, tenant: str, used: Used) -> None:
        self._rate_limits.charge(
            tenant, used.prompt_tokens + used.completion_tokens - used.saved_tokens
        )
        if self._ledger is not None:
            self._ledger.count(tenant, used)

    def stats(self) -> IngressStats:
        """What this ingress counts."""
        stats = self._graph.own_stats()
        stats.open_connections = (
            self._gateway.open_connections + self._response_sockets.open_connections
        )
        stats.requests = self._outcomes.stats()
        stats.accounts = self._accounts.stats()
        stats.ledger = {} if self._ledger is None else self._ledger.stats()
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
        await asyncio.gather(
            self._gateway.drain(deadline_s),
            self._response_sockets.drain(deadline_s),
            self._cut_exchanges(deadline_s),
        )

    async def _cut_exchanges(self, deadline_s: float) -> None:
        await asyncio.sleep(deadline_s)
        for exchange in tuple(self._exchanges):
            exchange.cut()


def _default_limits(settings: Settings) -> Limits:
    accounts = settings.accounts
    return Limits(
        requests_per_minute=accounts.requests_per_minute,
        tokens_per_minute=accounts.tokens_per_minute,
        concurrent_requests=accounts.concurrent_requests,
    )


def build_web(graph: Graph, settings: Settings) -> FastAPI:
    """The application of a `Web` that is never drained."""
    return Web(graph, settings).app


def _embedder_id(settings: Settings) -> str | None:
    """What /v1/embeddings calls its model: a folder by its name only."""
    cache = settings.cache
    if not (cache.enabled and cache.semantic):
        return None
    path = Path(cache.embedder)
    return path.name if path.is_absolute() else cache.embedder


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


def _add_tickets(web: FastAPI, tickets: Tickets, holder_of: Callable[[Request], Holder]) -> None:
    @web.post(
        "/v1/tickets", response_model=TicketReply, responses=errors(401, 500), tags=["WebSocket"]
    )
    async def create_ticket(request: Request) -> Response:
        """A ticket that opens one WebSocket within 30 s, where no header can carry the key."""
        reply = TicketReply(ticket=tickets.issue(holder_of(request)), expires_in_s=LIFE_S)
        return JSONResponse(reply.model_dump(), headers={"Cache-Control": "no-store"})


class Health(BaseModel):
    """What a probe is told."""

    status: str
    reason: str | None = None


def _add_probes(web: FastAPI, graph: Graph) -> None:
    @web.get("/healthz", response_model=Health)
    async def healthz() -> Response:
        """Alive: this process answers."""
        return JSONResponse({"status": "alive"})

    not_ready: dict[int | str, Any] = {503: {"model": Health}}

    @web.get("/health", response_model=Health, responses=not_ready)
    @web.get("/readyz", response_model=Health, responses=not_ready)
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
