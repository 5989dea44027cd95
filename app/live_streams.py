"""The generations that run on the model for this ingress."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from app.answer_cache import Found
from app.generation import FailoverLimits, Generation, SubmitPort
from app.model_bus import ModelBus, Spawn
from app.serving import Stream
from deployments.replica_board import ReplicaBoard
from protocol.errors import Overloaded
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal

CHECK_LIMITS = FailoverLimits(
    accept_timeout_s=1.0, submit_timeout_s=1.0, failover_timeout_s=1.0, max_failovers=0
)
"""A check that meets any trouble is dropped."""

BeforeEnd = Callable[[Generation, Terminal, str, Found], None]
"""Gets a generation's last record before its log does, the revision that was asked for, and what
the look-up before it had brought."""


class LiveStreams:
    """Running generations by their names; those that no client waits for are not among them.

    Args:
        max_pending: generations at a time.
    """

    def __init__(
        self,
        model: SubmitPort,
        bus: ModelBus,
        board: ReplicaBoard,
        *,
        limits: FailoverLimits,
        max_pending: int,
        before_end: BeforeEnd,
        spawn: Spawn,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._bus = bus
        self._board = board
        self._limits = limits
        self._max_pending = max_pending
        self._before_end = before_end
        self._spawn = spawn
        self._clock = clock
        self._live: dict[str, Generation] = {}
        self.failovers_total = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._live.values())

    def find(self, name: str) -> Generation | None:
        return self._live.get(name)

    def check_room(self) -> None:
        """Returns when one more may run.

        Raises:
            Overloaded: there are as many as may be.
        """
        limit = self._max_pending
        if len(self._live) >= limit:
            raise Overloaded(
                f"{limit} requests are running or waiting, the limit", limit=limit, retry_after_s=1
            )

    async def start(
        self, request: InferenceRequest, revision: str, started_s: float, found: Found
    ) -> Generation:
        """One that a replica has accepted.

        Raises:
            ServingError: none does.
        """
        generation = self.add(request, revision, started_s, found)
        try:
            await generation.start()
        except BaseException:
            self._live.pop(generation.name, None)
            raise
        return generation

    def add(
        self, request: InferenceRequest, revision: str, started_s: float, found: Found | None = None
    ) -> Generation:
        """One that is still to be started, or adopted."""

        def before_end(ended: Generation, terminal: Terminal) -> None:
            self._live.pop(ended.name, None)
            self.failovers_total += ended.failovers
            self._before_end(ended, terminal, revision, found or Found())

        generation = self._live[request.request_id] = Generation(
            request,
            self._bus,
            self._model,
            self._limits,
            clock=self._clock,
            spawn=self._spawn,
            started_s=started_s,
            replicas=lambda: self._board.replicas,
            before_end=before_end,
        )
        return generation

    def new_check(self, request: InferenceRequest) -> Generation:
        """A generation that no client waits for."""
        return Generation(
            request,
            self._bus,
            self._model,
            CHECK_LIMITS,
            clock=self._clock,
            spawn=self._spawn,
            started_s=self._clock(),
            replicas=lambda: self._board.replicas,
        )


def stream_of(generation: Generation, outcome: CacheOutcome, token: str) -> Stream:
    """What its client gets."""
    accepted = generation.accepted
    return Stream(
        request=generation.request,
        log=generation.log,
        cache=outcome,
        queue_position=None if accepted is None else accepted.queue_position,
        prompt_tokens=0 if accepted is None else accepted.prompt_tokens,
        cancel=generation.cancel,
        park=generation.park,
        unpark=generation.unpark,
        token=token,
    )
