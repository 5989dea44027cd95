"""The ingress's end of the token bus: links that break, replicas that hang, streams that move."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.model_bus import (
    MAX_REOPENS,
    RENEW_S,
    SUSPECT_AFTER_S,
    TICK_S,
    ModelBus,
    Nobody,
    Sink,
)
from deployments import wire
from deployments.bus import UNKNOWN_STREAM, maybe_here
from deployments.replica_board import ReplicaBoard, ReplicaGone
from protocol.token_log import Terminal
from tests.app.bus_fakes import FakeMessages, part
from tests.app.stack import eventually
from tests.protocol.fakes import FakeClock

WATCHDOG_S = 5.0
STOP = Terminal(finish_reason="stop")


@dataclass
class FakePort:
    """Notes every call. `refusals` are raised by the next attempts to open a bus, one each."""

    refusals: list[Exception] = field(default_factory=list)
    opened: list[tuple[str, FakeMessages]] = field(default_factory=list)
    cancels: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    parked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    renewals: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """What a cancel waits for."""

    def __post_init__(self) -> None:
        self.gate.set()

    def bus(self, ingress: str, positions: dict[str, int], replica: str) -> FakeMessages:
        assert ingress == "i"
        messages = FakeMessages(dict(positions))
        self.opened.append((replica, messages))
        if self.refusals:
            messages.fail(self.refusals.pop(0))
        return messages

    async def cancel(
        self, names: tuple[str, ...], ingress: str, replica: str, *, keep: bool = False
    ) -> None:
        calls = self.parked if keep else self.cancels
        calls.append((replica, tuple(sorted(names))))
        await self.gate.wait()

    async def renew(self, ingress: str, replica: str) -> None:
        self.renewals.append(replica)

    def last(self, replica: str) -> FakeMessages:
        """The newest bus to a replica."""
        return [messages for name, messages in self.opened if name == replica][-1]

    def num_opened(self, replica: str) -> int:
        return sum(name == replica for name, _ in self.opened)


class Stream:
    """A sink that notes what it gets."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seqs: list[int] = []
        self.terminal: Terminal | None = None
        self.losses: list[str] = []
        self._error = error

    @property
    def next_seq(self) -> int:
        return self.seqs[-1] + 1 if self.seqs else 0

    def take(self, part: wire.Part) -> None:
        if self._error is not None:
            raise self._error
        self.seqs += [delta.seq for delta in part.deltas]
        self.terminal = part.terminal or self.terminal

    def lost(self, why: str) -> None:
        self.losses.append(why)
        if self._error is not None:
            raise self._error


