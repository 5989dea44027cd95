"""Streams that outlive their connection: the tokens that name them, and who owns them here.

A stream has one owner at a time: the request, on some connection, that relays it.
One that lost its owner is kept for a while, so that a RESUME finds it. Knows
nothing of sockets; the clock is an argument, and somebody else calls `tick`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from app.serving import Stream
from protocol.errors import Replaced, ResumeExpired
from protocol.request import InferenceRequest

logger = logging.getLogger(__name__)

MAX_TOKEN_CHARS = 256
_MAC_BYTES = 16
_DELTA_BYTES = 256
"""Memory of one delta of a token or so, and of one kept log probability beside it."""


def resume_expired() -> ResumeExpired:
    """The one refusal of every RESUME: it must not tell whether such a stream ever was."""
    return ResumeExpired("there is no such stream, or none any more: ask again", param="stream")


class Named(NamedTuple):
    """What a token names: a stream, and the replica that computes it."""

    stream: str
    replica: str


class ResumeTokens:
    """Makes and reads resume tokens: HMAC-SHA256 over names and tenant, URL-safe.

    Whoever holds one may read the names in it, and nobody but its tenant may use it.
    Every ingress has to have the same key.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, stream: str, replica: str, tenant: str) -> str:
        """A token of at most 256 characters.

        Raises:
            ValueError: the names are too long for one.
        """
        names = msgspec.msgpack.encode((stream, replica))
        token = _armour(self._mac(names, tenant) + names)
        if len(token) > MAX_TOKEN_CHARS:
            raise ValueError(f"a token has {len(token)} characters, the limit is {MAX_TOKEN_CHARS}")
        return token

    def open(self, token: str, tenant: str) -> Named:
        """What the token names.

        Raises:
            ResumeExpired: it is not one of ours, or another tenant's.
        """
        if len(token) > MAX_TOKEN_CHARS:
            raise resume_expired()
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            raise resume_expired() from None
        mac, names = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        # The decoder skips what it does not know, and a stream must have one token only.
        if not hmac.compare_digest(mac, self._mac(names, tenant)) or _armour(raw) != token:
            raise resume_expired()
        stream, replica = msgspec.msgpack.decode(names)
        return Named(stream, replica)

    def _mac(self, names: bytes, tenant: str) -> bytes:
        signed = msgspec.msgpack.encode(("seedance.resume.v1", tenant, names))
        return hmac.digest(self._key, signed, hashlib.sha256)[:_MAC_BYTES]


