"""The schemas that hold a model to a call's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_BY_NAME = ("properties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_COMBINING = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties")
_OTHER_PROPERTIES = ("additionalProperties", "patternProperties")


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function's `parameters`, without room for what it does not declare.

    JSON Schema allows any further property where it is silent; a function takes none, and a
    small model would go on to invent them. A schema that says something of them stays as it is,
    and so does one that is put together from parts, each of which sees the others' properties.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **parameters}
    try:
        return schema if any(map(_is_combined, _schemas(schema))) else _closed(schema)
    except RecursionError:
        # The engine refuses it, in its own words.
        return schema


def _is_combined(schema: Mapping[str, Any]) -> bool:
    beside = ("anyOf", "oneOf", "$ref") if "properties" in schema else ()
    return any(keyword in schema for keyword in (*_COMBINING, *beside))


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all within it. What is no schema is left to the engine to refuse."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for keyword in _BY_NAME:
        named = schema.get(keyword)
        for inner in named.values() if isinstance(named, Mapping) else ():
            yield from _schemas(inner)
    for keyword in _IN_LISTS:
        listed = schema.get(keyword)
        for inner in listed if isinstance(listed, list) else ():
            yield from _schemas(inner)
    for keyword in _SINGLE:
        yield from _schemas(schema.get(keyword))


def _closed(schema: Any) -> Any:
    """A copy whose objects have no other properties than they declare."""
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    for keyword in _BY_NAME:
        if isinstance(named := schema.get(keyword), Mapping):
            copy[keyword] = {name: _closed(inner) for name, inner in named.items()}
    for keyword in _IN_LISTS:
        if isinstance(listed := schema.get(keyword), list):
            copy[keyword] = [_closed(inner) for inner in listed]
    for keyword in _SINGLE:
        if keyword in schema:
            copy[keyword] = _closed(schema[keyword])
    if schema.get("properties") and not any(keyword in schema for keyword in _OTHER_PROPERTIES):
        copy["additionalProperties"] = False
    return copy
