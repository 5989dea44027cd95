"""What makes two requests the same question: a hard partition, then the last user turn.

Everything that may change a reply, except the last user turn and `max_tokens`,
goes into the partition: tenant, model and revision, system prompt, earlier
turns, tools, response format, sampling parameters. Partitions are compared for
equality of full digests, never for similarity, and no part of them is ever
embedded or used as a query.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

Json = str | int | float | bool | None | Mapping[str, "Json"] | Sequence["Json"]
"""A JSON value; what `partition_digest` accepts (tuples count as arrays)."""

DIGEST_BYTES = 32
_AS_IS = frozenset({str, int, bool, type(None)})
_ENCODER = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), check_circular=False
)


@dataclass(frozen=True, slots=True)
class PromptKey:
    """One question, ready to look up; made by `make_key`.

    `partition` and `exact` are hex digests of 256 bits: of everything around the
    last user turn, and of that together with `text`. `max_tokens` None means
    unlimited. `completion` marks a raw prompt that the model continues: it is
    kept byte for byte, since there trailing white space has meaning.
    """

    tenant: str
    partition: str
    text: str
    exact: str
    allow_semantic: bool
    max_tokens: int | None
    completion: bool = False


def make_key(
    parts: Mapping[str, Json],
    text: str,
    *,
    max_tokens: int | None,
    allow_semantic: bool,
    completion: bool = False,
) -> PromptKey:
    """The key of a request whose last user turn is `text`.

    `parts` names everything else that may change the reply, and always the
    `tenant`; `max_tokens` stays out of it (`cache.decision` compares it). A
    completion never takes the semantic path.

    Raises:
        ValueError: `parts` holds no tenant, a number that is not finite, or a `max_tokens`.
        TypeError: `parts` holds something that is not JSON.
    """
    tenant = parts.get("tenant")
    if not isinstance(tenant, str) or not tenant:
        raise ValueError(f"parts must name a tenant, got {tenant!r}")
    if "max_tokens" in parts:
        raise ValueError("max_tokens must not be among the parts, it is compared on its own")
    if not completion:
        text = normalise(text)
    partition = partition_digest({"completion": completion, "parts": parts})
    return PromptKey(
        tenant=tenant,
        partition=partition,
        text=text,
        # The partition has a fixed length, so no text can imitate another partition.
        exact=_digest(partition + text),
        allow_semantic=allow_semantic and not completion,
        max_tokens=max_tokens,
        completion=completion,
    )


def truncated_key(key: PromptKey) -> PromptKey:
    """The key of an answer that the limit of `key` cut: its own place, never found by meaning.

    So neither replaces the other: the whole answer, and one that was cut.
    """
    return replace(key, exact=_digest(f"{key.exact} cut {key.max_tokens}"), allow_semantic=False)


def partition_digest(parts: Mapping[str, Json]) -> str:
    """Digest of `parts` by exact value: key order is nothing, every character counts.

    1 and 1.0 are one number, as are 0 and -0.0; 1 and true are two values. Strings
    are not normalised.

    Raises:
        ValueError: a number is not finite.
        TypeError: a value is not JSON, or a key is not a string.
    """
    return _digest(_ENCODER.encode(_plain(parts)))


def normalise(text: str) -> str:
    """`text` in NFC without outer white space: equal for equal questions, and no other change."""
    return unicodedata.normalize("NFC", text).strip()


def _plain(value: Json) -> object:
    if type(value) in _AS_IS:
        return value
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"parts must hold finite numbers, got {value}")
            return int(value) if value.is_integer() else value
        case Mapping():
            for name in value:
                if not isinstance(name, str):
                    raise TypeError(f"keys of parts must be strings, got {name!r}")
            return {
                name: item if type(item) in _AS_IS else _plain(item) for name, item in value.items()
            }
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            raise TypeError(f"parts must be JSON, got a {type(value).__name__}")


def _digest(text: str) -> str:
    # A lone surrogate cannot be encoded strictly, but may be what a client sent.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
