"""The whole of one process, without Ray: engine, model, cache and graph, and a real server over them.

The engine is the real one on scripted tokens, the cache the real one on fake
embeddings in which every text is like every other: only guards and partitions
keep questions apart.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from app.front_cache import FrontCache
from app.generation import FailoverLimits
from app.graph import Graph, GraphLimits
from app.ports import CachePort, ModelPort
from app.resume import ResumeTokens
from app.serving import Stream
from app.settings import parse_settings
from app.web import build_web
from cache.budget import ErrorBudget
from cache.decision import Decider
from cache.prompt_cache import CacheConfig, PromptCache
from cache.verifier import Verifier
from deployments import wire
from deployments.cache_admin import CacheAdmin
from deployments.cache_service import CacheService
from deployments.embedder import EmbedText, Vector
from deployments.engine.async_engine import AsyncEngine
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.scripted import Fault, Script, ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import byte_tokenizer
from deployments.model_service import BusLeases, ModelService
from deployments.replica_board import ReplicaBoard, ReplicaGone
from protocol.errors import ResumeExpired, ServingError
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import Terminal, TokenLog

MODEL = "maker/scripted-1"
QUESTION = "What is the capital of France?"
INFO = wire.ModelInfo(
    id=MODEL, revision="rev-1", context_length=0, created=1_700_000_000, backend="mock"
)
TOKENIZER = byte_tokenizer()
PATIENCE_S = 30.0
"""How long a test waits for what should come at once."""

same_for_all: Vector = np.array([1, 0, 0, 0], dtype=np.float32)


def echo(seq: Sequence) -> list[int]:
    """The script that answers with the prompt's own bytes, roles and all: no two answers agree."""
    return [token_id for token_id in seq.prompt_token_ids if token_id < 256]


def talks_on(seq: Sequence) -> list[int]:
    """The script that echoes, and goes on until somebody stops it."""
    return (echo(seq) + [ord("~")] * 100_000)[:100_000]


async def embed_alike(text: str) -> Vector | None:
    return same_for_all


async def eventually(holds: Callable[[], Any], what: str = "") -> None:
    """Waits until `holds()`; for what another thread or the other end of a socket does."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, what or "it did not come true"
        await asyncio.sleep(0.005)


def ask(
    text: str = QUESTION,
    *,
    messages: Iterable[Message] | None = None,
    prompt: str | None = None,
    tenant: str = "red",
    model: str = MODEL,
    **fields: Any,
) -> InferenceRequest:
    """A greedy chat of one turn; `fields` are the request's, or its sampling's."""
    own = {name: fields.pop(name) for name in list(fields) if name in OWN_FIELDS}
    turns = None if prompt is not None else tuple(messages or (Message(role="user", content=text),))
    ask.number += 1  # type: ignore[attr-defined]
    return InferenceRequest(
        request_id=f"r-{ask.number}",  # type: ignore[attr-defined]
        tenant=tenant,
        model=model,
        messages=turns,
        prompt=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, **fields}),
        **own,
    )


ask.number = 0  # type: ignore[attr-defined]
OWN_FIELDS = ("tools", "tool_choice", "response_format", "cache", "priority", "timeout_s")


async def terminal_of(log: TokenLog) -> Terminal:
    async with asyncio.timeout(PATIENCE_S):
        cursor = log.cursor()
        while await cursor.wait():
            pass
    assert log.terminal is not None
    return log.terminal


async def answer(graph: Graph, request: InferenceRequest) -> Stream:
    """The stream, once it has ended and what there is to store is stored."""
    stream = await graph.open_stream(request)
    await terminal_of(stream.log)
    await eventually(lambda: not graph.is_storing)
    return stream


class TaskRecords:
    """`model_bus.MessageStream` over a generator in this process, cancelled like a remote one."""

    def __init__(self, records: AsyncGenerator[bytes], is_awake: asyncio.Event) -> None:
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._is_awake = is_awake
        self._task = asyncio.create_task(self._run(records))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._arrivals()

    def cancel(self) -> None:
        self._task.cancel()

    def fail(self, error: Exception) -> None:
        """Breaks the stream at both ends."""
        self._queue.put_nowait(error)
        self._task.cancel()

    async def _run(self, records: AsyncGenerator[bytes]) -> None:
        try:
            async with aclosing(records):
                async for record in records:
                    await self._is_awake.wait()
                    self._queue.put_nowait(record)
        except Exception as error:
            self._queue.put_nowait(error)
        finally:
            self._queue.put_nowait(None)

    async def _arrivals(self) -> AsyncIterator[bytes]:
        while (record := await self._queue.get()) is not None:
            if isinstance(record, Exception):
                raise record
            yield record


class Brake:
    """Stops an engine's thread before a token of whatever it answers."""

    def __init__(self) -> None:
        self._token: int | None = None

    def stop_before(self, token: int) -> None:
        self._token = token

    def release(self) -> None:
        self._token = None

    def over(self, script: Script) -> Script:
        def braked(seq: Sequence) -> list[int]:
            while (token := self._token) is not None and len(seq.output_token_ids) >= token:
                time.sleep(0.001)
            return script(seq)

        return braked


