"""What every route of the API does with bodies: reads them, describes them, writes replies."""

from __future__ import annotations

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.openai_errors import name_request
from app.serving import ModelInfo
from protocol.errors import InputTooLarge, InvalidRequest, ModelNotFound

DRAIN_FACTOR = 16
"""A body over the limit is read on, and thrown away, up to this many times the limit: a client
that is still sending would see a reset connection and not the 413."""


async def read_json(request: Request, max_bytes: int) -> bytes:
    """The body of a request that says it is JSON.

    Raises:
        InputTooLarge: it is longer than `max_bytes`.
        InvalidRequest: it is something else, or ends early.
    """
    _check_content_type(request)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= max_bytes:
                parts.append(part)
            elif size > max_bytes * DRAIN_FACTOR:
                break
            else:
                parts.clear()
    except ClientDisconnect as error:
        raise InvalidRequest("the connection ended within the body") from error
    if size > max_bytes:
        raise InputTooLarge(
            f"the body has {'over ' if size > max_bytes * DRAIN_FACTOR else ''}{size} bytes, "
            f"the limit is {max_bytes}",
            limit=max_bytes,
        )
    return b"".join(parts)


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json").lower()
    kind, _, parameters = (part.strip() for part in content_type.partition(";"))
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise InvalidRequest(
            f"content-type must be application/json, got {content_type[:60]!a}",
            param="content-type",
        )
    charset = parameters.removeprefix("charset=").strip('"')
    if parameters.startswith("charset=") and charset not in ("utf-8", "utf8", "us-ascii"):
        raise InvalidRequest(f"charset must be utf-8, got {charset[:60]!a}", param="content-type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequest(
            f"content-encoding {encoding[:60]!a} is not supported", param="content-encoding"
        )


def check_model(asked: str | None, info: ModelInfo) -> ModelInfo:
    """The model, if it is the one that is asked for; who names none means it.

    Raises:
        ModelNotFound: it is another.
    """
    if asked is not None and asked != info.id:
        raise ModelNotFound(
            f"model {asked[:200]!a} is not served here, {info.id!a} is", param="model"
        )
    return info


def json_response(request: Request, reply: msgspec.Struct) -> Response:
    """A reply of one JSON object."""
    headers = {"x-request-id": name_request(request)}
    return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")
