"""Carries a client's streams over whatever connection there is, from one to the next.

A stream whose connection was lost waits until there is another, and goes on there
by a RESUME; a request that was not answered yet is sent again. A server that
drains keeps what it has, and what is new goes over a new connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

from app.client_connection import ClientConnection
from app.client_stream import ClientStream, ConnectionLost
from protocol.errors import ServingError
from protocol.frames import Cancel, ErrorFrame, Hello
from protocol.session import CLOSE_CODES

logger = logging.getLogger(__name__)

FINAL_CODES = frozenset({1002, 1003, 1007, 1008, 1010}) | {
    code for code, row in CLOSE_CODES.items() if not row.should_reconnect
}
"""Close codes after which the same would only happen again."""

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0

Connect = Callable[[float], Awaitable[ClientConnection]]
"""Opens a connection within so many seconds."""


def backoff(random: Callable[[], float]) -> Iterator[float]:
    """Seconds to wait before each try: doubling from 50 ms up to 2 s, the later half of it by chance."""
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s * (0.5 + 0.5 * random())
        delay_s = min(2 * delay_s, MAX_DELAY_S)


class StreamCarrier:
    """The connections of one client, and the streams on them.

    Args:
        is_resuming: False ends a stream with its connection, and the client with its only one.
        reconnect_timeout_s: how long a stream waits for a connection, or goes from one to the
            next without getting on.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        is_resuming: bool,
        open_timeout_s: float,
        reconnect_timeout_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        random: Callable[[], float],
    ) -> None:
        self.hello: Hello | None = None
        self._connect = connect
        self._is_resuming = is_resuming
        self._open_timeout_s = open_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._delays = backoff(random)
        self._current: ClientConnection | None = None
        self._connections: set[ClientConnection] = set()
        self._waiting: dict[str, ClientStream] = {}
        self._left: list[ClientStream] = []
        self._recovery: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._end = ConnectionLost("not connected: enter the client with `async with`")
        self._is_open = False

    async def open(self) -> None:
        """Makes the first connection; one try.

        Raises:
            ServingError: the server refused.
            ConnectionLost: no server answered.
        """
        self._use(await self._connect(self._open_timeout_s))
        self._is_open = True

    async def launch(self, stream: ClientStream) -> None:
        """Sends the stream's request, now or as soon as there is a connection.

        Raises:
            InvalidRequest: it cannot be written.
            ConnectionLost: there is no connection, and there will be none.
        """
        if not self._is_open:
            raise ConnectionLost(str(self._end), self._end.code)
        if self._current is None:
            self._wait(stream)
            self._recover(pause=False)
            return
        try:
            await self._place(stream, self._current)
        except ConnectionLost:
            # The connection's end is about to be told, and takes care of what is on it.
            if not self._is_resuming:
                raise

    async def cancel(self, stream: ClientStream) -> None:
        """Asks the server to stop; where there is no connection, as soon as there is one."""
        stream.is_cancelled = True
        if stream.connection is not None:
            try:
                await stream.connection.send(Cancel(id=stream.id))
            except ConnectionLost:
                if not self._is_resuming:
                    raise

    def release(self, stream: ClientStream) -> None:
        """A stream has ended, for whatever reason: nothing more is expected for it."""
        connection = stream.connection
        if connection is None:
            self._waiting.pop(stream.id, None)
            return
        connection.streams.pop(stream.id, None)
        if connection.is_draining and not connection.streams:
            self._retire(connection)

    async def leave(self, stream: ClientStream) -> None:
        """A stream was left before its end: stops it on the server."""
        if stream.connection is not None and stream.connection.lost is None:
            try:
                await stream.connection.send(Cancel(id=stream.id))
                return
            except ConnectionLost:
                logger.debug("stream %s was left on a lost connection", stream.id)
        if self._is_open and self._is_resuming and stream.token is not None:
            self._left.append(stream)
            self._recover(pause=True)

    async def close(self) -> None:
        """Ends every stream and every connection."""
        self._is_open = False
        self._end = ConnectionLost("the client was closed")
        if self._recovery is not None:
            self._recovery.cancel()
        connections = [*self._connections]
        for streams in (self._waiting, *(connection.streams for connection in connections)):
            for stream in [*streams.values()]:
                stream.end(ConnectionLost(str(self._end)))
        tasks = [connection.close() for connection in connections]
        recovery = [] if self._recovery is None else [self._recovery]
        await asyncio.gather(*tasks, *recovery, *self._retiring, return_exceptions=True)

    def on_drain(self, connection: ClientConnection) -> None:
        if not self._is_resuming:
            return
        connection.is_draining = True
        if self._current is connection:
            self._current = None
        if not connection.streams:
            self._retire(connection)

    def on_refusal(
        self, connection: ClientConnection, stream: ClientStream, refusal: ErrorFrame
    ) -> bool:
        is_accepted = stream.token is not None
        is_misplaced = connection.is_draining and refusal.code == "overloaded"
        if not (self._is_resuming and (is_misplaced or (is_accepted and refusal.retryable))):
            return False
        del connection.streams[stream.id]
        self._wait(stream)
        stream.problem = ServingError.from_info(refusal.info)
        if connection.is_draining and not connection.streams:
            self._retire(connection)
        self._recover(pause=not is_misplaced)
        return True

    def on_end(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if self._current is connection:
            self._current = None
        lost = connection.lost
        assert lost is not None
        if not self._is_resuming and self._is_open:
            self._is_open, self._end = False, lost
        streams = [*connection.streams.values()]
        connection.streams.clear()
        hello = connection.hello
        is_final = not self._is_resuming or not _should_reconnect(lost)
        for stream in streams:
            is_lost = stream.token is not None and (hello is None or not hello.resume_window_s)
            if is_final or is_lost:
                stream.end(ConnectionLost(str(lost), lost.code))
            else:
                self._wait(stream)
                stream.problem = lost
        if self._waiting:
            self._recover(pause=True)

    def _use(self, connection: ClientConnection) -> None:
        self._connections.add(connection)
        self._current = connection
        self.hello = connection.hello

    async def _place(self, stream: ClientStream, connection: ClientConnection) -> None:
        """Sends what starts a stream, or goes on with it."""
        self._waiting.pop(stream.id, None)
        stream.connection = connection
        connection.streams[stream.id] = stream
        await connection.send(stream.opening())
        if stream.is_cancelled:
            await connection.send(Cancel(id=stream.id))

    def _wait(self, stream: ClientStream) -> None:
        stream.connection = None
        self._waiting[stream.id] = stream
        if stream.waiting_since_s is None:
            stream.waiting_since_s = self._clock()
            self._delays = backoff(self._random)

    def _recover(self, *, pause: bool) -> None:
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._run_recovery(pause=pause))

    async def _run_recovery(self, *, pause: bool) -> None:
        """Tries until no stream waits any more, be it that its time is up."""
        try:
            delay_s = next(self._delays) if pause else 0.0
            while self._waiting or self._left:
                if delay_s:
                    await self._sleep(delay_s)
                self._give_up_the_late()
                if not self._waiting and not self._left:
                    return
                delay_s = next(self._delays)
                try:
                    await self._place_all()
                except ConnectionLost as error:
                    if not _should_reconnect(error):
                        self._give_up(error)
                    self._note(error)
                except ServingError as error:
                    if not error.retryable:
                        self._give_up(error)
                    delay_s = max(delay_s, error.retry_after_s or 0.0)
                    self._note(error)
                delay_s = min(delay_s, max(self._time_left_s(), 0.0))
        except Exception as error:
            logger.exception("the client failed to connect again")
            self._give_up(error)

    async def _place_all(self) -> None:
        """Puts every stream that waits on a connection.

        Raises:
            ServingError, ConnectionLost: there is none.
        """
        if self._current is None:
            timeout_s = min(self._open_timeout_s, self._time_left_s())
            self._use(await self._connect(timeout_s))
        while self._current is not None and self._left:
            # Its frames go nowhere: it is on no connection.
            left = self._left.pop()
            await self._current.send(left.opening())
            await self._current.send(Cancel(id=left.id))
        for stream in [*self._waiting.values()]:
            if self._current is None or stream.id not in self._waiting:
                continue
            try:
                await self._place(stream, self._current)
            except ConnectionLost:
                raise
            except ServingError as error:
                stream.end(error)

    def _time_left_s(self) -> float:
        """Until the first of the waiting streams gives up."""
        since_s = [stream.waiting_since_s for stream in self._waiting.values()]
        first_s = min((at for at in since_s if at is not None), default=self._clock())
        return first_s + self._reconnect_timeout_s - self._clock()

    def _note(self, problem: Exception) -> None:
        logger.debug("not connected: %s", problem)
        for stream in self._waiting.values():
            stream.problem = problem
        if not self._waiting:
            # To stop what nobody reads, one try is enough.
            self._left.clear()

    def _give_up_the_late(self) -> None:
        now_s = self._clock()
        for stream in [*self._waiting.values()]:
            since_s = stream.waiting_since_s
            if since_s is not None and now_s - since_s >= self._reconnect_timeout_s:
                stream.end(_as_own(stream.problem, f" within {self._reconnect_timeout_s:g} s"))

    def _give_up(self, error: Exception) -> None:
        self._left.clear()
        for stream in [*self._waiting.values()]:
            stream.end(_as_own(error))

    def _retire(self, connection: ClientConnection) -> None:
        """Closes a connection on which nothing is left to come."""
        task = asyncio.create_task(connection.close())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


def _should_reconnect(lost: ConnectionLost) -> bool:
    return lost.code not in FINAL_CODES


def _as_own(problem: Exception | None, limit: str = "") -> Exception:
    """The reason why a stream could not go on, as an exception of its own."""
    if isinstance(problem, ServingError):
        return ServingError.from_info(problem.info)
    code = problem.code if isinstance(problem, ConnectionLost) else None
    return ConnectionLost(f"could not connect again{limit}: {problem}", code)
