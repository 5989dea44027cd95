"""The request router: each call reaches the replica that was chosen, or named, for it.

The first half drives the router alone, with replicas that answer from a table; the second
plays a scenario on a real Serve cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from typing import Any, cast

import psutil
import pytest

with warnings.catch_warnings():
    # Serve's own models trip over a deprecation of pydantic's as they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.exceptions import ActorDiedError
    from ray.serve._private.common import (
        DeploymentHandleSource,
        DeploymentID,
        ReplicaID,
        RequestMetadata,
    )
    from ray.serve._private.request_router.common import PendingRequest

    from deployments.routing import DEPARTED_S, MAX_DEPARTED, PrefixRouter

from bench.cluster import ROOT
from deployments.replica_board import ReplicaBoard, ReplicaGone, board_of
from deployments.wire import Load, Route
from tests.protocol.fakes import FakeClock

SLOW_S = 20.0
"""Far above what anything here takes on the busiest machine."""
SCENARIO_S = 240.0
CHAIN = (1, 2, 3)
_deployments = itertools.count()


class FakeReplica:
    """Tells its queue length, fails, or hangs."""

    max_ongoing_requests = 4

    def __init__(self, deployment: DeploymentID, name: str) -> None:
        self.replica_id = ReplicaID(name, deployment)
        self.queue_len: int | Exception | None = 0
        self.probes = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probes += 1
        if self.queue_len is None:
            await asyncio.Event().wait()
        if isinstance(self.queue_len, Exception):
            raise self.queue_len
        return cast(int, self.queue_len)


class Routing:
    """A router with replicas `a`, `b`, …, and ways to ask it."""

    def __init__(self, names: str, **options: Any) -> None:
        # A board is its process's, and so a deployment is used only once.
        self.deployment = DeploymentID(f"routed-{next(_deployments)}", "test")
        self.clock = FakeClock()
        self.router = PrefixRouter(
            self.deployment,
            DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            get_curr_time_s=self.clock,
            initial_backoff_s=0.001,
            max_backoff_s=0.001,
        )
        self.router.initialize_state(clock=self.clock, find=self._find, **options)
        self.unheard_of: dict[str, FakeReplica] = {}
        """Replicas that drained before the router came."""
        self.replicas = {name: FakeReplica(self.deployment, name) for name in names}
        self.set_replicas(names)

    async def _find(self, replica_id: ReplicaID) -> Any:
        if replica_id.unique_id not in self.unheard_of:
            raise ReplicaGone(f"no replica {replica_id.unique_id}")
        return self.unheard_of.pop(replica_id.unique_id)

    @property
    def board(self) -> ReplicaBoard:
        return board_of(self.deployment.name)

    def set_replicas(self, names: str) -> None:
        self.router.update_replicas([cast(Any, self.replicas[name]) for name in names])

    async def ask(self, route: Route | None = None, *, is_retry: bool = False) -> str:
        metadata = RequestMetadata(request_id="r", internal_request_id="shared")
        kwargs = {} if route is None else {"route": route}
        pending = PendingRequest(args=[], kwargs=kwargs, metadata=metadata)
        chosen = await self.router._choose_replica_for_request(pending, is_retry=is_retry)
        return chosen.replica_id.unique_id


async def test_calls_with_the_same_prefix_go_to_the_same_replica() -> None:
    routing = Routing("ab")
    assert len({await routing.ask(Route(chain=CHAIN, cost=10)) for _ in range(10)}) == 1
    assert routing.board.prefix_routed_total == 9


async def test_a_burst_spreads_though_all_its_calls_have_one_id() -> None:
    routing = Routing("ab")
    await asyncio.sleep(0.01)  # the probes of the new replicas
    asked = (routing.ask(Route(chain=(i,), cost=100)) for i in range(20))
    assert Counter(await asyncio.gather(*asked)) == {"a": 10, "b": 10}


async def test_a_call_without_a_route_goes_to_the_least_busy() -> None:
    routing = Routing("ab")
    routing.board.set_load("a", Load(tokens=100))
    assert await routing.ask() == "b"
    assert routing.board.routed_total == 0, "it is no request for the model"


async def test_a_pinned_call_reaches_its_replica_however_busy_it_is() -> None:
    routing = Routing("ab")
    routing.replicas["a"].queue_len = 1000
    routing.board.set_load("a", Load(tokens=10**9))
    routing.board.suspect("a", 100.0)
    assert await routing.ask(Route(replica="a", chain=CHAIN)) == "a"
    assert routing.board.routed_total == 0


async def test_a_replica_that_left_is_reached_by_its_name_only() -> None:
    routing = Routing("ab")
    routing.set_replicas("b")
    assert await routing.ask(Route(replica="a")) == "a"
    assert {await routing.ask(Route(chain=(i,))) for i in range(10)} == {"b"}
    assert routing.board.replicas == {"b"}
    routing.set_replicas("ab")
    assert await routing.ask(Route(replica="a")) == "a"


async def test_a_replica_that_left_before_we_came_is_reached_by_its_name_only() -> None:
    routing = Routing("ab")
    routing.unheard_of["old"] = FakeReplica(routing.deployment, "old")
    assert [await routing.ask(Route(replica="old")) for _ in range(3)] == ["old"] * 3
    assert {await routing.ask(Route(chain=(i,))) for i in range(10)} == {"a", "b"}
    assert routing.board.replicas == {"a", "b"}


async def test_replicas_that_left_are_forgotten_in_time_and_beyond_a_number() -> None:
    names = "".join(chr(0x4E00 + i) for i in range(MAX_DEPARTED + 1))
    routing = Routing(names)
    for left in range(len(names)):
        routing.set_replicas(names[left + 1 :])
    with pytest.raises(ReplicaGone):
        await routing.ask(Route(replica=names[0]))
    assert await routing.ask(Route(replica=names[1])) == names[1]
    routing.clock.now += DEPARTED_S
    routing.set_replicas("")
    with pytest.raises(ReplicaGone):
        await routing.ask(Route(replica=names[1]))


async def test_a_pinned_call_fails_at_once_where_it_cannot_arrive() -> None:
    routing = Routing("ab")
    with pytest.raises(ReplicaGone, match="no replica nobody"):
        await routing.ask(Route(replica="nobody"))
    with pytest.raises(ReplicaGone, match="a did not take the call"):
        await routing.ask(Route(replica="a"), is_retry=True)
    routing.router.on_replica_actor_died(routing.replicas["a"].replica_id)
    with pytest.raises(ReplicaGone, match="no replica a"):
        await routing.ask(Route(replica="a"))


async def test_a_dead_replica_leaves_the_board_and_is_last_when_an_update_still_names_it() -> None:
    routing = Routing("ab")
    routing.board.remember("a", CHAIN)
    routing.router.on_replica_actor_died(routing.replicas["a"].replica_id)
    assert routing.board.replicas == {"b"}
    routing.set_replicas("ab")
    routing.board.remember("a", CHAIN)
    assert {await routing.ask(Route(chain=CHAIN)) for _ in range(5)} == {"b"}


async def test_a_replica_that_lost_a_call_is_not_preferred() -> None:
    routing = Routing("ab")
    routing.board.remember("a", CHAIN)
    routing.router.on_replica_actor_unavailable(routing.replicas["a"].replica_id)
    assert await routing.ask(Route(chain=CHAIN), is_retry=True) == "b"


async def test_a_replica_that_does_not_answer_a_probe_is_passed_over_and_then_avoided() -> None:
    routing = Routing("ab")
    await asyncio.sleep(0)  # the probes of the new replicas
    routing.clock.now += 60
    routing.board.remember("a", CHAIN)
    routing.replicas["a"].queue_len = None
    assert await routing.ask(Route(chain=CHAIN)) == "b"
    probes = routing.replicas["a"].probes
    assert await routing.ask(Route(chain=CHAIN)) == "b"
    assert routing.replicas["a"].probes == probes


async def test_a_replica_that_shows_life_is_not_probed() -> None:
    routing = Routing("ab")
    await asyncio.sleep(0)
    routing.clock.now += 60
    for replica in routing.replicas.values():
        replica.probes = 0
        replica.queue_len = None
        routing.board.set_load(replica.replica_id.unique_id, Load())
    await routing.ask(Route(chain=CHAIN))
    assert [replica.probes for replica in routing.replicas.values()] == [0, 0]


async def test_full_replicas_are_asked_again_until_one_has_room() -> None:
    routing = Routing("ab")
    await asyncio.sleep(0)
    routing.clock.now += 60
    for replica in routing.replicas.values():
        replica.queue_len = FakeReplica.max_ongoing_requests
    asked = asyncio.create_task(routing.ask(Route(chain=CHAIN)))
    await asyncio.sleep(0.05)
    assert not asked.done()
    # A pause of 1 ms between tries, and not a busy loop.
    assert routing.replicas["a"].probes < 100
    routing.replicas["b"].queue_len = 0
    assert await asyncio.wait_for(asked, SLOW_S) == "b"


async def test_a_call_waits_for_the_first_replica() -> None:
    routing = Routing("")
    routing.replicas["a"] = FakeReplica(routing.deployment, "a")
    asked = asyncio.create_task(routing.ask())
    await asyncio.sleep(0)
    routing.set_replicas("a")
    assert await asyncio.wait_for(asked, SLOW_S) == "a"


async def test_a_probe_that_finds_a_replica_dead_takes_it_out() -> None:
    routing = Routing("ab")
    await asyncio.sleep(0)
    routing.clock.now += 60
    routing.board.remember("a", CHAIN)
    routing.replicas["a"].queue_len = ActorDiedError()
    assert await routing.ask(Route(chain=CHAIN)) == "b"
    assert routing.board.replicas == {"b"}


async def test_the_default_policy_goes_by_queue_length_and_still_pins() -> None:
    routing = Routing("ab", by_prefix=False)
    routing.replicas["a"].queue_len = 3
    routing.board.remember("a", CHAIN)
    await asyncio.sleep(0.01)
    assert {await routing.ask(Route(chain=CHAIN)) for _ in range(5)} == {"b"}
    assert await routing.ask(Route(replica="a")) == "a"
    assert await routing.ask(Route(avoid=("b",))) == "a"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="margin_token"):
        Routing("", margin_token=1)


def play_scenario(separate_loop: str) -> dict[str, Any]:
    """Runs routing_scenario.py and takes down whatever it leaves behind."""
    own = {
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": separate_loop,
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # Ray's sockets lie below, and their paths must stay short.
    with tempfile.TemporaryDirectory(prefix="sdr-", dir="/tmp", ignore_cleanup_errors=True) as tmp:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.routing_scenario"],
            cwd=ROOT,
            env={**inherited, **own, "RAY_TMPDIR": tmp},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=SCENARIO_S)
        except subprocess.TimeoutExpired:
            family = psutil.Process(process.pid).children(recursive=True)
            for each in (*family, process):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    each.kill()
            output, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    # Ray prints there too.
    (told,) = [line for line in output.splitlines() if line.startswith("{")]
    return cast(dict[str, Any], json.loads(told))


@pytest.fixture(scope="module", params=["0", "1"], ids=["callers_loop", "own_loop"])
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the scenario saw, with Serve's router in the caller's event loop and in its own."""
    return play_scenario(request.param)


