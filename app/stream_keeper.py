"""Where connections get their streams from, and leave those that they lose.

Opens streams, keeps the resumable ones of this process, and fetches those that
another ingress had. What it does for a stream does not hang on a connection's
task: Serve cancels that, with every call made in it, when the client is gone.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

from app.resume import Owner, ResumableStreams, resume_expired
from app.serving import Stream, StreamOpener
from protocol.errors import InvalidRequest, ResumeExpired
from protocol.request import InferenceRequest
from protocol.token_log import TokenLog

PARK_AFTER_S = 1.0
"""A client that comes back sooner finds its stream running; later, it goes on from where it was."""
MIN_TICK_S = 0.01
"""Streams whose time is up at nearly the same time go together."""


class StreamKeeper:
    """Opens, keeps and finds streams; one instance an ingress replica."""

    def __init__(
        self,
        opener: StreamOpener,
        resumable: ResumableStreams,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opener = opener
        self._resumable = resumable
        self._clock = clock
        self._own_context = contextvars.copy_context()
        self._fetching: dict[tuple[str, str], asyncio.Task[Stream]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def window_s(self) -> float:
        """How long a stream waits for its client; 0 when it does not."""
        return self._resumable.window_s

    @property
    def num_kept(self) -> int:
        """Streams that wait for their client, running or finished."""
        return len(self._resumable)

    async def open(self, request: InferenceRequest, owner: Owner) -> Stream:
        """A new stream.

        Raises:
            ServingError: the request was refused.
        """
        stream = await self._opener.open_stream(request)
        self._resumable.add(stream, owner)
        return stream

    async def warm(self, request: InferenceRequest) -> None:
        """Prefills what a request has so far; returns when that is done, or is of no use."""
        await self._opener.warm(request)

    async def resume(self, token: str, tenant: str, last_seq: int, owner: Owner) -> Stream:
        """A stream that goes on after `last_seq`; its former owner, if it has one, is replaced.

        Raises:
            ResumeExpired: there is none of that token for this tenant, or none any more.
            InvalidRequest: it did not come as far as `last_seq`.
            ServingError: whoever has it does not answer.
        """
        stream = self._resumable.find(token, tenant) or await self._fetch(token, tenant)
        check_last_seq(stream.log, last_seq)
        taken = self._resumable.take(stream.token, tenant, owner)
        taken.unpark()
        return taken

    def detach(self, stream: Stream, owner: Owner, *, has_all: bool = False) -> None:
        """`owner` is gone, or `has_all` been sent: keeps the stream for the window."""
        self._resumable.detach(stream, owner, has_all=has_all)
        self._set_timer()
        if not has_all and stream.log.terminal is None:
            self._park_soon(stream)

    def drop(self, stream: Stream, owner: Owner) -> None:
        """`owner`'s client does not want the stream any more: cancels it."""
        self._resumable.drop(stream, owner)

    def close(self) -> None:
        """Lets go of every stream that has no owner."""
        for task in self._fetching.values():
            task.cancel()
        self._resumable.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _fetch(self, token: str, tenant: str) -> Stream:
        """A stream of another process; those who ask for the same at a time get the same."""
        if self.window_s <= 0:
            raise resume_expired()
        key = (token, tenant)
        task = self._fetching.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(token, tenant), context=self._own_context)
            self._fetching[key] = task
            task.add_done_callback(lambda _: self._fetching.pop(key))
        # Whoever asked may be cancelled meanwhile; the stream is then kept for who comes next.
        return await asyncio.shield(task)

    async def _ask(self, token: str, tenant: str) -> Stream:
        try:
            stream = await self._opener.resume_stream(token, tenant)
        except ResumeExpired:
            raise resume_expired() from None
        # Where it came to its end it was counted.
        stream.is_counted = stream.log.terminal is not None
        self._resumable.add(stream)
        self._set_timer()
        # Whoever asked may have left meanwhile.
        self._park_soon(stream)
        return stream

    def _park_soon(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(PARK_AFTER_S, self._park, stream, context=self._own_context)

    def _park(self, stream: Stream) -> None:
        if self._resumable.is_unowned(stream.token):
            stream.park()

    def _set_timer(self) -> None:
        if self._timer is not None:
            # What came later is due later.
            return
        due_at = self._resumable.next_tick_at
        if due_at is not None:
            delay_s = max(MIN_TICK_S, due_at - self._clock())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self._tick, context=self._own_context)

    def _tick(self) -> None:
        self._timer = None
        self._resumable.tick()
        self._set_timer()


def check_last_seq(log: TokenLog, last_seq: int) -> None:
    """Checks that a client can have received `last_seq` as the number of a chunk, or nothing (-1).

    Raises:
        InvalidRequest: what comes after it cannot be told.
    """
    highest = log.next_seq - 1
    if last_seq > highest:
        raise InvalidRequest(
            f"last_seq is {last_seq}, the last token of this stream is {highest}",
            param="last_seq",
            limit=highest,
        )
    if last_seq < 0:
        return
    deltas = log.deltas
    if deltas[bisect_left(deltas, last_seq, key=attrgetter("seq"))].seq != last_seq:
        raise InvalidRequest(
            f"last_seq is {last_seq}, which no chunk of this stream had", param="last_seq"
        )
