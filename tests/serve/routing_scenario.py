"""What happens to calls through `PrefixRouter` on a real two-replica Serve cluster.

Run by test_routing.py in a process of its own, because Serve reads its environment when it is
imported. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client, _RequestContext, _serve_request_context

from deployments.replica_board import ReplicaBoard, board_of
from deployments.wire import Route

CHAIN = tuple(range(1, 9))


@serve.deployment(
    name="Echo",
    num_replicas=2,
    max_ongoing_requests=20,
    graceful_shutdown_wait_loop_s=0.2,
    graceful_shutdown_timeout_s=60,
    ray_actor_options={"num_cpus": 0.1},
    request_router_config=RequestRouterConfig(
        request_router_class="deployments.routing:PrefixRouter",
        request_router_kwargs={"margin_tokens": 1000},
    ),
)
class Echo:
    """Says which replica it is."""

    def __init__(self) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id

    async def who(self, delay_s: float = 0.0, *, route: Route | None = None) -> tuple[str, int]:
        await asyncio.sleep(delay_s)
        return self._name, os.getpid()

    async def hold(self, *, route: Route | None = None) -> AsyncIterator[str]:
        """A stream that keeps the replica busy until it is cancelled."""
        while True:
            yield self._name
            await asyncio.sleep(0.05)


@ray.remote(num_cpus=0)
class Newcomer:
    """A process that has never asked any replica."""

    async def ask(self, name: str) -> str:
        handle = serve.get_deployment_handle("Echo", "echo").options(_by_reference=False)
        answer, _ = await handle.who.remote(route=Route(replica=name))
        return str(answer)


class Scenario:
    def __init__(self, handle: Any, board: ReplicaBoard) -> None:
        self._handle = handle.options(_by_reference=False)
        self._streams = handle.options(stream=True, _by_reference=False)
        self.board = board

    async def ask(self, route: Route | None = None, delay_s: float = 0.0) -> str:
        fields = {} if route is None else {"route": route}
        name, _ = await self._handle.who.remote(delay_s, **fields)
        return str(name)

    async def pid(self, name: str) -> int:
        _, pid = await self._handle.who.remote(route=Route(replica=name))
        return int(pid)

    async def hold(self, name: str) -> Any:
        stream = self._streams.hold.remote(route=Route(replica=name))
        assert await anext(stream) == name
        return stream

    async def until(self, holds: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not await holds():
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)

    async def until_replicas(self, count: int) -> None:
        async def holds() -> bool:
            return len(self.board.replicas) == count

        await self.until(holds)

    async def failure(self, route: Route) -> str | None:
        """Name of the exception that a call ends with, if any."""
        try:
            await asyncio.wait_for(self.ask(route), 20)
        except Exception as exc:
            return type(exc).__name__
        return None


async def timed(call: Awaitable[Any]) -> tuple[Any, float]:
    begun_s = time.monotonic()
    return await call, time.monotonic() - begun_s


async def play(scenario: Scenario) -> dict[str, Any]:
    s, board = scenario, scenario.board
    told: dict[str, Any] = {}
    await s.ask()
    await s.until_replicas(2)
    names = sorted(board.replicas)

    told["same_chain"] = len({await s.ask(Route(chain=CHAIN, cost=10)) for _ in range(10)})
    told["pinned"] = [await s.ask(Route(replica=name)) == name for name in names * 2]
    # All calls that serve one client request have one internal id.
    token = _serve_request_context.set(_RequestContext(_internal_request_id="one"))
    routes = [Route(chain=(100 + i,), cost=500) for i in range(20)]
    burst = asyncio.gather(*(s.ask(route, 0.05) for route in routes))
    told["burst"] = sorted(Counter(await asyncio.wait_for(burst, 30)).values())
    mixed = [Route(replica=names[i % 2]) for i in range(20)]
    told["mixed_pins"] = await asyncio.gather(*map(s.ask, mixed)) == [r.replica for r in mixed]
    _serve_request_context.reset(token)
    told["unknown"] = await timed(s.failure(Route(replica="nobody")))
    over_capacity = asyncio.gather(*(s.ask(delay_s=0.3) for _ in range(60)))
    told["over_capacity"] = len(await asyncio.wait_for(over_capacity, 30))

    # A replica that hangs, and would be preferred.
    hung = await s.ask(Route(chain=CHAIN))
    pid = await s.pid(hung)
    await asyncio.sleep(1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        told["hung"] = [await timed(s.ask(Route(chain=CHAIN))) for _ in range(5)]
        told["hung"] = [(name != hung, took_s) for name, took_s in told["hung"]]
    finally:
        os.kill(pid, signal.SIGCONT)

    # A replica that dies.
    killed, survivor = names
    for name in names:
        board.clear(name)
    board.remember(killed, (7,))
    os.kill(await s.pid(killed), signal.SIGKILL)
    told["killed"] = await timed(s.ask(Route(chain=(7,))))
    told["killed"] = (told["killed"][0] == survivor, told["killed"][1])
    told["killed_pin"] = await timed(s.failure(Route(replica=killed)))
    told["other_pin"] = await s.ask(Route(replica=survivor)) == survivor

    # A replica that drains.
    async def is_replaced() -> bool:
        return len(board.replicas) == 2 and killed not in board.replicas

    await s.until(is_replaced)
    names = sorted(board.replicas)
    holds = {name: await s.hold(name) for name in names}
    changes: list[int] = []
    board.subscribe(lambda: changes.append(len(board.replicas)))
    controller = _get_global_client()._controller
    await controller.update_deployment_replicas.remote(DeploymentID("Echo", "echo"), 1)
    await s.until_replicas(1)
    told["heard"] = changes
    (leaving,) = set(names) - board.replicas
    told["drain_pin"] = await s.ask(Route(replica=leaving)) == leaving
    told["drain_pin_of_newcomer"] = await Newcomer.remote().ask.remote(leaving) == leaving
    told["drain_stream"] = await anext(holds[leaving]) == leaving
    told["drain_others"] = leaving not in {await s.ask() for _ in range(10)}
    for stream in holds.values():
        stream.cancel()

    async def is_gone() -> bool:
        return await s.failure(Route(replica=leaving)) == "ReplicaGone"

    told["gone"], _ = await timed(s.until(is_gone, 30))
    told["gone_pin"] = await timed(s.failure(Route(replica=leaving)))
    return told


async def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    serve.start(proxy_location="Disabled")
    handle = serve.run(Echo.bind(), name="echo", route_prefix=None, external_scaler_enabled=True)
    told = await play(Scenario(handle, board_of("Echo")))
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(serve.shutdown)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
