"""What crosses between deployments: small msgspec records, packed to bytes.

Bytes keep Serve's pickling to a copy, and a record that an older replica sent
decodes in a newer one as long as fields are only added.
"""

from __future__ import annotations

import msgspec

from protocol.errors import ErrorInfo
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal, TokenDelta


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """First record of a generation: the request fits and waits for its first step.

    `revision` is the answering model's: it may differ from what another replica told.
    """

    revision: str
    prompt_tokens: int
    queue_position: int


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a generation: `refused` alone, or `accepted` first, then deltas, then `terminal`."""

    accepted: Accepted | None = None
    refused: ErrorInfo | None = None
    deltas: tuple[TokenDelta, ...] = ()
    terminal: Terminal | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model being served, as clients and the cache need to know it."""

    id: str
    revision: str
    context_length: int
    created: int
    backend: str


class StoredStream(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer as the cache keeps it: transport-neutral, replayed with a new id."""

    deltas: tuple[TokenDelta, ...]
    terminal: Terminal


class LookupReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cache's answer; `stored` is a packed `StoredStream` on a hit."""

    outcome: CacheOutcome
    stored: bytes | None = None


class StoreCall(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to keep, with the request that it answers."""

    request: InferenceRequest
    model_revision: str
    completion_tokens: int
    stored: bytes
    is_truncated: bool = False


class LookupCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request to find an answer for."""

    request: InferenceRequest
    model_revision: str


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(InferenceRequest).decode
decode_record = msgspec.msgpack.Decoder(StreamRecord).decode
decode_info = msgspec.msgpack.Decoder(ModelInfo).decode
decode_stored = msgspec.msgpack.Decoder(StoredStream).decode
decode_lookup_reply = msgspec.msgpack.Decoder(LookupReply).decode
decode_lookup_call = msgspec.msgpack.Decoder(LookupCall).decode
decode_store_call = msgspec.msgpack.Decoder(StoreCall).decode
