"""The application graph: `serve run serve_config.yaml` calls `app(args)`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.ingress import IngressDeployment
from app.model_bus import RENEW_S
from app.settings import CacheSettings, ModelSettings, Settings, SettingsError, parse_settings
from cache.budget import BudgetConfig
from cache.prompt_cache import CacheConfig
from deployments.autoscaling import AlertSettings, autoscaling_config
from deployments.cache_store import StoreSpec
from deployments.engine.build import EngineSpec
from deployments.engine.config import EngineConfig
from deployments.engine.weights import ModelFolder, resolve
from deployments.model import ModelDeployment, ModelSpec
from deployments.model_service import BusLeases
from deployments.prompt_cache import VERIFIER_EMBEDDER, CacheSpec, PromptCacheDeployment
from deployments.scaling import ScalingRules, SurgeRule
from deployments.wire import ModelInfo

MOCK_MODEL = "seedance-mock"
SMALL_CPUS = 0.0
"""Ingress and cache mostly wait; a laptop's cores are for the model, of which a rollout needs two."""
SURGE_PERCENT = 100
"""In a rollout the new replica of a deployment is ready before the old one goes."""
RENEWALS_MISSED = 4
"""After so many a model replica takes an ingress for dead."""
RESUME_KEY_BYTES = 32
KEY_NAMESPACE = "seedance"
"""In the cluster's own key-value store."""
DRAIN_MARGIN_S = 10.0
"""Serve kills a replica that drains for longer: ours ends its streams before."""


def app(args: dict[str, Any]) -> Application:
    """Builds ingress → prompt cache → model from the `args:` of `serve_config.yaml`.

    Raises:
        SettingsError: a key is unknown or out of range, or a model is not prepared.
    """
    settings = parse_settings(args)
    model = _model(settings)
    prompt_cache = _prompt_cache(settings) if settings.cache.enabled else None
    return IngressDeployment.options(
        **_ingress_count(settings),
        ray_actor_options={"num_cpus": SMALL_CPUS},
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s + DRAIN_MARGIN_S,
        max_surge_percent=SURGE_PERCENT,
    ).bind(settings, model, prompt_cache, _resume_key(settings.home))


def dev(args: dict[str, Any]) -> Application:
    """The same graph on the mock model: `make dev` runs it with auto-reload."""
    cache = {"semantic": False, "store": {"kind": "memory"}}
    return app({"model": {"backend": "mock"}, "cache": cache} | args)


def _revision(folder: ModelFolder, quantization: str) -> str:
    """What gives the same answers: neither the cache nor a resumed stream may mix two of them."""
    return folder.revision if quantization == "none" else f"{folder.revision}-{quantization}"


def _model(settings: Settings) -> Application:
    model = settings.model
    if model.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            "model.backend is vllm, which is not installed: pip install 'seedance[vllm]'"
        )
    folder = _prepared(settings, model.name) if model.backend != "mock" else None
    context_length = 8192 if folder is None else folder.context_length
    try:
        config = EngineConfig(
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            prefill_slowdown=model.prefill_slowdown,
            speculative_tokens=model.speculative_tokens,
            max_speculative_rows=model.max_speculative_rows,
            max_waiting=model.max_waiting,
            max_waiting_tokens=model.max_waiting_tokens,
            max_model_len=min(model.max_model_len or context_length, context_length),
            device=model.device,
            dtype=model.dtype,
            quantization=model.quantization,
            kv_cache_gib=model.kv_cache_gib,
            num_threads=model.num_threads,
            cuda_graphs=model.cuda_graphs,
            compile=model.compile,
        )
    except ValueError as error:  # two values that do not go together
        raise SettingsError(f"settings: model: {error}") from None
    spec = ModelSpec(
        info=ModelInfo(
            id=model.served_name or (MOCK_MODEL if folder is None else folder.name),
            revision="mock" if folder is None else _revision(folder, model.quantization),
            context_length=context_length,
            created=0 if folder is None else folder.created,
            backend=model.backend,
        ),
        engine=EngineSpec(
            config=config,
            folder=None if folder is None else folder.path,
            mock_token_interval_s=model.mock_token_interval_s,
            is_vllm=model.backend == "vllm",
        ),
        leases=BusLeases(
            orphan_s=settings.limits.orphan_lease_s,
            keep_s=settings.limits.resume_window_s,
            renew_s=RENEWALS_MISSED * RENEW_S,
        ),
        log_level=settings.log_level,
    )
    return ModelDeployment.options(
        **_model_count(settings),
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": _num_gpus(model)},
        request_router_config=_router(settings),
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s + DRAIN_MARGIN_S,
        max_surge_percent=SURGE_PERCENT,
    ).bind(spec)


def _model_count(settings: Settings) -> dict[str, Any]:
    """A fixed number of model replicas, or the bounds and rules of a moving one."""
    scaling = settings.autoscaling
    if not scaling.enabled:
        return {"num_replicas": settings.model.num_replicas}
    surge = SurgeRule(
        ttft_p95_ms=scaling.surge_ttft_p95_ms,
        cpu_percent=scaling.surge_cpu_percent,
        waiting=scaling.surge_waiting,
        add_replicas=scaling.surge_replicas,
    )
    rules = ScalingRules(
        target_tokens_per_replica=scaling.target_tokens_per_replica,
        upscale_cooldown_s=scaling.upscale_cooldown_s,
        downscale_cooldown_s=scaling.downscale_cooldown_s,
        max_step_up=scaling.max_step_up,
        surge=surge if scaling.surge_replicas else None,
    )
    alert = None
    if scaling.alert_url is not None:
        alert = AlertSettings(url=scaling.alert_url, interval_s=scaling.alert_interval_s)
    return {
        "autoscaling_config": autoscaling_config(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            target_requests_per_replica=(
                scaling.target_requests_per_replica or settings.model.max_num_seqs
            ),
            rules=rules,
            alert=alert,
        )
    }


