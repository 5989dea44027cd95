"""Memory of the KV blocks: what is mapped, and what is taken."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from deployments.engine.kv_cache import KVCache, LayerShape


@pytest.mark.skipif(sys.platform != "linux", reason="pages are advised on Linux")
def test_a_short_sequence_takes_pages_and_not_the_whole_pool() -> None:
    layers = [LayerShape(num_kv_heads=3, key_size=64, value_size=64)] * 8
    before = psutil.Process().memory_info().rss
    cpu = torch.device("cpu")
    cache = KVCache(layers, 4096, 32, dtype=torch.float32, device=cpu)
    for tensor in (*cache.keys, *cache.values):
        for block in range(0, 4096, 256):
            tensor[block * 32] = 1.0
    taken = psutil.Process().memory_info().rss - before
    mapped = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert mapped > 2**30
    assert taken < 64 * 2**20
    assert float(cache.keys[0][1].sum()) == 0.0
