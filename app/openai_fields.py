"""Which fields of the API are supported, ignored or refused, as a table made from the code.

`python -m app.openai_fields` prints it; docs/openai.md holds it, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from app.openai_response_types import IGNORED_IN_RESPONSES, ResponseBody, SocketBody
from app.openai_text_routes import (
    IGNORED_IN_EMBEDDINGS,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from app.openai_types import IGNORED, ChatBody, CompletionBody, inline_schema


class Route(NamedTuple):
    title: str
    body: type[msgspec.Struct]
    ignored: Mapping[str, str] = {}


ROUTES = (
    Route("POST /v1/chat/completions", ChatBody, IGNORED["chat"]),
    Route("POST /v1/completions", CompletionBody, IGNORED["completions"]),
    Route("POST /v1/responses", ResponseBody, IGNORED_IN_RESPONSES),
    Route("WebSocket /v1/responses, beside the fields above", SocketBody),
    Route("POST /v1/embeddings", EmbeddingBody, IGNORED_IN_EMBEDDINGS),
    Route("POST /tokenize", TokenizeBody),
    Route("POST /detokenize", DetokenizeBody),
)


def field_tables() -> str:
    """One table a route, in Markdown."""
    return "\n\n".join(f"### {route.title}\n\n{_table(route)}" for route in ROUTES) + "\n"


def fields_of(route: Route) -> dict[str, str]:
    """How each field is treated: `supported`, `refused` or `ignored`."""
    known = {
        name: "refused" if _is_refused(schema) else "supported"
        for name, schema in _properties(route).items()
    }
    return known | dict.fromkeys(route.ignored, "ignored")


def _table(route: Route) -> str:
    treated = fields_of(route)
    properties = _properties(route)
    lines = ["| field | treated | |", "|---|---|---|"]
    for name in sorted(treated):
        note = route.ignored.get(name) or _note(properties[name])
        lines.append(f"| `{name}` | {treated[name]} | {note} |")
    return "\n".join(lines)


def _properties(route: Route) -> dict[str, Any]:
    properties: dict[str, Any] = inline_schema(route.body)["properties"]
    if route.body is SocketBody:
        shared = ResponseBody.__struct_fields__
        return {name: schema for name, schema in properties.items() if name not in shared}
    return properties


def _is_refused(schema: Mapping[str, Any]) -> bool:
    return str(schema.get("description", "")).startswith("Refused: ")


def _note(schema: Mapping[str, Any]) -> str:
    """Kind, range and default of a field, and what its type says of it."""
    told = str(schema.get("description", "")).removeprefix("Refused: ").rstrip(".")
    if _is_refused(schema):
        return told
    kinds = [_kind(kind) for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    words = [" or ".join(dict.fromkeys(kind for kind in kinds if kind))]
    default = schema.get("default")
    if default not in (None, [], (), {}):
        words.append(f"default {default}".lower() if default is not True else "default true")
    return "; ".join(word for word in (*words, told) if word)


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    kind = str(schema.get("type", ""))
    if kind == "array":
        items = _kind(schema.get("items", {}))
        return f"list of {items}" if items in ("string", "integer", "object") else "list"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None and high is None:
        return kind
    above = "over " if "exclusiveMinimum" in schema else ""
    return f"{kind}, {above}{low} to {high}" if high is not None else f"{kind}, from {above}{low}"


if __name__ == "__main__":
    print(field_tables(), end="")
