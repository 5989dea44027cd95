"""The app on the scripted engine, whose ingress notes when it lets go of a WebSocket.

Everything else of it is what users run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

import app.main
from app.ingress import IngressDeployment, IngressReplica
from bench import mock
from bench.ends import ENDS_FILE, NotingEnds


class NotingIngressReplica(IngressReplica):
    """The ingress as it is, and the notes."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        web = super().__serve_build_asgi_app__()
        web.add_middleware(NotingEnds, file=Path(os.environ[ENDS_FILE]))
        return web


def build(args: dict[str, Any]) -> Application:
    """What `serve run` builds."""
    app.main.IngressDeployment = IngressDeployment.options(  # type: ignore[attr-defined]
        func_or_class=serve.ingress()(NotingIngressReplica)
    )
    return mock.build(args)
