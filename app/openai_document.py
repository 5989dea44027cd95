"""What the served OpenAPI document says of replies, beside what FastAPI finds out itself.

Our routes read and write their bodies themselves, so FastAPI knows neither; and every refusal
is an error object of ours with a status of its own, never its 422.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from app.openai_errors import ErrorReply
from app.openai_requests import CACHE_CONTROL_HEADER
from app.openai_source import LAST_EVENT_HEADER, RESUMABLE_HEADER
from app.openai_types import inline_schema, schema_of
from protocol.request import CachePolicy

Json = dict[str, Any]

KEY = "key"
"""Name of the security scheme."""
MEANINGS = {
    400: "The request has to change; `param` names the field at fault.",
    401: "No key, or an unknown one.",
    403: "The key may not do this.",
    404: "There is no such thing; `code` tells what.",
    409: "Another request is in the way.",
    413: "The body is too long.",
    429: "The tenant's limit; `retry-after` tells when to try again.",
    500: "The server failed; the message names the incident.",
    503: "Not now: `retry-after` tells when to try again.",
    504: "The time that the request gave itself, `timeout_s`, is over.",
}
ASKING = (400, 401, 404, 413, 429, 500, 503)
"""Errors of a request with a body that is worked on."""
GENERATING = (*ASKING, 409, 504)
ADMINISTERING = (400, 401, 403, 500, 503)
EXAMPLES: dict[str, Json] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 16,
    },
    "/v1/completions": {"prompt": "One, two,", "max_tokens": 8, "temperature": 0},
    "/v1/responses": {"input": "Name a colour.", "max_output_tokens": 16},
    "/v1/embeddings": {"input": ["A text.", "Another."]},
    "/tokenize": {"prompt": "One, two,"},
    "/detokenize": {"tokens": [65, 66]},
}
"""A body that each path answers."""


def errors(*statuses: int) -> dict[int | str, Json]:
    """`responses` of a route whose refusals have these statuses."""
    return {status: {"description": MEANINGS[status]} for status in sorted(statuses)}


def describe(
    reply: type[msgspec.Struct],
    *,
    body: type[msgspec.Struct] | None = None,
    example: Json | None = None,
    is_streamed: bool = False,
    parameters: Sequence[Json] = (),
) -> Json:
    """`openapi_extra` of a route that reads `body` and writes `reply` itself.

    Args:
        is_streamed: it can answer with server-sent events too.
    """
    content: Json = {"application/json": {"schema": _always_whole(schema_of(reply))}}
    if is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    told: Json = {"responses": {"200": {"content": content}}}
    if body is not None:
        taken: Json = {"schema": inline_schema(body)}
        if example is not None:
            taken["example"] = example
        told["requestBody"] = {"required": True, "content": {"application/json": taken}}
    if parameters:
        told["parameters"] = list(parameters)
    return told


def describe_errors(app: FastAPI, *, takes_anonymous: bool = True) -> None:
    """Makes the document of `app` tell of our errors and keys.

    Args:
        takes_anonymous: whether requests without a key may be answered.
    """
    generate = app.openapi

    def with_errors() -> Json:
        if app.openapi_schema is None:
            document = generate()
            parts = document.setdefault("components", {})
            schemas = parts.setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas["Error"] = _always_whole(schema_of(ErrorReply))
            parts["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
            for path in document["paths"].values():
                for operation in path.values():
                    _tell_errors(operation)
                    if "401" in operation["responses"]:
                        operation["security"] = [{KEY: []}, *([{}] if takes_anonymous else [])]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = with_errors  # type: ignore[method-assign]


def _tell_errors(operation: Json) -> None:
    replies = operation["responses"]
    # FastAPI's own, which our handlers turn into a 400.
    replies.pop("422", None)
    for status, told in replies.items():
        if int(status) >= 400 and "content" not in told:
            schema = {"$ref": "#/components/schemas/Error"}
            told["content"] = {"application/json": {"schema": schema}}


def _always_whole(schema: Any) -> Any:
    """The schema of a reply, which leaves out no field for having its default."""
    if isinstance(schema, list):
        return [_always_whole(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {name: _always_whole(part) for name, part in schema.items() if name != "default"}
    fields = schema.get("properties")
    if isinstance(fields, dict):
        written = [name for name, field in fields.items() if "default" in field]
        whole["required"] = [*schema.get("required", ()), *written]
    return whole


def _header(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


CACHE_CONTROL = _header(
    CACHE_CONTROL_HEADER,
    msgspec.json.schema(CachePolicy),
    "The cache's policy for this request; `cache` in the body outranks it.",
)
RESUMPTION = (
    _header(
        RESUMABLE_HEADER,
        {"enum": ["true", "false"]},
        "Whether a stream of one answer outlives its connection.",
    ),
    _header(LAST_EVENT_HEADER, {"type": "string"}, "The last event that came of such a stream."),
)
