"""A network that parts two machines: both go on answering, and nobody hears anything twice."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.chaos.house import INGRESS, KEY, MODEL
from tests.chaos.ledger import Ledger, Row, make_row
from tests.chaos.machines import Machine, why_no_machines
from tests.chaos.nodes import GCS_PORT, INGRESS_PORT, PROXY_PORT, Nodes, running_nodes
from tests.chaos.questions import scripted
from tests.chaos.scenario import assert_nothing_lost, in_thread
from tests.chaos.swarm import Stream, Swarm, until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(why_no_machines() is not None, reason=str(why_no_machines())),
]

CLIENTS = 2
"""Of each address."""
FRONTS = {"proxies": PROXY_PORT, "ingresses": INGRESS_PORT}
"""A proxy takes an ingress of either machine, so that a cut may part those two as well."""
ANSWER_TOKENS = 800
"""40 s: longer than a cut, so that what was given up during one would be running after it."""
SETTLE_S = 0.2
"""After it, what was on its way when the wire was cut has arrived."""
CUT_S = 10.0
WATCHDOG_S = 5.0
LOOSE = 10
"""How much slower than promised a busy machine may be before a test says so."""
GIVEN_UP_WITHIN_S = 240.0
"""Ray takes a minute; then Serve starts new replicas."""
MOVED_ON_WITHIN_S = 60.0
ALL_END_WITHIN_S = 120.0
ORPHANS_STOP_WITHIN_S = 20.0
"""After healing: a bus whose ingress is gone is given up 20 s into a cut, its streams 1.5 s later."""
FAILOVERS = "seedance_failovers_total"
PRINT_KEY = (
    "import app.main, pathlib; print(app.main._resume_key(pathlib.Path('~/.cache/seedance')))"
)
WAYS = {"both ways": (), "to the head": ("head",), "to the worker": ("worker",)}
"""What does not arrive during a cut."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with running_nodes(
        "tests.chaos.app:build",
        model={
            "backend": "mock",
            "max_num_seqs": 64,
            "mock_token_interval_s": 0.05,
            "num_cpus": 0.1,
        },
        cache={"semantic": False},
        # By prefix a client's next question would follow the last one, which a cut has moved to
        # the side of its ingress: nothing would be parted by the second cut.
        routing={"policy": "default"},
    ) as nodes:
        nodes.until(lambda: is_whole(nodes), 60.0, "two replicas of both")
        yield nodes


def is_whole(nodes: Nodes) -> bool:
    """Whether both proxies reach ingresses that reach both model replicas."""
    return all(
        nodes.metric(machine, "seedance_model_replicas") == 2
        and nodes.metric(machine, "seedance_ingress_replicas") == 2
        for machine in nodes.network.machines
    )


def num_computed(nodes: Nodes) -> float:
    """Streams that any model replica computes or has queued."""
    running = nodes.metric(nodes.head, "seedance_requests_running")
    return running + nodes.metric(nodes.head, "seedance_requests_waiting")


def test_every_machine_has_a_proxy_an_ingress_and_a_model(nodes: Nodes) -> None:
    for machine in nodes.network.machines:
        assert len(machine.pids(INGRESS)) == 1
        assert len(machine.pids(MODEL)) == 1
        assert nodes.metric(machine, "seedance_model_replicas") == 2


def test_all_machines_come_to_the_same_resume_key(nodes: Nodes) -> None:
    # Any of them may build the application, and each has a key of its own at home.
    ask = f"import ray; ray.init(address='{nodes.head.address}:{GCS_PORT}'); {PRINT_KEY}"
    keys = {nodes.run(machine, sys.executable, "-c", ask) for machine in nodes.network.machines}
    assert len(keys) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_a_cut_between_machines_costs_no_stream_a_token(
    nodes: Nodes, ledger: Ledger, repeats: int, way: str
) -> None:
    receivers = [machine for machine in nodes.network.machines if machine.name.endswith(WAYS[way])]
    crowd = Crowd(nodes, way, nodes.network.machines, FRONTS)
    orphans_s: list[float] = []
    moved_before = moved = nodes.metric(nodes.head, FAILOVERS)

    async def turn() -> None:
        await crowd.inject(nodes.network.cut, *receivers)
        try:
            await asyncio.sleep(CUT_S)
        finally:
            await in_thread(nodes.network.heal)
        orphans_s.append(await in_thread(until_nothing_is_computed_in_vain, nodes, crowd.size))
        await crowd.moved_on()
        await crowd.all_anew()

    try:
        async with crowd:
            for _ in range(repeats):
                await turn()
            await crowd.finish()
        moved = nodes.metric(nodes.head, FAILOVERS)
    finally:
        stopped_s = max(orphans_s, default=-1)
        notes = (
            f"{moved - moved_before:.0f} failovers, orphans gone {stopped_s:.1f} s after healing"
        )
        rows = crowd.add_rows(ledger, f"network cut {way}, {CUT_S:g} s", notes)
    for row in rows.values():
        assert_nothing_lost(row)
    recovery_s = rows["ingresses"].worst_recovery_s
    assert recovery_s is not None
    assert recovery_s < LOOSE * WATCHDOG_S
    assert moved > moved_before
    until_nothing_is_computed_in_vain(nodes, 0)


