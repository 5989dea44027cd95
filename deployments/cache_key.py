"""Which part of a request is compared exactly, and which by meaning.

Everything that may change a correct answer goes into the partition, where only
equality counts; the last user turn alone is compared by similarity.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from cache.key import PromptKey, make_key
from protocol.request import InferenceRequest


def cache_key(
    request: InferenceRequest, *, model_revision: str, embedder_revision: str, epoch: int
) -> PromptKey:
    """Keys a request.

    A raw `prompt` has no similarity path: a continuation depends on each character
    of it. Nor has a chat whose last turn is not the user's, or is named.
    """
    sampling = msgspec.to_builtins(request.sampling, str_keys=True)
    max_tokens = sampling.pop("max_tokens", None)
    parts: dict[str, Any] = {
        "tenant": request.tenant,
        "model": request.model,
        "revision": model_revision,
        "embedder": embedder_revision,
        "epoch": epoch,
        "tools": _as_written(request.tools),
        "tool_choice": request.tool_choice,
        "response_format": _as_written(request.response_format),
        "sampling": sampling,
    }
    if request.messages is None:
        parts["prompt"] = request.prompt
        return make_key(parts, "", max_tokens=max_tokens, allow_semantic=False)
    *earlier, last = request.messages
    if last.role == "user" and last.content is not None and last.name is None:
        parts["earlier"] = _as_written(earlier)
        return make_key(parts, last.content, max_tokens=max_tokens, allow_semantic=True)
    parts["earlier"] = _as_written(request.messages)
    return make_key(parts, "", max_tokens=max_tokens, allow_semantic=False)


def _as_written(value: Any) -> str:
    """JSON with its keys in the client's order.

    That order changes answers: a template prints tools and calls in it, and a schema's
    properties are generated in it. A digest of the bare value would sort it away.
    """
    return json.dumps(msgspec.to_builtins(value))


def is_cacheable(request: InferenceRequest) -> bool:
    """Whether an answer to `request` may be looked up and stored at all."""
    if request.cache == "bypass":
        return False
    return request.sampling.is_greedy or request.cache in ("sampled", "only")
