"""What became of the requests of one ingress: each is counted once, at its end.

| outcome | the client |
|---|---|
| `stop`, `length`, `tool_calls` | got a whole answer |
| `cancelled` | asked for its end |
| `disconnected` | was gone, or was sent away, before the end |
| `refused` | asked for what we do not do, or for more than we can do now; nothing was computed |
| `failed` | got an error that is ours |

A request is what a client counts: one frame or one HTTP request, however many
choices it has. Tokens are those of the usage that clients were told.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from starlette.requests import ClientDisconnect

from app.rate_limits import Limits, RateLimits
from app.serving import Stream
from app.usage_ledger import Used
from protocol.errors import ERROR_BY_CODE, ErrorInfo, InternalError, Overloaded, ServingError
from protocol.token_log import CacheResult, Terminal, TokenLog

Outcome = Literal["stop", "length", "tool_calls", "cancelled", "disconnected", "refused", "failed"]
WORST_FIRST: tuple[Outcome, ...] = ("cancelled", "length", "tool_calls", "stop")
"""Several choices count as the first of these that one of them has."""

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of seconds by upper bound, the last one infinite."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def stats(self) -> dict[str, Any]:
        return {"bounds": list(BUCKETS_S), "counts": list(self._counts), "sum": self._sum_s}


class RequestOutcomes:
    """The counts of one ingress replica.

    Args:
        limits: what tenants may ask for; by default, anything.
        on_use: is told once of each stream, at its end, whose it was and what it used.
    """

    def __init__(
        self,
        *,
        limits: RateLimits | None = None,
        on_use: Callable[[str, Used], None] = lambda tenant, used: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or RateLimits(lambda tenant: Limits())
        self._on_use = on_use
        self._clock = clock
        self._num_live = 0
        self._ended: Counter[tuple[Outcome, CacheResult]] = Counter()
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._handshakes_refused: Counter[str] = Counter()
        self._tokens: Counter[tuple[str, CacheResult]] = Counter()
        self._ttft: dict[CacheResult, Histogram] = {}
        self._duration: dict[CacheResult, Histogram] = {}

    def begin(self) -> RequestRecord:
        """A request has come; whoever serves it ends the record, in a `finally`.

        One that resumes a stream is a request of its own; the first one was `disconnected`.
        """
        self._num_live += 1
        return RequestRecord(self, self._clock)

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """A place among the requests of the tenant, for one that makes no stream.

        Raises:
            RateLimited: there is none.
        """
        self._limits.admit(tenant)
        try:
            yield
        finally:
            self._limits.release(tenant)

    def note_use(self, tenant: str, used: Used) -> None:
        """What the tenant used without a stream."""
        self._on_use(tenant, used)

    def refuse(self, code: str) -> None:
        """A request was refused before anyone could serve it, such as by the WebSocket session."""
        self._ended["refused", "miss"] += 1
        self._refused[code] += 1

    def refuse_handshake(self, code: str) -> None:
        """A connection was refused: that is no request."""
        self._handshakes_refused[code] += 1

    def stats(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "live": self._num_live,
            "ended": _nested(self._ended),
            "refused": dict(self._refused),
            "failed": dict(self._failed),
            "handshakes_refused": dict(self._handshakes_refused),
            "tokens": _nested(self._tokens),
            "ttft_s": {source: seen.stats() for source, seen in self._ttft.items()},
            "duration_s": {source: seen.stats() for source, seen in self._duration.items()},
        }


class RequestRecord:
    """One request on its way; see `RequestOutcomes.begin`."""

    def __init__(self, outcomes: RequestOutcomes, clock: Callable[[], float]) -> None:
        self._outcomes = outcomes
        self._clock = clock
        self._started_s = clock()
        self._ttft_s: float | None = None
        self._streams: Sequence[Stream] = ()
        self._unsubscribes: list[Callable[[], None]] = []
        self._error: ErrorInfo | None = None
        self._admitted: str | None = None
        self._is_over = False

    def admit(self, tenant: str) -> None:
        """Takes a place among the requests of the tenant, until the end.

        Raises:
            RateLimited: there is none.
        """
        self._outcomes._limits.admit(tenant)
        self._admitted = tenant

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Ends the request when this does not come to its end: then nobody takes it over."""
        try:
            yield
        except ServingError as error:
            self.failed(error)
            self.ended(has_left=isinstance(error.__cause__, ClientDisconnect))
            raise
        except Exception:
            self.failed(InternalError("the request could not be prepared"))
            self.ended()
            raise
        except BaseException:
            self.ended(has_left=True)
            raise

    def opened(self, streams: Sequence[Stream]) -> None:
        """All of the request was accepted; its first delta is timed from here on."""
        self._streams = streams
        self._unsubscribes = [stream.log.subscribe(self._notice) for stream in streams]
        self._notice()

    def failed(self, error: ServingError) -> None:
        """The client was told this error in place of an answer, or of its rest."""
        self._error = self._error or error.info

    def ended(self, *, has_left: bool = False, n: int = 1) -> None:
        """Counts the request; later calls change nothing.

        Args:
            has_left: the client did not wait for the end.
            n: answers to each prompt, which is told once for all of them.
        """
        if self._is_over:
            return
        self._is_over = True
        self._unsubscribe()
        outcomes, source = self._outcomes, self._source()
        outcome = self._outcome(has_left)
        if self._admitted is not None:
            outcomes._limits.release(self._admitted)
        self._tell_use(n)
        outcomes._num_live -= 1
        outcomes._ended[outcome, source] += 1
        if self._ttft_s is not None:
            outcomes._ttft.setdefault(source, Histogram()).observe(self._ttft_s)
        if outcome in WORST_FIRST:
            self._count_usage(source, n)
        if outcome in ("stop", "length", "tool_calls"):
            seconds = self._clock() - self._started_s
            outcomes._duration.setdefault(source, Histogram()).observe(seconds)

    def _outcome(self, has_left: bool) -> Outcome:
        if has_left:
            return "disconnected"
        error = self._error or next(iter(self._errors()), None)
        if error is not None:
            # An overload is nobody's failure while nothing was begun.
            is_refusal = not self._streams and _is_refusal(error)
            counts = self._outcomes._refused if is_refusal else self._outcomes._failed
            counts[error.code] += 1
            return "refused" if is_refusal else "failed"
        reasons = {
            "cancelled" if stream.log.terminal is None else stream.log.terminal.finish_reason
            for stream in self._streams
        }
        return next((reason for reason in WORST_FIRST if reason in reasons), "cancelled")

    def _errors(self) -> Iterable[ErrorInfo]:
        for stream in self._streams:
            terminal = stream.log.terminal
            if terminal is not None and terminal.error is not None:
                yield terminal.error
            elif terminal is not None and terminal.finish_reason == "error":
                yield InternalError("the generation failed").info

    def _source(self) -> CacheResult:
        """As the cache header tells it: a miss if any choice was computed, else the first."""
        sources = [stream.cache.outcome for stream in self._streams]
        return "miss" if "miss" in sources or not sources else sources[0]

    def _count_usage(self, source: CacheResult, n: int) -> None:
        tokens = self._outcomes._tokens
        for index, stream in enumerate(self._streams):
            if stream.log.terminal is None:
                continue
            usage = stream.log.terminal.usage
            tokens["completion", source] += usage.completion_tokens
            if index % n == 0:
                tokens["prompt", source] += usage.prompt_tokens
                tokens["cached", source] += usage.cached_tokens

    def _tell_use(self, n: int) -> None:
        """Tells what each stream used, now or when it ends: it may run on, for a RESUME."""
        num_requests = 1
        for index, stream in enumerate(self._streams):
            if not stream.is_counted:
                stream.is_counted = True
                tell = self._outcomes._on_use
                _at_end(stream.log, _use_teller(stream, tell, num_requests, index % n == 0))
                num_requests = 0

    def _notice(self) -> None:
        if any(stream.log.next_seq for stream in self._streams):
            self._ttft_s = self._clock() - self._started_s
            self._unsubscribe()

    def _unsubscribe(self) -> None:
        for unsubscribe in self._unsubscribes:
            unsubscribe()
        self._unsubscribes = []


