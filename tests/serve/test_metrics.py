from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cache.prompt_cache import CacheStats
from deployments.engine.engine import EngineStats
from deployments.metrics import GraphStats, IngressStats, render_metrics

Samples = dict[tuple[str, ...], float]


def samples_of(stats: GraphStats) -> Samples:
    """Every sample by its name without the prefix and the values of its labels, by label name."""
    page, content_type = render_metrics(stats)
    assert content_type.startswith("text/plain")
    families = list(text_string_to_metric_families(page.decode()))
    assert all(family.name.startswith("seedance_") and family.documentation for family in families)
    assert len({family.name for family in families}) == len(families)
    return {
        (
            sample.name.removeprefix("seedance_"),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def rows(samples: Samples, name: str) -> Samples:
    return {labels[1:]: value for labels, value in samples.items() if labels[0] == name}


def engine(replica: str = "m-1", **stats: Any) -> dict[str, Any]:
    return {"replica": replica, **dataclasses.asdict(EngineStats(**stats))}


def cache(**stats: Any) -> dict[str, Any]:
    return dataclasses.asdict(CacheStats(**stats))


def ingress(name: str = "i-1", **stats: Any) -> dict[str, Any]:
    return dataclasses.asdict(IngressStats(ingress=name, **stats))


def test_replicas_are_added_up() -> None:
    stats = GraphStats(
        models=[
            engine(running=2, waiting=1, generated_tokens_total=10, finished_total={"stop": 3}),
            engine(running=1, refused_total=4, finished_total={"stop": 1, "cancelled": 2}),
        ],
        caches=[cache(exact_hits=2, misses=3, errors=3, bytes=100)],
        ingresses=[
            ingress("i-1", open_connections=2, cache_call_errors=1),
            ingress("i-2", open_connections=3, cache_call_errors=3),
        ],
    )
    samples = samples_of(stats)
    assert samples["model_replicas",] == 2
    assert samples["requests_running",] == 3
    assert samples["requests_waiting",] == 1
    assert samples["generated_tokens_total",] == 10
    assert rows(samples, "engine_requests_total") == {
        ("stop",): 4,
        ("cancelled",): 2,
        ("refused",): 4,
    }
    assert samples["cache_lookups_total", "exact"] == 2
    assert samples["cache_lookups_total", "miss"] == 3
    assert samples["cache_errors_total",] == 7
    assert samples["cache_bytes",] == 100
    assert samples["ingress_replicas",] == 2
    assert samples["open_connections",] == 5


def test_each_model_replica_is_told_apart() -> None:
    samples = samples_of(
        GraphStats(
            models=[
                engine("m-1", running=2, waiting=1, tokens=70, prompt_tokens_total=5),
                engine("m-2", running=3, generated_tokens_total=10, steps_total=4)
                | {"draft_tokens_total": 6, "accepted_tokens_total": 5}
                | {"admission_batch_size": 17, "admission_wait_s": 0.5},
            ]
        )
    )
    assert rows(samples, "replica_requests_running") == {("m-1",): 2, ("m-2",): 3}
    assert rows(samples, "replica_requests_waiting") == {("m-1",): 1, ("m-2",): 0}
    assert rows(samples, "replica_tokens_pending") == {("m-1",): 70, ("m-2",): 0}
    assert rows(samples, "replica_prompt_tokens_total") == {("m-1",): 5, ("m-2",): 0}
    assert rows(samples, "replica_generated_tokens_total") == {("m-1",): 0, ("m-2",): 10}
    assert rows(samples, "replica_steps_total") == {("m-1",): 0, ("m-2",): 4}
    assert rows(samples, "replica_draft_tokens_total") == {("m-1",): 0, ("m-2",): 6}
    assert rows(samples, "replica_accepted_tokens_total") == {("m-1",): 0, ("m-2",): 5}
    assert rows(samples, "replica_admission_batch_size") == {("m-1",): 0, ("m-2",): 17}
    assert rows(samples, "replica_admission_wait_seconds") == {("m-1",): 0, ("m-2",): 0.5}


def test_the_blocks_of_the_kv_memory_are_told_by_what_they_hold() -> None:
    model = engine("m-1", kv_blocks_total=10, kv_blocks_used=3, kv_blocks_cached=5)
    samples = samples_of(GraphStats(models=[model, {"replica": "m-2"}]))
    assert rows(samples, "replica_kv_blocks") == {
        ("m-1", "used"): 3,
        ("m-1", "cached"): 5,
        ("m-1", "empty"): 2,
        ("m-2", "used"): 0,
        ("m-2", "cached"): 0,
        ("m-2", "empty"): 0,
    }


def test_each_ingress_counts_its_own_requests() -> None:
    requests = {
        "live": 2,
        "ended": {"stop": {"miss": 3, "exact": 1}, "refused": {"miss": 2}},
        "refused": {"overloaded": 2},
        "failed": {"internal": 1},
        "handshakes_refused": {"unauthorized": 1},
        "tokens": {"prompt": {"miss": 9}},
    }
    samples = samples_of(GraphStats(ingresses=[ingress("i-1", requests=requests), ingress("i-2")]))
    assert rows(samples, "requests_total") == {
        ("i-1", "stop", "miss"): 3,
        ("i-1", "stop", "exact"): 1,
        ("i-1", "refused", "miss"): 2,
    }
    assert rows(samples, "requests_live") == {("i-1",): 2, ("i-2",): 0}
    # Labels in the order of their names.
    assert rows(samples, "requests_refused_total") == {("overloaded", "i-1"): 2}
    assert rows(samples, "requests_failed_total") == {("internal", "i-1"): 1}
    assert rows(samples, "handshakes_refused_total") == {("unauthorized", "i-1"): 1}
    assert rows(samples, "usage_tokens_total") == {("i-1", "prompt", "miss"): 9}


def test_a_histogram_counts_up_to_each_bound() -> None:
    seen = {"bounds": [0.005, 1.0], "counts": [1, 2, 3], "sum": 70.5}
    samples = samples_of(GraphStats(ingresses=[ingress(requests={"ttft_s": {"miss": seen}})]))
    assert rows(samples, "time_to_first_token_seconds_bucket") == {
        ("i-1", "0.005", "miss"): 1,
        ("i-1", "1.0", "miss"): 3,
        ("i-1", "+Inf", "miss"): 6,
    }
    assert samples["time_to_first_token_seconds_count", "i-1", "miss"] == 6
    assert samples["time_to_first_token_seconds_sum", "i-1", "miss"] == 70.5


def test_the_graph_of_each_ingress_is_shown() -> None:
    samples = samples_of(
        GraphStats(
            ingresses=[
                ingress(
                    coalesced_total=19,
                    failovers_total=2,
                    resumes_total=3,
                    routing={"prefix": 5, "overflow": 1},
                    breaker={
                        "state": "open",
                        "failures_total": 6,
                        "opened_total": 1,
                        "skipped_total": 40,
                    },
                )
            ]
        )
    )
    assert samples["coalesced_total", "i-1"] == 19
    assert samples["failovers_total", "i-1"] == 2
    assert samples["resumes_total", "i-1"] == 3
    assert rows(samples, "routing_total") == {("prefix", "i-1"): 5, ("overflow", "i-1"): 1}
    assert rows(samples, "cache_breaker_state") == {
        ("i-1", "closed"): 0,
        ("i-1", "half_open"): 0,
        ("i-1", "open"): 1,
    }
    assert samples["cache_breaker_openings_total", "i-1"] == 1
    assert samples["cache_calls_skipped_total", "i-1"] == 40


def test_a_replica_of_another_version_may_tell_less() -> None:
    samples = samples_of(GraphStats(models=[{}], caches=[{}], ingresses=[{"ingress": "old"}]))
    assert samples["requests_running",] == 0
    assert samples["requests_live", "old"] == 0


def test_a_page_without_replicas_is_a_page_of_zeros() -> None:
    samples = samples_of(GraphStats())
    assert samples["model_replicas",] == 0
    assert set(samples.values()) == {0.0}


def test_the_state_of_checks_tiers_and_budget_is_told_without_naming_tenants() -> None:
    checks = {"asked": 5, "is_blind": False, "right": 3, "wrong": 1, "unclear": 0}
    state = {"window": 4, "wrong": 1, "bound": 0.6}
    told = cache(entries=2, cold_entries=3, cold_bytes=30) | {
        "checks": checks,
        "budget": {"acme": state | {"least_score": None}, "else": state | {"least_score": 0.97}},
    }
    samples = samples_of(
        GraphStats(
            caches=[told],
            ingresses=[ingress(checks={"run": 2, "dropped_busy": 7}, front_entries=9)],
        )
    )
    assert rows(samples, "cache_tier_entries") == {("L1",): 9, ("L2",): 2, ("L3",): 3}
    assert samples["cache_tier_bytes", "L3"] == 30
    assert samples["cache_checks_total", "wrong"] == 1
    assert samples["cache_checks_asked_total",] == 5
    assert samples["cache_checks_blind",] == 0
    assert samples["cache_shadow_checks_total", "i-1", "dropped_busy"] == 7
    scores = rows(samples, "cache_budget_least_score")
    assert sorted(scores.values()) == [0.97, 2.0]
    assert "acme" not in str(samples)
    assert set(rows(samples, "cache_budget_window").values()) == {4}
