"""The request router of our deployments: `request_router_config` names it, Serve runs it.

Serve pickles this whole module into every process that holds a handle, so it has no state of
its own: what it learns is on the process's `ReplicaBoard`.

Unlike Serve's own routers it keeps no queue of waiting requests. Each call chooses for itself,
which is what lets it reach the replica chosen for *it*: Serve's queue finds a request by an id
that all calls made for one client request have in common.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest, ReplicaQueueLengthCache
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from deployments.departed import find_departed
from deployments.replica_board import MARGIN_TOKENS, ReplicaBoard, ReplicaGone, board_of
from deployments.wire import Route

MAX_DEPARTED = 64
DEPARTED_S = 3600.0
"""A drain that takes longer is cut by `graceful_shutdown_timeout_s` long before."""
ALIVE_S = 0.75
"""A replica that showed a sign of life this recently gets a request without being probed."""
PROBE_DEADLINE_S = 0.2
SUSPECT_S = 2.0
"""After a missed probe or a lost call; a replica that is well again is asked again soon."""
DEAD_S = 30.0
"""Until the controller has noticed too, its updates still name a dead replica."""

ANY = Route()


class PrefixRouter(RequestRouter):
    """Sends a call to the replica named by its `route`, or to the best one for it.

    A call carries its `Route` as the keyword argument `route`; one without goes to the least
    busy replica.
    """

    queue_len_response_deadline_s = PROBE_DEADLINE_S

    def initialize_state(
        self,
        *,
        margin_tokens: int = MARGIN_TOKENS,
        by_prefix: bool = True,
        clock: Callable[[], float] = time.monotonic,
        find: Callable[[ReplicaID], Awaitable[RunningReplica]] = find_departed,
    ) -> None:
        """Serve calls it once, with `request_router_kwargs`.

        Args:
            margin_tokens: see `ReplicaBoard`.
            by_prefix: False chooses as Serve does: the shorter queue of two drawn by lot.
            find: reaches a replica that was never in the running set here, or raises `ReplicaGone`.
        """
        self._by_prefix = by_prefix
        self._find_departed = find
        self._clock = clock
        self._board: ReplicaBoard = board_of(self._deployment_id.name)
        self._board.margin_tokens = margin_tokens
        self._departed: OrderedDict[str, tuple[RunningReplica, float]] = OrderedDict()
        if by_prefix:
            # Serve trusts an entry for 10 s, in which a replica that hangs gets all it asks for.
            self._replica_queue_len_cache = ReplicaQueueLengthCache(
                staleness_timeout_s=ALIVE_S, get_curr_time_s=clock
            )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the set of those that take new work; those that left stay reachable by name."""
        names = {replica.replica_id.unique_id for replica in replicas}
        self._keep_departed(names)
        super().update_replicas(replicas)
        self._board.set_replicas(names)

    def _keep_departed(self, names: set[str]) -> None:
        now_s = self._clock()
        for replica in self._replicas.values():
            if replica.replica_id.unique_id not in names:
                self._departed[replica.replica_id.unique_id] = (replica, now_s)
        for name in names:
            self._departed.pop(name, None)
        while self._departed:
            _, left_s = next(iter(self._departed.values()))
            if len(self._departed) <= MAX_DEPARTED and now_s - left_s < DEPARTED_S:
                break
            self._departed.popitem(last=False)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        name = replica_id.unique_id
        self._departed.pop(name, None)
        self._board.suspect(name, DEAD_S)
        self._board.set_replicas(self._board.replicas - {name})

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._board.suspect(replica_id.unique_id, SUSPECT_S)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Serve tries again without any pause where nobody asks for one.
            pending_request.routing_context.should_backoff = True
        route = _route(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._board.rank(by_name, route)
        if self._by_prefix:
            return [[by_name[name]] for name in ranked]
        bad = [name for name in ranked if name in route.avoid or self._board.is_suspect(name)]
        names = [name for name in ranked if name not in bad] or bad
        return [[by_name[name] for name in random.sample(names, min(2, len(names)))]]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica that Serve sends this very call to.

        Raises:
            ReplicaGone: a pinned call cannot reach its replica.
        """
        route = _route(pending_request)
        if route.replica is not None:
            return await self._pinned(route.replica, is_retry)
        ranks = self._choose_replicas_with_backoff(pending_request)
        try:
            return await self._first_free(ranks, route, is_retry)
        finally:
            await ranks.aclose()

    async def _first_free(
        self, ranks: AsyncIterator[list[RunningReplica]], route: Route, is_retry: bool
    ) -> RunningReplica:
        tries = 0
        async for rank in ranks:
            replica: RunningReplica | None
            if self._by_prefix and not is_retry and self._is_alive(rank[0]):
                replica = rank[0]
            else:
                replica = await self._select_from_candidate_replicas(rank, tries)
            if replica is not None:
                name = replica.replica_id.unique_id
                if route is ANY:
                    self._board.charge(name, 0)
                else:
                    self._board.place(name, route)
                return replica
            tries += 1
        raise AssertionError("ranks come until one is taken")

    def _is_alive(self, replica: RunningReplica) -> bool:
        return self._board.has_reported(replica.replica_id.unique_id, ALIVE_S)

    async def _pinned(self, name: str, is_retry: bool) -> RunningReplica:
        if is_retry:
            raise ReplicaGone(f"{self._deployment_id.name} replica {name} did not take the call")
        for replica in self._replicas.values():
            if replica.replica_id.unique_id == name:
                return replica
        if name not in self._departed:
            # Perhaps it drains, and did so before we came.
            found = await self._find_departed(ReplicaID(name, self._deployment_id))
            self._departed[name] = (found, self._clock())
        return self._departed[name][0]

    async def _probe_queue_lens(
        self, replicas: list[RunningReplica], backoff_index: int
    ) -> list[tuple[RunningReplica, int | None]]:
        lengths: list[tuple[RunningReplica, int | None]] = await super()._probe_queue_lens(
            replicas, backoff_index
        )
        for replica, length in lengths:
            if length is None:
                self._board.suspect(replica.replica_id.unique_id, SUSPECT_S)
        return lengths


def _route(pending_request: PendingRequest | None) -> Route:
    route = None if pending_request is None else pending_request.kwargs.get("route")
    return route if isinstance(route, Route) else ANY
