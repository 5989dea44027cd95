"""Where an exchange has its streams from, and what becomes of them when it is over.

A `FreshSource` opens streams that end with their exchange. A `ResumableSource` is for a
client that asked for it with `x-seedance-resumable: true`: its events are numbered, and a
stream that lost its client is kept for the resume window, parked after a second.

An event's id is `TOKEN.CREATED:SEQ`: the stream's resume token, the reply's time (hex), and
the number of the last token that the event tells of; -1 is the opening, and what comes
behind the last token counts on. Within the window, the same request with that id as
`Last-Event-ID` goes on behind it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from app.openai_replies import Event
from app.resume import resume_expired
from app.serving import Stream, StreamOpener
from app.stream_keeper import StreamKeeper
from protocol.errors import InvalidRequest
from protocol.request import InferenceRequest

logger = logging.getLogger(__name__)

RESUMABLE_HEADER = "x-seedance-resumable"
LAST_EVENT_HEADER = "last-event-id"
OPENING_SEQ = -1
_EVENT_ID = re.compile(r"([\w-]{1,256})\.([0-9a-f]{1,12}):(-1|[0-9]{1,9})", re.ASCII)


class Source(Protocol):
    """Gives an exchange its streams and takes them back."""

    on_replaced: Callable[[], None]
    """Set by the exchange; called when another request has taken over its stream."""

    async def open(self, request: InferenceRequest) -> Stream:
        """A stream for the request.

        Raises:
            ServingError: there is none.
        """
        ...

    def leave(self, stream: Stream, *, has_all: bool) -> None:
        """The exchange is over. `has_all`: and its client has been sent everything."""
        ...

    def line(self, event: Event, seq: int) -> bytes:
        """An event as it goes over the wire; empty where the client has it already."""
        ...

    @property
    def resumed_as(self) -> str | None:
        """The name of the reply that goes on here, if it was begun elsewhere."""
        ...


def _nothing() -> None:
    pass


def _framed(event: Event) -> bytes:
    if event.name:
        return b"event: %b\ndata: %b\n\n" % (event.name.encode(), event.data)
    return b"data: %b\n\n" % event.data


class FreshSource:
    """Streams that end with their exchange."""

    resumed_as: str | None = None

    def __init__(self, opener: StreamOpener) -> None:
        self._opener = opener
        self.on_replaced: Callable[[], None] = _nothing

    async def open(self, request: InferenceRequest) -> Stream:
        return await self._opener.open_stream(request)

    def leave(self, stream: Stream, *, has_all: bool) -> None:
        try:
            stream.cancel()
        except Exception:
            # One that cannot be cancelled must not keep the others running.
            logger.exception("request %s could not be cancelled", stream.request.request_id)

    def line(self, event: Event, seq: int) -> bytes:
        return _framed(event)


@dataclass(frozen=True)
class LastEvent:
    """What a `Last-Event-ID` says."""

    token: str
    created: int
    seq: int


def read_last_event(value: str) -> LastEvent:
    """Reads a `Last-Event-ID`.

    Raises:
        InvalidRequest: it is none of ours.
    """
    match = _EVENT_ID.fullmatch(value.strip())
    if match is None:
        raise InvalidRequest(
            f"{LAST_EVENT_HEADER} must be the id of one of our events, got {value[:60]!a}",
            param=LAST_EVENT_HEADER,
        )
    return LastEvent(token=match[1], created=int(match[2], 16), seq=int(match[3]))


class ResumableSource:
    """One stream that outlives its client, or one that is taken up again; an `Owner` of it.

    Args:
        created: the reply's time.
        after: where the client was; None begins.
    """

    def __init__(
        self, keeper: StreamKeeper, *, created: int, after: LastEvent | None = None
    ) -> None:
        self._keeper = keeper
        self._created = created
        self._after = after
        self._token = b""
        self.resumed_as: str | None = None
        self.on_replaced: Callable[[], None] = _nothing

    def replace(self) -> None:
        self.on_replaced()

    async def open(self, request: InferenceRequest) -> Stream:
        if self._after is None:
            stream = await self._keeper.open(request, self)
        else:
            stream = await self._resume(self._after, request)
        self._token = b"%b.%x" % (stream.token.encode(), self._created)
        return stream

    async def _resume(self, after: LastEvent, request: InferenceRequest) -> Stream:
        stream = await self._keeper.resume(after.token, request.tenant, OPENING_SEQ, self)
        name, _, _ = stream.request.request_id.partition(".")
        kind = request.request_id.partition("-")[0]
        if name.partition("-")[0] != kind:
            # What was asked for on another route is written in another format.
            self.leave(stream, has_all=False)
            raise resume_expired()
        highest = stream.log.next_seq + 1
        if after.seq > highest:
            self.leave(stream, has_all=False)
            raise InvalidRequest(
                f"{LAST_EVENT_HEADER} ends in {after.seq}, this stream came to {highest}",
                param=LAST_EVENT_HEADER,
                limit=highest,
            )
        self.resumed_as = name
        return stream

    def leave(self, stream: Stream, *, has_all: bool) -> None:
        self._keeper.detach(stream, self, has_all=has_all)

    def line(self, event: Event, seq: int) -> bytes:
        if self._after is not None and seq <= self._after.seq:
            return b""
        return b"id: %b:%d\n%b" % (self._token, seq, _framed(event))
