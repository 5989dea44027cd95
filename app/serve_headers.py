"""Keeps Serve's own request headers out of its clients' hands: ASGI middleware before Serve's code.

Serve lets each request say that its client's leaving is not to be noticed, and how long it
may take. Both would leave a model computing for nobody.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

RESERVED = frozenset({b"x-request-disconnect-disabled", b"x-request-timeout-seconds"})
NOT_WATCHED = (b"x-request-disconnect-disabled", b"?1")


class ServeHeaders:
    """Drops what a client may not ask of Serve.

    Args:
        is_ingress: whether an ingress replica is behind it. Serve reads a WebSocket there as
            fast as the client writes, into a queue without a bound, only to see it leave. Our
            own reader sees that too, so Serve is told not to.
    """

    def __init__(self, app: ASGIApp, *, is_ingress: bool) -> None:
        self._app = app
        self._is_ingress = is_ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = [header for header in scope["headers"] if header[0] not in RESERVED]
            if self._is_ingress and scope["type"] == "websocket":
                headers.append(NOT_WATCHED)
            scope["headers"] = headers
        await self._app(scope, receive, send)
