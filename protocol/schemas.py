"""JSON Schemas of the frames, made from their types; `python -m protocol.schemas` prints them.

They describe the JSON form. The payload of the binary form is the same without
`seq`, which is in the header.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from protocol.codec import CLIENT_FRAMES, SERVER_FRAMES
from protocol.frames import PROTOCOL, Frame, InferChunk, InferDone


def frame_schemas() -> dict[str, Any]:
    """One schema whose `$defs` hold every frame, and `ClientFrame` and `ServerFrame` over them."""
    frames = list(dict.fromkeys([*CLIENT_FRAMES.values(), *SERVER_FRAMES.values()]))
    _, definitions = msgspec.json.schema_components(frames, ref_template="#/$defs/{name}")
    for frame in (InferChunk, InferDone):
        definition = definitions[frame.__name__]
        # The default stands for "in the header"; in this form the field is always there.
        del definition["properties"]["seq"]["default"]
        definition["required"].append("seq")
    definitions["ClientFrame"] = _any_of(CLIENT_FRAMES.values())
    definitions["ServerFrame"] = _any_of(SERVER_FRAMES.values())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": PROTOCOL,
        "anyOf": [{"$ref": "#/$defs/ClientFrame"}, {"$ref": "#/$defs/ServerFrame"}],
        "$defs": definitions,
    }


def _any_of(frames: Iterable[type[Frame]]) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/$defs/{frame.__name__}"} for frame in frames]}


if __name__ == "__main__":
    json.dump(frame_schemas(), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
