"""Equal requests at the same time are one generation, read by all of them.

The first request opens it; whoever asks the same before its end rides along and
gets the whole answer, the beginning included, in a log of its own. Each rider
leaves on its own; the generation ends early only when the last one has left.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from app.serving import Stream
from deployments.cache_key import is_cacheable
from protocol.errors import InternalError, Overloaded, Replaced, ServingError
from protocol.request import InferenceRequest
from protocol.token_log import (
    CacheOutcome,
    Cursor,
    FinishReason,
    Terminal,
    Timing,
    TokenDelta,
    TokenLog,
    Usage,
)

logger = logging.getLogger(__name__)

OpenStream = Callable[[], Coroutine[Any, Any, Stream]]
TokenOf = Callable[[Stream, InferenceRequest], str]


def flight_key(request: InferenceRequest) -> str | None:
    """Equal for requests that one generation can answer; None for one that goes alone.

    Everything but the request's own id counts, to the byte: the tenant, the seed, the
    limit of tokens, the time-out. Who may not be given a stored answer may not be given
    this one either.
    """
    if request.cache not in ("auto", "sampled") or not is_cacheable(request):
        return None
    anonymous = msgspec.structs.replace(request, request_id="", share="")
    return hashlib.blake2b(msgspec.msgpack.encode(anonymous), digest_size=32).hexdigest()


class SingleFlight:
    """The generations that are shared now.

    Args:
        context: in which streams are opened: Serve cancels what was called in the context
            of a request whose client leaves, and others may wait for it. By default the
            caller's of this constructor.
        token_of: makes the resume token of one who rides along on a stream, since a token
            names one reader; by default there is none.
    """

    def __init__(
        self,
        *,
        context: contextvars.Context | None = None,
        token_of: TokenOf = lambda stream, request: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._token_of = token_of
        self._clock = clock
        self._flights: dict[str, _Flight] = {}
        self.coalesced_total = 0

    def __len__(self) -> int:
        return len(self._flights)

    async def open(self, key: str, request: InferenceRequest, open_stream: OpenStream) -> Stream:
        """A stream that answers `request`: of the running generation of that key, or a new one.

        A request with a time-out rides along only while the generation is being opened:
        later it would end by another's clock.

        Args:
            open_stream: is called again when a rider has taken the generation to another
                ingress and others are left. Each call has to open it under another name.

        Raises:
            ServingError: the opening was refused, to everyone who waited for it.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._begin(key, open_stream)
        elif flight.opening.done() and request.timeout_s is not None:
            return await open_stream()
        stream = await self._board(flight, request)
        self.coalesced_total += stream.cache.outcome == "coalesced"
        return stream

    async def join(self, key: str, request: InferenceRequest) -> Stream | None:
        """A view of the running generation of another request's key, for one that means the same.

        None when there is none that gives an answer: it is over, is refused, or ends without a
        word in a way that is no whole answer. Returns with the first words, from which on the
        view is as any rider's.
        """
        flight = self._flights.get(key)
        if flight is None:
            return None
        try:
            stream = await self._board(flight, request)
        except ServingError:
            return None
        try:
            has_words = bool(await stream.log.cursor().wait())
        except asyncio.CancelledError:
            stream.cancel()
            raise
        terminal = stream.log.terminal
        if terminal is None or (has_words and terminal.finish_reason == "stop"):
            return stream
        return None

    async def _board(self, flight: _Flight, request: InferenceRequest) -> Stream:
        rider = _Rider(flight, request, self._clock)
        try:
            while not flight.opening.done():
                # Unlike awaiting the task, this raises for our own cancel only.
                await asyncio.wait((flight.opening,))
        except asyncio.CancelledError:
            flight.leave(rider)
            raise
        return rider.board(_opened(flight.opening), self._token_of)

    def _begin(self, key: str, open_stream: OpenStream) -> _Flight:
        def end() -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]

        def begin(opening: Coroutine[Any, Any, Stream]) -> asyncio.Task[Stream]:
            return asyncio.create_task(opening, context=self._context.copy())

        flight = self._flights[key] = _Flight(open_stream, begin, end)
        return flight


