"""The whole of one process, without Ray: engine, model, cache and graph, and a real server over them.

The engine is the real one on scripted tokens, the cache the real one on fake
embeddings in which every text is like every other: only guards and partitions
keep questions apart.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from app.graph import Graph
from app.settings import parse_settings
from app.web import build_web
from cache.prompt_cache import CacheConfig, PromptCache
from deployments import wire
from deployments.cache_service import CacheService, EmbedText
from deployments.embedder import Vector
from deployments.engine.async_engine import AsyncEngine
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.scripted import Fault, Script, ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import byte_tokenizer
from deployments.model_service import ModelService
from protocol.errors import ServingError

MODEL = "maker/scripted-1"
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


class TaskRecords:
    """`graph.RecordStream` over a generator in this process, cancelled like a remote one."""

    def __init__(self, records: AsyncGenerator[bytes]) -> None:
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(records))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._arrivals()

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self, records: AsyncGenerator[bytes]) -> None:
        try:
            async with aclosing(records):
                async for record in records:
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


class InProcessModel:
    """`graph.ModelPort` without Serve."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    def generate(self, payload: bytes) -> TaskRecords:
        return TaskRecords(self._service.generate(payload, self._admit))

    async def info(self) -> bytes:
        return wire.encode(self._service.info)

    async def stats(self) -> list[dict[str, Any]]:
        return [self._service.stats()]

    async def _admit(self, sequence: Sequence) -> int | ServingError:
        return self._service.admit([sequence])[0]


class InProcessCache:
    """`graph.CachePort` without Serve."""

    def __init__(self, service: CacheService) -> None:
        self._service = service

    async def lookup(self, payload: bytes) -> bytes:
        return wire.encode(await self._service.lookup(wire.decode_lookup_call(payload)))

    async def store(self, payload: bytes) -> None:
        self._service.store(wire.decode_store_call(payload))
        await self._service.settle()

    async def stats(self) -> list[dict[str, Any]]:
        return [self._service.stats()]


def cache_service(embed: EmbedText | None = embed_alike, **options: Any) -> CacheService:
    cache = PromptCache(CacheConfig(), clock=time.monotonic)
    settings = {"embedder_revision": "e-1", "epoch": 0, "embed_timeout_s": PATIENCE_S}
    return CacheService(cache, embed=embed, **{**settings, **options})


@dataclass
class Stack:
    """A running graph and what a test looks at behind it."""

    engine: AsyncEngine
    runner: ScriptedRunner
    model: InProcessModel
    cache: InProcessCache | None
    graph: Graph

    async def until_idle(self) -> None:
        """Waits until the engine holds no request."""
        await eventually(lambda: self.num_live == 0 and not self.runner.held, "requests are left")

    @property
    def num_live(self) -> int:
        stats = self.engine.stats()
        return stats.running + stats.waiting

    @property
    def num_generated(self) -> int:
        return self.engine.stats().generated_tokens_total


@asynccontextmanager
async def running_stack(
    script: Script = echo,
    *,
    with_cache: bool = True,
    token_interval_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
    fault: Callable[[Sequence], Fault | None] = lambda seq: None,
    accept_timeout_s: float = PATIENCE_S,
    **engine: Any,
) -> AsyncIterator[Stack]:
    config = EngineConfig(**{"max_num_seqs": 8, "max_model_len": 4096, **engine})
    runner = ScriptedRunner(
        script, TOKENIZER, config, token_interval_s=token_interval_s, sleep=sleep, fault=fault
    )
    async_engine = AsyncEngine(Engine(runner, TOKENIZER, config))
    await async_engine.start()
    model = InProcessModel(ModelService(async_engine, INFO))
    cache = InProcessCache(cache_service()) if with_cache else None
    graph = Graph(model, cache, lookup_timeout_s=PATIENCE_S, accept_timeout_s=accept_timeout_s)
    try:
        yield Stack(async_engine, runner, model, cache, graph)
    finally:
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
        """Every sample by its name without the prefix; a label stands in brackets."""
        page = (await self.http.get("/metrics")).text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = "".join(f"[{value}]" for value in sample.labels.values())
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
async def served(web: FastAPI) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    # The kind that Serve's own servers use; pings of the transport would hide our heartbeat.
    config = uvicorn.Config(
        web, log_config=None, lifespan="off", ws="websockets-sansio", ws_ping_interval=None
    )
    server = PromptServer(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()
    finally:
        server.force_exit = True
        server.is_told.set()
        await running
        listener.close()