class InProcessReplica:
    """A model replica that can be killed, hung and cut off.

    Attributes:
        calls: what was called, in order.
        submits: what it was asked to run.
        warm_ups: what it was asked to compute ahead.
        refuses_bus: whether an ingress cannot open a bus now.
    """

    def __init__(
        self, name: str, service: ModelService, engine: AsyncEngine, brake: Brake | None = None
    ) -> None:
        self.name = name
        self.service = service
        self.engine = engine
        self.brake = brake or Brake()
        self.is_dead = False
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self.calls: list[str] = []
        self.submits: list[wire.Submit] = []
        self.warm_ups: list[InferenceRequest] = []
        self.refuses_bus: Callable[[str], bool] = lambda ingress: False
        self._buses: list[TaskRecords] = []

    @property
    def num_live(self) -> int:
        stats = self.engine.stats()
        return stats.running + stats.waiting

    def kill(self) -> None:
        """The process is gone: it computes nothing, calls fail, and what was open breaks."""
        self.is_dead = True
        self.brake.stop_before(0)
        self.cut()

    def hang(self) -> None:
        """The process is stopped: nothing moves, and nothing is told."""
        self._is_awake.clear()
        self.brake.stop_before(0)

    def wake_up(self) -> None:
        """It goes on as if nothing had been."""
        self._is_awake.set()
        self.brake.release()

    def cut(self) -> None:
        """Breaks every open bus."""
        for bus in self._buses:
            bus.fail(ConnectionError(f"{self.name} broke the connection"))
        self._buses.clear()

    async def reach(self, call: str) -> None:
        """What a call meets on its way here."""
        self.calls.append(call)
        if self.is_dead:
            raise ReplicaGone(f"{self.name} is dead")
        await self._is_awake.wait()

    def bus(self, ingress: str, positions: dict[str, int]) -> TaskRecords:
        async def messages() -> AsyncGenerator[bytes]:
            await self.reach("bus")
            if self.refuses_bus(ingress):
                raise ConnectionError(f"{self.name} refuses the connection")
            async with aclosing(self.service.bus(ingress, positions)) as packed:
                async for message in packed:
                    yield message

        opened = TaskRecords(messages(), self._is_awake)
        self._buses.append(opened)
        return opened

    async def admit(self, sequence: Sequence) -> int | ServingError:
        return self.service.admit([sequence])[0]


class InProcessModel:
    """`graph.ModelPort` without Serve; the board chooses, as our router does."""

    def __init__(self, replicas: list[InProcessReplica], board: ReplicaBoard) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.board = board
        board.set_replicas(self.replicas)

    async def submit(self, payload: bytes, route: wire.Route) -> bytes:
        replica = await self._choose("submit", route)
        replica.submits.append(wire.decode_submit(payload))
        return await replica.service.submit(payload, replica.admit)

    async def warm(self, payload: bytes, route: wire.Route) -> None:
        replica = await self._choose("warm", route)
        replica.warm_ups.append(wire.decode_request(payload))
        await replica.service.warm(payload)

    async def _choose(self, call: str, route: wire.Route) -> InProcessReplica:
        while (name := self.board.choose(route)) is not None:
            replica = self.replicas[name]
            try:
                await replica.reach(call)
            except ReplicaGone:
                # What Serve's router does with an actor that died.
                self.board.set_replicas(self.board.replicas - {name})
                continue
            return replica
        raise ConnectionError("no replica")

    async def tokenize(self, payload: bytes) -> bytes:
        replica = await self._choose("tokenize", wire.Route())
        return await replica.service.tokenize(payload)

    def bus(self, ingress: str, positions: dict[str, int], replica: str) -> TaskRecords:
        return self._replica(replica).bus(ingress, positions)

    async def cancel(
        self, names: tuple[str, ...], ingress: str, replica: str, *, keep: bool = False
    ) -> None:
        await self._replica(replica).reach("cancel")
        self._replica(replica).service.cancel(names, ingress, keep=keep)

    async def find(self, name: str, replica: str) -> bytes:
        await self._replica(replica).reach("find")
        return self._replica(replica).service.find(name)

    async def attach(self, name: str, ingress: str, replica: str) -> bytes:
        await self._replica(replica).reach("attach")
        try:
            return self._replica(replica).service.attach(name, ingress)
        except ResumeExpired:
            return b""

    async def renew(self, ingress: str, replica: str) -> None:
        await self._replica(replica).reach("renew")
        self._replica(replica).service.renew(ingress)

    async def info(self) -> bytes:
        for replica in self.replicas.values():
            if not replica.is_dead:
                return wire.encode(replica.service.info)
        raise ConnectionError("no replica")

    async def stats(self) -> list[dict[str, Any]]:
        return [one.service.stats() for one in self.replicas.values() if not one.is_dead]

    def _replica(self, name: str) -> InProcessReplica:
        if name not in self.replicas:
            raise ReplicaGone(name)
        return self.replicas[name]


