"""The app on the scripted engine of the bench; everything else of it is what users run."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

import app.main
import deployments.model
from bench.scripted_engine import build_mock
from deployments.model import ModelDeployment, ModelReplica, ModelSpec


class MockModelReplica(ModelReplica):
    """The model replica as it is, around the engine above."""

    async def __init__(self, spec: ModelSpec) -> None:  # type: ignore[misc]
        deployments.model.build_engine = build_mock  # type: ignore[attr-defined]
        await super().__init__(spec)


def build(args: dict[str, Any]) -> Application:
    """`app.main:app` on the scripted engine; `args` are the same."""
    app.main.ModelDeployment = ModelDeployment.options(func_or_class=MockModelReplica)  # type: ignore[attr-defined]
    return app.main.app(args)
