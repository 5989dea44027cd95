"""The ingress's end of the token bus: a link to each model replica, and the streams it carries.

A link is one long-lived call. It is reopened when it breaks, and its streams go on from
where they were; when it cannot be reopened, or the replica behind it stops moving, they
are told that they are lost, and find another replica themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments import wire
from deployments.bus import maybe_here
from deployments.replica_board import ReplicaBoard, ReplicaGone
from protocol.errors import Replaced

logger = logging.getLogger(__name__)

TICK_S = 0.25
RENEW_S = 5.0
"""A replica takes an ingress that has not renewed its bus for several times this for dead."""
MAX_REOPENS = 3
REOPEN_BACKOFF_S = 0.1
SUSPECT_AFTER_S = 2.0
"""A replica tells something several times a second; a silent one gets no new work."""
SUSPECT_FOR_S = 30.0


class MessageStream(Protocol):
    """Packed messages, as a Serve response generator gives them."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def cancel(self) -> None: ...


class BusPort(Protocol):
    """The calls to a replica that keep a bus going."""

    def bus(self, ingress: str, positions: dict[str, int], replica: str) -> MessageStream:
        """Opens the bus; for `positions` see `deployments.bus.BusHub.messages`."""
        ...

    async def cancel(
        self, names: tuple[str, ...], ingress: str, replica: str, *, keep: bool
    ) -> None:
        """Stops streams; `keep` leaves what was answered there to be attached."""
        ...

    async def renew(self, ingress: str, replica: str) -> None: ...


class Sink(Protocol):
    """One stream, as its link sees it."""

    @property
    def next_seq(self) -> int:
        """Number of the token that it needs next."""
        ...

    def take(self, part: wire.Part) -> None: ...

    def lost(self, why: str) -> None:
        """Its replica is gone. The stream is not carried any more, until it is followed again."""
        ...


class Nobody:
    """The sink of a stream that is just being taken over, until its owner is made."""

    next_seq = 0

    def take(self, part: wire.Part) -> None:
        """Nothing is handed over before somebody follows."""

    def lost(self, why: str) -> None:
        """Nothing is known of it yet, so there is nothing to lose."""


