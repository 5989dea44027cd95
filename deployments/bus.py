"""The model replica's end of the token bus: streams, and one outlet for each ingress.

An ingress opens one long-lived call, its bus. Every accepted stream is a log; the bus of
the ingress that follows it carries whatever is new in all of them, one message a step: the
step appends to all logs in one go, and that wakes the bus once. While a message waits
for a slow ingress the logs grow, and the next message takes all of it.

A stream that no open bus carries is an orphan: after `lease_s` it is parked, which means that
nobody computes it any more. Parked and ended streams are kept for `keep_s`: another ingress
can fetch them, and have the former go on anywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from deployments import wire
from protocol.errors import Replaced, ResumeExpired
from protocol.token_log import Cursor, Terminal, TokenLog

logger = logging.getLogger(__name__)

MAX_DELTAS = 1024
"""Of one stream in one message, and so well below the transport's limit."""
MAX_MESSAGE_DELTAS = 8192
"""Of one message: what is left goes into the next one."""
UNKNOWN_STREAM = Terminal(
    finish_reason="error", error=ResumeExpired("this replica has no such stream").info
)
TAKEN_OVER = Terminal(
    finish_reason="error", error=Replaced("the stream was resumed elsewhere").info
)


def maybe_here(next_seq: int) -> int:
    """The position of a stream that may be on this replica or not, and back from that."""
    return ~next_seq


@dataclass(eq=False)
class BusStream:
    """One accepted request on this replica.

    Attributes:
        log: begins with what an earlier replica had answered.
        abandon: stops the computation; harmless at any time.
        ingress: whose bus carries it.
        idle_since_s: when it lost its bus, or ended; None while it runs and is carried.
        first_seq: of the first delta that this replica adds.
        is_parked: it is computed no more, for want of a client, and could go on.
        is_admitted: whether the engine has taken it; a bus carries it from then on.
    """

    submit: wire.Submit
    accepted: wire.Accepted
    log: TokenLog
    abandon: Callable[[], None]
    ingress: str = field(init=False)
    accepted_s: float = field(init=False)
    first_seq: int = field(init=False)
    idle_since_s: float | None = None
    is_parked: bool = False
    is_admitted: bool = True
    unsubscribe: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.ingress = self.submit.ingress
        self.first_seq = self.log.next_seq

    @property
    def name(self) -> str:
        return self.submit.request.request_id

    @property
    def has_ended(self) -> bool:
        return self.is_parked or self.log.terminal is not None


class Bus:
    """The outlet to one ingress, for as long as its call is open."""

    def __init__(self) -> None:
        self.is_open = True
        self.renewed_s = 0.0
        self._cursors: dict[str, Cursor] = {}
        self._dirty: dict[str, None] = {}
        self._gone: dict[str, Terminal] = {}
        self._changed = asyncio.Event()

    def carry(self, name: str, cursor: Cursor) -> None:
        self._cursors[name] = cursor
        self._gone.pop(name, None)
        self.mark(name)

    def mark(self, name: str) -> None:
        """There is something new in this stream."""
        self._dirty[name] = None
        self._changed.set()

    def drop(self, name: str, terminal: Terminal) -> None:
        """The stream is not here any more; `terminal` tells the ingress why."""
        self._cursors.pop(name, None)
        self._gone[name] = terminal
        self._changed.set()

    def forget(self, name: str) -> None:
        """Nothing more is said of the stream that had this name."""
        self._cursors.pop(name, None)
        self._gone.pop(name, None)

    def wake(self) -> None:
        """Makes a message due, if only as a sign of life."""
        self._changed.set()

    def close(self) -> None:
        self.is_open = False
        self._changed.set()

    async def wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def collect(self) -> tuple[wire.Part, ...]:
        """Whatever is new since the last call, up to a message's bound."""
        parts = [wire.Part(name, (), terminal) for name, terminal in self._gone.items()]
        self._gone.clear()
        dirty, self._dirty = self._dirty, {}
        num_deltas = 0
        for name in dirty:
            cursor = self._cursors.get(name)
            if cursor is None:
                continue
            if num_deltas >= MAX_MESSAGE_DELTAS:
                self.mark(name)
                continue
            deltas = tuple(cursor.take(MAX_DELTAS))
            num_deltas += len(deltas)
            terminal = cursor.log.terminal if cursor.is_at_end else None
            if terminal is not None:
                del self._cursors[name]
            elif len(deltas) == MAX_DELTAS:
                self.mark(name)
            if deltas or terminal is not None:
                parts.append(wire.Part(name, deltas, terminal))
        return tuple(parts)