def _use_teller(
    stream: Stream, tell: Callable[[str, Used], None], num_requests: int, has_prompt: bool
) -> Callable[[Terminal], None]:
    """What tells the use of a stream that has ended; a failed one is given away."""

    def tell_use(terminal: Terminal) -> None:
        if terminal.finish_reason == "error":
            return
        usage = terminal.usage
        prompt_tokens = usage.prompt_tokens if has_prompt else 0
        is_saved = stream.cache.outcome != "miss"
        used = Used(
            requests=num_requests,
            prompt_tokens=prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens if has_prompt else 0,
            saved_tokens=prompt_tokens + usage.completion_tokens if is_saved else 0,
        )
        tell(stream.request.tenant, used)

    return tell_use


def _at_end(log: TokenLog, tell: Callable[[Terminal], None]) -> None:
    """Calls `tell` when the log has ended, at once if it has."""
    if log.terminal is not None:
        tell(log.terminal)
        return

    def look() -> None:
        if log.terminal is not None:
            unsubscribe()
            tell(log.terminal)

    unsubscribe = log.subscribe(look)


def _is_refusal(error: ErrorInfo) -> bool:
    kind = ERROR_BY_CODE.get(error.code, InternalError)
    return kind.http_status < 500 or kind is Overloaded


def _nested(counts: Counter[tuple[Any, Any]]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (outer, inner), count in counts.items():
        nested.setdefault(outer, {})[inner] = count
    return nested