@pytest.mark.serve
class TestOnARealCluster:
    def test_the_same_prefix_goes_to_the_same_replica(self, told: dict[str, Any]) -> None:
        assert told["same_chain"] == 1

    def test_pinned_calls_reach_the_replica_named(self, told: dict[str, Any]) -> None:
        assert all(told["pinned"])

    def test_calls_for_one_client_request_are_routed_each_for_itself(
        self, told: dict[str, Any]
    ) -> None:
        assert told["burst"] == [10, 10]
        assert told["mixed_pins"]

    def test_an_unknown_name_fails_at_once(self, told: dict[str, Any]) -> None:
        failure, took_s = told["unknown"]
        assert failure == "ReplicaGone"
        assert took_s < 1.0

    def test_more_calls_than_there_is_room_for_wait_and_are_answered(
        self, told: dict[str, Any]
    ) -> None:
        assert told["over_capacity"] == 60

    def test_a_hung_replica_does_not_hold_up_new_calls(self, told: dict[str, Any]) -> None:
        assert all(went_elsewhere for went_elsewhere, _ in told["hung"])
        assert max(took_s for _, took_s in told["hung"]) < 2.0

    def test_a_killed_replica_does_not_hold_up_new_calls(self, told: dict[str, Any]) -> None:
        went_elsewhere, took_s = told["killed"]
        assert went_elsewhere
        assert took_s < 2.0
        assert told["other_pin"]

    def test_calls_pinned_to_a_killed_replica_fail_at_once(self, told: dict[str, Any]) -> None:
        failure, took_s = told["killed_pin"]
        assert failure == "ReplicaGone"
        assert took_s < 2.0

    def test_a_draining_replica_is_reached_by_its_name_only(self, told: dict[str, Any]) -> None:
        assert told["heard"] == [1]
        assert told["drain_pin"]
        assert told["drain_pin_of_newcomer"]
        assert told["drain_stream"]
        assert told["drain_others"]

    def test_a_replica_that_has_drained_is_gone(self, told: dict[str, Any]) -> None:
        failure, took_s = told["gone_pin"]
        assert failure == "ReplicaGone"
        assert took_s < 2.0