class _Flight:
    """One generation and who rides on it, those who still wait for its opening included."""

    def __init__(
        self,
        open_stream: OpenStream,
        begin: Callable[[Coroutine[Any, Any, Stream]], asyncio.Task[Stream]],
        on_end: Callable[[], None],
    ) -> None:
        self._open_stream = open_stream
        self._begin = begin
        self._on_end = on_end
        self._riders: dict[_Rider, None] = {}
        self._parked: set[_Rider] = set()
        self._has_leader = False
        self._moved_log: TokenLog | None = None
        self.opening = self._start()

    def add(self, rider: _Rider) -> bool:
        """Whether this rider is the first of all."""
        is_leader, self._has_leader = not self._has_leader, True
        self._riders[rider] = None
        self.unpark(rider)
        return is_leader

    def leave(self, rider: _Rider) -> None:
        """One rider less; without any the generation is given up."""
        self._riders.pop(rider, None)
        self._parked.discard(rider)
        if self._riders:
            self._rest()
            return
        self._on_end()
        if not self.opening.done():
            self.opening.cancel()
        elif (stream := self._opened()) is not None:
            stream.cancel()

    def park(self, rider: _Rider) -> None:
        """Nobody waits for this rider's answer at present; when that is so for all, it rests."""
        if rider in self._riders:
            self._parked.add(rider)
            self._rest()

    def unpark(self, rider: _Rider) -> None:
        self._parked.discard(rider)
        if (stream := self._opened()) is not None:
            stream.unpark()

    def _rest(self) -> None:
        stream = self._opened()
        if stream is not None and self._parked.issuperset(self._riders):
            stream.park()

    def _opened(self) -> Stream | None:
        """The generation now, once it is open."""
        opening = self.opening
        if not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()

    def goes_on_after(self, log: TokenLog) -> bool:
        """Whether the end of this log is not the end of the answer.

        A rider that resumes on another ingress takes the generation there with it; the
        others did not move, and get a new one.
        """
        return log is self._moved_log

    def _start(self) -> asyncio.Task[Stream]:
        opening = self._begin(self._open())
        opening.add_done_callback(_look_at)
        return opening

    async def _open(self) -> Stream:
        try:
            stream = await self._open_stream()
        except BaseException:
            self._on_end()
            raise
        if not self._riders:
            stream.cancel()
        # Before any rider, so that it is decided by then whether an end is the end.
        stream.log.subscribe(lambda: self._watch(stream.log))
        self._watch(stream.log)
        return stream

    def _watch(self, log: TokenLog) -> None:
        terminal = log.terminal
        if terminal is None:
            return
        is_moved = terminal.error is not None and terminal.error.code == Replaced.code
        if not is_moved or len(self._riders) < 2:
            self._on_end()
            return
        self._moved_log = log
        self.opening = self._start()
        self.opening.add_done_callback(self._change)

    def _change(self, opening: asyncio.Task[Stream]) -> None:
        """Moves the riders that are left to the new generation."""
        for rider in tuple(self._riders):
            if not rider.is_aboard:
                continue
            try:
                rider.change(_opened(opening))
            except ServingError as error:
                rider.end("error", error)
            except Exception as error:
                logger.error("a shared generation could not be begun again", exc_info=error)
                rider.end("error", InternalError("the generation failed; try again"))


