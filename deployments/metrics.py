"""Every replica's stats as Prometheus text: the one place that exports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass
class GraphStats:
    """What all replicas told, one mapping each."""

    models: Sequence[Mapping[str, Any]] = field(default_factory=list)
    caches: Sequence[Mapping[str, Any]] = field(default_factory=list)
    open_connections: int = 0
    cache_call_errors: int = 0


def render_metrics(stats: GraphStats) -> tuple[bytes, str]:
    """The metrics page and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(stats))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Page(Collector):
    def __init__(self, stats: GraphStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        models, caches = self._stats.models, self._stats.caches
        yield _gauge("model_replicas", "Model replicas that answered.", len(models))
        yield _gauge("requests_running", "Requests being computed.", _sum(models, "running"))
        yield _gauge("requests_waiting", "Requests queued.", _sum(models, "waiting"))
        yield _counter(
            "prompt_tokens", "Prompt tokens computed.", _sum(models, "prompt_tokens_total")
        )
        yield _counter(
            "generated_tokens", "Tokens sampled.", _sum(models, "generated_tokens_total")
        )
        yield _counter("engine_steps", "Steps of the engines.", _sum(models, "steps_total"))
        outcomes: Counter[str] = Counter(refused=_sum(models, "refused_total"))
        for model in models:
            outcomes.update(model["finished_total"])
        yield _labelled("requests", "Requests that ended.", "outcome", outcomes)
        lookups = {
            "exact": _sum(caches, "exact_hits"),
            "semantic": _sum(caches, "semantic_hits"),
            "miss": _sum(caches, "misses"),
        }
        yield _labelled("cache_lookups", "Questions put to the cache.", "outcome", lookups)
        yield _gauge("cache_entries", "Answers held.", _sum(caches, "entries"))
        yield _gauge("cache_bytes", "Memory they take.", _sum(caches, "bytes"))
        yield _counter("cache_stores", "Answers stored.", _sum(caches, "stores"))
        yield _counter("cache_evictions", "Answers evicted.", _sum(caches, "evictions"))
        errors = _sum(caches, "errors")
        yield _counter(
            "cache_errors", "Failed look-ups and stores.", errors + self._stats.cache_call_errors
        )
        yield _gauge(
            "open_connections", "WebSockets of this ingress.", self._stats.open_connections
        )


def _sum(replicas: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(replica[name] for replica in replicas)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"seedance_{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"seedance_{name}", help, value=value)


def _labelled(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"seedance_{name}", help, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family
