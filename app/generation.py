"""One request on the model, through the loss of the replicas that compute it.

A generation is a log that fills from the bus. When its replica is lost, the request goes to
another one together with what was answered so far, and the log goes on there: whoever
reads it sees a pause. A replica numbers and samples tokens by their position, so the
answer is the one that the first replica would have given.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from app.model_bus import ModelBus, Spawn
from deployments import wire
from deployments.prompt_chain import prompt_chain, prompt_cost
from protocol.errors import DeadlineExceeded, InternalError, Overloaded, ServingError
from protocol.request import InferenceRequest
from protocol.token_log import FinishReason, Terminal, Timing, TokenLog, Usage

logger = logging.getLogger(__name__)

GIVEN_UP_BY_REPLICA = frozenset({"overloaded", "resume_expired"})
"""Ends that tell of the replica and not of the request: another one may go on."""
RETRY_PAUSE_S = 0.25


class SubmitPort(Protocol):
    def submit(self, payload: bytes, route: wire.Route) -> Awaitable[bytes]: ...


@dataclass(frozen=True)
class FailoverLimits:
    """How long to try.

    Args:
        accept_timeout_s: for some replica to accept a new request.
        submit_timeout_s: for one replica to answer.
        failover_timeout_s: for some replica to go on with a request whose replica was lost.
        max_failovers: losses in a row, without a token between them, that end a request.
    """

    accept_timeout_s: float
    submit_timeout_s: float
    failover_timeout_s: float
    max_failovers: int


class Generation:
    """A request that is being answered; a `Sink` of the bus.

    Args:
        before_end: called once, with the last record before the log gets it.
    """

    def __init__(
        self,
        request: InferenceRequest,
        bus: ModelBus,
        port: SubmitPort,
        limits: FailoverLimits,
        *,
        clock: Callable[[], float],
        spawn: Spawn,
        started_s: float,
        replicas: Callable[[], frozenset[str]],
        before_end: Callable[[Generation, Terminal], None] = lambda generation, terminal: None,
    ) -> None:
        self.request = request
        self.log = TokenLog()
        self.accepted: wire.Accepted | None = None
        self.replica = ""
        self.failovers = 0
        self.is_parked = False
        self._has_moved = False
        self._seeded = _with_seed(request)
        self._epoch = 0
        self._bus = bus
        self._port = port
        self._limits = limits
        self._clock = clock
        self._spawn = spawn
        self._started_s = started_s
        self._first_delta_s: float | None = None
        self._replicas = replicas
        self._before_end = before_end
        self._losses_in_a_row = 0
        self._recovery: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def next_seq(self) -> int:
        return self.log.next_seq

    async def start(self) -> None:
        """Has a replica accept the request.

        Raises:
            ServingError: none does.
        """
        self._bus.expect(self.name, self)
        deadline_s = self._clock() + self._limits.accept_timeout_s
        try:
            reply = await self._submit(deadline_s, avoid=())
        except BaseException:
            self._bus.cancel(self.name)
            raise
        self._follow(reply)

    def adopt(self, replica: str, attached: wire.Attached) -> None:
        """Takes over a stream that runs already, moved to our bus by its replica."""
        self.replica = replica
        self.accepted = attached.accepted
        self._epoch = attached.submit.epoch
        self.log.append(*attached.deltas)
        self._bus.expect(self.name, self)
        if attached.terminal is not None:
            self._take_end(attached.terminal)
        elif attached.is_parked:
            self._go_elsewhere(attached.accepted, avoid=())
        else:
            self._bus.follow(self.name, replica)

    def take(self, part: wire.Part) -> None:
        """Moves what came into the log. A part with a hole before it counts as a loss."""
        if self.log.terminal is not None:
            return
        next_seq = self.log.next_seq
        deltas = part.deltas
        if deltas and deltas[0].seq < next_seq:
            deltas = tuple(delta for delta in deltas if delta.seq >= next_seq)
        if deltas:
            is_last = part.terminal is not None and len(deltas) == 1
            # The last delta may lack the token that ended the answer.
            if not is_last and deltas[0].seq - len(deltas[0].token_ids) >= next_seq:
                self.lost(f"tokens {next_seq} to {deltas[0].seq} are missing")
                return
            if self._first_delta_s is None:
                self._first_delta_s = self._clock()
            self._losses_in_a_row = 0
            self.log.append(*deltas)
        if part.terminal is not None:
            self._take_end(part.terminal)

    def lost(self, why: str) -> None:
        """Its replica is gone: goes on with another one, or ends with an error."""
        if self.log.terminal is not None or self._recovery is not None:
            return
        logger.info("request %s lost replica %s: %s", self.name, self.replica, why)
        assert self.accepted is not None, "nothing is handed over before a replica accepts"
        # Not cancelled there: the cancel could meet the stream that comes back to this replica.
        # Wherever it goes on, a former one is given up once it is heard of.
        self._bus.forget(self.name)
        self._bus.expect(self.name, self)
        self._losses_in_a_row += 1
        if self._losses_in_a_row > self._limits.max_failovers:
            self._fail(InternalError("the model replica failed; try again"))
        else:
            self.failovers += 1
            self._go_elsewhere(self.accepted, avoid=(self.replica,))

    def park(self) -> None:
        """Stops the computation for as long as nobody waits for the answer."""
        if self.log.terminal is not None or self.accepted is None or self.is_parked:
            return
        self.is_parked = True
        if self._recovery is None:
            self._bus.park(self.name)
        # Else it is on its way to a replica, and to stop that might leave no replica with it.

    def unpark(self) -> None:
        """Goes on, on any replica, behind what was answered."""
        if self.log.terminal is not None or self.accepted is None or not self.is_parked:
            return
        self.is_parked = False
        if self._recovery is None:
            self._bus.expect(self.name, self)
            self._go_elsewhere(self.accepted, avoid=())

    def cancel(self) -> None:
        """Stops the computation; harmless at any time, more than once."""
        if self.log.terminal is None:
            self._end("cancelled")

    def _take_end(self, terminal: Terminal) -> None:
        if terminal.error is not None and terminal.error.code in GIVEN_UP_BY_REPLICA:
            self.lost(terminal.error.message)
            return
        if self._has_moved:
            # The last replica knows its own part only.
            error, timeout_s = terminal.error, self.request.timeout_s
            if error is not None and error.code == DeadlineExceeded.code and timeout_s is not None:
                error = _deadline_exceeded(timeout_s).info
            terminal = msgspec.structs.replace(terminal, timing=self._timing(), error=error)
        self._bus.forget(self.name)
        self._finish(terminal)

    def _follow(self, reply: wire.SubmitReply) -> None:
        self.accepted = reply.accepted
        self.replica = reply.replica
        self._bus.follow(self.name, reply.replica)

    def _go_elsewhere(self, accepted: wire.Accepted, avoid: tuple[str, ...]) -> None:
        self._has_moved = True
        self._recovery = self._spawn(self._recover(accepted, avoid))

    async def _recover(self, accepted: wire.Accepted, avoid: tuple[str, ...]) -> None:
        lost_s = self._clock()
        try:
            deadline_s = lost_s + self._limits.failover_timeout_s
            reply = await self._submit(deadline_s, avoid)
        except ServingError as error:
            self._not_moved(error)
        except Exception:
            logger.exception("request %s could not be moved", self.name)
            self._not_moved(InternalError("the model replica failed; try again"))
        else:
            self._go_on(reply, accepted, lost_s)

    def _not_moved(self, error: ServingError) -> None:
        self._recovery = None
        if self.is_parked:
            # Nobody waits for it now; whoever comes may find a replica.
            self._bus.park(self.name)
        else:
            self._fail(error)

    def _go_on(self, reply: wire.SubmitReply, former: wire.Accepted, lost_s: float) -> None:
        self._recovery = None
        assert reply.accepted is not None
        if self.log.next_seq and reply.accepted.revision != former.revision:
            # Followed without being expected, it is cancelled there.
            self._bus.forget(self.name)
            self._bus.follow(self.name, reply.replica)
            self._fail(InternalError("the model changed in mid-answer; try again"))
            return
        logger.info(
            "request %s goes on at token %d on replica %s after %.2f s",
            self.name,
            self.log.next_seq,
            reply.replica,
            self._clock() - lost_s,
        )
        self._follow(reply)
        if self.is_parked and self._recovery is None and self.log.terminal is None:
            self._bus.park(self.name)

    async def _submit(self, deadline_s: float, avoid: tuple[str, ...]) -> wire.SubmitReply:
        """The first acceptance.

        Raises:
            ServingError: why there is none: the request is refused, or no replica has room
                or answers before the deadline.
        """
        chain = prompt_chain(self.request)
        cost = prompt_cost(self.request)
        refusal: ServingError | None = None
        while (left_s := deadline_s - self._clock()) > 0:
            is_first = refusal is None and self.accepted is None
            call = wire.encode(self._call(is_first))
            timeout_s = min(left_s, self._limits.submit_timeout_s, self._left_s())
            route = wire.Route(chain=chain, cost=cost, avoid=avoid)
            try:
                async with asyncio.timeout(timeout_s):
                    raw = await self._port.submit(call, route)
                reply = wire.decode_submit_reply(raw)
            except ServingError:
                raise
            except Exception as error:
                logger.warning("request %s could not be submitted: %r", self.name, error)
                is_silent = isinstance(error, TimeoutError)
                what = "no model replica answers" if is_silent else "no model replica is ready"
                refusal = Overloaded(what, retry_after_s=1)
                await asyncio.sleep(min(RETRY_PAUSE_S, left_s))
                continue
            if reply.refused is None:
                return reply
            refusal = ServingError.from_info(reply.refused)
            if not isinstance(refusal, Overloaded):
                raise refusal
            avoid = (*avoid, reply.replica)
            if self._replicas() <= {*avoid}:
                if self.accepted is None:
                    # A full house is told at once; who was promised an answer waits for it.
                    raise refusal
                await asyncio.sleep(min(RETRY_PAUSE_S * (1 + random.random()), left_s))
        raise refusal or Overloaded("no model replica answers", retry_after_s=1)

    def _call(self, is_first: bool) -> wire.Submit:
        """What a replica is to do: all of it, or what is left.

        Raises:
            DeadlineExceeded: no time is left for it.
        """
        request = self._seeded
        if request.timeout_s is not None and not is_first:
            left_s = self._left_s()
            if left_s <= 0:
                raise _deadline_exceeded(request.timeout_s)
            request = msgspec.structs.replace(request, timeout_s=left_s)
        return wire.Submit(
            request=request,
            ingress=self._bus.ingress,
            answered=self.log.deltas,
            epoch=self._epoch,
        )

    def _left_s(self) -> float:
        """Time until the request's own deadline."""
        timeout_s = self.request.timeout_s
        if timeout_s is None:
            return math.inf
        return timeout_s - (self._clock() - self._started_s)

    def _fail(self, error: ServingError) -> None:
        self._end("error", error)

    def _end(self, reason: FinishReason, error: ServingError | None = None) -> None:
        """Ends the log from our side, with the figures known here."""
        self._bus.cancel(self.name)
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()
        self._finish(
            Terminal(
                finish_reason=reason,
                usage=Usage(
                    prompt_tokens=0 if self.accepted is None else self.accepted.prompt_tokens,
                    completion_tokens=self.log.next_seq,
                ),
                timing=self._timing(),
                error=None if error is None else error.info,
            )
        )

    def _finish(self, terminal: Terminal) -> None:
        self._before_end(self, terminal)
        self.log.finish(terminal)

    def _timing(self) -> Timing:
        now_s = self._clock()
        first_s = now_s if self._first_delta_s is None else self._first_delta_s
        return Timing(
            ttft_ms=(first_s - self._started_s) * 1000, total_ms=(now_s - self._started_s) * 1000
        )


def _with_seed(request: InferenceRequest) -> InferenceRequest:
    """The request with the seed of its sampling fixed, so that any replica draws the same."""
    sampling = request.sampling
    if sampling.is_greedy or sampling.seed is not None:
        return request
    seed = random.SystemRandom().getrandbits(63)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=seed))


def _deadline_exceeded(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"request took over {timeout_s:g} s, its timeout_s", param="timeout_s", limit=timeout_s
    )