class _Rider:
    """One request's own view of a shared generation."""

    def __init__(
        self, flight: _Flight, request: InferenceRequest, clock: Callable[[], float]
    ) -> None:
        self._flight = flight
        self._request = request
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._log = TokenLog()
        self._cursor: Cursor | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        # What a new generation has to repeat before it brings anything new.
        self._known_text = ""
        self._known_tokens = 0
        self._prompt_tokens = 0
        self._is_leader = flight.add(self)

    @property
    def is_aboard(self) -> bool:
        return self._cursor is not None

    def board(self, shared: Stream, token_of: TokenOf) -> Stream:
        """The stream of this rider, from the first token on."""
        cache, token = shared.cache, shared.token
        if not self._is_leader:
            token = token_of(shared, self._request) if token else ""
            if cache.outcome == "miss":
                cache = CacheOutcome(outcome="coalesced")
        stream = dataclasses.replace(shared, request=self._request, cache=cache, token=token)
        if shared.log.terminal is not None and not self._flight.goes_on_after(shared.log):
            # Nothing can grow or end any more, so it needs no view: an answer of the cache.
            return stream
        self._read(shared)
        return dataclasses.replace(
            stream,
            log=self._log,
            cancel=self._cancel,
            park=lambda: self._flight.park(self),
            unpark=lambda: self._flight.unpark(self),
        )

    def change(self, shared: Stream) -> None:
        """Goes on with another generation of the same answer."""
        self._unsubscribe()
        self._known_text = self._log.text
        self._known_tokens = self._log.next_seq
        self._read(shared)

    def end(self, reason: FinishReason, error: ServingError | None = None) -> None:
        """Ends this view from our side, with the figures known here."""
        self._unsubscribe()
        self._log.finish(
            Terminal(
                finish_reason=reason,
                usage=Usage(
                    prompt_tokens=self._prompt_tokens, completion_tokens=self._log.next_seq
                ),
                timing=self._timing(),
                error=None if error is None else error.info,
            )
        )

    def _read(self, shared: Stream) -> None:
        self._prompt_tokens = shared.prompt_tokens
        self._cursor = shared.log.cursor()
        self._unsubscribe = shared.log.subscribe(self._follow)
        self._follow()

    def _follow(self) -> None:
        """Passes on what is new in the shared log."""
        assert self._cursor is not None
        if self._log.terminal is not None:
            return
        shared = self._cursor.log
        terminal = None if self._flight.goes_on_after(shared) else shared.terminal
        try:
            deltas = self._unknown(self._cursor.take())
            if terminal is not None and self._known_text:
                raise _other_answer()
        except ServingError as error:
            self.end("error", error)
            self._flight.leave(self)
            return
        if deltas:
            if self._first_s is None:
                self._first_s = self._clock()
            self._log.append(*deltas)
        if terminal is not None:
            self._log.finish(terminal if self._is_leader else self._as_own(terminal))

    def _unknown(self, deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
        """The part of `deltas` that was not passed on yet.

        Raises:
            InternalError: they do not repeat what was passed on.
        """
        if not self._known_tokens:
            return list(deltas)
        unknown = []
        for delta in deltas:
            head = delta.text[: len(self._known_text)]
            if not self._known_text.startswith(head):
                raise _other_answer()
            self._known_text = self._known_text[len(head) :]
            num_new = delta.seq + 1 - self._known_tokens
            if num_new > 0:
                cut = max(0, len(delta.token_ids) - num_new)
                unknown.append(
                    TokenDelta(
                        delta.seq,
                        delta.text[len(head) :],
                        delta.token_ids[cut:],
                        None if delta.logprobs is None else delta.logprobs[cut:],
                    )
                )
        return unknown

    def _as_own(self, terminal: Terminal) -> Terminal:
        """The generation's end and its usage, in the time that this request has seen."""
        return msgspec.structs.replace(terminal, timing=self._timing())

    def _timing(self) -> Timing:
        now_s = self._clock()
        first_s = now_s if self._first_s is None else self._first_s
        return Timing(
            ttft_ms=(first_s - self._started_s) * 1000, total_ms=(now_s - self._started_s) * 1000
        )

    def _cancel(self) -> None:
        if self._log.terminal is not None:
            return
        try:
            # For the last rider this ends the generation, which tells the end better than we can.
            self._flight.leave(self)
        finally:
            self.end("cancelled")


def _look_at(opening: asyncio.Task[Stream]) -> None:
    """Takes note of a failure that nobody may have waited for."""
    if not opening.cancelled():
        opening.exception()


def _opened(opening: asyncio.Task[Stream]) -> Stream:
    """The stream that was opened.

    Raises:
        ServingError: it was refused; an error of each caller's own, since callers add to it.
    """
    if opening.cancelled():
        raise Overloaded("the request was dropped before it started", retry_after_s=1)
    error = opening.exception()
    if isinstance(error, ServingError):
        raise ServingError.from_info(error.info) from error
    if error is not None:
        raise error
    return opening.result()


def _other_answer() -> InternalError:
    return InternalError("the answer could not go on as it began; try again")
