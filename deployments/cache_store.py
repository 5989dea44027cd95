"""Where a cache replica keeps its answers: in memory, in a file, or on a server that others share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cache.cold import ColdStore, MemoryColdStore
from cache.cold_redis import redis_store
from cache.cold_sqlite import sqlite_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreSpec:
    """What a store is opened from.

    Args:
        folder: of files that are named after `name`, unless `path` names one.
        name: of those who share their answers; empty: the application's.
        max_bytes: of a file.
        timeout_s: longest wait of a look-up for a server.
    """

    kind: Literal["memory", "sqlite", "redis"]
    folder: Path = Path()
    path: Path | None = None
    url: str = ""
    name: str = ""
    max_bytes: int = 2**30
    timeout_s: float = 0.05


def open_store(spec: StoreSpec, app_name: str, wall_clock: Callable[[], float]) -> ColdStore:
    """The store; one in memory, and an error in the log, where it cannot be had at all.

    A server that is down, or a folder that cannot be written to now, is no reason: the store
    finds its way to it later.
    """
    name = spec.name or app_name
    try:
        if spec.kind == "sqlite":
            path = (spec.path or spec.folder / f"{name}.sqlite3").expanduser()
            return sqlite_store(path, max_bytes=spec.max_bytes, wall_clock=wall_clock)
        if spec.kind == "redis":
            return redis_store(spec.url, name=name, timeout_s=spec.timeout_s)
    except Exception:
        # Answers matter more than what is left of them tomorrow.
        logger.exception("the store of the cache cannot be used: answers end with this process")
    return MemoryColdStore()
