"""The states of a connection and of its requests, and what every frame does in each of them."""

from __future__ import annotations

from enum import StrEnum

from protocol.frames import (
    Ack,
    Anchor,
    Cancel,
    Drain,
    ErrorFrame,
    Frame,
    Hello,
    InferAck,
    InferChunk,
    InferDone,
    InferReq,
    InputChunk,
    InputState,
    Ping,
    Pong,
    Resume,
)


class ConnectionState(StrEnum):
    CONNECTING = "connecting"
    """HELLO was not sent yet."""
    OPEN = "open"
    DRAINING = "draining"
    """Live requests go on, new ones are refused."""
    CLOSED = "closed"
    """Nothing is read any more."""


class RequestState(StrEnum):
    ABSENT = "absent"
    """No request of that id is known."""
    RECEIVING = "receiving"
    """INFER_REQ with chunked input came, its last INPUT_CHUNK not yet."""
    QUEUED = "queued"
    """All of the request came, or RESUME; INFER_ACK was not sent yet."""
    STREAMING = "streaming"
    """INFER_ACK was sent, INFER_DONE not yet."""
    DONE = "done"
    """Ended, and still remembered."""


class Action(StrEnum):
    BY_REQUEST = "look at the request's state"
    START = "start the request"
    TAKE_INPUT = "take the piece"
    COUNT_CREDIT = "count the credit"
    STOP = "cancel the request"
    ANSWER_PING = "send PONG"
    IGNORE = "nothing"
    SEND = "send it"
    REFUSE_DUPLICATE = "ERROR duplicate_id"
    REFUSE_UNKNOWN = "ERROR unknown_id"
    REFUSE_DRAINING = "ERROR overloaded"


State = ConnectionState | RequestState
_C, _R, _A = ConnectionState, RequestState, Action

TRANSITIONS: dict[tuple[State, type[Frame]], tuple[Action, State]] = {
    (_C.CONNECTING, Hello): (_A.SEND, _C.OPEN),
    (_C.OPEN, InferReq): (_A.BY_REQUEST, _C.OPEN),
    (_C.OPEN, Resume): (_A.BY_REQUEST, _C.OPEN),
    (_C.OPEN, InputChunk): (_A.BY_REQUEST, _C.OPEN),
    (_C.OPEN, Ack): (_A.BY_REQUEST, _C.OPEN),
    (_C.OPEN, Cancel): (_A.BY_REQUEST, _C.OPEN),
    (_C.OPEN, Ping): (_A.ANSWER_PING, _C.OPEN),
    (_C.OPEN, Pong): (_A.IGNORE, _C.OPEN),
    (_C.OPEN, Drain): (_A.SEND, _C.DRAINING),
    (_C.DRAINING, InferReq): (_A.REFUSE_DRAINING, _C.DRAINING),
    (_C.DRAINING, Resume): (_A.REFUSE_DRAINING, _C.DRAINING),
    (_C.DRAINING, InputChunk): (_A.BY_REQUEST, _C.DRAINING),
    (_C.DRAINING, Ack): (_A.BY_REQUEST, _C.DRAINING),
    (_C.DRAINING, Cancel): (_A.BY_REQUEST, _C.DRAINING),
    (_C.DRAINING, Ping): (_A.ANSWER_PING, _C.DRAINING),
    (_C.DRAINING, Pong): (_A.IGNORE, _C.DRAINING),
    (_R.ABSENT, InferReq): (_A.START, _R.QUEUED),
    (_R.ABSENT, Resume): (_A.START, _R.QUEUED),
    (_R.ABSENT, InputChunk): (_A.REFUSE_UNKNOWN, _R.ABSENT),
    (_R.ABSENT, Ack): (_A.REFUSE_UNKNOWN, _R.ABSENT),
    (_R.ABSENT, Cancel): (_A.REFUSE_UNKNOWN, _R.ABSENT),
    (_R.RECEIVING, InferReq): (_A.REFUSE_DUPLICATE, _R.RECEIVING),
    (_R.RECEIVING, Resume): (_A.REFUSE_DUPLICATE, _R.RECEIVING),
    (_R.RECEIVING, InputChunk): (_A.TAKE_INPUT, _R.RECEIVING),
    (_R.RECEIVING, Ack): (_A.COUNT_CREDIT, _R.RECEIVING),
    (_R.RECEIVING, Cancel): (_A.STOP, _R.RECEIVING),
    (_R.RECEIVING, Anchor): (_A.SEND, _R.RECEIVING),
    (_R.RECEIVING, InputState): (_A.SEND, _R.RECEIVING),
    (_R.RECEIVING, InferDone): (_A.SEND, _R.DONE),
    (_R.RECEIVING, ErrorFrame): (_A.SEND, _R.DONE),
    (_R.QUEUED, InferReq): (_A.REFUSE_DUPLICATE, _R.QUEUED),
    (_R.QUEUED, Resume): (_A.REFUSE_DUPLICATE, _R.QUEUED),
    (_R.QUEUED, Ack): (_A.COUNT_CREDIT, _R.QUEUED),
    (_R.QUEUED, Cancel): (_A.STOP, _R.QUEUED),
    (_R.QUEUED, InferAck): (_A.SEND, _R.STREAMING),
    (_R.QUEUED, InferDone): (_A.SEND, _R.DONE),
    (_R.QUEUED, ErrorFrame): (_A.SEND, _R.DONE),
    (_R.STREAMING, InferReq): (_A.REFUSE_DUPLICATE, _R.STREAMING),
    (_R.STREAMING, Resume): (_A.REFUSE_DUPLICATE, _R.STREAMING),
    (_R.STREAMING, Ack): (_A.COUNT_CREDIT, _R.STREAMING),
    (_R.STREAMING, Cancel): (_A.STOP, _R.STREAMING),
    (_R.STREAMING, InferChunk): (_A.SEND, _R.STREAMING),
    (_R.STREAMING, Anchor): (_A.SEND, _R.STREAMING),
    (_R.STREAMING, InputState): (_A.SEND, _R.STREAMING),
    (_R.STREAMING, InferDone): (_A.SEND, _R.DONE),
    (_R.DONE, InferReq): (_A.START, _R.QUEUED),
    (_R.DONE, Resume): (_A.START, _R.QUEUED),
    (_R.DONE, Ack): (_A.IGNORE, _R.DONE),
    (_R.DONE, Cancel): (_A.IGNORE, _R.DONE),
}
"""Two outcomes hang on a field too: with `input: chunked` START leads to RECEIVING, and with
`is_last` TAKE_INPUT leads to QUEUED."""
