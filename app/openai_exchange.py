"""One HTTP exchange: opens its streams, sends them as JSON or as events, and cancels what is left.

An `Exchange` is the response object that a route returns. It owns the streams
from the first call to the graph on: however it ends, by the last token, an
error, a client that left or a cancelled task, its source gets each of them back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.openai_errors import report_incident
from app.openai_replies import Event, Writer, cache_header, total_usage
from app.openai_requests import Plan
from app.openai_source import OPENING_SEQ, Source
from app.outcomes import RequestRecord
from app.serving import Stream
from protocol.errors import InternalError, Overloaded, Replaced, ServingError
from protocol.token_log import Cursor, TokenLog

logger = logging.getLogger(__name__)

BURST = 128
"""Deltas of one choice that are encoded in one go."""
HEARTBEAT = b": ping\n\n"


class _ClientLeft(Exception):
    """The connection broke while we wrote."""


class Exchange(Response):
    """Answers one request of the API.

    Args:
        name: the `x-request-id`.
        heartbeat_s: longest silence on an event stream. It is also how long the status
            waits for a first token, so that an early failure still gets its own.
        unread_timeout_s: a client that takes nothing for so long is given up.
        live: holds the exchange for as long as it runs.
        record: counts it.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        writer: Writer,
        *,
        name: str,
        heartbeat_s: float,
        unread_timeout_s: float,
        live: set[Exchange],
        record: RequestRecord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._live = live
        self._record = record
        self._source = source
        source.on_replaced = self._replaced
        self._plan = plan
        self._writer = writer
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._unread_timeout_s = unread_timeout_s
        self._clock = clock
        self._slots: list[Stream | None] = [None] * len(plan.requests)
        self._is_over = False
        self._changed = asyncio.Event()
        self._early: ServingError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the exchange.

        Raises:
            ServingError: it failed before anything was sent.
        """
        started_s = self._clock()
        end = "cancelled"
        self._live.add(self)
        answer = asyncio.create_task(self._answer(_guarded(send, self._unread_timeout_s)))
        departure = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                end = answer.result()
        except _ClientLeft:
            pass
        except ServingError as error:
            end = error.code
            self._record.failed(error)
            raise
        except Exception as exc:
            end = "internal"
            incident = report_incident(exc)
            self._record.failed(incident)
            raise incident from exc
        finally:
            # First what cannot be interrupted: this task may be cancelled at its next await.
            self._live.discard(self)
            self._is_over = True
            self._record.ended(has_left=end == "cancelled", n=self._plan.n)
            for stream in self._slots:
                if stream is not None:
                    self._source.leave(stream, has_all=end == "done")
            answer.cancel()
            departure.cancel()
            self._log_end(end, self._clock() - started_s)
            await asyncio.gather(answer, departure, return_exceptions=True)

    def cut(self) -> None:
        """Ends it: a client that still listens is told to try again."""
        self._end_early(Overloaded("the server ends this request: try again", retry_after_s=1))

    def _replaced(self) -> None:
        self._end_early(Replaced("another request has taken this stream over"))

    def _end_early(self, error: ServingError) -> None:
        self._early = error
        self._changed.set()

    async def _answer(self, send: Send) -> str:
        await _all_of(self._open(index) for index in range(len(self._slots)))
        streams = [stream for stream in self._slots if stream is not None]
        if len(streams) < len(self._slots):
            raise Overloaded("the request was dropped before it started", retry_after_s=1)
        self._record.opened(streams)
        if self._source.resumed_as is not None:
            self._writer.rename(self._source.resumed_as)
        self._writer.begin(streams)
        if self._plan.is_stream:
            return await self._send_events(streams, send)
        await self._send_whole(streams, send)
        return "done"

    async def _open(self, index: int) -> None:
        stream = await self._source.open(self._plan.requests[index])
        self._slots[index] = stream
        if self._is_over:
            self._source.leave(stream, has_all=False)

    async def _send_whole(self, streams: Sequence[Stream], send: Send) -> None:
        unsubscribes = [stream.log.subscribe(self._changed.set) for stream in streams]
        try:
            while not all(stream.log.terminal for stream in streams):
                self._changed.clear()
                for stream in streams:
                    raise_failure(stream.log)
                self._raise_early()
                await self._changed.wait()
        finally:
            for unsubscribe in unsubscribes:
                unsubscribe()
        for stream in streams:
            raise_failure(stream.log)
        logs = [stream.log for stream in streams]
        body = self._writer.whole(logs, total_usage(logs, n=self._plan.n))
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send(self._start(streams, headers))
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, streams: Sequence[Stream], send: Send) -> str:
        unsubscribes = [stream.log.subscribe(self._changed.set) for stream in streams]
        try:
            await self._first_record(streams)
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-store",
                "x-accel-buffering": "no",
            }
            await send(self._start(streams, headers))
            end = await self._pump(streams, send)
            await send({"type": "http.response.body", "body": b""})
            return end
        finally:
            for unsubscribe in unsubscribes:
                unsubscribe()

    async def _first_record(self, streams: Sequence[Stream]) -> None:
        """Waits for the first delta or end of any stream, at most for one heartbeat.

        Raises:
            ServingError: a stream failed before its first token; the status can still say so.
        """
        if not any(stream.log.terminal or stream.log.next_seq for stream in streams):
            await _wait(self._changed, self._heartbeat_s)
        self._raise_early()
        for stream in streams:
            if stream.log.next_seq == 0:
                raise_failure(stream.log)

    async def _pump(self, streams: Sequence[Stream], send: Send) -> str:
        """Sends events until every choice has ended, or one has failed; returns how it ended."""
        cursors = {index: stream.log.cursor() for index, stream in enumerate(streams)}
        lines: list[bytes] = []
        for index in cursors:
            self._add(lines, self._writer.opening(index), OPENING_SEQ)
        try:
            while cursors:
                self._changed.clear()
                has_moved = self._collect(cursors, lines)
                if any(lines):
                    part, lines = b"".join(lines), []
                    await _send_part(send, part)
                self._raise_early()
                if has_moved:
                    # A long replay shares the loop: others run between its bursts.
                    await asyncio.sleep(0)
                elif not await _wait(self._changed, self._heartbeat_s):
                    await _send_part(send, HEARTBEAT)
            logs = [stream.log for stream in streams]
            written = self._writer.usage(total_usage(logs, n=self._plan.n))
            self._add(lines, written, logs[0].next_seq + 1)
            await _send_part(send, b"".join(lines) + self._writer.last_line)
            return "done"
        except _ClientLeft:
            raise
        except Exception as exc:
            # The status is out, so the body has to tell; text that came before it stays.
            error = exc if isinstance(exc, ServingError) else report_incident(exc)
            self._record.failed(error)
            self._add(lines, self._writer.failure(error), streams[0].log.next_seq)
            await _send_part(send, b"".join(lines))
            return error.code

    def _collect(self, cursors: dict[int, Cursor], lines: list[bytes]) -> bool:
        """Moves what is new into `lines`, and finished choices out of `cursors`.

        Returns: whether there was anything new.

        Raises:
            ServingError: a choice failed; `lines` holds what came before.
        """
        has_moved = False
        for index, cursor in tuple(cursors.items()):
            deltas = cursor.take(BURST)
            for delta in deltas:
                self._add(lines, self._writer.piece(index, delta), delta.seq)
            has_moved |= bool(deltas)
            if cursor.is_at_end:
                del cursors[index]
                raise_failure(cursor.log)
                self._add(lines, self._writer.closing(index, cursor.log), cursor.log.next_seq)
                has_moved = True
        return has_moved

    def _add(self, lines: list[bytes], events: Sequence[Event], seq: int) -> None:
        lines += [self._source.line(event, seq) for event in events]

    def _raise_early(self) -> None:
        if self._early is not None:
            raise self._early

    def _start(self, streams: Sequence[Stream], headers: dict[str, str]) -> Message:
        headers["x-request-id"] = self._name
        headers["x-seedance-cache"] = cache_header([stream.cache for stream in streams])
        if len(streams) == 1 and streams[0].cache.id is not None:
            headers["x-seedance-cache-id"] = streams[0].cache.id
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}

    def _log_end(self, end: str, seconds: float) -> None:
        streams = [stream for stream in self._slots if stream is not None]
        logger.info(
            "request %s (%s): %s, %d choices, %d tokens, cache %s, %.3f s",
            self._plan.requests[0].request_id,
            self._name,
            end,
            len(self._slots),
            sum(stream.log.next_seq for stream in streams),
            ", ".join(stream.cache.outcome for stream in streams) or "not asked",
            seconds,
        )


async def _departure(receive: Receive) -> None:
    """Returns when the client has left. The body was read before, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them together; the first failure cancels the rest and is raised bare."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def raise_failure(log: TokenLog) -> None:
    """Raises what ended the log, if that was a failure."""
    terminal = log.terminal
    if terminal is None:
        return
    if terminal.error is not None:
        raise ServingError.from_info(terminal.error)
    if terminal.finish_reason == "cancelled":
        # Our own cancel comes when nobody listens any more; this one was the server's.
        raise Overloaded("the server cancelled this request before its end", retry_after_s=1)
    if terminal.finish_reason == "error":
        raise InternalError("the generation failed")


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event came in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _guarded(send: Send, unread_timeout_s: float) -> Send:
    """`send` that tells a broken connection apart from every other failure.

    A client that takes nothing for `unread_timeout_s` counts as gone.
    """

    async def guarded(message: Message) -> None:
        try:
            async with asyncio.timeout(unread_timeout_s):
                await send(message)
        except OSError as exc:  # a time-out is one, too
            raise _ClientLeft from exc

    return guarded


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
