"""The protocol as an AsyncAPI 3 document; `python -m protocol.async_api` prints it as YAML.

Frames and their schemas come from the types; what a schema cannot say (order, credit, the
binary header) is told in docs/protocol.md, to which the document refers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml

from protocol.codec import CLIENT_FRAMES, SERVER_FRAMES
from protocol.frames import PROTOCOL, Frame
from protocol.schemas import frame_schemas

_PROSE = "order, credit, resuming and the binary form are described in docs/protocol.md"
_REPLIES: dict[str, tuple[str, ...]] = {
    "INFER_REQ": ("INFER_ACK", "ERROR"),
    "RESUME": ("INFER_ACK", "ERROR"),
    "INPUT_CHUNK": ("ANCHOR", "INPUT_STATE", "ERROR"),
    "CANCEL": ("INFER_DONE", "ERROR"),
    "PING": ("PONG",),
}
"""What the server may answer first, by the client's frame; the others are not answered."""


def async_api() -> dict[str, Any]:
    """The document, as plain values."""
    frames = {**CLIENT_FRAMES, **SERVER_FRAMES}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": f"Seedance, {PROTOCOL}",
            "version": "1.0.0",
            "description": "Prompts in, tokens out as they are computed, over one WebSocket.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "local": {
                "host": "127.0.0.1:8000",
                "protocol": "ws",
                "description": "`make serve`; behind TLS the protocol is wss",
                "security": [{"$ref": "#/components/securitySchemes/key"}],
            }
        },
        "channels": {
            "infer": {
                "address": "/v1/infer",
                "title": "Any number of requests at once",
                "description": f"Offer the subprotocol seedance.v1.json or none; {_PROSE}.",
                "messages": {name: _ref(f"components/messages/{name}") for name in frames},
                "bindings": {"ws": {"bindingVersion": "0.1.0", "method": "GET"}},
            }
        },
        "operations": {
            **{_operation(name, "receive"): _receive(name) for name in CLIENT_FRAMES},
            **{_operation(name, "send"): _send(name) for name in SERVER_FRAMES},
        },
        "components": {
            "messages": {name: _message(name, frame) for name, frame in frames.items()},
            "schemas": _schemas(),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "an API key, where the server has any",
                }
            },
        },
    }


def _operation(name: str, action: str) -> str:
    words = name.lower().split("_")
    return action + "".join(word.capitalize() for word in words)


def _receive(name: str) -> dict[str, Any]:
    operation = _send(name) | {"action": "receive"}
    if name in _REPLIES:
        operation["reply"] = {
            "channel": _ref("channels/infer"),
            "messages": [_ref(f"channels/infer/messages/{reply}") for reply in _REPLIES[name]],
        }
    return operation


def _send(name: str) -> dict[str, Any]:
    return {
        "action": "send",
        "channel": _ref("channels/infer"),
        "messages": [_ref(f"channels/infer/messages/{name}")],
    }


def _message(name: str, frame: type[Frame]) -> dict[str, Any]:
    return {
        "name": name,
        "title": name,
        "summary": (frame.__doc__ or "").strip().splitlines()[0],
        "contentType": "application/json",
        "payload": _ref(f"components/schemas/{frame.__name__}"),
    }


def _schemas() -> dict[str, Any]:
    """The schemas of the frames and of what is in them, in the document's own places."""
    definitions = frame_schemas()["$defs"]
    unions = {"ClientFrame", "ServerFrame"}
    own = {name: schema for name, schema in definitions.items() if name not in unions}
    text = json.dumps(own).replace("#/$defs/", "#/components/schemas/")
    schemas: dict[str, Any] = json.loads(text)
    return schemas


def _ref(path: str) -> dict[str, str]:
    return {"$ref": f"#/{path}"}


def as_yaml() -> str:
    """What docs/asyncapi.yaml has."""
    return yaml.safe_dump(async_api(), sort_keys=False, allow_unicode=True, width=100)


if __name__ == "__main__":
    sys.stdout.write(as_yaml())