class InProcessCache:
    """`graph.CachePort` without Serve.

    Attributes:
        checks: what was compared, in order.
    """

    def __init__(self, service: CacheService, admin: CacheAdmin | None = None) -> None:
        self._service = service
        self._admin = admin
        self.checks: list[tuple[wire.Check, str]] = []

    async def lookup(self, payload: bytes) -> bytes:
        return wire.encode(await self._service.lookup(wire.decode_lookup_call(payload)))

    async def store(self, payload: bytes) -> None:
        self._service.store(wire.decode_store_call(payload))
        await self._service.settle()

    async def embed(self, payload: bytes) -> bytes:
        return wire.encode(await self._service.embed(wire.decode_embed_call(payload)))

    async def check(self, payload: bytes) -> bytes:
        call = wire.decode_check_call(payload)
        found = await self._service.check(call)
        self.checks.append((call.check, found))
        return wire.encode(wire.CheckReply(agreement=found))

    async def manage(self, payload: bytes) -> list[bytes]:
        assert self._admin is not None
        return [await self._admin.manage(wire.decode_manage_call(payload))]

    async def epochs(self) -> list[str]:
        return [self._service.epoch()]

    async def stats(self) -> list[dict[str, Any]]:
        return [self._service.stats()]


def cache_service(
    embed: EmbedText | None = embed_alike, cache: PromptCache | None = None, **options: Any
) -> CacheService:
    cache = cache or PromptCache(CacheConfig(), clock=time.monotonic)
    settings = {"embedder_revision": "e-1", "epoch": 0, "embed_timeout_s": PATIENCE_S}
    return CacheService(cache, embed=embed, **{**settings, **options})


def whole_cache(
    embed: EmbedText | None = embed_alike,
    *,
    budget: ErrorBudget | None = None,
    verifier: Verifier | None = None,
    config: CacheConfig | None = None,
) -> InProcessCache:
    """The cache with its operator's side; with a budget it serves more than the same wording."""
    decider = None
    if budget is not None:
        decider = Decider(budget=budget, verifier=verifier, rng=random.Random(0))
    cache = PromptCache(config or CacheConfig(), clock=time.monotonic, decider=decider)
    service = cache_service(embed, cache)
    return InProcessCache(service, CacheAdmin(service, cache, budget=budget, verifier=verifier))


LEASES = BusLeases(orphan_s=PATIENCE_S, keep_s=PATIENCE_S, renew_s=PATIENCE_S)


