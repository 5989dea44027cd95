"""Serve shell of the ingress: hands the graph's handles to `web.build_web`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.account_store import open_store
from app.cache_routes import is_loopback
from app.front_cache import FrontCache
from app.generation import FailoverLimits
from app.graph import Graph, GraphLimits
from app.model_bus import MessageStream
from app.resume import ResumeTokens
from app.settings import Settings
from app.tickets import Claim, Tickets
from app.web import Web
from deployments.membership import watch_replicas
from deployments.replica_board import MODEL, ReplicaBoard, board_of
from deployments.wire import Route
from deployments.work_meter import WorkMeter

MAX_ONGOING_REQUESTS = 100_000
"""Far above our own caps: past Serve's limit a handshake hangs and a probe is refused."""
STATS_TIMEOUT_S = 2.0
MANAGE_TIMEOUT_S = 10.0
INGRESS = "Ingress"
"""Name of the deployment."""
NOTICE_S = 1.0
"""HAProxy is told at the same time as we are: until it knows, new sockets may still come."""


logger = logging.getLogger(__name__)


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
    """`ports.ModelPort` over a Serve handle; `route` is for our request router."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(_by_reference=False)
        self._streams = handle.options(stream=True, _by_reference=False)

    async def submit(self, payload: bytes, route: Route) -> bytes:
        return cast(bytes, await self._handle.submit.remote(payload, route=route))

    async def warm(self, payload: bytes, route: Route) -> None:
        await self._handle.warm.remote(payload, route=route)

    async def tokenize(self, payload: bytes) -> bytes:
        return cast(bytes, await self._handle.tokenize.remote(payload))

    def bus(self, ingress: str, positions: dict[str, int], replica: str) -> MessageStream:
        route = Route(replica=replica)
        messages = self._streams.bus.remote(ingress, positions, route=route)
        return cast(MessageStream, messages)

    async def cancel(
        self, names: tuple[str, ...], ingress: str, replica: str, *, keep: bool
    ) -> None:
        await self._handle.cancel.remote(names, ingress, keep, route=Route(replica=replica))

    async def find(self, name: str, replica: str) -> bytes:
        route = Route(replica=replica)
        return cast(bytes, await self._handle.find.remote(name, route=route))

    async def attach(self, name: str, ingress: str, replica: str) -> bytes:
        route = Route(replica=replica)
        return cast(bytes, await self._handle.attach.remote(name, ingress, route=route))

    async def renew(self, ingress: str, replica: str) -> None:
        await self._handle.renew.remote(ingress, route=Route(replica=replica))

    async def info(self) -> bytes:
        return cast(bytes, await self._handle.info.remote())

    async def stats(self) -> list[dict[str, Any]]:
        return await _every_replica(self._handle, "stats")


class CacheHandle:
    """`ports.CachePort` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(_by_reference=False)

    async def lookup(self, payload: bytes) -> bytes:
        try:
            return cast(bytes, await self._handle.lookup.remote(payload))
        except RequestCancelledError:
            # The client has left: that tells nothing of the cache.
            raise asyncio.CancelledError from None

    async def store(self, payload: bytes) -> None:
        await self._handle.store.remote(payload)

    async def embed(self, payload: bytes) -> bytes:
        return cast(bytes, await self._handle.embed.remote(payload))

    async def check(self, payload: bytes) -> bytes:
        return cast(bytes, await self._handle.check.remote(payload))

    async def manage(self, payload: bytes) -> list[bytes]:
        return await _every_replica(self._handle, "manage", payload, timeout_s=MANAGE_TIMEOUT_S)

    async def epochs(self) -> list[str]:
        return await _every_replica(self._handle, "epoch")

    async def stats(self) -> list[dict[str, Any]]:
        return await _every_replica(self._handle, "stats")


async def _every_replica(
    handle: DeploymentHandle, method: str, *args: Any, timeout_s: float = STATS_TIMEOUT_S
) -> list[Any]:
    return list(await handle.broadcast(method, *args).results_async(timeout_s=timeout_s))