def _armour(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


class Owner(Protocol):
    """Whoever relays a stream to its client."""

    def replace(self) -> None:
        """Ends the relaying, but not the stream: another has it now."""
        ...


@dataclasses.dataclass
class _Entry:
    stream: Stream
    owner: Owner | None
    deadline_s: float = 0.0
    request_bytes: int = 0
    size_bytes: int = 0
    has_all: bool = False
    unsubscribe: Callable[[], None] = lambda: None


class ResumableStreams:
    """The streams of this process that a RESUME can find, each with its one owner.

    A stream that has no owner any more is kept for `window_s` after it lost him, and as
    long after its end; then one that still runs is cancelled. More of them than
    `max_streams` or `max_bytes` (an estimate) are not kept: the oldest go first, of those
    whose client has been sent everything before any other.

    Args:
        window_s: 0 keeps nothing, so that a stream ends with its owner.
    """

    def __init__(
        self,
        window_s: float,
        *,
        max_streams: int = 4096,
        max_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window_s = window_s
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        # Both in the order of their deadlines, since all have the same time from when they come in.
        # Taking the first of a plain dict that loses its first again and again goes over the gaps.
        self._spent: OrderedDict[str, _Entry] = OrderedDict()
        self._missed: OrderedDict[str, _Entry] = OrderedDict()
        self._unowned_bytes = 0

    def __len__(self) -> int:
        """How many are kept for an owner to come."""
        return len(self._spent) + len(self._missed)

    @property
    def next_tick_at(self) -> float | None:
        """When `tick` has something to do next, on the clock; None when nothing is kept."""
        first = self._first_due()
        return None if first is None else first.deadline_s

    def add(self, stream: Stream, owner: Owner | None = None) -> None:
        """Takes in a stream; one without an owner waits for him from now on."""
        if not stream.token or self.window_s <= 0:
            if owner is None:
                stream.cancel()
            return
        self._remove(stream.token)
        self._entries[stream.token] = entry = _Entry(stream, owner)
        if owner is None:
            self._keep(entry)
            self._shrink()

    def is_unowned(self, token: str) -> bool:
        """Whether that stream is here and waits for its client."""
        entry = self._entries.get(token)
        return entry is not None and entry.owner is None

    def find(self, token: str, tenant: str) -> Stream | None:
        """The tenant's stream of that token, if it is here; its owner stays."""
        entry = self._entries.get(token)
        if entry is None or entry.stream.request.tenant != tenant:
            return None
        if is_replaced(entry.stream):
            # Another ingress has it now, and knows how it goes on.
            self._remove(token)
            return None
        return entry.stream

    def take(self, token: str, tenant: str, owner: Owner) -> Stream:
        """Makes `owner` the owner, in the place of any other.

        Raises:
            ResumeExpired: it is not here.
        """
        stream = self.find(token, tenant)
        if stream is None:
            raise resume_expired()
        entry = self._entries[token]
        self._unkeep(entry)
        former, entry.owner = entry.owner, owner
        if former is not None:
            former.replace()
        return stream

    def detach(self, stream: Stream, owner: Owner, *, has_all: bool = False) -> None:
        """The owner is gone, or `has_all` been sent; nothing when he is not the owner any more.

        The window starts. What cannot be resumed is cancelled at once.
        """
        entry = self._entries.get(stream.token)
        if entry is None:
            _stop(stream)
        elif entry.owner is owner:
            entry.owner, entry.has_all = None, has_all
            self._keep(entry)
            self._shrink()

    def drop(self, stream: Stream, owner: Owner) -> None:
        """Nobody wants it any more: cancels it; nothing when another than `owner` has it."""
        entry = self._entries.get(stream.token)
        if entry is None:
            _stop(stream)
        elif entry.owner is owner or entry.owner is None:
            self._remove(stream.token)
            _stop(stream)

    def tick(self) -> None:
        """Lets go of what nobody came for; to be called at `next_tick_at`, or more often."""
        now = self._clock()
        while (entry := self._first_due()) is not None and entry.deadline_s <= now:
            self._let_go(entry)
        self._shrink()

    def clear(self) -> None:
        """Lets go of everything that has no owner."""
        while (entry := self._first_due()) is not None:
            self._let_go(entry)

    def _first_due(self) -> _Entry | None:
        firsts = [next(iter(kept.values())) for kept in (self._spent, self._missed) if kept]
        return min(firsts, key=lambda entry: entry.deadline_s, default=None)

    def _kept(self, entry: _Entry) -> OrderedDict[str, _Entry]:
        return self._spent if entry.has_all else self._missed

    def _keep(self, entry: _Entry) -> None:
        """Keeps an entry for the window from now on, and once more when its stream ends."""
        stream = entry.stream
        if is_replaced(stream):
            self._remove(stream.token)
            return
        if stream.log.terminal is None:
            entry.unsubscribe = stream.log.subscribe(lambda: self._watch(entry))
        else:
            # Only its text is still of use: a prompt may be long.
            bare = msgspec.structs.replace(stream.request, messages=None, prompt=None, tools=None)
            entry.stream = dataclasses.replace(stream, request=bare, cancel=_nothing)
        entry.deadline_s = self._clock() + self.window_s
        entry.request_bytes = _size_of_request(entry.stream.request)
        self._kept(entry)[stream.token] = entry
        self._measure(entry)

    def _watch(self, entry: _Entry) -> None:
        if entry.stream.log.terminal is None:
            # Nothing is let go here: it could be this stream, in the middle of an append.
            self._measure(entry)
            return
        self._unkeep(entry)
        self._keep(entry)
        self._shrink()

    def _measure(self, entry: _Entry) -> None:
        self._unowned_bytes -= entry.size_bytes
        entry.size_bytes = entry.request_bytes + _size_of_log(entry.stream)
        self._unowned_bytes += entry.size_bytes

    def _unkeep(self, entry: _Entry) -> None:
        entry.unsubscribe()
        entry.unsubscribe = _nothing
        if self._kept(entry).pop(entry.stream.token, None) is not None:
            self._unowned_bytes -= entry.size_bytes
            entry.size_bytes = 0

    def _remove(self, token: str) -> None:
        entry = self._entries.pop(token, None)
        if entry is not None:
            self._unkeep(entry)

    def _let_go(self, entry: _Entry) -> None:
        stream = entry.stream
        self._remove(stream.token)
        if stream.log.terminal is None:
            logger.info("request %s: nobody came for it", stream.request.request_id)
        _stop(stream)

    def _shrink(self) -> None:
        while len(self) > self._max_streams or self._unowned_bytes > self._max_bytes:
            self._let_go(next(iter((self._spent or self._missed).values())))


def is_replaced(stream: Stream) -> bool:
    """Whether the stream ended here because it goes on in another process."""
    terminal = stream.log.terminal
    return (
        terminal is not None and terminal.error is not None and terminal.error.code == Replaced.code
    )


def _size_of_log(stream: Stream) -> int:
    """About what the log takes in memory, without going through it."""
    entries = 1 + (0 if stream.request.sampling.logprobs is None else 1)
    entries += stream.request.sampling.logprobs or 0
    return 1024 + stream.log.next_seq * _DELTA_BYTES * entries


def _size_of_request(request: InferenceRequest) -> int:
    """About what the texts of a request take, in code points or ids."""
    texts = [message.content or "" for message in request.messages or ()]
    size = len(request.prompt or "") + sum(map(len, texts))
    return size if request.tools is None else size + len(msgspec.msgpack.encode(request.tools))


def _stop(stream: Stream) -> None:
    if stream.log.terminal is None:
        stream.cancel()


def _nothing() -> None:
    pass
