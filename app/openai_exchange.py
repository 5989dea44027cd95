"""One HTTP exchange: opens its streams, sends them as JSON or as events, and cancels what is left.

An `Exchange` is the response object that a route returns. It owns the streams
from the first call to the graph on: however it ends, by the last token, an
error, a client that left or a cancelled task, each of them is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.openai_errors import error_reply, report_incident
from app.openai_replies import Writer, cache_header, total_usage
from app.openai_requests import Plan
from app.outcomes import RequestRecord
from app.serving import Stream, StreamOpener
from protocol.errors import InternalError, Overloaded, ServingError
from protocol.token_log import Cursor, TokenLog

logger = logging.getLogger(__name__)

BURST = 128
"""Deltas of one choice that are encoded in one go."""
HEARTBEAT = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


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
        opener: StreamOpener,
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
        self._opener = opener
        self._plan = plan
        self._writer = writer
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._unread_timeout_s = unread_timeout_s
        self._clock = clock
        self._slots: list[Stream | None] = [None] * len(plan.requests)
        self._is_over = False

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
            self.cut()
            answer.cancel()
            departure.cancel()
            self._log_end(end, self._clock() - started_s)
            await asyncio.gather(answer, departure, return_exceptions=True)

    def cut(self) -> None:
        """Stops the computation: a client that still listens is told to try again."""
        for stream in self._slots:
            if stream is not None:
                _cancel(stream)

    async def _answer(self, send: Send) -> str:
        await _all_of(self._open(index) for index in range(len(self._slots)))
        streams = [stream for stream in self._slots if stream is not None]
        if len(streams) < len(self._slots):
            raise Overloaded("the request was dropped before it started", retry_after_s=1)
        self._record.opened(streams)
        if self._plan.is_stream:
            return await self._send_events(streams, send)
        await self._send_whole(streams, send)
        return "done"

    async def _open(self, index: int) -> None:
        stream = await self._opener.open_stream(self._plan.requests[index])
        self._slots[index] = stream
        if self._is_over:
            _cancel(stream)

    async def _send_whole(self, streams: Sequence[Stream], send: Send) -> None:
        await _all_of(_ended(stream.log) for stream in streams)
        logs = [stream.log for stream in streams]
        body = self._writer.whole(logs, total_usage(logs, n=self._plan.n))
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send(self._start(streams, headers))
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, streams: Sequence[Stream], send: Send) -> str:
        changed = asyncio.Event()
        unsubscribes = [stream.log.subscribe(changed.set) for stream in streams]
        try:
            await self._first_record(streams, changed)
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-store",
                "x-accel-buffering": "no",
            }
            await send(self._start(streams, headers))
            end = await self._pump(streams, changed, send)
            await send({"type": "http.response.body", "body": b""})
            return end
        finally:
            for unsubscribe in unsubscribes:
                unsubscribe()

    async def _first_record(self, streams: Sequence[Stream], changed: asyncio.Event) -> None:
        """Waits for the first delta or end of any stream, at most for one heartbeat.

        Raises:
            ServingError: a stream failed before its first token; the status can still say so.
        """
        if not any(stream.log.terminal or stream.log.next_seq for stream in streams):
            await _wait(changed, self._heartbeat_s)
        for stream in streams:
            if stream.log.next_seq == 0:
                _raise_failure(stream.log)

    async def _pump(self, streams: Sequence[Stream], changed: asyncio.Event, send: Send) -> str:
        """Sends events until every choice has ended, or one has failed; returns how it ended."""
        cursors = {index: stream.log.cursor() for index, stream in enumerate(streams)}
        events = [self._writer.opening(index) for index in cursors]
        try:
            while cursors:
                changed.clear()
                has_moved = self._collect(cursors, events)
                if any(events):
                    lines, events = _event_lines(events), []
                    await _send_part(send, lines)
                if has_moved:
                    # A long replay shares the loop: others run between its bursts.
                    await asyncio.sleep(0)
                elif not await _wait(changed, self._heartbeat_s):
                    await _send_part(send, HEARTBEAT)
            usage = total_usage([stream.log for stream in streams], n=self._plan.n)
            await _send_part(send, _event_lines([self._writer.usage(usage)]) + DONE)
            return "done"
        except _ClientLeft:
            raise
        except Exception as exc:
            # The status is out, so the body has to tell; text that came before it stays.
            error = exc if isinstance(exc, ServingError) else report_incident(exc)
            self._record.failed(error)
            events.append(msgspec.json.encode(error_reply(error)))
            await _send_part(send, _event_lines(events))
            return error.code

    def _collect(self, cursors: dict[int, Cursor], events: list[bytes | None]) -> bool:
        """Moves what is new into `events`, and finished choices out of `cursors`.

        Returns: whether there was anything new.

        Raises:
            ServingError: a choice failed; `events` holds what came before.
        """
        has_moved = False
        for index, cursor in tuple(cursors.items()):
            deltas = cursor.take(BURST)
            events += [self._writer.piece(index, delta) for delta in deltas]
            has_moved |= bool(deltas)
            if cursor.is_at_end:
                del cursors[index]
                _raise_failure(cursor.log)
                events.append(self._writer.closing(index, cursor.log))
                has_moved = True
        return has_moved

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


async def _ended(log: TokenLog) -> None:
    """Waits for the end of a log.

    Raises:
        ServingError: it did not end well.
    """
    cursor = log.cursor()
    while await cursor.wait():
        pass
    _raise_failure(log)


def _raise_failure(log: TokenLog) -> None:
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


def _cancel(stream: Stream) -> None:
    try:
        stream.cancel()
    except Exception:
        # One that cannot be cancelled must not keep the others running.
        logger.exception("request %s could not be cancelled", stream.request.request_id)


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


def _event_lines(events: Iterable[bytes | None]) -> bytes:
    return b"".join(b"data: %b\n\n" % event for event in events if event is not None)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
