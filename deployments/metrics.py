"""Everyone's stats as Prometheus text: the one place that exports them.

A page shows all replicas, whichever ingress answers, because a scraper behind a
load balancer meets another one each time. What an ingress or a replica counts
carries its name, so that no sum falls when one of them goes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

NOTHING = 2.0
"""Stands for a least score that no answer reaches."""
BREAKER_STATES = ("closed", "half_open", "open")

Stats = Mapping[str, Any]


@dataclass(kw_only=True)
class IngressStats:
    """What one ingress tells of itself; crosses processes as a plain mapping (`asdict`).

    Args:
        ingress: its name, unique among all that ever were.
        requests: `RequestOutcomes.stats()`.
        breaker: `Breaker.stats()`; empty without a cache.
        checks: `ShadowChecks.stats()`.
        routing: counts of the router's choices, by name.
        accounts: `Accounts.stats()`; empty without a store, as is `ledger`.
        ledger: `UsageLedger.stats()`.
    """

    ingress: str
    open_connections: int = 0
    cache_call_errors: int = 0
    front_hits: int = 0
    front_entries: int = 0
    front_bytes: int = 0
    coalesced_total: int = 0
    failovers_total: int = 0
    resumes_total: int = 0
    requests: Stats = field(default_factory=dict)
    breaker: Stats = field(default_factory=dict)
    checks: Mapping[str, int] = field(default_factory=dict)
    routing: Mapping[str, int] = field(default_factory=dict)
    accounts: Mapping[str, int] = field(default_factory=dict)
    ledger: Mapping[str, int] = field(default_factory=dict)


@dataclass
class GraphStats:
    """What all replicas told, one mapping each."""

    models: Sequence[Stats] = field(default_factory=list)
    caches: Sequence[Stats] = field(default_factory=list)
    ingresses: Sequence[Stats] = field(default_factory=list)


def render_metrics(stats: GraphStats) -> tuple[bytes, str]:
    """The metrics page and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(stats))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Page(Collector):
    def __init__(self, stats: GraphStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        yield from _of_models(self._stats.models)
        yield from _of_caches(self._stats.caches, self._stats.ingresses)
        yield from _of_ingresses(self._stats.ingresses)
        yield from _of_requests(self._stats.ingresses)
        yield from _of_accounts(self._stats.ingresses)


def _of_models(models: Sequence[Stats]) -> Iterable[Metric]:
    yield _gauge("model_replicas", "Model replicas that answered.", len(models))
    yield _gauge("requests_running", "Requests being computed.", _sum(models, "running"))
    yield _gauge("requests_waiting", "Requests queued.", _sum(models, "waiting"))
    yield _counter("prompt_tokens", "Prompt tokens computed.", _sum(models, "prompt_tokens_total"))
    yield _counter("generated_tokens", "Tokens sampled.", _sum(models, "generated_tokens_total"))
    yield _counter("engine_steps", "Steps of the engines.", _sum(models, "steps_total"))
    outcomes: Counter[str] = Counter(refused=_sum(models, "refused_total"))
    for model in models:
        outcomes.update(model.get("finished_total", {}))
    yield _counters(
        "engine_requests", "Sequences that ended in an engine.", ["outcome"], _rows(outcomes)
    )
    for name, help, key in (
        ("replica_requests_running", "Requests being computed by a replica.", "running"),
        ("replica_requests_waiting", "Requests queued in a replica.", "waiting"),
        ("replica_tokens_pending", "Tokens that a replica has yet to compute.", "tokens"),
        (
            "replica_admission_batch_size",
            "Most requests that join a replica's engine at once.",
            "admission_batch_size",
        ),
        (
            "replica_admission_wait_seconds",
            "Longest wait of a request for others to join with.",
            "admission_wait_s",
        ),
    ):
        yield _gauges(name, help, ["replica"], _each(models, "replica", key))
    yield _gauges(
        "replica_kv_blocks",
        "Blocks of a replica's KV memory: used by requests, free with content, free and empty.",
        ["replica", "state"],
        _kv_rows(models),
    )
    for name, help, key in (
        ("replica_prompt_tokens", "Prompt tokens computed by a replica.", "prompt_tokens_total"),
        ("replica_generated_tokens", "Tokens sampled by a replica.", "generated_tokens_total"),
        ("replica_steps", "Steps of a replica's engine.", "steps_total"),
        (
            "replica_preemptions",
            "Running requests of a replica that waited again, for a higher priority or memory.",
            "preemptions_total",
        ),
        (
            "replica_draft_tokens",
            "Tokens that a replica guessed and checked in the same step.",
            "draft_tokens_total",
        ),
        (
            "replica_accepted_tokens",
            "Guessed tokens that were right; each saved a step of its answer.",
            "accepted_tokens_total",
        ),
    ):
        yield _counters(name, help, ["replica"], _each(models, "replica", key))


def _of_caches(caches: Sequence[Stats], ingresses: Sequence[Stats]) -> Iterable[Metric]:
    lookups = {
        "exact": _sum(caches, "exact_hits") + _sum(ingresses, "front_hits"),
        "semantic": _sum(caches, "semantic_hits"),
        "miss": _sum(caches, "misses"),
    }
    yield _counters("cache_lookups", "Questions put to the cache.", ["outcome"], _rows(lookups))
    yield _gauge("cache_entries", "Answers held.", _sum(caches, "entries"))
    yield _gauge("cache_bytes", "Memory they take.", _sum(caches, "bytes"))
    for name, help, keys in (
        ("cache_tier_entries", "Answers held by a tier.", ("entries", "cold_entries")),
        ("cache_tier_bytes", "Size of a tier.", ("bytes", "cold_bytes")),
    ):
        held = [((tier,), _sum(caches, key)) for tier, key in zip(("L2", "L3"), keys, strict=True)]
        held.append((("L1",), _sum(ingresses, f"front_{keys[0]}")))
        yield _gauges(name, help, ["tier"], held)
    yield from _of_checks(caches, ingresses)
    yield _counter("cache_stores", "Answers stored.", _sum(caches, "stores"))
    yield _counter("cache_evictions", "Answers evicted.", _sum(caches, "evictions"))
    errors = _sum(caches, "errors") + _sum(ingresses, "cache_call_errors")
    yield _counter("cache_errors", "Failed look-ups and stores.", errors)


def _of_checks(caches: Sequence[Stats], ingresses: Sequence[Stats]) -> Iterable[Metric]:
    """Whether the answers by meaning are right, as far as it was looked at."""
    found: Counter[str] = Counter()
    for cache in caches:
        found.update(cache.get("checks", {}))
    is_blind, asked = found.pop("is_blind", 0), found.pop("asked", 0)
    yield _counters("cache_checks", "Shadow checks by what they found.", ["found"], _rows(found))
    yield _counter("cache_checks_asked", "Shadow checks that the error budget asked for.", asked)
    yield _gauge(
        "cache_checks_blind", "Cache replicas whose checks come to nothing for too long.", is_blind
    )
    yield _counters(
        "cache_shadow_checks",
        "Shadow checks by what became of them: run, free (the model answered anyway), dropped.",
        ["ingress", "outcome"],
        _by_ingress(ingresses, lambda stats: _rows(stats.get("checks", {}))),
    )
    states: dict[str, list[Mapping[str, Any]]] = {}
    for cache in caches:
        for category, state in cache.get("budget", {}).items():
            states.setdefault(_nameless(category), []).append(state)
    for name, help, key, of_all in (
        ("least_score", "Least score that is served; 2: none is.", "least_score", max),
        ("wrong_rate_at_most", "Upper bound of wrong answers among checks, 95 %.", "bound", max),
        ("window", "Checks that are remembered.", "window", sum),
    ):
        rows = [
            ((category,), float(of_all(NOTHING if s[key] is None else s[key] for s in told)))
            for category, told in sorted(states.items())
        ]
        yield _gauges(f"cache_budget_{name}", help, ["category"], rows)


def _nameless(category: str) -> str:
    """Stands for a category, which is a tenant, where anybody may read."""
    return hashlib.sha256(category.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _of_ingresses(ingresses: Sequence[Stats]) -> Iterable[Metric]:
    yield _gauge("ingress_replicas", "Ingress replicas that answered.", len(ingresses))
    yield _gauge("open_connections", "WebSockets.", _sum(ingresses, "open_connections"))
    for name, help in (
        ("coalesced", "Requests that shared the generation of an equal one."),
        ("failovers", "Streams that went on with another model replica."),
        ("resumes", "Streams that an ingress took over."),
    ):
        yield _counters(name, help, ["ingress"], _each(ingresses, "ingress", f"{name}_total"))
    yield _counters(
        "routing",
        "Choices of a model replica.",
        ["ingress", "choice"],
        _by_ingress(ingresses, lambda stats: _rows(stats.get("routing", {}))),
    )
    yield _gauges(
        "cache_breaker_state",
        "1 for the state that the breaker before the cache is in.",
        ["ingress", "state"],
        _by_ingress(ingresses, _breaker_rows),
    )
    for name, help, key in (
        ("cache_breaker_openings", "Times that the cache was switched off.", "opened_total"),
        ("cache_calls_skipped", "Look-ups left out meanwhile.", "skipped_total"),
    ):
        breakers = [
            {"ingress": stats["ingress"], **stats["breaker"]}
            for stats in ingresses
            if stats.get("breaker")
        ]
        yield _counters(name, help, ["ingress"], _each(breakers, "ingress", key))


def _of_accounts(ingresses: Sequence[Stats]) -> Iterable[Metric]:
    kept = [stats for stats in ingresses if stats.get("accounts")]
    accounts = [{"ingress": stats["ingress"], **stats["accounts"]} for stats in kept]
    ledgers = [{"ingress": stats["ingress"], **stats["ledger"]} for stats in kept]
    for name, help, replicas, key in (
        ("account_store_up", "1: the store of accounts was read last time.", accounts, "store_up"),
        ("usage_rows_pending", "Tenants and days that are not written.", ledgers, "pending_rows"),
    ):
        yield _gauges(name, help, ["ingress"], _each(replicas, "ingress", key))
    for name, help, replicas, key in (
        ("account_reads_failed", "Failed reads of accounts.", accounts, "read_errors_total"),
        ("usage_writes_failed", "Failed writes of usage.", ledgers, "flush_errors_total"),
        ("usage_requests_lost", "Requests missing in the usage.", ledgers, "lost_requests_total"),
    ):
        yield _counters(name, help, ["ingress"], _each(replicas, "ingress", key))


def _of_requests(ingresses: Sequence[Stats]) -> Iterable[Metric]:
    """What `RequestOutcomes` counted."""

    def told(name: str) -> Callable[[Stats], Rows]:
        return lambda stats: _rows(stats.get("requests", {}).get(name, {}))

    live = _by_ingress(ingresses, lambda stats: [((), stats.get("requests", {}).get("live", 0))])
    yield _gauges("requests_live", "Requests without an end yet.", ["ingress"], live)
    for name, help, labels, key in (
        ("requests", "Requests by what became of them.", ["outcome", "source"], "ended"),
        ("requests_refused", "Refused requests by reason.", ["code"], "refused"),
        ("requests_failed", "Failed requests by error.", ["code"], "failed"),
        ("handshakes_refused", "Refused connections by reason.", ["code"], "handshakes_refused"),
        ("usage_tokens", "Tokens of the usage told to clients.", ["kind", "source"], "tokens"),
    ):
        rows = _by_ingress(ingresses, told(key))
        yield _counters(name, help, ["ingress", *labels], rows)
    for name, help, key in (
        ("time_to_first_token_seconds", "From a request to its first token.", "ttft_s"),
        ("request_duration_seconds", "From a request to its whole answer.", "duration_s"),
    ):
        family = HistogramMetricFamily(f"seedance_{name}", help, labels=["ingress", "source"])
        for stats in ingresses:
            for source, seen in sorted(stats.get("requests", {}).get(key, {}).items()):
                bounds = [*map(floatToGoString, seen["bounds"]), "+Inf"]
                buckets = list(zip(bounds, accumulate(seen["counts"]), strict=True))
                family.add_metric([stats["ingress"], source], buckets, seen["sum"])
        yield family


Rows = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""


def _rows(counts: Mapping[str, Any]) -> Rows:
    """The rows of counts by one or two labels."""
    for label, count in sorted(counts.items()):
        if isinstance(count, Mapping):
            for inner, value in sorted(count.items()):
                yield (label, inner), value
        else:
            yield (label,), count


def _each(replicas: Iterable[Stats], label: str, key: str) -> Rows:
    return [((str(replica.get(label, "")),), replica.get(key, 0)) for replica in replicas]


def _kv_rows(models: Iterable[Stats]) -> Rows:
    for model in models:
        replica = str(model.get("replica", ""))
        used, cached = model.get("kv_blocks_used", 0), model.get("kv_blocks_cached", 0)
        yield (replica, "used"), used
        yield (replica, "cached"), cached
        yield (replica, "empty"), max(0, model.get("kv_blocks_total", 0) - used - cached)


def _by_ingress(ingresses: Iterable[Stats], rows_of: Callable[[Stats], Rows]) -> Rows:
    for stats in ingresses:
        for labels, value in rows_of(stats):
            yield (stats["ingress"], *labels), value


def _breaker_rows(stats: Stats) -> Rows:
    state = stats.get("breaker", {}).get("state")
    if state is None:
        return []
    return [((name,), float(name == state)) for name in BREAKER_STATES]


def _sum(replicas: Iterable[Stats], name: str) -> int:
    return sum(replica.get(name, 0) for replica in replicas)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"seedance_{name}", help, value=value)


def _gauges(name: str, help: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(f"seedance_{name}", help, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"seedance_{name}", help, value=value)


def _counters(name: str, help: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = CounterMetricFamily(f"seedance_{name}", help, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
