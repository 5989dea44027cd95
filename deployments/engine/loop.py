"""The thread around an engine: an inbox, sleep without work, and a way out of every failure."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from deployments.engine.engine import Emission, Engine, EngineStats, internal_error
from deployments.engine.sequence import Sequence
from protocol.errors import DuplicateId, Overloaded, ServingError
from protocol.token_log import Terminal, TokenDelta

logger = logging.getLogger(__name__)

Deliver = Callable[[list[TokenDelta], Terminal | None], None]
OnStep = Callable[[list[Emission]], None]


class EngineLoop:
    """Runs an engine on a daemon thread of its own. Every method may be called from any thread.

    Args:
        engine: used by this loop's thread only, from `start` on.
        on_step: called on that thread with all emissions of a step at once. Must be short;
            an exception from it is logged and stops nothing.
    """

    def __init__(self, engine: Engine, on_step: OnStep | None = None) -> None:
        self._engine = engine
        self._on_step = on_step
        self._changed = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._deliver: dict[str, Deliver | None] = {}
        self._refused = 0
        self._is_closing = False
        self._is_idle = True
        self._last_beat_s = engine.clock()
        self._warmed_up = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, which warms the engine up first."""
        self._thread.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the warm-up.

        Raises:
            TimeoutError: it takes longer.
            Exception: what the warm-up raised.
        """
        if not self._warmed_up.wait(timeout_s):
            raise TimeoutError(f"engine not ready after {timeout_s} s")
        if self._failure is not None:
            raise self._failure

    def submit(self, seq: Sequence, deliver: Deliver | None = None) -> None:
        """Hands a sequence over; its emissions go to `on_step`, and to `deliver` when given.

        Raises:
            Overloaded: the loop is closing or dead, or see `Admission.take`.
            DuplicateId: a live sequence has this request id.
        """
        with self._changed:
            try:
                self._check_submit(seq)
            except ServingError:
                self._refused += 1
                raise
            self._deliver[seq.request_id] = deliver
            self._inbox.append(seq)
            # Work waits from now on, however long the thread takes to wake up.
            self._end_idleness()
            self._changed.notify()

    def abort(self, seq: Sequence) -> None:
        """Drops a sequence before the next step is planned; harmless at any time."""
        seq.is_abandoned = True
        with self._changed:
            self._changed.notify()

    def stats(self) -> EngineStats:
        """The engine's numbers, with what is still in the inbox counted as waiting."""
        with self._changed:
            stats, refused = self._engine.stats(), self._refused
            requests = [seq for seq in self._inbox if not seq.is_warm_up]
        return replace(
            stats,
            waiting=stats.waiting + len(requests),
            tokens=stats.tokens + sum(seq.num_tokens_left for seq in requests),
            refused_total=refused,
            stalled_s=self.heartbeat_age_s(),
        )

    @property
    def num_live(self) -> int:
        """Sequences accepted and not ended."""
        return len(self._deliver)

    def heartbeat_age_s(self) -> float:
        """Seconds since the loop last proved to move; 0 while it sleeps without work."""
        return 0.0 if self._is_idle else max(0.0, self._engine.clock() - self._last_beat_s)

    @property
    def is_healthy(self) -> bool:
        """Whether a request would be served: warmed up, alive, and not stuck in a step."""
        return (
            self._warmed_up.is_set()
            and self._failure is None
            and not self._is_closing
            and self._thread.is_alive()
            and self.heartbeat_age_s() < self._engine.config.stall_after_s
        )

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what is live, ends the thread and frees the runner. May be called twice."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.ident is None:
            self._engine.close()
        else:
            self._thread.join(timeout_s)

    def _check_submit(self, seq: Sequence) -> None:
        if self._is_closing or self._failure is not None:
            raise Overloaded("the engine is shutting down", retry_after_s=1.0)
        if seq.request_id in self._deliver:
            raise DuplicateId(f"request {seq.request_id} is already running")
        if not seq.is_warm_up:
            self._engine.admission.take(seq)

    def _run(self) -> None:
        try:
            self._engine.warm_up()
        except BaseException as exc:
            logger.exception("engine cannot start")
            self._failure = exc
        finally:
            self._warmed_up.set()
        try:
            while self._failure is None and self._take_inbox():
                self._publish(self._step())
        except BaseException as exc:
            logger.exception("engine loop died")
            self._failure = exc
        finally:
            self._wind_up()

    def _take_inbox(self) -> bool:
        """Moves new sequences into the engine, sleeping while there is nothing to do.

        Returns:
            False when the loop is to end.
        """
        with self._changed:
            while not (self._inbox or self._engine.has_work or self._is_closing):
                self._is_idle = True
                self._changed.wait()
            self._end_idleness()
            self._last_beat_s = self._engine.clock()
            arrived = list(self._inbox)
            if self._is_closing:
                return False
            refused = []
            for seq in arrived:
                try:
                    self._engine.add(seq)
                except Exception as exc:
                    refused.append((seq, _as_serving_error(seq, exc)))
            self._inbox.clear()
        for seq, error in refused:
            self._refuse(seq, error)
        return True

    def _step(self) -> list[Emission]:
        try:
            return self._engine.step()
        except Exception as exc:
            # Nobody knows which row it was: all end, and the loop goes on empty.
            return self._engine.fail_all(internal_error("engine step failed", exc))

    def _refuse(self, seq: Sequence, error: ServingError) -> None:
        """Ends a sequence that the engine did not take though the loop had accepted it."""
        self._engine.admission.release(seq)
        timing = seq.timing(self._engine.clock())
        terminal = Terminal(
            finish_reason="error", usage=seq.usage(), timing=timing, error=error.info
        )
        self._publish([Emission(seq, [], terminal)])

    def _end_idleness(self) -> None:
        # The beat goes first, or a reader could see an old one of a loop no longer idle.
        if self._is_idle:
            self._last_beat_s = self._engine.clock()
        self._is_idle = False

    def _publish(self, emissions: list[Emission]) -> None:
        if not emissions:
            return
        deliveries = []
        with self._changed:
            for emission in emissions:
                request_id = emission.seq.request_id
                deliver = self._deliver.get(request_id)
                if emission.terminal is not None:
                    self._deliver.pop(request_id, None)
                if deliver is not None:
                    deliveries.append((deliver, emission))
        for deliver, emission in deliveries:
            try:
                deliver(emission.deltas, emission.terminal)
            except Exception:
                logger.exception("delivery of request %s failed", emission.seq.request_id)
        if self._on_step is not None:
            try:
                self._on_step(emissions)
            except Exception:
                logger.exception("on_step failed with %d emissions", len(emissions))

    def _wind_up(self) -> None:
        """Ends everything that is still live, so that no reader waits for ever."""
        with self._changed:
            self._is_closing = True
            left = list(self._inbox)
            self._inbox.clear()
        error = Overloaded("the engine is shutting down", retry_after_s=1.0)
        for seq in left:
            self._refuse(seq, error)
        self._publish(self._engine.fail_all(error))
        self._engine.close()


def _as_serving_error(seq: Sequence, exc: Exception) -> ServingError:
    if isinstance(exc, ServingError):
        return exc
    return internal_error(f"request {seq.request_id} could not be added", exc)
