"""What a session asks of whoever owns its connection, and why a connection is closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from protocol.errors import ServingError
from protocol.frames import InferReq, Resume


class CloseCode(NamedTuple):
    """What a close code means, and whether the client should connect again."""

    meaning: str
    should_reconnect: bool


CLOSE_CODES = {
    1000: CloseCode("normal closure", False),
    1001: CloseCode("this server is going away", True),
    1007: CloseCode("a text message was not UTF-8", False),
    1009: CloseCode("a message was over max_message_bytes", False),
    1011: CloseCode("the server failed", True),
    1012: CloseCode("this server restarts", True),
    4406: CloseCode("none of the subprotocols offered is spoken here", False),
    4408: CloseCode("nothing was heard for two heartbeats", True),
    4410: CloseCode("the client did not take what was sent to it", True),
}


@dataclass(frozen=True)
class StartRequest:
    """A request is to be started; answer it with `accept` or `refuse`, and end it with `done`."""

    id: str
    req: InferReq
    binary: bool


@dataclass(frozen=True)
class ReceiveRequest:
    """The pieces of a request are to come, then a `StartRequest`; `refuse` or `done` may end it before."""

    id: str
    req: InferReq
    binary: bool


@dataclass(frozen=True)
class InputArrived:
    """A piece of that request came: `input_so_far` has it, and `take_input` is to tell when it is taken."""

    id: str


@dataclass(frozen=True)
class ResumeRequest:
    """A stream is to go on under this id; to be answered and ended as after `StartRequest`."""

    id: str
    req: Resume
    binary: bool


@dataclass(frozen=True)
class GrantCredit:
    """More of that stream may be sent than before."""

    id: str


@dataclass(frozen=True)
class EndRequest:
    """A request that was still to come has ended with an ERROR, which was sent: nothing is to come."""

    id: str
    error: ServingError


@dataclass(frozen=True)
class CancelRequest:
    """A live request is to be stopped. Comes at most once a request; end it with `done` as ever."""

    id: str


@dataclass(frozen=True)
class Send:
    """A message is to be sent now.

    Attributes:
        refused: code of the error, when it refuses a request that never was live.
    """

    data: str | bytes
    refused: str | None = None


@dataclass(frozen=True)
class Close:
    """The connection is to be closed, after what was sent before. Nothing comes after it."""

    code: int
    reason: str


Event = (
    StartRequest
    | ReceiveRequest
    | InputArrived
    | ResumeRequest
    | GrantCredit
    | EndRequest
    | CancelRequest
    | Send
    | Close
)