def _ingress_count(settings: Settings) -> dict[str, Any]:
    ingress = settings.ingress
    if ingress.max_replicas is None:
        return {"num_replicas": ingress.num_replicas}
    return {
        "autoscaling_config": autoscaling_config(
            min_replicas=ingress.num_replicas,
            max_replicas=ingress.max_replicas,
            target_requests_per_replica=ingress.target_generations,
            rules=ScalingRules(
                upscale_cooldown_s=settings.autoscaling.upscale_cooldown_s,
                downscale_cooldown_s=settings.autoscaling.downscale_cooldown_s,
            ),
        )
    }


def _router(settings: Settings) -> RequestRouterConfig:
    """Pinned calls need our router, whatever its policy."""
    routing = settings.routing
    return RequestRouterConfig(
        request_router_class="deployments.routing:PrefixRouter",
        request_router_kwargs={
            "margin_tokens": routing.margin_tokens,
            "by_prefix": routing.policy == "prefix",
        },
    )


def _resume_key(home: Path) -> bytes:
    """The secret behind resume tokens, made once: they must outlive a rollout.

    The first that a cluster has seen counts, since a later version of the application may be
    built on another machine, with a key of its own in its home.
    """
    key = _kept_key(home)
    if not ray.is_initialized():
        return key
    name = f"resume.key {home}"
    internal_kv._internal_kv_put(name, key, overwrite=False, namespace=KEY_NAMESPACE)
    agreed: bytes = internal_kv._internal_kv_get(name, namespace=KEY_NAMESPACE)
    return agreed


def _kept_key(home: Path) -> bytes:
    """This machine's own."""
    home.expanduser().mkdir(parents=True, exist_ok=True)
    file = home.expanduser() / "resume.key"
    with contextlib.suppress(FileExistsError):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(opened, "wb") as new:
            new.write(secrets.token_bytes(RESUME_KEY_BYTES))
    key = file.read_bytes()
    if len(key) != RESUME_KEY_BYTES:
        raise SettingsError(f"{file} has {len(key)} bytes, not {RESUME_KEY_BYTES}: remove it")
    return key


def _prompt_cache(settings: Settings) -> Application:
    cache = settings.cache
    embedder = _prepared(settings, cache.embedder) if cache.semantic else None
    spec = CacheSpec(
        config=CacheConfig(
            max_bytes=cache.max_bytes,
            max_entry_bytes=cache.max_entry_bytes,
            # Without a cold tier to go to, an answer stays for its whole life.
            ttl_s=min(cache.warm_s, cache.ttl_s) if cache.cold_bytes else cache.ttl_s,
            cold_max_bytes=cache.cold_bytes,
            cold_ttl_s=cache.ttl_s,
            tenant_max_bytes=cache.tenant_max_bytes,
            tenant_max_entries=cache.tenant_max_entries,
            miss_rate_per_s=cache.tenant_stores_per_s,
            policy=cache.policy,
            semantic_threshold=cache.semantic_threshold,
        ),
        embedder_folder=None if embedder is None else embedder.path,
        embedder_revision="" if embedder is None else embedder.revision,
        epoch=cache.epoch,
        embed_timeout_s=cache.embed_timeout_s,
        log_level=settings.log_level,
        store=_store(settings),
        budget=_budget(cache),
    )
    return PromptCacheDeployment.options(
        num_replicas=cache.num_replicas, ray_actor_options={"num_cpus": SMALL_CPUS}
    ).bind(spec)


def _store(settings: Settings) -> StoreSpec:
    cache, store = settings.cache, settings.cache.store
    if store.kind == "redis" and importlib.util.find_spec("redis") is None:
        raise SettingsError(
            "cache.store.kind is redis, whose client is not installed: "
            "pip install 'seedance[redis]'"
        )
    return StoreSpec(
        kind=store.kind,
        folder=settings.home / "cache",
        path=store.path,
        url=store.url or "",
        name=store.name or "",
        # Twice what the replicas count: records of one that died end by themselves.
        max_bytes=2 * cache.num_replicas * (cache.max_bytes + cache.cold_bytes),
        timeout_s=cache.lookup_timeout_s,
    )


def _budget(cache: CacheSettings) -> BudgetConfig | None:
    """How much the verifier may get wrong; None where it cannot be used."""
    if cache.verifier == "off" or cache.embedder != VERIFIER_EMBEDDER:
        return None
    return BudgetConfig(max_wrong_rate=cache.max_wrong_rate, check_rate=cache.check_rate)


def _prepared(settings: Settings, name: str) -> ModelFolder:
    folder = resolve(name, settings.home)
    if folder is None:
        raise SettingsError(
            f"{name} is not prepared in {settings.home}: run `seedance models pull {name}`"
        )
    return folder


def _num_gpus(model: ModelSettings) -> float:
    if model.num_gpus is not None:
        return model.num_gpus
    wants_gpu = model.backend != "mock" and model.device != "cpu"
    return 1.0 if wants_gpu and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
