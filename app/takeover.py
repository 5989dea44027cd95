"""Moves a stream from wherever it is to this ingress, for a client that resumes it here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from app.generation import Generation
from app.live_streams import LiveStreams
from app.model_bus import ModelBus, Nobody
from app.ports import ModelPort
from app.resume import Named, resume_expired
from deployments import wire
from deployments.replica_board import ReplicaBoard

logger = logging.getLogger(__name__)

FIND_GRACE_S = 0.25
"""Time for the other replicas to tell of a stream that one has found."""


class Takeover:
    """Finds streams on the model's replicas and has them go on here.

    Args:
        timeout_s: for one replica to answer.
    """

    def __init__(
        self,
        model: ModelPort,
        bus: ModelBus,
        board: ReplicaBoard,
        live: LiveStreams,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._bus = bus
        self._board = board
        self._live = live
        self._timeout_s = timeout_s
        self._clock = clock
        self.resumes_total = 0

    async def resume(self, named: Named, revision: str) -> Generation:
        """The generation of that name, running here.

        Raises:
            ResumeExpired: no replica has it.
        """
        generation = self._live.find(named.stream)
        if generation is None:
            return await self._take_over(named, revision)
        generation.unpark()
        return generation

    async def _take_over(self, named: Named, revision: str) -> Generation:
        self._bus.expect(named.stream, Nobody())
        try:
            replica, attached = await self._attach(named)
        except BaseException:
            if self._live.find(named.stream) is None:
                self._bus.forget(named.stream)
            raise
        live = self._live.find(named.stream)
        if live is not None:
            # Somebody else asked for it too, and was faster.
            return live
        started_s = self._clock() - attached.age_s
        generation = self._live.add(attached.submit.request, revision, started_s)
        generation.adopt(replica, attached)
        self.resumes_total += 1
        return generation

    async def _attach(self, named: Named) -> tuple[str, wire.Attached]:
        """Has the replica that knows most of a stream move it to our bus.

        Raises:
            ResumeExpired: no replica has it.
        """
        copies = await self._find(named) if named.replica else []
        for replica in copies:
            try:
                async with asyncio.timeout(self._timeout_s):
                    raw = await self._model.attach(named.stream, self._bus.ingress, replica)
            except Exception as error:
                logger.info("stream %s cannot be had from %s: %r", named.stream, replica, error)
                continue
            if raw:
                copies.remove(replica)
                await self._end_copies(named.stream, copies)
                return replica, wire.decode_attached(raw)
        raise resume_expired()

    async def _end_copies(self, name: str, replicas: list[str]) -> None:
        """Has replicas forget their old copies of a stream, and other ingresses those that they follow."""

        async def end(replica: str) -> None:
            await self._model.attach(name, self._bus.ingress, replica)
            await self._model.cancel((name,), self._bus.ingress, replica, keep=False)

        calls = [asyncio.create_task(end(replica)) for replica in replicas]
        if not calls:
            return
        _, late = await asyncio.wait(calls, timeout=FIND_GRACE_S)
        for call in late:
            call.cancel()
        failed = await asyncio.gather(*calls, return_exceptions=True)
        for replica, error in zip(replicas, failed, strict=True):
            if error is not None:
                logger.info("stream %s may still have a copy at %s: %r", name, replica, error)

    async def _find(self, named: Named) -> list[str]:
        """The replicas that have a stream, the newest copy first.

        After a failover it is not where its token says. All are asked at once; when one has it,
        those that are silent are not waited for much longer.
        """
        calls = {
            asyncio.create_task(self._model.find(named.stream, replica)): replica
            for replica in self._board.replicas | {named.replica}
        }
        found: dict[str, wire.Found] = {}
        waiting = set(calls)
        deadline_s = self._clock() + self._timeout_s
        try:
            while waiting and (left_s := deadline_s - self._clock()) > 0:
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                for call in done:
                    if (error := call.exception()) is not None:
                        logger.info("%s cannot tell of a stream: %r", calls[call], error)
                    elif raw := call.result():
                        found[calls[call]] = wire.decode_found(raw)
                        deadline_s = min(deadline_s, self._clock() + FIND_GRACE_S)
        finally:
            for call in waiting:
                call.cancel()
        return sorted(found, key=lambda replica: msgspec.structs.astuple(found[replica]))[::-1]
