"""What crosses between deployments: small msgspec records, packed to bytes.

Bytes keep Serve's pickling to a copy, and a record that an older replica sent
decodes in a newer one as long as fields are only added.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import ErrorInfo
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal, TokenDelta


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a call to the model should go; read by the request router in the caller's process.

    `replica` pins the call to that one and no other. `chain` names the prompt's prefixes, the
    shortest first (see `prompt_chain`), `cost` is the work the request will be, in tokens, and
    `avoid` names replicas that have just failed. A warm-up is no request and is not counted as one.
    """

    replica: str | None = None
    chain: tuple[int, ...] = ()
    cost: int = 0
    avoid: tuple[str, ...] = ()
    is_warm_up: bool = False


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to run, its deltas to go onto the bus of `ingress`.

    Args:
        answered: what an earlier replica had answered when it was lost: the answer goes on
            behind it, with the same numbering.
        epoch: how often another ingress took it over: one that was cut off and does not know
            yet cannot take it back.
    """

    request: InferenceRequest
    ingress: str
    answered: tuple[TokenDelta, ...] = ()
    epoch: int = 0


class Accepted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request fits and waits for its first step.

    `revision` is the answering model's: it may differ from what another replica told.
    """

    revision: str
    prompt_tokens: int
    queue_position: int


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica says to a request: `accepted` or `refused`."""

    replica: str
    accepted: Accepted | None = None
    refused: ErrorInfo | None = None


class Part(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a bus message has for one stream: its new deltas, its end, or both."""

    stream: str
    deltas: tuple[TokenDelta, ...] = ()
    terminal: Terminal | None = None


class Load(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How busy a replica is.

    Args:
        tokens: still to be computed for all accepted requests, as far as can be told.
        stalled_s: time since the engine last moved while it had work; 0 without any.
    """

    running: int = 0
    waiting: int = 0
    tokens: int = 0
    stalled_s: float = 0.0


class BusMessage(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """All that one step has for one ingress, or a sign of life when `parts` is empty."""

    parts: tuple[Part, ...] = ()
    load: Load = Load()


class Attached(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stream that another ingress takes over, with all its deltas so far.

    `age_s` is the time since this replica accepted it. One that `is_parked` is computed no
    more, and has to be submitted again to go on.
    """

    submit: Submit
    accepted: Accepted
    deltas: tuple[TokenDelta, ...] = ()
    terminal: Terminal | None = None
    age_s: float = 0.0
    is_parked: bool = False


class Found(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How far a replica's copy of a stream has come; the greatest of several is the newest.

    A replica that seemed lost, or where a stream rested before it went on elsewhere, may still
    have an old copy. All of them tell the same tokens.
    """

    epoch: int
    next_seq: int
    is_live: bool


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


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be compared with the model's own answer, to learn whether a score can be trusted.

    Args:
        id: of the entry; with the rest, what the cache needs to know its decision again.
        stored: the packed `StoredStream` that would have been given; None on a hit, where it was.
    """

    id: str
    action: Literal["serve", "shadow"]
    score: float | None
    check_rate: float
    category: str
    stored: bytes | None = None


class LookupReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cache's answer; `stored` is a packed `StoredStream` on a hit.

    `promote` says that the ingress may hold it for this very request, if `epoch` still is the
    replica's. With `check` the model's answer is due: on a miss the one that it gives anyway.
    `flight` names a request of the ingress whose answer, when it has come, does for this one too.
    """

    outcome: CacheOutcome
    stored: bytes | None = None
    promote: bool = False
    check: Check | None = None
    epoch: str = ""
    flight: str | None = None


class CheckCall(msgspec.Struct, frozen=True, kw_only=True):
    """Two packed answers to compare: the cache's, and the one that the model gave for it."""

    check: Check
    stored: bytes
    given: bytes


class CheckReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison found; `unclear` counts as wrong, but condemns no entry."""

    agreement: Literal["right", "wrong", "unclear"]


class EntryQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which stored answers are meant; see `cache.stats.EntryFilter`."""

    id: str | None = None
    prompt: str | None = None
    tenant: str | None = None
    model: str | None = None
    tag: str | None = None
    older_than_s: float | None = None
    younger_than_s: float | None = None


class ManageCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that an operator asks of every cache replica; see `deployments.cache_admin`.

    `records` are lines of an export, numbered from `first` on.
    """

    action: Literal[
        "find", "delete", "explain", "feedback", "quarantine", "keys", "records", "import", "stats"
    ]
    which: EntryQuery = EntryQuery()
    limit: int = 0
    request: InferenceRequest | None = None
    model_revision: str = ""
    was_right: bool = False
    keys: tuple[str, ...] = ()
    records: tuple[bytes, ...] = ()
    first: int = 1


class StoreCall(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to keep, with the request that it answers."""

    request: InferenceRequest
    model_revision: str
    completion_tokens: int
    stored: bytes
    is_truncated: bool = False


class LookupCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to find an answer for.

    Args:
        flight: names it among those that `ingress` has computed, where others may share its
            answer, and it another's; empty where not.
        over: names of such of the ingress whose answers did not come to their end.
    """

    request: InferenceRequest
    model_revision: str
    flight: str = ""
    ingress: str = ""
    over: tuple[str, ...] = ()


class TokenizeCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt to tokenise as a request's would be, or else token ids to decode."""

    request: InferenceRequest | None = None
    has_special_tokens: bool = True
    token_ids: tuple[int, ...] = ()


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token ids with the text of each, and the text of all; or why there is none."""

    token_ids: tuple[int, ...] = ()
    token_texts: tuple[str, ...] = ()
    text: str = ""
    refused: ErrorInfo | None = None


class EmbedCall(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed, for a client and not for the cache."""

    texts: tuple[str, ...]


class EmbedReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Unit-norm float32 vectors as their bytes, and the tokens of all texts; or why there are none."""

    vectors: tuple[bytes, ...] = ()
    num_tokens: int = 0
    refused: ErrorInfo | None = None


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(InferenceRequest).decode
decode_submit = msgspec.msgpack.Decoder(Submit).decode
decode_submit_reply = msgspec.msgpack.Decoder(SubmitReply).decode
decode_bus_message = msgspec.msgpack.Decoder(BusMessage).decode
decode_attached = msgspec.msgpack.Decoder(Attached).decode
decode_found = msgspec.msgpack.Decoder(Found).decode
decode_tokenize_call = msgspec.msgpack.Decoder(TokenizeCall).decode
decode_tokenize_reply = msgspec.msgpack.Decoder(TokenizeReply).decode
decode_embed_call = msgspec.msgpack.Decoder(EmbedCall).decode
decode_embed_reply = msgspec.msgpack.Decoder(EmbedReply).decode
decode_info = msgspec.msgpack.Decoder(ModelInfo).decode
decode_stored = msgspec.msgpack.Decoder(StoredStream).decode
decode_lookup_reply = msgspec.msgpack.Decoder(LookupReply).decode
decode_lookup_call = msgspec.msgpack.Decoder(LookupCall).decode
decode_store_call = msgspec.msgpack.Decoder(StoreCall).decode
decode_check_call = msgspec.msgpack.Decoder(CheckCall).decode
decode_check_reply = msgspec.msgpack.Decoder(CheckReply).decode
decode_manage_call = msgspec.msgpack.Decoder(ManageCall).decode