def graph_over(
    model: ModelPort,
    cache: CachePort | None,
    board: ReplicaBoard | None = None,
    *,
    ingress: str = "ingress-1",
    lookup_timeout_s: float = PATIENCE_S,
    accept_timeout_s: float = PATIENCE_S,
    watchdog_s: float = PATIENCE_S,
    failover_timeout_s: float = PATIENCE_S,
    max_failovers: int = 2,
    max_pending: int = 4096,
    front: FrontCache | None = None,
    shares_by_meaning: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Graph:
    """A graph with a test's patience."""
    return Graph(
        model,
        cache,
        ReplicaBoard() if board is None else board,
        ingress=ingress,
        limits=GraphLimits(
            lookup_timeout_s=lookup_timeout_s,
            max_pending=max_pending,
            watchdog_s=watchdog_s,
            failover=FailoverLimits(
                accept_timeout_s=accept_timeout_s,
                submit_timeout_s=watchdog_s,
                failover_timeout_s=failover_timeout_s,
                max_failovers=max_failovers,
            ),
        ),
        tokens=ResumeTokens(b"k" * 32),
        front=front,
        shares_by_meaning=shares_by_meaning,
        clock=clock,
    )


@dataclass
class Stack:
    """A running graph and what a test looks at behind it: the first replica's engine."""

    engine: AsyncEngine
    runner: ScriptedRunner
    model: InProcessModel
    cache: InProcessCache | None
    graph: Graph
    runners: list[ScriptedRunner]

    async def until_idle(self) -> None:
        """Waits until no engine holds a request, but those of the dead."""
        await eventually(lambda: self.num_live == 0 and not self._held, "requests are left")

    @property
    def replicas(self) -> list[InProcessReplica]:
        return list(self.model.replicas.values())

    @property
    def num_live(self) -> int:
        return sum(replica.num_live for replica in self.replicas if not replica.is_dead)

    @property
    def num_generated(self) -> int:
        engines = [replica.engine for replica in self.replicas]
        return sum(engine.stats().generated_tokens_total for engine in engines)

    @property
    def _held(self) -> bool:
        both = zip(self.runners, self.replicas, strict=True)
        return any(runner.held for runner, replica in both if not replica.is_dead)


@asynccontextmanager
async def running_stack(
    script: Script = echo,
    *,
    runner_type: type[ScriptedRunner] = ScriptedRunner,
    with_cache: bool = True,
    cache: InProcessCache | None = None,
    num_replicas: int = 1,
    token_interval_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
    fault: Callable[[Sequence], Fault | None] = lambda seq: None,
    leases: BusLeases = LEASES,
    limits: dict[str, Any] | None = None,
    accept_timeout_s: float = PATIENCE_S,
    **engine: Any,
) -> AsyncIterator[Stack]:
    # No guesses unless a test wants them: they run past the token that a brake stands before.
    settings = {"max_num_seqs": 8, "max_model_len": 4096, "speculative_tokens": 0, **engine}
    config = EngineConfig(**settings)
    brakes = [Brake() for _ in range(num_replicas)]
    runners = [
        runner_type(
            brake.over(script),
            TOKENIZER,
            config,
            token_interval_s=token_interval_s,
            sleep=sleep,
            fault=fault,
        )
        for brake in brakes
    ]
    engines = [AsyncEngine(Engine(runner, TOKENIZER, config)) for runner in runners]
    replicas = []
    for number, async_engine in enumerate(engines, 1):
        await async_engine.start()
        service = ModelService(
            async_engine, INFO, replica=f"m{number}", leases=leases, clock=time.monotonic
        )
        brake = brakes[number - 1]
        replicas.append(InProcessReplica(f"m{number}", service, async_engine, brake))
    board = ReplicaBoard()
    model = InProcessModel(replicas, board)
    if cache is None and with_cache:
        cache = whole_cache()
    graph = graph_over(model, cache, board, accept_timeout_s=accept_timeout_s, **(limits or {}))
    clockwork = [asyncio.create_task(replica.service.keep_time()) for replica in replicas]
    try:
        yield Stack(engines[0], runners[0], model, cache, graph, runners)
    finally:
        for task in clockwork:
            task.cancel()
        await asyncio.gather(*clockwork, return_exceptions=True)
        await graph.close()
        for brake in brakes:
            brake.release()
        for async_engine in engines:
            await async_engine.close()


@dataclass
class Site:
    """A graph on the air."""

    address: tuple[str, int]
    http: httpx.AsyncClient

    @property
    def infer_url(self) -> str:
        return f"ws://{self.address[0]}:{self.address[1]}/v1/infer"

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name without the prefix; a label stands in brackets.

        There is one ingress, so its name is left out.
        """
        page = (await self.http.get("/metrics")).text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                values = (value for name, value in sample.labels.items() if name != "ingress")
                labels = "".join(f"[{value}]" for value in values)
                samples[sample.name.removeprefix("seedance_") + labels] = sample.value
        return samples


async def until_metrics(site: Site, **expected: float) -> dict[str, float]:
    """Waits until the metrics page shows these values; returns the whole page."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            samples = await site.metrics()
            if all(samples[name] == value for name, value in expected.items()):
                return samples
            await asyncio.sleep(0.01)


@asynccontextmanager
async def on_air(graph: Graph, **settings: Any) -> AsyncIterator[Site]:
    """Serves the graph on a free port, as the settings say."""
    async with (
        served(build_web(graph, parse_settings(settings))) as address,
        httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=PATIENCE_S) as http,
    ):
        yield Site(address, http)


class PromptServer(uvicorn.Server):
    """Ends when it is told, and not at the next tick of its clock."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_told = asyncio.Event()

    async def main_loop(self) -> None:
        await self.is_told.wait()


@asynccontextmanager
async def served(web: FastAPI, ws: Any = "websockets-sansio") -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    # Pings of the transport would hide our heartbeat.
    config = uvicorn.Config(web, log_config=None, lifespan="off", ws=ws, ws_ping_interval=None)
    server = PromptServer(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()
    finally:
        server.force_exit = True
        server.is_told.set()
        await running
        listener.close()
