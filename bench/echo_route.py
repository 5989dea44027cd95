"""The app on the scripted engine, with one route more: `/echo` sends every message back.

The ingress is the one that users run, with its server and its settings; only conformance tests
have the route.
"""

from __future__ import annotations

import contextlib
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from starlette.websockets import WebSocket

import app.main
from app.connection import PEER_GONE
from app.ingress import IngressDeployment, IngressReplica
from bench import mock


async def echo(socket: WebSocket) -> None:
    """Every message goes back as it came, text as text and bytes as bytes."""
    with contextlib.suppress(*PEER_GONE):
        await socket.accept()
        while (message := await socket.receive())["type"] == "websocket.receive":
            await socket.send({**message, "type": "websocket.send"})


class EchoingIngressReplica(IngressReplica):
    """The ingress as it is, and the echo."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        web = super().__serve_build_asgi_app__()
        web.add_api_websocket_route("/echo", echo)
        return web


def build(args: dict[str, Any]) -> Application:
    """What `serve run` builds."""
    app.main.IngressDeployment = IngressDeployment.options(  # type: ignore[attr-defined]
        func_or_class=serve.ingress()(EchoingIngressReplica)
    )
    return mock.build(args)
