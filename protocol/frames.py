"""The frames of `seedance.v1`, as types. What is on the wire is described in docs/protocol.md.

Client → server: `InferReq`, `InputChunk`, `Resume`, `Ack`, `Cancel`, `Ping`, `Pong`.
Server → client: `Hello`, `InferAck`, `InferChunk`, `Anchor`, `InferDone`, `ErrorFrame`,
`InputState`, `Drain`, `Ping`, `Pong`.
Unknown fields are ignored, so that either side may be newer than the other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from protocol.errors import ErrorInfo
from protocol.parse import ChatMessage
from protocol.request import CachePolicy
from protocol.token_log import (
    CacheOutcome,
    FinishReason,
    Timing,
    TokenDelta,
    TokenLogprob,
    Usage,
)

PROTOCOL = "seedance.v1"
BINARY_VERSION = 1
MAX_ID_CHARS = 64

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Seq = Annotated[int, Meta(ge=0, le=2**32 - 1)]
LastSeq = Annotated[int, Meta(ge=-1, le=2**32 - 1)]
MAX_WINDOW = 65_536
Window = Annotated[int, Meta(ge=1, le=MAX_WINDOW)]
Boundary = Literal["grapheme", "utf8"]
"""Where a chunk may end: between two user-perceived characters, or between two code points."""
AnchorKind = Literal["plain", "sha256", "none"]
InputKind = Literal["whole", "chunked"]
InputLevel = Literal["ok", "high"]
IN_HEADER = -1
"""`seq` of a frame whose payload leaves it to the binary header."""


class Frame(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="FRAME"
):
    """What all frames have in common: `type` names them."""


class InferReq(Frame, frozen=True, kw_only=True, tag="INFER_REQ"):
    """Starts a stream. `id` is the client's name for it, unique among its live requests.

    The fields are those of the OpenAI API, flat, with null or nothing for the default;
    their ranges are checked when the request is built, not here. The last four are about
    the stream alone: `window` is the initial credit, with `input: chunked` the rest of
    the prompt comes in `InputChunk`s.
    """

    id: Id
    model: str | None = None
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    cache: CachePolicy | None = None
    priority: int | None = None
    timeout_s: float | None = None
    input: InputKind | None = None
    boundary: Boundary | None = None
    anchor: AnchorKind | None = None
    window: Window | None = None


class InputChunk(Frame, frozen=True, kw_only=True, tag="INPUT_CHUNK"):
    """The next piece of a chunked prompt; `input_id` numbers them from 0 on."""

    id: Id
    input_id: Seq
    text: str
    is_last: bool | None = None


class Resume(Frame, frozen=True, kw_only=True, tag="RESUME"):
    """Goes on with a stream whose connection was lost, under the name `id` on this one.

    `stream` is the token of its INFER_ACK, `last_seq` the `seq` of the last chunk that
    came, -1 for none. The rest is asked for again: a token does not tell it.
    """

    id: Id
    stream: str
    last_seq: LastSeq
    return_token_ids: bool | None = None
    boundary: Boundary | None = None
    anchor: AnchorKind | None = None
    window: Window | None = None


class Ack(Frame, frozen=True, kw_only=True, tag="ACK"):
    """The client has shown everything up to `seq`, -1 for nothing: so far the credit goes."""

    id: Id
    seq: LastSeq


class Cancel(Frame, frozen=True, kw_only=True, tag="CANCEL"):
    """Stops the request of that name."""

    id: Id


class Ping(Frame, frozen=True, kw_only=True, tag="PING"):
    """Asks for a `Pong` with the same `ts`."""

    ts: int | float | None = None


class Pong(Frame, frozen=True, kw_only=True, tag="PONG"):
    """Answers a `Ping`."""

    ts: int | float | None = None


class Hello(Frame, frozen=True, kw_only=True, tag="HELLO"):
    """The server's first frame: who it is, and all limits in force.

    `resume_window_s` 0 means that a lost connection ends its streams.
    """

    session: str
    model: str
    limits: dict[str, int | float]
    heartbeat_s: float
    resume_window_s: float


class InferAck(Frame, frozen=True, kw_only=True, tag="INFER_ACK"):
    """The request was accepted, or goes on. `stream` is the token to RESUME it by."""

    id: str
    stream: str
    cache: CacheOutcome
    queue_position: int | None = None


class TokenAlternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could have been sampled."""

    token_id: int
    token: str
    logprob: float


class ChunkLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token's log probability and the best alternatives, best first."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenAlternative, ...] = ()

    @classmethod
    def of(cls, entry: TokenLogprob) -> Self:
        return cls(
            token_id=entry.token_id,
            token=entry.token,
            logprob=entry.logprob,
            top=tuple(
                TokenAlternative(token_id=token_id, token=token, logprob=logprob)
                for token_id, token, logprob in entry.top
            ),
        )

    @property
    def entry(self) -> TokenLogprob:
        return TokenLogprob(
            self.token_id,
            self.token,
            self.logprob,
            tuple((alt.token_id, alt.token, alt.logprob) for alt in self.top),
        )


class InferChunk(Frame, frozen=True, kw_only=True, tag="INFER_CHUNK"):
    """The next piece of text. `seq` is the number of the last token that it completes.

    `logprob` is that last token's, `logprobs` has an entry a token; both only when
    asked for, as is `token_ids`. In the binary form `seq` is in the header.
    """

    id: str
    seq: Seq = IN_HEADER
    text: str
    token_ids: tuple[int, ...] = ()
    logprob: float | None = None
    logprobs: tuple[ChunkLogprob, ...] | None = None

    @classmethod
    def of(cls, id: str, delta: TokenDelta, *, with_token_ids: bool) -> Self:
        logprobs = delta.logprobs
        return cls(
            id=id,
            seq=delta.seq,
            text=delta.text,
            token_ids=delta.token_ids if with_token_ids else (),
            logprob=logprobs[-1].logprob if logprobs else None,
            logprobs=None if logprobs is None else tuple(map(ChunkLogprob.of, logprobs)),
        )

    @property
    def delta(self) -> TokenDelta:
        """The chunk as a record of a `TokenLog`."""
        logprobs = self.logprobs
        return TokenDelta(
            self.seq,
            self.text,
            self.token_ids,
            None if logprobs is None else tuple(entry.entry for entry in logprobs),
        )


class Anchor(Frame, frozen=True, kw_only=True, tag="ANCHOR"):
    """Where an answer stands: a checkpoint for whoever keeps a copy of it.

    `input_id` is that of the last input piece that the model has taken, -1 for none;
    `offset` the number of tokens sent so far; `ts` the server's monotonic nanoseconds;
    `sha256` the digest of the text so far in UTF-8, when asked for.
    """

    id: str
    input_id: LastSeq
    offset: Seq
    ts: int
    sha256: str | None = None


class FinalUsage(Usage, frozen=True, kw_only=True):
    """`Usage` with its sum, which OpenAI's clients expect beside it."""

    total_tokens: int = 0


class InferDone(Frame, frozen=True, kw_only=True, tag="INFER_DONE"):
    """The one last frame of an accepted request. `seq` is one above the last token's number."""

    id: str
    seq: Seq = IN_HEADER
    is_final: bool
    finish_reason: FinishReason
    usage: FinalUsage
    timing: Timing
    cache: CacheOutcome
    error: ErrorInfo | None = None


class ErrorFrame(Frame, frozen=True, kw_only=True, tag="ERROR"):
    """A request that could not start or go on, or a frame that could not be read."""

    id: str | None = None
    code: str
    message: str
    param: str | None = None
    limit: int | float | None = None
    retryable: bool
    retry_after_s: float | None = None

    @classmethod
    def of(cls, id: str | None, error: ErrorInfo) -> Self:
        return cls(id=id, **msgspec.structs.asdict(error))

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(**{name: getattr(self, name) for name in ErrorInfo.__struct_fields__})


class InputState(Frame, frozen=True, kw_only=True, tag="INPUT_STATE"):
    """How full the buffer of a chunked prompt is: at `high` the client should pause.

    `buffered` are the bytes that came and that the model has not taken yet.
    """

    id: str
    buffered: int
    capacity: int
    level: InputLevel


class Drain(Frame, frozen=True, kw_only=True, tag="DRAIN"):
    """This server is going away: it takes no new requests and closes within `deadline_s` seconds."""

    deadline_s: float


ClientFrame = InferReq | InputChunk | Resume | Ack | Cancel | Ping | Pong
ServerFrame = (
    Hello
    | InferAck
    | InferChunk
    | Anchor
    | InferDone
    | ErrorFrame
    | InputState
    | Drain
    | Ping
    | Pong
)


def type_of(frame: type[Frame]) -> str:
    """The name that frames of this class carry on the wire."""
    tag = frame.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
