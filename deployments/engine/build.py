"""From a model folder, or from nothing for the mock, to an engine that is ready to start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployments.engine.async_engine import AsyncEngine
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner, Runner
from deployments.engine.scripted import ScriptedRunner, text_script
from deployments.engine.tokenizer import ChatTokenizer, byte_tokenizer

MOCK_ANSWER = (
    "This is Seedance's mock model: no weights, the real scheduler, one token at a time. "
    "Grüße, 你好 and 🙂 take several tokens each."
)


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from; `folder` None is the mock, with a token each interval."""

    config: EngineConfig
    folder: Path | None
    mock_token_interval_s: float = 0.1


def build_engine(spec: EngineSpec) -> AsyncEngine:
    """Loads the model, or makes the mock. Takes seconds: call it before anyone waits."""
    runner: Runner
    if spec.folder is None:
        tokenizer = byte_tokenizer()
        runner = ScriptedRunner(
            text_script(tokenizer, MOCK_ANSWER),
            tokenizer,
            spec.config,
            token_interval_s=spec.mock_token_interval_s,
        )
    else:
        tokenizer = ChatTokenizer.load(spec.folder)
        runner = ModelRunner.load(spec.folder, spec.config)
    return AsyncEngine(Engine(runner, tokenizer, spec.config))