async def test_a_machine_that_is_given_up_costs_no_stream_a_token(
    nodes: Nodes, ledger: Ledger
) -> None:
    """The last test here: what Ray has given up ends itself when it hears of it."""
    crowd = Crowd(nodes, "given up", [nodes.head], {"ingresses": INGRESS_PORT})
    replaced_s = ended_s = -1.0
    try:
        async with crowd:
            await crowd.inject(nodes.network.cut)
            try:
                replaced_s = await in_thread(until_replaced, nodes)
                await crowd.all_streaming()
            finally:
                await in_thread(nodes.network.heal)
            ended_s = await in_thread(until_ended, nodes)
            await crowd.moved_on()
            await crowd.finish()
    finally:
        notes = f"replaced after {replaced_s:.0f} s, ended {ended_s:.0f} s after healing"
        rows = crowd.add_rows(ledger, "network cut until given up", notes)
    for row in rows.values():
        assert_nothing_lost(row)


def until_nothing_is_computed_in_vain(nodes: Nodes, num_clients: int) -> float:
    """Waits until the model computes only what clients wait for."""
    return nodes.until(
        lambda: is_whole(nodes) and num_computed(nodes) <= num_clients,
        ORPHANS_STOP_WITHIN_S,
        "nothing is computed in vain",
    )


def until_replaced(nodes: Nodes) -> float:
    """Waits until the head has the model replicas of both machines."""
    return nodes.until(
        lambda: (
            len(nodes.head.pids(MODEL)) == 2
            and nodes.metric(nodes.head, "seedance_model_replicas") == 2
        ),
        GIVEN_UP_WITHIN_S,
        "two model replicas on the head",
    )


def until_ended(nodes: Nodes) -> float:
    """Waits until nothing of the model is left on the worker."""
    return nodes.until(
        lambda: not nodes.worker.pids(MODEL), GIVEN_UP_WITHIN_S, "no model replica on the worker"
    )


class Crowd:
    """Swarms at several addresses, for as long as the context lasts.

    Args:
        fronts: name and port of what they connect to on each of the machines.
    """

    def __init__(
        self, nodes: Nodes, subject: str, machines: Sequence[Machine], fronts: Mapping[str, int]
    ) -> None:
        self._swarms = {
            (front, machine.name): Swarm(
                nodes.ws_url(machine, port),
                CLIENTS,
                scripted(f"{subject}, {front}, {machine.name}", ANSWER_TOKENS),
                key=KEY,
            )
            for front, port in fronts.items()
            for machine in machines
        }
        self._fronts = tuple(fronts)
        self._stack = contextlib.AsyncExitStack()
        self._fault_at_s: list[float] = []

    @property
    def size(self) -> int:
        return len(self._swarms) * CLIENTS

    async def __aenter__(self) -> Crowd:
        for swarm in self._swarms.values():
            await self._stack.enter_async_context(swarm)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def all_streaming(self) -> None:
        """Waits until every client is in the middle of an answer."""
        await asyncio.gather(*(swarm.all_streaming() for swarm in self._swarms.values()))

    async def inject(self, fault: Callable[..., object], *args: object) -> None:
        """Breaks something in the middle of every client's answer."""
        await self.all_streaming()
        await in_thread(fault, *args)
        await asyncio.sleep(SETTLE_S)
        self._fault_at_s.append(time.monotonic())

    async def moved_on(self) -> None:
        """Waits until every stream that the last fault met has said more.

        Raises:
            TimeoutError: one has not.
        """
        at_s, met = self._fault_at_s[-1], self._met()
        await until(
            lambda: all(stream.silence_after_s(at_s) is not None for stream in met),
            MOVED_ON_WITHIN_S,
        )

    async def all_anew(self) -> None:
        """Waits for the end of what the last fault met: its parted streams were brought together.

        Raises:
            TimeoutError: one has none.
        """
        met = self._met()
        await until(lambda: all(stream.ended_s is not None for stream in met), ALL_END_WITHIN_S)

    def _met(self) -> list[Stream]:
        """The streams that ran at the last fault."""
        every = [stream for swarm in self._swarms.values() for stream in swarm.streams]
        return [stream for stream in every if stream.is_live_at(self._fault_at_s[-1])]

    async def finish(self) -> None:
        """Lets every stream end."""
        await asyncio.gather(*(swarm.finish() for swarm in self._swarms.values()))

    def add_rows(self, ledger: Ledger, fault: str, notes: str) -> dict[str, Row]:
        """A row for each front, by its name."""
        return {front: self._add_row(ledger, fault, front, notes) for front in self._fronts}

    def _add_row(self, ledger: Ledger, fault: str, front: str, notes: str) -> Row:
        swarms = [swarm for (own, _), swarm in self._swarms.items() if own == front]
        row = make_row(
            f"{fault}, clients of {front}",
            self._fault_at_s,
            [stream for swarm in swarms for stream in swarm.streams],
            bare_closes=sum(swarm.bare_closes for swarm in swarms),
            notes=notes,
        )
        return ledger.add(row)
