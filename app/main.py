"""The application graph: `serve run serve_config.yaml` calls `app(args)`."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve import Application

from app.ingress import IngressDeployment
from app.settings import ModelSettings, Settings, SettingsError, parse_settings
from cache.prompt_cache import CacheConfig
from deployments.engine.build import EngineSpec
from deployments.engine.config import EngineConfig
from deployments.engine.weights import ModelFolder, resolve
from deployments.model import ModelDeployment, ModelSpec
from deployments.prompt_cache import CacheSpec, PromptCacheDeployment
from deployments.wire import ModelInfo

MOCK_MODEL = "seedance-mock"
SMALL_CPUS = 0.1
"""Ingress and cache mostly wait; a laptop's two cores are for the model."""


def app(args: dict[str, Any]) -> Application:
    """Builds ingress → prompt cache → model from the `args:` of `serve_config.yaml`.

    Raises:
        SettingsError: a key is unknown or out of range, or a model is not prepared.
    """
    settings = parse_settings(args)
    model = _model(settings)
    prompt_cache = _prompt_cache(settings) if settings.cache.enabled else None
    return IngressDeployment.options(
        num_replicas=settings.ingress.num_replicas, ray_actor_options={"num_cpus": SMALL_CPUS}
    ).bind(settings, model, prompt_cache)


def dev(args: dict[str, Any]) -> Application:
    """The same graph on the mock model: `make dev` runs it with auto-reload."""
    return app({"model": {"backend": "mock"}, "cache": {"semantic": False}} | args)


def _model(settings: Settings) -> Application:
    model = settings.model
    folder = _prepared(settings, model.name) if model.backend == "transformers" else None
    context_length = 8192 if folder is None else folder.context_length
    try:
        config = EngineConfig(
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            max_waiting=model.max_waiting,
            max_model_len=min(model.max_model_len or context_length, context_length),
            device=model.device,
            dtype=model.dtype,
            num_threads=model.num_threads,
        )
    except ValueError as error:  # two values that do not go together
        raise SettingsError(f"settings: model: {error}") from None
    spec = ModelSpec(
        info=ModelInfo(
            id=model.served_name or (MOCK_MODEL if folder is None else folder.name),
            revision="mock" if folder is None else folder.revision,
            context_length=context_length,
            created=0 if folder is None else folder.created,
            backend=model.backend,
        ),
        engine=EngineSpec(
            config=config,
            folder=None if folder is None else folder.path,
            mock_token_interval_s=model.mock_token_interval_s,
        ),
        log_level=settings.log_level,
    )
    return ModelDeployment.options(
        num_replicas=model.num_replicas,
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": _num_gpus(model)},
    ).bind(spec)


def _prompt_cache(settings: Settings) -> Application:
    cache = settings.cache
    embedder = _prepared(settings, cache.embedder) if cache.semantic else None
    spec = CacheSpec(
        config=CacheConfig(
            max_bytes=cache.max_bytes,
            max_entry_bytes=cache.max_entry_bytes,
            ttl_s=cache.ttl_s,
            semantic_threshold=cache.semantic_threshold,
        ),
        embedder_folder=None if embedder is None else embedder.path,
        embedder_revision="" if embedder is None else embedder.revision,
        epoch=cache.epoch,
        embed_timeout_s=cache.embed_timeout_s,
        log_level=settings.log_level,
    )
    return PromptCacheDeployment.options(ray_actor_options={"num_cpus": SMALL_CPUS}).bind(spec)


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
    wants_gpu = model.backend == "transformers" and model.device != "cpu"
    return 1.0 if wants_gpu and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