class BusHub:
    """All streams of one model replica, and the buses that carry them.

    Args:
        load: the replica's load now, told with every message.
        lease_s: how long an orphan runs on.
        keep_s: how long an ended stream can still be attached.
        renew_s: an ingress that does not renew its bus for so long is gone, whatever its
            connection looks like.
        max_ended: ended streams that are kept at most.
    """

    def __init__(
        self,
        load: Callable[[], wire.Load],
        clock: Callable[[], float],
        *,
        lease_s: float,
        keep_s: float,
        renew_s: float,
        max_ended: int = 1024,
    ) -> None:
        self._load = load
        self._clock = clock
        self._lease_s = lease_s
        self._keep_s = keep_s
        self._renew_s = renew_s
        self._max_ended = max_ended
        self._buses: dict[str, Bus] = {}
        self._streams: dict[str, BusStream] = {}
        self._ended: dict[str, None] = {}

    @property
    def num_live(self) -> int:
        return len(self._streams) - len(self._ended)

    def has(self, name: str) -> bool:
        """Whether a stream of that name is known, running or ended."""
        return name in self._streams

    def add(self, stream: BusStream) -> None:
        """Takes a stream that is not running yet; its ingress's bus carries it.

        It was here before when it went elsewhere, because we seemed lost, and comes back: the
        former one is given up.

        Raises:
            Replaced: another ingress has taken it over since.
        """
        name = stream.name
        former = self._streams.get(name)
        if former is not None:
            if former.submit.epoch > stream.submit.epoch:
                raise Replaced("the stream was resumed elsewhere")
            self._forget(former)
            if former.ingress != stream.ingress and former.ingress in self._buses:
                self._buses[former.ingress].drop(name, TAKEN_OVER)
        self._streams[name] = stream
        stream.accepted_s = self._clock()
        stream.unsubscribe = stream.log.subscribe(lambda: self._news(name, stream))
        if stream.ingress in self._buses:
            self._buses[stream.ingress].forget(name)
        self._carry(name, stream, stream.first_seq)

    def admitted(self, stream: BusStream) -> None:
        """The engine has taken a stream; it may have been cancelled meanwhile."""
        stream.is_admitted = True
        if self._streams.get(stream.name) is stream:
            self._carry(stream.name, stream, stream.first_seq)

    def refused(self, stream: BusStream) -> None:
        """The engine has not taken a stream, and only the reply to its submission tells that.

        On the bus it would be taken for the end of a later submission of the same name.
        """
        if self._streams.get(stream.name) is stream:
            self._forget(stream)

    def cancel(self, names: tuple[str, ...], ingress: str, *, keep: bool = False) -> None:
        """Gives streams of an ingress up; unknown ones are nothing new, and another's go on.

        Args:
            keep: what was answered can still be attached for a while.
        """
        for name in names:
            stream = self._streams.get(name)
            if stream is None or stream.ingress != ingress:
                continue
            if not keep:
                self.discard(stream)
            elif not stream.has_ended:
                self._park(stream)

    def discard(self, stream: BusStream) -> None:
        """Gives one stream up; harmless when another has taken its place.

        Its ingress is told. It has mostly forgotten it, but where it still waits, since the
        cancel was meant for an earlier stream of the same name, it must not wait in vain.
        """
        if self._streams.get(stream.name) is stream:
            self._forget(stream)
            bus = self._buses.get(stream.ingress)
            if bus is not None:
                bus.drop(stream.name, UNKNOWN_STREAM)

    def find(self, name: str) -> wire.Found | None:
        """What is here of a stream, if anything; changes nothing."""
        stream = self._streams.get(name)
        if stream is None:
            return None
        return wire.Found(
            epoch=stream.submit.epoch,
            next_seq=stream.log.next_seq,
            is_live=not stream.is_parked,
        )

    def attach(self, name: str, ingress: str) -> wire.Attached:
        """Moves a stream to another ingress, whose bus carries what is not in the reply.

        Raises:
            ResumeExpired: there is no such stream, or none any more.
        """
        stream = self._streams.get(name)
        if stream is None:
            raise ResumeExpired("this replica has no such stream")
        if stream.ingress != ingress:
            if (bus := self._buses.get(stream.ingress)) is not None:
                bus.drop(name, TAKEN_OVER)
            epoch = stream.submit.epoch + 1
            stream.submit = msgspec.structs.replace(stream.submit, ingress=ingress, epoch=epoch)
            stream.ingress = ingress
        if not stream.has_ended:
            self._carry(name, stream, stream.log.next_seq)
        return wire.Attached(
            submit=stream.submit,
            age_s=self._clock() - stream.accepted_s,
            accepted=stream.accepted,
            deltas=stream.log.deltas,
            terminal=None if stream.is_parked else stream.log.terminal,
            is_parked=stream.is_parked,
        )

    def renew(self, ingress: str) -> None:
        """A sign of life of an ingress."""
        bus = self._buses.get(ingress)
        if bus is not None:
            bus.renewed_s = self._clock()

    async def messages(
        self, ingress: str, positions: Mapping[str, int]
    ) -> AsyncGenerator[wire.BusMessage]:
        """The bus of one ingress: a first message at once, then one whenever there is news.

        Args:
            positions: of the streams that the ingress follows here, the `seq` that it needs
                next. A stream of its that is not named starts at its beginning; one that is not
                here gets an end that says so, unless the position is a `maybe_here`.
        """
        bus = self._open(ingress, positions)
        try:
            while bus.is_open:
                yield wire.BusMessage(bus.collect(), self._load())
                await bus.wait()
        finally:
            bus.close()
            if self._buses.get(ingress) is bus:
                del self._buses[ingress]
                self._orphan(ingress)

    def tick(self) -> None:
        """Every second or so: signs of life on all buses, and an end to what has run out."""
        now_s = self._clock()
        for bus in self._buses.values():
            if now_s - bus.renewed_s > self._renew_s:
                bus.close()
            bus.wake()
        for name, stream in list(self._streams.items()):
            if stream.idle_since_s is None:
                continue
            allowed_s = self._keep_s if stream.has_ended else self._lease_s
            if now_s - stream.idle_since_s < allowed_s:
                continue
            if stream.has_ended:
                self._forget(stream)
            else:
                logger.info("request %s has no ingress any more, it waits for another", name)
                self._park(stream)

    def _open(self, ingress: str, positions: Mapping[str, int]) -> Bus:
        former = self._buses.get(ingress)
        if former is not None:
            former.close()
        bus = self._buses[ingress] = Bus()
        bus.renewed_s = self._clock()
        for name, stream in self._streams.items():
            # Of the ended ones it gets only what it asks for: the others had their end told.
            is_wanted = not stream.is_parked if name in positions else not stream.has_ended
            if stream.ingress == ingress and is_wanted:
                position = positions.get(name, stream.first_seq)
                self._carry(name, stream, position if position >= 0 else maybe_here(position))
        for name, position in positions.items():
            if position < 0:
                continue
            if name not in self._streams or self._streams[name].is_parked:
                bus.drop(name, UNKNOWN_STREAM)
            elif self._streams[name].ingress != ingress:
                bus.drop(name, TAKEN_OVER)
        return bus

    def _carry(self, name: str, stream: BusStream, next_seq: int) -> None:
        """Puts a stream on its ingress's bus, if that is open."""
        bus = self._buses.get(stream.ingress)
        if bus is not None and stream.is_admitted:
            bus.carry(name, stream.log.cursor(next_seq))
        if not stream.has_ended:
            stream.idle_since_s = self._clock() if bus is None else None

    def _news(self, name: str, stream: BusStream) -> None:
        bus = self._buses.get(stream.ingress)
        if bus is not None:
            bus.mark(name)
        if stream.has_ended:
            self._end(name, stream)

    def _end(self, name: str, stream: BusStream) -> None:
        stream.idle_since_s = self._clock()
        self._ended[name] = None
        if len(self._ended) > self._max_ended:
            oldest = next(iter(self._ended))
            self._forget(self._streams[oldest])

    def _orphan(self, ingress: str) -> None:
        """The streams of an ingress that is gone run on for a lease."""
        for stream in self._streams.values():
            if stream.ingress == ingress and not stream.has_ended:
                stream.idle_since_s = self._clock()

    def _park(self, stream: BusStream) -> None:
        """Stops the computation, and keeps what there is as if it were an end."""
        stream.unsubscribe()
        stream.abandon()
        stream.is_parked = True
        self._end(stream.name, stream)
        bus = self._buses.get(stream.ingress)
        if bus is not None:
            bus.drop(stream.name, UNKNOWN_STREAM)

    def _forget(self, stream: BusStream) -> None:
        stream.unsubscribe()
        stream.abandon()
        self._ended.pop(stream.name, None)
        del self._streams[stream.name]
