"""The replica's end of the token bus: one message a step, orphans, and moves between ingresses."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import wire
from deployments.bus import MAX_DELTAS, TAKEN_OVER, UNKNOWN_STREAM, BusHub, BusStream, maybe_here
from protocol.errors import Replaced, ResumeExpired
from protocol.request import InferenceRequest
from protocol.token_log import Terminal, TokenDelta, TokenLog

STOP = Terminal(finish_reason="stop")
LEASE_S, KEEP_S, RENEW_S = 2.0, 30.0, 20.0
PATIENCE_S = 30.0


class Replica:
    """A hub whose clock stands still, and whose engine is the test."""

    def __init__(self, max_ended: int = 1024) -> None:
        self.now_s = 100.0
        self.abandoned: list[str] = []
        self.load = wire.Load(running=1)
        self.hub = BusHub(
            lambda: self.load,
            lambda: self.now_s,
            lease_s=LEASE_S,
            keep_s=KEEP_S,
            renew_s=RENEW_S,
            max_ended=max_ended,
        )

    def accept(self, name: str, ingress: str = "a", answered: int = 0, epoch: int = 0) -> TokenLog:
        request = InferenceRequest(request_id=name, tenant="t", model="m", prompt="p")
        deltas = tuple(token(seq) for seq in range(answered))
        submit = wire.Submit(request=request, ingress=ingress, answered=deltas, epoch=epoch)
        accepted = wire.Accepted(revision="r", prompt_tokens=1, queue_position=0)
        log = TokenLog()
        log.append(*deltas)
        self.hub.add(BusStream(submit, accepted, log, lambda: self.abandoned.append(name)))
        return log

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.hub.tick()


def token(seq: int) -> TokenDelta:
    return TokenDelta(seq, f"{seq} ", (seq,))


class Ingress:
    """Reads a bus for as long as it is open."""

    def __init__(self, hub: BusHub, name: str, positions: dict[str, int] | None = None) -> None:
        self.messages: list[wire.BusMessage] = []
        self.has_ended = False
        self._task = asyncio.create_task(self._read(hub, name, positions or {}))

    async def _read(self, hub: BusHub, name: str, positions: dict[str, int]) -> None:
        async for message in hub.messages(name, positions):
            self.messages.append(message)
        self.has_ended = True

    async def news(self) -> list[wire.BusMessage]:
        """What came since the last call."""
        for _ in range(5):
            await asyncio.sleep(0)
        news, self.messages = self.messages, []
        return news

    async def parts(self) -> list[wire.Part]:
        return [part for message in await self.news() for part in message.parts]

    async def ended(self) -> None:
        """Waits until the replica has closed the bus."""
        async with asyncio.timeout(PATIENCE_S):
            await self._task

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))


async def test_a_bus_says_at_once_that_it_is_open() -> None:
    replica = Replica()
    ingress = Ingress(replica.hub, "a")
    assert await ingress.news() == [wire.BusMessage((), wire.Load(running=1))]


async def test_all_that_one_step_has_leaves_in_one_message() -> None:
    replica = Replica()
    logs = [replica.accept(f"s{n}") for n in range(8)]
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    for seq in range(3):
        for log in logs:
            log.append(token(seq))
        (message,) = await ingress.news()
        assert {part.stream for part in message.parts} == {f"s{n}" for n in range(8)}
        assert all(part.deltas == (token(seq),) for part in message.parts)


async def test_what_came_while_a_message_waited_leaves_with_the_next() -> None:
    replica = Replica()
    log = replica.accept("s")
    bus = replica.hub.messages("a", {})
    await anext(bus)
    for seq in range(5):
        log.append(token(seq))
    message = await anext(bus)
    assert message.parts == (wire.Part("s", tuple(map(token, range(5)))),)
    await bus.aclose()


async def test_the_end_comes_with_the_last_of_the_text_and_once() -> None:
    replica = Replica()
    log = replica.accept("s")
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    log.append(token(0))
    log.finish(STOP)
    assert await ingress.parts() == [wire.Part("s", (token(0),), STOP)]
    replica.hub.tick()
    assert await ingress.parts() == []


async def test_tokens_from_before_the_bus_was_open_are_not_lost() -> None:
    replica = Replica()
    log = replica.accept("s")
    log.append(token(0), token(1))
    ingress = Ingress(replica.hub, "a")
    assert await ingress.parts() == [wire.Part("s", (token(0), token(1)))]


async def test_an_ingress_gets_its_own_streams_only() -> None:
    replica = Replica()
    mine, other = replica.accept("mine", "a"), replica.accept("other", "b")
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    mine.append(token(0))
    other.append(token(0))
    assert [part.stream for part in await ingress.parts()] == ["mine"]


async def test_a_tick_is_a_sign_of_life() -> None:
    replica = Replica()
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    replica.load = wire.Load(running=3, tokens=77)
    replica.hub.tick()
    assert await ingress.news() == [wire.BusMessage((), wire.Load(running=3, tokens=77))]


async def test_a_bus_that_is_opened_again_goes_on_where_the_ingress_was() -> None:
    replica = Replica()
    log = replica.accept("s")
    log.append(*map(token, range(4)))
    first = Ingress(replica.hub, "a")
    await first.news()
    await first.leave()
    log.append(token(4))
    again = Ingress(replica.hub, "a", {"s": 2})
    assert await again.parts() == [wire.Part("s", (token(2), token(3), token(4)))]


async def test_a_second_bus_takes_the_place_of_the_first() -> None:
    replica = Replica()
    log = replica.accept("s")
    first = Ingress(replica.hub, "a")
    await first.news()
    second = Ingress(replica.hub, "a", {"s": 0})
    await second.news()
    log.append(token(0))
    assert [part.stream for part in await second.parts()] == ["s"]
    assert await first.parts() == []
    assert first.has_ended
    replica.pass_s(LEASE_S)
    assert replica.abandoned == []


async def test_an_end_that_was_missed_is_told_when_it_is_asked_for() -> None:
    replica = Replica()
    log = replica.accept("s")
    log.append(token(0))
    log.finish(STOP)
    asks = Ingress(replica.hub, "a", {"s": 1})
    assert await asks.parts() == [wire.Part("s", (), STOP)]
    other = Ingress(replica.hub, "a")
    assert await other.parts() == []


async def test_a_stream_that_is_not_here_is_told_so() -> None:
    replica = Replica()
    ingress = Ingress(replica.hub, "a", {"gone": 7})
    (part,) = await ingress.parts()
    assert part.stream == "gone"
    assert part.terminal is not None
    assert part.terminal.error is not None
    assert part.terminal.error.code == "resume_expired"


async def test_a_stream_that_may_be_here_is_asked_for_without_harm() -> None:
    replica = Replica()
    log = replica.accept("s")
    log.append(*map(token, range(3)))
    log.finish(STOP)
    ingress = Ingress(replica.hub, "a", {"s": maybe_here(1), "elsewhere": maybe_here(0)})
    assert await ingress.parts() == [wire.Part("s", (token(1), token(2)), STOP)]


async def test_an_orphan_runs_for_its_lease_and_no_longer() -> None:
    replica = Replica()
    replica.accept("s")
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    replica.pass_s(10)
    await ingress.leave()
    replica.pass_s(LEASE_S - 0.1)
    assert replica.abandoned == []
    replica.pass_s(0.1)
    assert replica.abandoned == ["s"]
    parked = replica.hub.attach("s", "b")
    assert (parked.is_parked, parked.terminal) == (True, None)
    replica.pass_s(KEEP_S)
    assert not replica.hub.has("s")


async def test_a_stream_whose_ingress_never_opens_a_bus_is_an_orphan() -> None:
    replica = Replica()
    replica.accept("s")
    replica.pass_s(LEASE_S)
    assert replica.abandoned == ["s"]


async def test_an_ingress_that_renews_nothing_is_gone() -> None:
    replica = Replica()
    replica.accept("s")
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    replica.pass_s(RENEW_S - 1)
    replica.hub.renew("a")
    replica.pass_s(RENEW_S - 1)
    assert await ingress.news() != []
    assert not ingress.has_ended
    replica.pass_s(2)
    await ingress.ended()
    replica.pass_s(LEASE_S)
    assert replica.abandoned == ["s"]


async def test_another_ingress_takes_a_stream_over_with_all_its_text() -> None:
    replica = Replica()
    log = replica.accept("s", "a")
    log.append(token(0))
    former, new = Ingress(replica.hub, "a"), Ingress(replica.hub, "b")
    await former.news()
    await new.news()
    attached = replica.hub.attach("s", "b")
    assert attached.deltas == (token(0),)
    assert attached.terminal is None
    log.append(token(1))
    assert await new.parts() == [wire.Part("s", (token(1),))]
    (told,) = await former.parts()
    assert told.terminal is not None
    assert told.terminal.error is not None
    assert told.terminal.error.code == "replaced"
    replica.pass_s(LEASE_S)
    assert replica.abandoned == []


async def test_an_orphan_that_is_taken_over_in_time_runs_on() -> None:
    replica = Replica()
    replica.accept("s", "a")
    former, new = Ingress(replica.hub, "a"), Ingress(replica.hub, "b")
    await former.news()
    await former.leave()
    replica.pass_s(LEASE_S / 2)
    replica.hub.attach("s", "b")
    replica.pass_s(LEASE_S)
    await new.news()
    assert replica.abandoned == []


async def test_an_ended_stream_can_be_attached_for_a_while() -> None:
    replica = Replica()
    replica.accept("s").finish(STOP)
    replica.pass_s(KEEP_S - 1)
    assert replica.hub.attach("s", "b").terminal == STOP
    replica.pass_s(1)
    with pytest.raises(ResumeExpired):
        replica.hub.attach("s", "b")


async def test_only_so_many_ended_streams_are_kept() -> None:
    replica = Replica(max_ended=2)
    for name in ("one", "two", "three"):
        replica.accept(name).finish(STOP)
    assert [name for name in ("one", "two", "three") if replica.hub.has(name)] == ["two", "three"]


async def test_a_cancel_stops_the_work_and_says_only_that_the_stream_is_gone() -> None:
    replica = Replica()
    log = replica.accept("s")
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    log.append(token(0))
    replica.hub.cancel(("s", "unknown"), "a")
    log.append(token(1))
    log.finish(Terminal(finish_reason="cancelled"))
    # One who still waits, because the cancel was meant for an earlier stream, learns of it.
    assert await ingress.parts() == [wire.Part("s", (), UNKNOWN_STREAM)]
    assert replica.abandoned == ["s"]
    assert replica.hub.num_live == 0


async def test_a_stream_that_goes_on_here_sends_what_is_new_only() -> None:
    replica = Replica()
    log = replica.accept("s", answered=3)
    ingress = Ingress(replica.hub, "a")
    assert await ingress.parts() == []
    log.append(token(3))
    assert await ingress.parts() == [wire.Part("s", (token(3),))]
    assert replica.hub.attach("s", "b").deltas == tuple(map(token, range(4)))


async def test_a_stream_that_comes_back_takes_the_place_of_its_former_self() -> None:
    replica = Replica()
    former = replica.accept("s")
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    again = replica.accept("s", answered=2)
    assert replica.abandoned == ["s"]
    former.append(token(0))
    former.finish(Terminal(finish_reason="cancelled"))
    again.append(token(2))
    assert await ingress.parts() == [wire.Part("s", (token(2),))]
    assert replica.hub.num_live == 1


async def test_an_ingress_that_was_cut_off_cannot_take_a_stream_back() -> None:
    replica = Replica()
    log = replica.accept("s", "a")
    assert replica.hub.attach("s", "b").submit.epoch == 1
    assert replica.hub.attach("s", "b").submit.epoch == 1
    with pytest.raises(Replaced):
        replica.accept("s", "a")
    assert replica.abandoned == []
    log.finish(STOP)
    with pytest.raises(Replaced):
        replica.accept("s", "a")
    assert replica.hub.attach("s", "b").terminal == STOP


async def test_the_latest_owner_gets_a_stream_that_two_bring_to_the_same_replica() -> None:
    replica = Replica()
    former = Ingress(replica.hub, "a")
    replica.accept("s", "a")
    await former.news()
    log = replica.accept("s", "b", epoch=1)
    assert replica.abandoned == ["s"]
    assert await former.parts() == [wire.Part("s", (), TAKEN_OVER)]
    new = Ingress(replica.hub, "b", {"s": 0})
    log.append(token(0))
    assert await new.parts() == [wire.Part("s", (token(0),))]
    with pytest.raises(Replaced):
        replica.accept("s", "a")


async def test_one_whose_bus_was_broken_learns_that_another_has_taken_its_stream() -> None:
    replica = Replica()
    replica.accept("s", "a")
    replica.hub.attach("s", "b")
    ingress = Ingress(replica.hub, "a", {"s": 0})
    assert await ingress.parts() == [wire.Part("s", (), TAKEN_OVER)]


async def test_a_stream_that_comes_after_it_was_asked_for_is_not_called_unknown() -> None:
    replica = Replica()
    bus = replica.hub.messages("a", {"s": 0})
    await anext(bus)
    replica.hub.cancel(("s",), "a")
    replica.accept("s").append(token(0))
    assert (await anext(bus)).parts == (wire.Part("s", (token(0),)),)
    await bus.aclose()


async def test_the_end_of_one_that_is_kept_no_longer_is_still_told() -> None:
    replica = Replica(max_ended=1)
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    for name in ("one", "two", "three"):
        replica.accept(name).finish(STOP)
    assert [part.terminal for part in await ingress.parts()] == [STOP] * 3


async def test_a_long_log_is_cut_into_messages_of_a_bounded_size() -> None:
    replica = Replica()
    log = replica.accept("s")
    log.append(*map(token, range(2 * MAX_DELTAS + 5)))
    log.finish(STOP)
    ingress = Ingress(replica.hub, "a", {"s": 0})
    for _ in range(5):
        await asyncio.sleep(0)
    messages = await ingress.news()
    sizes = [len(part.deltas) for message in messages for part in message.parts]
    assert sizes == [MAX_DELTAS, MAX_DELTAS, 5]
    assert messages[-1].parts[0].terminal == STOP


@given(st.data())
def test_whatever_breaks_each_delta_arrives_once(data: st.DataObject) -> None:
    """Random tokens, cuts and reopenings: the ingress, which drops what it has, sees no gap."""

    async def run() -> None:
        replica = Replica()
        names = ("s0", "s1")
        logs = {name: replica.accept(name) for name in names}
        seen: dict[str, list[int]] = {name: [] for name in names}
        ended: set[str] = set()

        def positions() -> dict[str, int]:
            return {name: len(seen[name]) for name in names if name not in ended}

        async def read(ingress: Ingress) -> None:
            for part in await ingress.parts():
                seen[part.stream].extend(delta.seq for delta in part.deltas)
                if part.terminal is not None:
                    assert part.stream not in ended
                    ended.add(part.stream)

        ingress = Ingress(replica.hub, "a", positions())
        for action in data.draw(st.lists(st.sampled_from(["s0", "s1", "cut", "read"]))):
            if action == "cut":
                # What was on its way is lost.
                await ingress.leave()
                ingress = Ingress(replica.hub, "a", positions())
            elif action == "read":
                await read(ingress)
            else:
                logs[action].append(token(logs[action].next_seq))
        for log in logs.values():
            log.finish(STOP)
        await read(ingress)
        for name in names:
            assert seen[name] == list(range(logs[name].next_seq))
        assert ended == {*names}
        await ingress.leave()

    asyncio.run(run())


async def test_an_ingress_cannot_cancel_what_another_has_taken_over() -> None:
    replica = Replica()
    log = replica.accept("s", "a")
    replica.hub.attach("s", "b")
    replica.hub.cancel(("s",), "a")
    log.append(token(0))
    assert replica.abandoned == []
    replica.hub.cancel(("s",), "b")
    assert replica.abandoned == ["s"]


async def test_a_parked_stream_is_computed_no_more_and_can_be_fetched_for_a_while() -> None:
    replica = Replica()
    log = replica.accept("s", "a")
    ingress = Ingress(replica.hub, "a")
    log.append(token(0))
    await ingress.news()
    replica.hub.cancel(("s",), "a", keep=True)
    assert replica.abandoned == ["s"]
    # The engine ends it as cancelled; nobody is told that as its end.
    log.finish(Terminal(finish_reason="cancelled"))
    told = await ingress.parts()
    assert [part.terminal for part in told] == [UNKNOWN_STREAM]
    attached = replica.hub.attach("s", "b")
    assert attached.is_parked
    assert (attached.deltas, attached.terminal) == ((token(0),), None)
    assert replica.hub.num_live == 0
    other = Ingress(replica.hub, "b", {"s": maybe_here(1)})
    assert await other.parts() == []
    again = replica.accept("s", "b", answered=1, epoch=attached.submit.epoch)
    again.append(token(1))
    assert await other.parts() == [wire.Part("s", (token(1),))]
    replica.pass_s(KEEP_S)
    assert replica.hub.has("s")


async def test_a_refused_stream_leaves_no_end_that_a_later_one_of_its_name_would_take() -> None:
    replica = Replica()
    ingress = Ingress(replica.hub, "a")
    await ingress.news()
    for is_taken in (False, True):
        request = InferenceRequest(request_id="s", tenant="t", model="m", prompt="p")
        submit = wire.Submit(request=request, ingress="a", answered=())
        accepted = wire.Accepted(revision="r", prompt_tokens=1, queue_position=0)
        log = TokenLog()
        stream = BusStream(submit, accepted, log, lambda: None, is_admitted=False)
        replica.hub.add(stream)
        if is_taken:
            log.append(token(0))
            replica.hub.admitted(stream)
            assert await ingress.parts() == [wire.Part("s", (token(0),))]
        else:
            log.finish(Terminal(finish_reason="error"))
            assert await ingress.parts() == []
            replica.hub.refused(stream)
            assert await ingress.parts() == []
