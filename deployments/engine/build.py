"""From a model folder, or from nothing for the mock, to an engine that is ready to start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from deployments.engine.async_engine import AsyncEngine
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.front import EngineFront
from deployments.engine.fused import FusedRunner
from deployments.engine.runner import ModelRunner, Runner, UnsupportedModel, choose_device
from deployments.engine.scripted import ScriptedRunner, text_script
from deployments.engine.tokenizer import ChatTokenizer, byte_tokenizer
from deployments.engine.vllm_backend import build_vllm_engine

logger = logging.getLogger(__name__)

MOCK_ANSWER = (
    "This is Seedance's mock model: no weights, the real scheduler, one token at a time. "
    "Grüße, 你好 and 🙂 take several tokens each."
)


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from; `folder` None is the mock, with a token each interval.

    `is_vllm`: vLLM computes, instead of our own engine.
    """

    config: EngineConfig
    folder: Path | None
    mock_token_interval_s: float = 0.1
    is_vllm: bool = False


def build_engine(spec: EngineSpec) -> EngineFront:
    """Loads the model, or makes the mock. Takes seconds: call it before anyone waits."""
    if spec.is_vllm and spec.folder is not None:
        return build_vllm_engine(spec.folder, spec.config)
    runner: Runner
    config = spec.config
    if spec.folder is None:
        # Its interval lies between two tokens, so that a step gives one.
        config = replace(config, speculative_tokens=0)
        tokenizer = byte_tokenizer()
        runner = ScriptedRunner(
            text_script(tokenizer, MOCK_ANSWER),
            tokenizer,
            config,
            token_interval_s=spec.mock_token_interval_s,
        )
    else:
        tokenizer = ChatTokenizer.load(spec.folder)
        runner = load_runner(spec.folder, config)
    return AsyncEngine(Engine(runner, tokenizer, config))


def load_runner(folder: Path, config: EngineConfig) -> Runner:
    """The fastest runner that computes a model.

    Raises:
        UnsupportedModel: none does, or not in 8 bits where these are asked for.
    """
    if choose_device(config).type == "cpu":
        try:
            return FusedRunner.load(folder, config)
        except UnsupportedModel as exc:
            if config.quantization != "none":
                raise
            logger.info("transformers' own code computes the model: %s", exc)
    elif config.quantization != "none":
        raise UnsupportedModel(f"quantization {config.quantization} is for CPUs")
    return ModelRunner.load(folder, config)