class IngressReplica:
    """One ingress process."""

    def __init__(
        self,
        settings: Settings,
        model: DeploymentHandle,
        cache: DeploymentHandle | None,
        resume_key: bytes,
    ) -> None:
        logging.getLogger().setLevel(settings.log_level)
        self._settings = settings
        context = serve.get_replica_context()
        replica = context.replica_id.unique_id
        self._name, self._app_name = replica, context.app_name
        # A replica that is started again keeps nothing of what its name followed before.
        ingress = f"{replica}-{uuid.uuid4().hex[:8]}"
        self._is_on_loopback = _serves_on_loopback()
        self._tickets = Tickets(resume_key, ingress, ask=self._spend_elsewhere)
        self._graph = Graph(
            ModelHandle(model),
            None if cache is None else CacheHandle(cache),
            board_of(MODEL),
            ingress=ingress,
            limits=_graph_limits(settings),
            tokens=ResumeTokens(resume_key),
            front=_front(settings),
            shares_by_meaning=settings.cache.semantic and settings.cache.coalesce_similar,
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        self._meter = WorkMeter()
        self._web = Web(
            self._graph,
            self._settings,
            self._peer_stats,
            self._tickets,
            is_on_loopback=self._is_on_loopback,
            store=open_store(self._settings.accounts, self._settings.home),
        )
        await self._web.start()
        self._web.app.add_middleware(WithoutRequestId)
        self._watch = asyncio.get_running_loop().create_task(self._watch_for_the_end())
        return self._web.app

    async def stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self._web.stats())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve where the replica count moves: live requests, and no idle socket."""
        live = self._web.stats().requests["live"]
        return self._meter.stats(tokens=0, running=live, waiting=0)

    def _peers(self) -> DeploymentHandle:
        peers = serve.get_deployment_handle(INGRESS, self._app_name)
        return peers.options(_by_reference=False)

    async def _peer_stats(self) -> list[dict[str, Any]]:
        try:
            return await _every_replica(self._peers(), "stats")
        except Exception as error:
            logger.warning("stats of other ingresses are missing: %r", error)
            return []

    async def spend_ticket(self, issuer: str, number: int, expires_s: float) -> bool | None:
        """Asked by another ingress, of all."""
        return self._tickets.spend(Claim(issuer, number, expires_s))

    async def _spend_elsewhere(self, claim: Claim) -> bool | None:
        try:
            answers = await _every_replica(self._peers(), "spend_ticket", *claim)
        except Exception as error:
            logger.warning("a ticket's issuer cannot be asked: %r", error)
            return None
        return next((answer for answer in answers if answer is not None), None)

    async def _watch_for_the_end(self) -> None:
        """Drains once Serve has taken this replica out of the set that gets new requests.

        Serve tells a replica itself only when it waits for its requests to end already.
        """
        board = watch_replicas(INGRESS, self._app_name, self._name)
        # Not before it has been in it: a replica is built before it joins.
        await _until(board, lambda: self._name in board.replicas)
        await _until(board, lambda: self._name not in board.replicas)
        logger.info("ingress %s leaves: its clients are told", self._name)
        await asyncio.sleep(NOTICE_S)
        await self._web.drain(self._settings.limits.drain_timeout_s)


IngressDeployment = serve.deployment(
    name=INGRESS,
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=5,
)(serve.ingress()(IngressReplica))


async def _until(board: ReplicaBoard, holds: Callable[[], bool]) -> None:
    """Waits for a change of the board that makes `holds()` true."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def notice() -> None:
        loop.call_soon_threadsafe(changed.set)

    unsubscribe = board.subscribe(notice)
    try:
        while not holds():
            await changed.wait()
            changed.clear()
    finally:
        unsubscribe()


def _serves_on_loopback() -> bool:
    """Whether Serve's HTTP side listens on this machine only.

    An ingress cannot tell from a connection: behind HAProxy everyone comes from this machine.
    """
    try:
        host = serve.context._get_global_client().http_config.host
    except Exception as error:
        logger.warning("it is not known where Serve listens: %r", error)
        return False
    return host is not None and is_loopback(host)


def _front(settings: Settings) -> FrontCache | None:
    cache = settings.cache
    if cache.front_bytes == 0:
        return None
    return FrontCache(cache.front_bytes, cache.ttl_s, time.monotonic)


def _graph_limits(settings: Settings) -> GraphLimits:
    cache, limits = settings.cache, settings.limits
    return GraphLimits(
        lookup_timeout_s=cache.embed_timeout_s + cache.lookup_timeout_s,
        max_pending=limits.max_pending_requests,
        watchdog_s=limits.watchdog_s,
        failover=FailoverLimits(
            accept_timeout_s=limits.accept_timeout_s,
            submit_timeout_s=limits.watchdog_s,
            failover_timeout_s=limits.failover_timeout_s,
            max_failovers=limits.max_failovers,
        ),
    )
