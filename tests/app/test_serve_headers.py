"""No client tells Serve how to treat its request."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.serve_headers import RESERVED, ServeHeaders

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray.serve._private.constants import (
        SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    )
    from ray.serve._private.http_util import (
        parse_disconnect_disabled_header,
        parse_request_timeout_header,
    )

HOSTILE = [
    (b"host", b"here"),
    (b"x-request-disconnect-disabled", b"?1"),
    (b"x-request-timeout-seconds", b"-1"),
    (b"x-request-disconnect-disabled", b"?1"),
    (b"x-request-id", b"mine"),
]


async def nothing() -> Message:
    raise AssertionError("nobody receives")


async def ignore(message: Message) -> None:
    raise AssertionError("nobody sends")


async def headers_behind(type: str, *, is_ingress: bool) -> list[tuple[bytes, bytes]]:
    """What an application sees of the hostile headers."""
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    scope = {"type": type, "headers": list(HOSTILE)}
    await ServeHeaders(app, is_ingress=is_ingress)(scope, nothing, ignore)
    return seen


def test_these_are_the_headers_that_serve_obeys() -> None:
    names = {SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER, SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER}
    assert {name.decode() for name in RESERVED} == names
    assert parse_disconnect_disabled_header(dict(HOSTILE))
    assert parse_request_timeout_header(dict(HOSTILE), 7.0) is None


@pytest.mark.parametrize("is_ingress", [False, True])
async def test_a_client_switches_nothing_off(is_ingress: bool) -> None:
    kept = await headers_behind("http", is_ingress=is_ingress)
    assert kept == [(b"host", b"here"), (b"x-request-id", b"mine")]
    assert not parse_disconnect_disabled_header(dict(kept))
    assert parse_request_timeout_header(dict(kept), 7.0) == 7.0


async def test_only_an_ingress_reads_its_websockets_itself() -> None:
    assert parse_disconnect_disabled_header(
        dict(await headers_behind("websocket", is_ingress=True))
    )
    proxied = await headers_behind("websocket", is_ingress=False)
    assert proxied == [(b"host", b"here"), (b"x-request-id", b"mine")]


async def test_other_scopes_have_no_headers() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert "headers" not in scope

    await ServeHeaders(app, is_ingress=True)({"type": "lifespan"}, nothing, ignore)
