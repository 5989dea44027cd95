"""One stored answer with its question, as the tiers hold it, and as a record outside of them."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.answer import StoredAnswer
from cache.index import Vector
from cache.key import PromptKey

ENTRY_OVERHEAD_BYTES = 3072
"""Book-keeping of one entry with its keys and four ghosts; measured: at most 3,020."""
VECTOR_OVERHEAD_BYTES = 1024
ID_CHARS = 16
_CHECKSUM, _LENGTHS = struct.Struct("<I"), struct.Struct("<II")


def entry_id(key: PromptKey) -> str:
    """The id of the entry of a key, whether or not it is held."""
    return key.exact[:ID_CHARS]


@dataclass(slots=True)
class Entry:
    """An answer and what the tiers know of it.

    `created` never changes: it bounds the life of the answer wherever it is held.
    `vector` (D,) float32 of unit norm makes it findable by meaning. `is_recorded` says that a
    store which outlives the process has it.
    """

    key: PromptKey
    answer: StoredAnswer
    created: float
    vector: Vector | None = None
    model: str = ""
    tags: tuple[str, ...] = ()
    hits: int = 0
    last_hit: float | None = None
    is_recorded: bool = False

    @property
    def id(self) -> str:
        """Short, and the same for an equal question, whenever it is stored."""
        return entry_id(self.key)

    @property
    def size_bytes(self) -> int:
        # Four bytes a character is the widest Python stores a string. The vector counts four
        # times: itself, its row in an index that grows by doubling, and its ghost's.
        vector_bytes = 0 if self.vector is None else 4 * self.vector.nbytes + VECTOR_OVERHEAD_BYTES
        words = len(self.key.text) + len(self.model) + sum(map(len, self.tags))
        return ENTRY_OVERHEAD_BYTES + 4 * words + vector_bytes + self.answer.size_bytes


def to_record(entry: Entry, now: float) -> dict[str, Any]:
    """`entry` as plain values: strings, numbers, bytes. Times are ages, good for any clock."""
    return {**_fields(entry), "age_s": now - entry.created, "payload": entry.answer.payload,
            "vector": None if entry.vector is None else entry.vector.tobytes()}  # fmt: skip


def from_record(record: dict[str, Any], now: float) -> Entry:
    """The entry of a record; unknown fields are left aside.

    Raises:
        ValueError: a field is missing or of the wrong kind.
    """
    try:
        created = now - max(0.0, float(record["age_s"]))
        return _entry(record, created, bytes(record["payload"]), record["vector"])
    except (KeyError, TypeError) as exc:
        raise ValueError(f"not a record of an entry: {exc!r}") from exc


def encode_entry(entry: Entry) -> bytes:
    """`entry` as bytes, with a checksum: JSON, then payload and vector as they are."""
    vector = b"" if entry.vector is None else entry.vector.tobytes()
    head = json.dumps({**_fields(entry), "created": entry.created}).encode()
    body = _LENGTHS.pack(len(head), len(vector)) + head + entry.answer.payload + vector
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def decode_entry(data: bytes) -> Entry:
    """The entry that was encoded.

    Raises:
        ValueError: the bytes are damaged.
    """
    if len(data) < _CHECKSUM.size + _LENGTHS.size:
        raise ValueError(f"record has {len(data)} bytes only")
    (checksum,) = _CHECKSUM.unpack_from(data)
    body = data[_CHECKSUM.size :]
    if zlib.crc32(body) != checksum:
        raise ValueError(f"record of {len(data)} bytes is damaged")
    head_bytes, vector_bytes = _LENGTHS.unpack_from(body)
    body = body[_LENGTHS.size :]
    try:
        fields = json.loads(body[:head_bytes])
        payload = body[head_bytes : len(body) - vector_bytes]
        vector = body[len(body) - vector_bytes :] if vector_bytes else None
        return _entry(fields, float(fields["created"]), payload, vector)
    except (KeyError, TypeError) as exc:
        raise ValueError(f"not a record of an entry: {exc!r}") from exc


def _fields(entry: Entry) -> dict[str, Any]:
    key, answer = entry.key, entry.answer
    return {
        "id": entry.id,
        "tenant": key.tenant,
        "partition": key.partition,
        "text": key.text,
        "exact": key.exact,
        "allow_semantic": key.allow_semantic,
        "max_tokens": key.max_tokens,
        "completion": key.completion,
        "completion_tokens": answer.completion_tokens,
        "model_revision": answer.model_revision,
        "is_truncated": answer.is_truncated,
        "model": entry.model,
        "tags": list(entry.tags),
        "hits": entry.hits,
    }


def _entry(fields: dict[str, Any], created: float, payload: bytes, vector: bytes | None) -> Entry:
    names = ("tenant", "partition", "text", "exact", "allow_semantic", "max_tokens", "completion")
    answer = StoredAnswer(
        payload, fields["completion_tokens"], fields["model_revision"], fields["is_truncated"]
    )
    return Entry(
        key=PromptKey(**{name: fields[name] for name in names}),
        answer=answer,
        created=created,
        vector=None if vector is None else np.frombuffer(vector, dtype=np.float32),
        model=fields["model"],
        tags=tuple(fields["tags"]),
        hits=int(fields["hits"]),
    )
