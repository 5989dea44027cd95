"""Memory of the KV slots: what is mapped, and what is taken."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from deployments.engine.kv_cache import KVCache, KVLimits, LayerShape


@pytest.mark.skipif(sys.platform != "linux", reason="pages are advised on Linux")
def test_a_short_sequence_takes_pages_and_not_its_whole_slot() -> None:
    layers = [LayerShape(num_kv_heads=3, key_size=64, value_size=64)] * 8
    limits = KVLimits(max_num_seqs=16, max_model_len=8192)
    before = psutil.Process().memory_info().rss
    cpu = torch.device("cpu")
    cache = KVCache(layers, limits, dtype=torch.float32, device=cpu, block_tokens=32)
    for tensor in (*cache.keys, *cache.values):
        for slot in range(limits.max_num_seqs):
            tensor[slot * limits.max_model_len] = 1.0
    taken = psutil.Process().memory_info().rss - before
    mapped = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert mapped > 2**30
    assert taken < 64 * 2**20
    assert float(cache.keys[0][1].sum()) == 0.0
