"""The app on the scripted engine, with a cache that can be told to answer rubbish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray.serve import Application

import app.main
from bench import mock
from deployments.prompt_cache import PromptCacheDeployment, PromptCacheReplica
from tests.chaos.rubbish import RAISE, RUBBISH, RUBBISH_SWITCH


def told_to_answer() -> str | None:
    """What the switch says; None while it is off."""
    switch = Path(os.environ[RUBBISH_SWITCH])
    return switch.read_text() if switch.exists() else None


class RubbishCacheReplica(PromptCacheReplica):
    """The cache as it is, until the switch is on."""

    async def lookup(self, payload: bytes) -> bytes:
        kind = told_to_answer()
        if kind is None:
            return await super().lookup(payload)
        if kind == RAISE:
            raise RuntimeError("the cache was told to fail")
        return RUBBISH[kind]


def build(args: dict[str, Any]) -> Application:
    """What `serve run` and `serve deploy` build."""
    app.main.PromptCacheDeployment = PromptCacheDeployment.options(  # type: ignore[attr-defined]
        func_or_class=RubbishCacheReplica
    )
    return mock.build(args)
