"""What schemathesis is told of our server: how to reach deeper, and what counts as a fault.

Runs in schemathesis's own environment, which loads it by SCHEMATHESIS_HOOKS.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import schemathesis
from schemathesis.transport.requests import REQUESTS_TRANSPORT

MODEL = os.environ["SEEDANCE_MODEL"]
EMBEDDER = os.environ["SEEDANCE_EMBEDDER"]
FIELDS = {
    "/v1/chat/completions": {"messages"},
    "/v1/completions": {"prompt"},
    "/v1/responses": {"input"},
    "/v1/embeddings": {"input"},
    "/tokenize": {"prompt", "messages"},
}
"""What each needs."""
REFUSED_ALONE = {
    *("audio", "functions", "function_call", "web_search_options", "modalities", "suffix"),
    *("structured_outputs", "best_of", "conversation", "previous_response_id", "background"),
    *("truncation", "dimensions", "add_generation_prompt", "stream_options", "top_logprobs"),
}
"""Fields most of whose values are refused, whatever stands beside them."""


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Two bodies in three are made plainer, so that not every one has a field that is refused."""
    if context.operation.path not in FIELDS or not isinstance(body, dict):
        return body
    chance = random.Random(json.dumps(body, default=str))
    if chance.random() < 1 / 3:
        return body
    kept = {
        name: value
        for name, value in body.items()
        if name in FIELDS[context.operation.path]
        or (name not in REFUSED_ALONE and chance.random() < 0.4)
    }
    if isinstance(kept.get("model"), str):
        is_embedding = context.operation.path.endswith("/embeddings")
        kept["model"] = EMBEDDER if is_embedding else MODEL
    if isinstance(kept.get("messages"), list):
        kept["messages"] = [_with_text(message) for message in kept["messages"]]
    return kept


def _with_text(message: Any) -> Any:
    if not isinstance(message, dict) or isinstance(message.get("content"), str):
        return message
    return message | {"content": "Name a colour."}


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """A third of the models that are asked for exist."""
    name = (path_parameters or {}).get("model_id")
    if isinstance(name, str) and len(name) % 3 == 0:
        return path_parameters | {"model_id": MODEL}
    return path_parameters


@REQUESTS_TRANSPORT.serializer("application/x-ndjson")
def lines(context: Any, value: Any) -> dict[str, Any]:
    """A body of lines: a text as it is, anything else as one line of JSON."""
    if isinstance(value, bytes):
        return {"data": value}
    text = value if isinstance(value, str) else json.dumps(value)
    return {"data": text.encode("utf-8", "surrogatepass")}


@schemathesis.check
def server_has_no_fault(context: Any, response: Any, case: Any) -> None:
    """No 5xx, but for the 504 of a request that set itself a deadline."""
    if response.status_code < 500:
        return
    body = case.body if isinstance(case.body, dict) else {}
    if response.status_code == 504 and body.get("timeout_s") is not None:
        return
    raise AssertionError(f"{response.status_code}: {response.text[:500]}")
