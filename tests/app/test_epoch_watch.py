"""What an ingress holds itself follows what is removed from the cache, within a second."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path

import pytest

from app.epoch_watch import ASK_S, FRESH_S, WATCH_S, EpochWatch
from app.front_cache import FrontCache
from app.graph import Graph
from cache.cold_sqlite import sqlite_store
from cache.prompt_cache import CacheConfig, PromptCache
from cache.stats import EntryFilter
from cache.wall_clock import WallClock
from deployments.cache_service import CacheService
from tests.app.stack import (
    PATIENCE_S,
    InProcessCache,
    Stack,
    ask,
    embed_alike,
    eventually,
    graph_over,
    running_stack,
    terminal_of,
)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Replicas:
    """Tell their epochs, unless they are told to fail."""

    def __init__(self) -> None:
        self.epochs = ["a.1", "b.1"]
        self.fails = False
        self.asked = 0

    async def ask(self) -> list[str]:
        self.asked += 1
        if self.fails:
            raise ConnectionError("no replica")
        return self.epochs


class Held:
    """Counts how often everything was forgotten."""

    times = 0

    def forget(self) -> None:
        self.times += 1


def watch_over(replicas: Replicas, held: Held, clock: Clock) -> EpochWatch:
    return EpochWatch(replicas.ask, held.forget, spawn=asyncio.create_task, clock=clock)


async def test_nothing_may_be_given_before_the_cache_was_heard() -> None:
    replicas, held, clock = Replicas(), Held(), Clock()
    watch = watch_over(replicas, held, clock)
    assert not watch.is_fresh
    watch.wake()
    assert not watch.is_fresh
    await eventually(lambda: watch.is_fresh)
    assert watch.knows("a.1")
    assert not watch.knows("a.2")
    assert not watch.knows("")
    clock.now_s += WATCH_S


async def test_a_change_anywhere_forgets_everything_once() -> None:
    replicas, held, clock = Replicas(), Held(), Clock()
    watch = watch_over(replicas, held, clock)
    watch.wake()
    await eventually(lambda: held.times == 1)
    await eventually(lambda: replicas.asked == 2)
    assert held.times == 1
    replicas.epochs = ["a.1", "b.2"]
    await eventually(lambda: held.times == 2)
    assert watch.knows("b.2")
    assert not watch.knows("b.1")
    clock.now_s += WATCH_S


async def test_what_is_held_rests_while_the_cache_is_not_heard() -> None:
    replicas, held, clock = Replicas(), Held(), Clock()
    watch = watch_over(replicas, held, clock)
    watch.wake()
    await eventually(lambda: watch.is_fresh)
    replicas.fails = True
    asked = replicas.asked
    await eventually(lambda: replicas.asked > asked + 1)
    clock.now_s += FRESH_S
    assert not watch.is_fresh
    replicas.fails = False
    await eventually(lambda: watch.is_fresh)
    # Nothing was removed meanwhile: it may be given again.
    assert held.times == 1
    replicas.epochs = []
    clock.now_s += FRESH_S
    await asyncio.sleep(2 * ASK_S)
    assert not watch.is_fresh
    clock.now_s += WATCH_S


async def test_nobody_is_asked_while_no_request_comes() -> None:
    replicas, held, clock = Replicas(), Held(), Clock()
    watch = watch_over(replicas, held, clock)
    watch.wake()
    await eventually(lambda: replicas.asked == 1)
    clock.now_s += WATCH_S
    await asyncio.sleep(2 * ASK_S)
    asked = replicas.asked
    await asyncio.sleep(2 * ASK_S)
    assert replicas.asked == asked
    watch.wake()
    await eventually(lambda: replicas.asked == asked + 1)
    clock.now_s += WATCH_S


def cache_on(path: Path) -> PromptCache:
    clock = WallClock()
    store = sqlite_store(path, max_bytes=2**24, wall_clock=clock)
    return PromptCache(CacheConfig(cold_max_bytes=2**24), clock=clock, store=store)


class Behind(InProcessCache):
    """One cache replica of two: look-ups go to it, and both are asked for their epochs."""

    def __init__(self, service: CacheService, other: CacheService) -> None:
        super().__init__(service)
        self._both = (service, other)

    async def epochs(self) -> list[str]:
        return [service.epoch() for service in self._both]


def ingress(stack: Stack, name: str, cache: InProcessCache) -> Graph:
    front = FrontCache(2**20, 900, time.monotonic)
    return graph_over(stack.model, cache, stack.model.board, ingress=name, front=front)


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_deletion_at_one_of_two_replicas_shows_at_both_ingresses(
    asked: int, tmp_path: Path
) -> None:
    path = tmp_path / "c.sqlite3"
    with closing(cache_on(path)) as cache, closing(cache_on(path)) as other:
        one, two = (
            CacheService(
                each, embed=embed_alike, embedder_revision="e", epoch=0, embed_timeout_s=PATIENCE_S
            )
            for each in (cache, other)
        )
        async with running_stack() as stack:
            graphs = [
                ingress(stack, "i1", Behind(one, two)),
                ingress(stack, "i2", Behind(two, one)),
            ]

            async def tier(graph: Graph) -> str | None:
                stream = await graph.open_stream(ask())
                await terminal_of(stream.log)
                return stream.cache.tier

            async def until(graph: Graph, expected: str | None) -> float:
                started_s = time.monotonic()
                while await tier(graph) != expected:
                    assert time.monotonic() - started_s < PATIENCE_S
                    await asyncio.sleep(0.01)
                return time.monotonic() - started_s

            for graph in graphs:
                await until(graph, "L1")
            one.delete(EntryFilter(tenant="red"))
            assert await until(graphs[asked], None) < 10
            for graph in graphs:
                await graph.close()
