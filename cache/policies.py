"""The eviction policies by name."""

from __future__ import annotations

from cachetools import LRUCache

from cache.config import PolicyName
from cache.lru_k import EvictionPolicy, LRUKCache
from cache.s3_fifo import S3FIFOCache
from cache.windowed import WindowedLRUK


def make_policy(
    name: PolicyName, max_bytes: int, *, k: int = 2, ghosts: float = 4.0
) -> EvictionPolicy:
    """A policy that holds `max_bytes`; `k` and `ghosts` are for the LRU-K family."""
    match name:
        case "windowed":
            return WindowedLRUK(max_bytes, k=k, ghosts=ghosts)
        case "lru-k":
            return LRUKCache(max_bytes, k=k, ghosts=ghosts)
        case "s3-fifo":
            return S3FIFOCache(max_bytes)
        case "lru":
            return LRUCache(max_bytes, getsizeof=lambda size: size)