@dataclass
class _Followed:
    """A stream that is waited for; `replica` is None until one has accepted it.

    Attributes:
        early: what came before that was known, each with the replica that sent it: only
            those of the one that has accepted count.
    """

    sink: Sink
    replica: str | None = None
    early: list[tuple[str, wire.Part]] = field(default_factory=list)

    def hold(self, replica: str, part: wire.Part) -> None:
        # A stream ends once: an end before this part said that it was not there yet.
        self.early = [
            (sender, held)
            for sender, held in self.early
            if sender != replica or held.terminal is None
        ]
        self.early.append((replica, part))


Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a task that no request owns."""


class ModelBus:
    """All links of one ingress.

    Args:
        ingress: this ingress's name, unique among all that ever were.
        watchdog_s: a replica that is silent, or makes no step, for so long while it has our
            streams is given up.
    """

    def __init__(
        self,
        port: BusPort,
        board: ReplicaBoard,
        *,
        ingress: str,
        watchdog_s: float,
        clock: Callable[[], float],
        spawn: Spawn,
    ) -> None:
        self.ingress = ingress
        self._port = port
        self._board = board
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._spawn = spawn
        self._followed: dict[str, _Followed] = {}
        # Streams that rest where they are. Only that another ingress took one is of interest.
        self._parked: dict[str, Sink] = {}
        self._links: dict[str, _Link] = {}
        self._ticked_s = self._renewed_s = clock()
        self._watch: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def expect(self, name: str, sink: Sink) -> None:
        """From now on parts of this stream are kept for `sink`, until it is followed."""
        self._parked.pop(name, None)
        former = self._followed.get(name)
        self._followed[name] = followed = _Followed(sink)
        if former is not None and former.replica is None:
            followed.early = former.early

    def follow(self, name: str, replica: str) -> None:
        """An expected stream is on this replica and no other: its sink gets what comes from there."""
        if self._is_closed:
            return
        link = self._link(replica)
        # To accept is a sign of life.
        link.heard_s = self._clock()
        followed = self._followed.get(name)
        if followed is None:
            # It was given up while it was on its way.
            link.cancel(name)
            return
        followed.replica = replica
        early, followed.early = followed.early, []
        for sender, part in early:
            if sender != replica:
                self._refuse(sender, part)
            elif self._followed.get(name) is followed and followed.replica == replica:
                self._hand_over(followed, part)

    def forget(self, name: str) -> None:
        """The stream has ended."""
        self._parked.pop(name, None)
        followed = self._followed.pop(name, None)
        if followed is not None and followed.replica not in self._board.replicas:
            self._close_idle()

    def cancel(self, name: str) -> None:
        """Gives a stream up, wherever it is."""
        followed = self._followed.get(name)
        if followed is not None and followed.replica is not None:
            self._link(followed.replica).cancel(name)
        self.forget(name)

    def park(self, name: str) -> None:
        """Stops a stream where it is, so that it can go on from there."""
        followed = self._followed.get(name)
        if followed is not None and followed.replica is not None:
            self._spawn(self._link(followed.replica).park(name))
        self.forget(name)
        if followed is not None:
            self._parked[name] = followed.sink

    def names_on(self, replica: str) -> list[str]:
        """Streams that are followed on a replica."""
        return [name for name, one in self._followed.items() if one.replica == replica]

    async def close(self) -> None:
        """Ends all links; streams get nothing any more."""
        self._is_closed = True
        self._unsubscribe()
        self._followed.clear()
        self._links.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def tick(self, now_s: float) -> None:
        """Looks after all links; to be called every `TICK_S`."""
        # A late tick means that we were stopped ourselves: nobody's silence counts then.
        is_late = now_s - self._ticked_s > 4 * TICK_S
        self._ticked_s = now_s
        is_renewal = now_s - self._renewed_s >= RENEW_S
        if is_renewal:
            self._renewed_s = now_s
        for link in list(self._links.values()):
            if is_late:
                link.heard_s = now_s
            self._judge(link, now_s)
            if is_renewal:
                self._start(link.renew())

    def _judge(self, link: _Link, now_s: float) -> None:
        silent_s = now_s - link.heard_s
        stalled_s = max(silent_s, link.load.stalled_s)
        if stalled_s > SUSPECT_AFTER_S:
            self._board.suspect(link.replica, SUSPECT_FOR_S)
        if stalled_s > self._watchdog_s and self.names_on(link.replica):
            what = "is silent" if silent_s >= stalled_s else "makes no step"
            self._give_up(link, f"it {what} since {stalled_s:.1f} s")

    def _link(self, replica: str) -> _Link:
        link = self._links.get(replica)
        if link is None:
            link = self._links[replica] = _Link(
                replica, self._port, self.ingress, self._start, self._watchdog_s, self._clock()
            )
            link.task = self._start(self._run(link))
            if self._watch is None:
                self._begin_watch()
        return link

    def _begin_watch(self) -> None:
        loop = asyncio.get_running_loop()

        def replicas_changed() -> None:
            # The router may live in another thread.
            loop.call_soon_threadsafe(self._close_idle)

        self._unsubscribe = self._board.subscribe(replicas_changed)
        self._watch = self._start(self._run_watch())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(self._clock())

    async def _run(self, link: _Link) -> None:
        """Keeps one link open until its replica is gone or nobody needs it."""
        failures = 0
        while failures <= MAX_REOPENS:
            if failures:
                await asyncio.sleep(REOPEN_BACKOFF_S * 2 ** (failures - 1))
            # With those that are just being submitted: this replica may have accepted them,
            # and even ended them, while no bus was open.
            positions = {
                name: maybe_here(one.sink.next_seq) if one.replica is None else one.sink.next_seq
                for name, one in self._followed.items()
                if one.replica in (None, link.replica)
            }
            messages: MessageStream | None = None
            why = "its bus ended"
            try:
                messages = self._port.bus(self.ingress, positions, link.replica)
                async for raw in messages:
                    self._take(link, wire.decode_bus_message(raw))
                    failures = 0
            except ReplicaGone as error:
                why = str(error)
                break
            except Exception as error:
                why = f"its bus broke: {error!r}"[:300]
            finally:
                if messages is not None:
                    messages.cancel()
            failures += 1
        self._give_up(link, why)

    def _take(self, link: _Link, message: wire.BusMessage) -> None:
        link.heard_s = self._clock()
        link.load = message.load
        self._board.set_load(link.replica, message.load)
        if message.load.stalled_s <= SUSPECT_AFTER_S:
            self._board.clear(link.replica)
        for part in message.parts:
            followed = self._followed.get(part.stream)
            if followed is None or followed.replica not in (None, link.replica):
                self._refuse(link.replica, part)
            elif followed.replica is None:
                followed.hold(link.replica, part)
            else:
                self._hand_over(followed, part)

    def _hand_over(self, followed: _Followed, part: wire.Part) -> None:
        try:
            followed.sink.take(part)
        except Exception:
            logger.exception("stream %s took a part badly", part.stream)

    def _refuse(self, replica: str, part: wire.Part) -> None:
        """Nobody here follows this stream there."""
        link = self._links.get(replica)
        terminal = part.terminal
        if terminal is None and link is not None:
            if part.stream in self._parked:
                # It left before the replica heard that the stream is to rest, if it ever did.
                self._spawn(link.park(part.stream))
            else:
                link.cancel(part.stream)
        elif terminal is not None and terminal.error is not None:
            sink = self._parked.get(part.stream)
            if sink is not None and terminal.error.code == Replaced.code:
                # What we have of it grows old while it goes on there.
                self._hand_over(_Followed(sink), part)

    def _give_up(self, link: _Link, why: str) -> None:
        """Ends a link; whatever it carried is lost there."""
        if self._links.get(link.replica) is not link:
            return
        del self._links[link.replica]
        link.close()
        lost = self.names_on(link.replica)
        if lost:
            logger.warning("replica %s is lost with %d streams: %s", link.replica, len(lost), why)
            self._board.suspect(link.replica, SUSPECT_FOR_S)
        for name in lost:
            followed = self._followed.get(name)
            if followed is None or followed.replica != link.replica:
                # Whoever was told before it has given it up.
                continue
            followed.replica = None
            try:
                followed.sink.lost(why)
            except Exception:
                logger.exception("stream %s took its loss badly", name)

    def _close_idle(self) -> None:
        """Lets go of replicas that leave, once they carry nothing of ours: they wait for it."""
        for link in list(self._links.values()):
            if link.replica not in self._board.replicas and not self.names_on(link.replica):
                del self._links[link.replica]
                link.close()


class _Link:
    """The call to one replica."""

    def __init__(
        self,
        replica: str,
        port: BusPort,
        ingress: str,
        spawn: Spawn,
        call_timeout_s: float,
        now_s: float,
    ) -> None:
        self.replica = replica
        self.load = wire.Load()
        self.heard_s = now_s
        self.task: asyncio.Task[None]
        self._port = port
        self._ingress = ingress
        self._spawn = spawn
        self._call_timeout_s = call_timeout_s
        self._to_cancel: set[str] = set()
        self._is_cancelling = False

    def close(self) -> None:
        if self.task is not asyncio.current_task():
            self.task.cancel()

    def cancel(self, name: str) -> None:
        """Tells the replica that a stream is not wanted; all of one moment go together."""
        self._to_cancel.add(name)
        if not self._is_cancelling:
            self._is_cancelling = True
            self._spawn(self._send_cancels())

    async def park(self, name: str) -> None:
        call = self._port.cancel((name,), self._ingress, self.replica, keep=True)
        await self._attempt(call)

    async def renew(self) -> None:
        await self._attempt(self._port.renew(self._ingress, self.replica))

    async def _send_cancels(self) -> None:
        try:
            while self._to_cancel:
                names = tuple(self._to_cancel)
                await self._attempt(
                    self._port.cancel(names, self._ingress, self.replica, keep=False)
                )
                # What came meanwhile for these was on its way already.
                self._to_cancel.difference_update(names)
        finally:
            self._is_cancelling = False

    async def _attempt(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await call
        except Exception as error:
            # Its leases end there what a lost call does not.
            logger.info("call to replica %s failed: %r", self.replica, error)
