from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cache.prompt_cache import CacheStats
from deployments.engine.engine import EngineStats
from deployments.metrics import GraphStats, render_metrics


def samples_of(stats: GraphStats) -> dict[tuple[str, str], float]:
    page, content_type = render_metrics(stats)
    assert content_type.startswith("text/plain")
    families = list(text_string_to_metric_families(page.decode()))
    assert all(family.name.startswith("seedance_") and family.documentation for family in families)
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


def engine(**stats: Any) -> dict[str, Any]:
    return dataclasses.asdict(EngineStats(**stats))


def cache(**stats: Any) -> dict[str, Any]:
    return dataclasses.asdict(CacheStats(**stats))


def test_replicas_are_added_up() -> None:
    stats = GraphStats(
        models=[
            engine(running=2, waiting=1, generated_tokens_total=10, finished_total={"stop": 3}),
            engine(running=1, refused_total=4, finished_total={"stop": 1, "cancelled": 2}),
        ],
        caches=[cache(exact_hits=2, misses=3, errors=3, bytes=100)],
        open_connections=5,
        cache_call_errors=4,
    )
    samples = samples_of(stats)
    assert samples["seedance_model_replicas", ""] == 2
    assert samples["seedance_requests_running", ""] == 3
    assert samples["seedance_requests_waiting", ""] == 1
    assert samples["seedance_generated_tokens_total", ""] == 10
    outcomes = {
        label: value
        for (name, label), value in samples.items()
        if name == "seedance_requests_total"
    }
    assert outcomes == {"stop": 4, "cancelled": 2, "refused": 4}
    assert samples["seedance_cache_lookups_total", "exact"] == 2
    assert samples["seedance_cache_lookups_total", "miss"] == 3
    assert samples["seedance_cache_errors_total", ""] == 7
    assert samples["seedance_cache_bytes", ""] == 100
    assert samples["seedance_open_connections", ""] == 5


def test_a_page_without_replicas_is_a_page_of_zeros() -> None:
    samples = samples_of(GraphStats())
    assert samples["seedance_model_replicas", ""] == 0
    assert set(samples.values()) == {0.0}