class House:
    """A bus over a fake port, whose clock stands still."""

    def __init__(self, *replicas: str) -> None:
        self.clock = FakeClock()
        self.port = FakePort()
        self.board = ReplicaBoard(clock=self.clock)
        self.board.set_replicas(replicas or ("m1",))
        self.tasks: set[asyncio.Task[None]] = set()
        self.bus = ModelBus(
            self.port,
            self.board,
            ingress="i",
            watchdog_s=WATCHDOG_S,
            clock=self.clock,
            spawn=self._spawn,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def follow(self, name: str, replica: str = "m1", sink: Sink | None = None) -> Stream:
        stream = sink or Stream()
        self.bus.expect(name, stream)
        self.bus.follow(name, replica)
        assert isinstance(stream, Stream)
        return stream

    def pass_s(self, seconds: float) -> None:
        """Lets time pass in ticks that come when they should."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.now += TICK_S
            self.bus.tick(self.clock.now)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def house(*replicas: str) -> AsyncIterator[House]:
    built = House(*replicas)
    try:
        yield built
    finally:
        await built.bus.close()


# ------------------------------------------------------------------ what the link brings


async def test_one_link_carries_all_streams_of_a_replica() -> None:
    async with house() as here:
        one, two = here.follow("one"), here.follow("two")
        await here.settle()
        here.port.last("m1").say(part("one", 0), part("two", 0, 1, terminal=STOP))
        await here.settle()
        assert (one.seqs, two.seqs, two.terminal) == ([0], [0, 1], STOP)
        assert here.port.num_opened("m1") == 1


async def test_a_message_tells_the_load_of_its_replica() -> None:
    async with house() as here:
        here.follow("s")
        await here.settle()
        load = wire.Load(running=3, waiting=1, tokens=77)
        here.port.last("m1").say(load=load)
        await here.settle()
        assert here.board.load_of("m1") == load


async def test_what_comes_before_a_replica_has_accepted_waits_for_that() -> None:
    async with house() as here:
        here.follow("other")
        early = Stream()
        here.bus.expect("s", early)
        await here.settle()
        here.port.last("m1").say(part("s", 0), part("s", 1, terminal=STOP))
        await here.settle()
        assert early.seqs == []
        here.bus.follow("s", "m1")
        assert (early.seqs, early.terminal) == ([0, 1], STOP)
        assert here.port.cancels == []


async def test_only_the_replica_that_has_accepted_is_heard() -> None:
    async with house("m1", "m2") as here:
        here.follow("a", "m1")
        here.follow("b", "m2")
        early = Stream()
        here.bus.expect("s", early)
        await here.settle()
        # A submission that was given up because it took too long, and was accepted after all.
        here.port.last("m1").say(part("s", 0))
        here.port.last("m2").say(part("s", 0))
        await here.settle()
        here.bus.follow("s", "m2")
        here.port.last("m1").say(part("s", 1))
        here.port.last("m2").say(part("s", 1))
        await here.settle()
        assert early.seqs == [0, 1]
        assert {*here.port.cancels} == {("m1", ("s",))}


async def test_what_comes_of_a_stream_that_was_just_parked_does_not_cancel_it() -> None:
    async with house() as here:
        stream = here.follow("s")
        await here.settle()
        here.port.last("m1").say(part("s", 0))
        await here.settle()
        here.bus.park("s")
        # It had left the replica before that heard of it; or it never did.
        here.port.last("m1").say(part("s", 1))
        await here.settle()
        assert stream.seqs == [0]
        assert here.port.cancels == []
        assert {*here.port.parked} == {("m1", ("s",))}
        here.bus.forget("s")
        here.port.last("m1").say(part("s", 2))
        await here.settle()
        assert here.port.cancels == [("m1", ("s",))]


async def test_an_end_that_was_told_too_early_does_not_count() -> None:
    async with house() as here:
        here.follow("other")
        stream = Stream()
        here.bus.expect("s", stream)
        await here.settle()
        here.port.last("m1").say(part("s", terminal=UNKNOWN_STREAM))
        here.port.last("m1").say(part("s", 0))
        await here.settle()
        here.bus.follow("s", "m1")
        assert (stream.seqs, stream.terminal) == ([0], None)


async def test_what_came_for_a_stream_is_kept_when_its_owner_is_made() -> None:
    async with house() as here:
        here.follow("other")
        await here.settle()
        here.bus.expect("s", Nobody())
        here.port.last("m1").say(part("s", 4))
        await here.settle()
        owner = here.follow("s")
        assert owner.seqs == [4]


async def test_a_sink_that_raises_harms_no_other_stream() -> None:
    async with house() as here:
        bad, good = here.follow("bad", sink=Stream(ValueError("bad"))), here.follow("good")
        await here.settle()
        here.port.last("m1").say(part("bad", 0), part("good", 0))
        await here.settle()
        assert good.seqs == [0]
        here.port.last("m1").fail(ReplicaGone("m1 is gone"))
        await here.settle()
        assert (len(bad.losses), len(good.losses)) == (1, 1)


async def test_a_loss_that_makes_another_stream_give_up_harms_no_third() -> None:
    async with house() as here:

        class Giving(Stream):
            def lost(self, why: str) -> None:
                super().lost(why)
                here.bus.cancel("second")

        here.follow("first", sink=Giving())
        second, third = here.follow("second"), here.follow("third")
        await here.settle()
        here.port.last("m1").fail(ReplicaGone("m1 is gone"))
        await here.settle()
        assert second.losses == []
        assert third.losses == ["m1 is gone"]


# ------------------------------------------------------------------ links that break


@pytest.mark.parametrize("how", ["error", "end", "rubbish"])
async def test_a_link_that_breaks_is_opened_again_where_its_streams_are(how: str) -> None:
    async with house() as here:
        begun, fresh = here.follow("begun"), here.follow("fresh")
        here.follow("elsewhere", "m2")
        here.bus.expect("submitted", Stream())
        await here.settle()
        broken = here.port.last("m1")
        broken.say(part("begun", 0, 1, 2))
        if how == "error":
            broken.fail(ConnectionError("reset"))
        elif how == "end":
            broken.end()
        else:
            broken.say_raw(b"\xc1")
        await eventually(lambda: here.port.num_opened("m1") == 2)
        again = here.port.last("m1")
        assert again.positions == {"begun": 3, "fresh": 0, "submitted": maybe_here(0)}
        assert broken.cancels > 0
        again.say(part("begun", 3), part("fresh", 0))
        await here.settle()
        assert (begun.seqs, fresh.seqs) == ([0, 1, 2, 3], [0])
        assert begun.losses == fresh.losses == []


async def test_a_link_that_cannot_be_opened_again_loses_its_streams() -> None:
    async with house() as here:
        here.port.refusals = [ConnectionError("no route")] * (MAX_REOPENS + 1)
        stream = here.follow("s")
        await eventually(lambda: stream.losses)
        assert here.port.num_opened("m1") == MAX_REOPENS + 1
        assert "no route" in stream.losses[0]
        assert here.board.is_suspect("m1")
        assert here.bus.names_on("m1") == []


async def test_a_link_that_brings_something_has_all_its_tries_again() -> None:
    async with house() as here:
        here.port.refusals = [ConnectionError("no route")] * MAX_REOPENS
        stream = here.follow("s")
        await eventually(lambda: here.port.num_opened("m1") == MAX_REOPENS + 1)
        here.port.last("m1").say()
        here.port.last("m1").fail(ConnectionError("again"))
        await eventually(lambda: here.port.num_opened("m1") == MAX_REOPENS + 2)
        assert stream.losses == []


async def test_a_replica_that_is_gone_is_not_tried_again() -> None:
    async with house() as here:
        stream = here.follow("s")
        await here.settle()
        here.port.last("m1").fail(ReplicaGone("m1 died"))
        await here.settle()
        assert stream.losses == ["m1 died"]
        assert here.port.num_opened("m1") == 1
        assert here.board.is_suspect("m1")


async def test_a_port_that_raises_at_once_is_a_break_like_any_other() -> None:
    async with house() as here:

        class NoPort(FakePort):
            def bus(self, ingress: str, positions: dict[str, int], replica: str) -> FakeMessages:
                raise ReplicaGone("the handle is closed")

        here.bus._port = NoPort()
        stream = here.follow("s")
        await here.settle()
        assert stream.losses == ["the handle is closed"]


async def test_a_stream_that_is_lost_can_be_followed_elsewhere() -> None:
    async with house("m1", "m2") as here:
        stream = here.follow("s")
        await here.settle()
        here.port.last("m1").fail(ReplicaGone("m1 died"))
        await here.settle()
        here.follow("s", "m2", stream)
        await here.settle()
        here.port.last("m2").say(part("s", 0))
        await here.settle()
        assert stream.seqs == [0]


# ------------------------------------------------------------------ replicas that hang


async def test_a_silent_replica_is_suspected_and_then_loses_its_streams() -> None:
    async with house() as here:
        stream = here.follow("s")
        await here.settle()
        here.port.last("m1").say()
        await here.settle()
        here.pass_s(SUSPECT_AFTER_S)
        assert not here.board.is_suspect("m1")
        here.pass_s(TICK_S)
        assert here.board.is_suspect("m1")
        here.pass_s(WATCHDOG_S - SUSPECT_AFTER_S - TICK_S)
        assert stream.losses == []
        here.pass_s(TICK_S)
        assert stream.losses == ["it is silent since 5.2 s"]
        await here.settle()
        assert here.port.last("m1").cancels > 0


async def test_a_sign_of_life_takes_suspicion_back() -> None:
    async with house() as here:
        stream = here.follow("s")
        await here.settle()
        here.pass_s(WATCHDOG_S - TICK_S)
        assert here.board.is_suspect("m1")
        here.port.last("m1").say()
        await here.settle()
        assert not here.board.is_suspect("m1")
        here.pass_s(WATCHDOG_S - TICK_S)
        assert stream.losses == []


async def test_a_replica_that_talks_but_makes_no_step_loses_its_streams() -> None:
    async with house() as here:
        stream = here.follow("s")
        await here.settle()
        for stalled_s in (1.0, 3.0):
            here.port.last("m1").say(load=wire.Load(running=1, stalled_s=stalled_s))
            await here.settle()
            here.pass_s(TICK_S)
            assert here.board.is_suspect("m1") == (stalled_s > SUSPECT_AFTER_S)
        here.port.last("m1").say(load=wire.Load(running=1, stalled_s=WATCHDOG_S + 0.1))
        await here.settle()
        here.pass_s(TICK_S)
        assert stream.losses == ["it makes no step since 5.1 s"]


async def test_when_we_were_stopped_ourselves_nobody_s_silence_counts() -> None:
    async with house() as here:
        stream = here.follow("s")
        await here.settle()
        here.pass_s(TICK_S)
        here.clock.now += 3 * WATCHDOG_S
        here.bus.tick(here.clock.now)
        assert stream.losses == []
        assert not here.board.is_suspect("m1")
        here.pass_s(WATCHDOG_S + TICK_S)
        assert len(stream.losses) == 1


async def test_a_silent_replica_without_streams_is_only_suspected() -> None:
    async with house() as here:
        here.follow("s")
        await here.settle()
        here.port.last("m1").say(part("s", 0, terminal=STOP))
        await here.settle()
        here.bus.forget("s")
        here.pass_s(2 * WATCHDOG_S)
        assert here.board.is_suspect("m1")
        assert here.port.num_opened("m1") == 1
        assert here.port.last("m1").cancels == 0


async def test_a_replica_that_was_silent_and_accepts_again_has_all_its_time() -> None:
    async with house() as here:
        here.follow("s")
        await here.settle()
        here.bus.forget("s")
        here.pass_s(2 * WATCHDOG_S)
        stream = here.follow("next")
        here.pass_s(WATCHDOG_S)
        assert stream.losses == []
        here.pass_s(TICK_S)
        assert len(stream.losses) == 1


async def test_every_open_bus_is_renewed_now_and_then() -> None:
    async with house("m1", "m2") as here:
        here.follow("a", "m1")
        here.follow("b", "m2")
        for _ in range(2):
            here.pass_s(RENEW_S - TICK_S)
            await here.settle()
            assert here.port.renewals == []
            here.pass_s(TICK_S)
            await here.settle()
            assert sorted(here.port.renewals) == ["m1", "m2"]
            here.port.renewals.clear()
            here.port.last("m1").say()
            here.port.last("m2").say()
            await here.settle()


# ------------------------------------------------------------------ cancels


async def test_the_cancels_of_one_moment_are_one_call() -> None:
    async with house() as here:
        for name in ("a", "b", "c"):
            here.follow(name)
        for name in ("a", "b"):
            here.bus.cancel(name)
        await here.settle()
        assert here.port.cancels == [("m1", ("a", "b"))]
        assert here.bus.names_on("m1") == ["c"]


async def test_parts_of_streams_nobody_knows_are_answered_by_one_cancel() -> None:
    async with house() as here:
        here.port.gate.clear()
        here.follow("s")
        await here.settle()
        messages = here.port.last("m1")
        messages.say(part("x", 0), part("y", 0), part("s", 0))
        messages.say(part("x", 1), part("y", 1))
        await here.settle()
        messages.say(part("x", 2), part("z", 0))
        await here.settle()
        assert here.port.cancels == [("m1", ("x", "y"))]
        here.port.gate.set()
        await here.settle()
        # Not x again: what came of it had left before the cancel arrived.
        assert here.port.cancels[1:] == [("m1", ("z",))]
        messages.say(part("x", 3))
        await here.settle()
        assert here.port.cancels[2:] == [("m1", ("x",))]


async def test_the_end_of_a_stream_nobody_knows_needs_no_cancel() -> None:
    async with house() as here:
        here.follow("s")
        await here.settle()
        here.port.last("m1").say(part("x", 7, terminal=STOP))
        await here.settle()
        assert here.port.cancels == []


async def test_a_cancel_on_the_way_to_a_replica_reaches_whichever_accepts() -> None:
    async with house() as here:
        here.bus.expect("s", Stream())
        here.bus.cancel("s")
        await here.settle()
        assert here.port.opened == []
        here.bus.follow("s", "m1")
        await here.settle()
        assert here.port.cancels == [("m1", ("s",))]


async def test_a_cancel_that_fails_harms_nothing() -> None:
    async with house() as here:

        async def fail(names: tuple[str, ...], replica: str) -> None:
            raise ConnectionError("no route")

        here.port.cancel = fail  # type: ignore[method-assign]
        here.follow("s")
        kept = here.follow("kept")
        here.bus.cancel("s")
        await here.settle()
        here.port.last("m1").say(part("kept", 0))
        await here.settle()
        assert kept.seqs == [0]


# ------------------------------------------------------------------ replicas that leave


async def test_a_replica_that_leaves_is_kept_as_long_as_it_has_our_streams() -> None:
    async with house("m1", "m2") as here:
        first, second = here.follow("first"), here.follow("second")
        await here.settle()
        messages = here.port.last("m1")
        here.board.set_replicas(["m2"])
        await here.settle()
        messages.say(part("first", 0), part("second", 0))
        await here.settle()
        assert first.seqs == second.seqs == [0]
        here.bus.forget("first")
        await here.settle()
        assert messages.cancels == 0
        here.bus.forget("second")
        await here.settle()
        assert messages.cancels > 0
        assert first.losses == second.losses == []


async def test_an_idle_link_ends_when_its_replica_leaves() -> None:
    async with house("m1", "m2") as here:
        here.follow("s")
        await here.settle()
        here.bus.forget("s")
        await here.settle()
        assert here.port.last("m1").cancels == 0
        # Serve's router lives in a thread of its own.
        thread = threading.Thread(target=here.board.set_replicas, args=(["m2"],))
        thread.start()
        thread.join()
        await eventually(lambda: here.port.last("m1").cancels > 0)


# ------------------------------------------------------------------ the end


async def test_nothing_is_left_after_close() -> None:
    here = House("m1", "m2")
    here.port.gate.clear()
    streams = [here.follow("a", "m1"), here.follow("b", "m2")]
    here.follow("c", "m1")
    here.bus.cancel("c")
    await here.settle()
    assert here.port.cancels
    await here.bus.close()
    assert here.tasks == set()
    assert all(messages.cancels > 0 for _, messages in here.port.opened)
    # Whoever does not know yet may go on calling.
    here.bus.cancel("a")
    here.bus.follow("late", "m1")
    here.board.set_replicas([])
    await here.settle()
    assert here.tasks == set()
    assert all(stream.losses == [] for stream in streams)
