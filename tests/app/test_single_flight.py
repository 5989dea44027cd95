"""Single flight: equal requests are one generation, and each of them is on its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.serving import Stream
from app.single_flight import SingleFlight, flight_key
from protocol.errors import ErrorInfo, InternalError, Overloaded, Replaced, ServingError
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import CacheOutcome, Terminal, Timing, TokenDelta, TokenLog, Usage
from tests.protocol.fakes import FakeClock

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
PATIENCE_S = 30.0


def ask(text: str = "hi", *, tenant: str = "red", **fields: Any) -> InferenceRequest:
    own = {name: fields.pop(name) for name in list(fields) if name in ("cache", "timeout_s")}
    ask.number += 1  # type: ignore[attr-defined]
    return InferenceRequest(
        request_id=f"r-{ask.number}",  # type: ignore[attr-defined]
        tenant=tenant,
        model="m",
        messages=(Message(role="user", content=text),),
        sampling=SamplingParams(**{"temperature": 0.0, **fields}),
        **own,
    )


ask.number = 0  # type: ignore[attr-defined]


def delta(seq: int) -> TokenDelta:
    return TokenDelta(seq, f"<{seq}>", (seq,))


def ended(reason: Any = "stop", error: ErrorInfo | None = None) -> Terminal:
    timing = Timing(queue_ms=1, ttft_ms=2, total_ms=3)
    return Terminal(finish_reason=reason, usage=USAGE, timing=timing, error=error)


REPLACED = ended("error", Replaced("it goes on elsewhere").info)


@dataclass
class Generation:
    """One run of the model."""

    request: InferenceRequest
    cache: CacheOutcome = field(default_factory=CacheOutcome)
    log: TokenLog = field(default_factory=TokenLog)
    cancels: int = 0

    def say(self, count: int = 1) -> None:
        for _ in range(count):
            self.log.append(delta(self.log.next_seq))

    def cancel(self) -> None:
        self.cancels += 1
        self.log.finish(
            Terminal(
                finish_reason="cancelled",
                usage=Usage(prompt_tokens=7, completion_tokens=self.log.next_seq),
            )
        )


class Model:
    """Opens streams when the test says so."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.num_openings = 0
        self.num_cancelled_openings = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: Exception | None = None
        self.cache = CacheOutcome()
        self.prepare: Callable[[Generation], object] = lambda generation: None

    def opener(self, request: InferenceRequest) -> Callable[[], Any]:
        async def open_stream() -> Stream:
            self.num_openings += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_cancelled_openings += 1
                raise
            if self.refusal is not None:
                raise self.refusal
            generation = Generation(request, self.cache)
            self.prepare(generation)
            self.generations.append(generation)
            return Stream(
                request=request,
                log=generation.log,
                cache=generation.cache,
                queue_position=4,
                cancel=generation.cancel,
                token="token-1",
            )

        return open_stream

    @property
    def only(self) -> Generation:
        (generation,) = self.generations
        return generation


@dataclass
class House:
    model: Model = field(default_factory=Model)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.flights = SingleFlight(clock=self.clock)

    async def open(self, request: InferenceRequest | None = None) -> Stream:
        request = request or ask()
        key = flight_key(request)
        assert key is not None
        async with asyncio.timeout(PATIENCE_S):
            return await self.flights.open(key, request, self.model.opener(request))

    async def open_many(self, count: int) -> list[Stream]:
        return list(await asyncio.gather(*(self.open() for _ in range(count))))


async def turn() -> None:
    """Lets everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


# ------------------------------------------------------------------ who is equal


def test_equal_requests_have_equal_keys_whatever_their_ids() -> None:
    assert flight_key(ask()) == flight_key(ask())


@pytest.mark.parametrize(
    "other",
    [
        ask("ho"),
        ask(tenant="blue"),
        ask(seed=1),
        ask(max_tokens=5),
        ask(logprobs=1),
        ask(timeout_s=3.0),
        ask(temperature=0.5, cache="sampled"),
    ],
    ids=["text", "tenant", "seed", "max_tokens", "logprobs", "timeout_s", "temperature"],
)
def test_whatever_may_change_the_answer_makes_another_key(other: InferenceRequest) -> None:
    assert flight_key(other) not in (None, flight_key(ask()))


@pytest.mark.parametrize(
    "request_",
    [
        ask(cache="bypass"),
        ask(cache="refresh"),
        ask(cache="only"),
        ask(temperature=1.0),
        ask(temperature=1.0, seed=3),
    ],
    ids=["bypass", "refresh", "only", "sampled", "sampled with a seed"],
)
def test_who_wants_an_answer_of_his_own_goes_alone(request_: InferenceRequest) -> None:
    assert flight_key(request_) is None


def test_sampled_answers_are_shared_by_those_who_take_stored_ones() -> None:
    assert flight_key(ask(temperature=1.0, cache="sampled")) is not None


# ------------------------------------------------------------------ sharing


async def test_twenty_equal_requests_are_one_generation_with_twenty_whole_answers() -> None:
    house = House()
    streams = await house.open_many(20)
    house.model.only.say(3)
    house.model.only.log.finish(ended())
    assert {stream.log.text for stream in streams} == {"<0><1><2>"}
    assert {stream.log.terminal.usage for stream in streams if stream.log.terminal} == {USAGE}
    assert len({stream.request.request_id for stream in streams}) == 20
    assert [stream.cache.outcome for stream in streams] == ["miss"] + ["coalesced"] * 19
    assert house.flights.coalesced_total == 19
    assert len(house.flights) == 0


async def test_others_are_not_merged() -> None:
    house = House()
    await asyncio.gather(
        house.open(), house.open(ask(tenant="blue")), house.open(ask(seed=1)), house.open(ask("ho"))
    )
    assert len(house.model.generations) == 4


async def test_a_late_joiner_gets_the_beginning_too() -> None:
    house = House()
    await house.open()
    house.model.only.say(2)
    late = await house.open()
    assert late.log.text == "<0><1>"
    house.model.only.say()
    house.model.only.log.finish(ended("length"))
    assert late.log.text == "<0><1><2>"
    assert late.log.terminal is not None
    assert late.log.terminal.finish_reason == "length"


async def test_a_follower_is_told_the_time_that_it_waited_itself() -> None:
    house = House()
    first = await house.open()
    house.clock.now += 10
    late = await house.open()
    house.clock.now += 0.5
    house.model.only.say()
    house.clock.now += 1.5
    house.model.only.log.finish(ended())
    assert first.log.terminal == ended()
    assert late.log.terminal is not None
    assert late.log.terminal.timing == Timing(queue_ms=0, ttft_ms=500, total_ms=2000)


async def test_a_request_after_the_end_is_not_merged() -> None:
    house = House()
    await house.open()
    house.model.only.log.finish(ended())
    stream = await house.open()
    assert stream.cache.outcome == "miss"
    assert len(house.model.generations) == 2


async def test_an_answer_from_the_cache_is_everyones_hit() -> None:
    house = House()
    house.model.cache = CacheOutcome(outcome="semantic", tier="L2", similarity=0.97)

    def replay(generation: Generation) -> None:
        generation.say(2)
        generation.log.finish(ended())

    house.model.prepare = replay
    streams = await house.open_many(3)
    assert [stream.cache.outcome for stream in streams] == ["semantic"] * 3
    assert [stream.log.text for stream in streams] == ["<0><1>"] * 3
    assert len({stream.request.request_id for stream in streams}) == 3
    assert house.flights.coalesced_total == 0
    assert len(house.flights) == 0


async def test_an_error_ends_everyone_and_is_not_kept() -> None:
    house = House()
    streams = await house.open_many(3)
    house.model.only.say()
    house.model.only.log.finish(ended("error", InternalError("broken").info))
    for stream in streams:
        assert stream.log.terminal is not None
        assert stream.log.terminal.error is not None
    await house.open()
    assert len(house.model.generations) == 2


async def test_a_time_out_rides_along_only_from_the_start() -> None:
    house = House()
    house.model.gate.clear()
    together = [asyncio.create_task(house.open(ask(timeout_s=5.0))) for _ in range(2)]
    await turn()
    house.model.gate.set()
    await asyncio.gather(*together)
    assert len(house.model.generations) == 1
    house.clock.now += 4
    late = await house.open(ask(timeout_s=5.0))
    assert len(house.model.generations) == 2
    assert late.cache.outcome == "miss"


async def test_resume_tokens_name_one_reader_each() -> None:
    flights = SingleFlight(token_of=lambda stream, request: f"{stream.token}/{request.request_id}")
    house = House()
    house.flights = flights
    first, second = ask(), ask()
    streams = await asyncio.gather(house.open(first), house.open(second))
    assert [stream.token for stream in streams] == ["token-1", f"token-1/{second.request_id}"]


# ------------------------------------------------------------------ leaving


async def test_the_leader_may_leave_and_the_others_get_everything() -> None:
    house = House()
    leader, follower = await house.open_many(2)
    house.model.only.say()
    leader.cancel()
    assert leader.log.terminal is not None
    assert leader.log.terminal.finish_reason == "cancelled"
    assert leader.log.terminal.usage.completion_tokens == 1
    house.model.only.say()
    house.model.only.log.finish(ended())
    assert leader.log.text == "<0>"
    assert follower.log.text == "<0><1>"
    assert house.model.only.cancels == 0


async def test_the_last_one_who_leaves_ends_the_generation() -> None:
    house = House()
    streams = await house.open_many(3)
    house.model.only.say()
    for stream in streams:
        assert house.model.only.cancels == 0
        stream.cancel()
        stream.cancel()
    assert house.model.only.cancels == 1
    last = streams[-1].log.terminal
    assert last is not None
    assert last.usage == Usage(prompt_tokens=7, completion_tokens=1)
    assert len(house.flights) == 0


async def test_nobody_joins_a_generation_that_was_given_up() -> None:
    house = House()
    stream = await house.open()
    stream.cancel()
    again = await house.open()
    assert again.log.terminal is None
    assert len(house.model.generations) == 2


async def test_a_cancel_after_the_end_is_harmless() -> None:
    house = House()
    streams = await house.open_many(2)
    house.model.only.log.finish(ended())
    for stream in streams:
        stream.cancel()
        assert stream.log.terminal is not None
        assert stream.log.terminal.finish_reason == "stop"
    assert house.model.only.cancels == 0


async def test_the_opening_goes_on_for_the_others_when_the_first_leaves() -> None:
    house = House()
    house.model.gate.clear()
    leader = asyncio.create_task(house.open())
    await turn()
    follower = asyncio.create_task(house.open())
    await turn()
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    house.model.gate.set()
    stream = await follower
    house.model.only.say()
    assert stream.log.text == "<0>"
    assert house.model.num_openings == 1


async def test_an_opening_that_nobody_waits_for_is_given_up() -> None:
    house = House()
    house.model.gate.clear()
    waiting = [asyncio.create_task(house.open()) for _ in range(3)]
    await turn()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await turn()
    assert house.model.num_cancelled_openings == 1
    assert len(house.flights) == 0


async def test_who_leaves_in_the_moment_of_the_opening_leaves_nothing_running() -> None:
    house = House()
    house.model.gate.clear()
    waiting = asyncio.create_task(house.open())
    await turn()
    house.model.prepare = lambda generation: bool(waiting.cancel())
    house.model.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await turn()
    assert house.model.only.cancels >= 1
    assert len(house.flights) == 0


async def test_the_opening_runs_in_the_context_of_the_house() -> None:
    whose = contextvars.ContextVar("whose", default="nobody's")
    whose.set("the house's")
    flights = SingleFlight()
    seen = []

    async def open_stream() -> Stream:
        seen.append(whose.get())
        whose.set("the stream's")
        return Stream(request=ask(), log=TokenLog())

    whose.set("a request's")
    await flights.open("a", ask(), open_stream)
    await flights.open("b", ask(), open_stream)
    assert seen == ["the house's"] * 2


# ------------------------------------------------------------------ refusals


async def test_a_refusal_is_everyones_own_error() -> None:
    house = House()
    house.model.refusal = Overloaded("full", retry_after_s=2)
    results = await asyncio.gather(*(house.open() for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [Overloaded] * 3
    assert len({id(result) for result in results}) == 3
    assert {result.retry_after_s for result in results if isinstance(result, Overloaded)} == {2}
    house.model.refusal = None
    await house.open()
    assert house.model.num_openings == 2


async def test_an_opening_that_is_cancelled_from_outside_is_an_error_and_no_cancel() -> None:
    house = House()
    house.model.refusal = asyncio.CancelledError()  # type: ignore[assignment]
    with pytest.raises(Overloaded):
        await house.open()
    assert len(house.flights) == 0


async def test_an_unforeseen_failure_is_told_too() -> None:
    house = House()
    house.model.refusal = RuntimeError("bug")
    results = await asyncio.gather(*(house.open() for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError] * 2


# ------------------------------------------------------------------ moved to another ingress


async def test_a_stream_alone_that_moves_away_ends_here() -> None:
    house = House()
    stream = await house.open()
    house.model.only.log.finish(REPLACED)
    assert stream.log.terminal == REPLACED
    assert len(house.flights) == 0


async def test_when_one_takes_the_generation_away_the_others_go_on_with_a_new_one() -> None:
    house = House()
    streams = await house.open_many(3)
    house.model.only.say(2)
    house.model.only.log.finish(REPLACED)
    await turn()
    second = house.model.generations[1]
    assert len(house.flights) == 1
    late = await house.open()
    second.say(1)
    assert {stream.log.text for stream in streams} == {"<0><1>"}
    # Under pressure pieces are merged, so that one may begin before and end behind the cut.
    second.log.append(TokenDelta(3, "<1><2><3>", (1, 2, 3)))
    second.log.finish(ended())
    for stream in streams:
        assert [d.seq for d in stream.log.deltas] == [0, 1, 3]
        assert [d.token_ids for d in stream.log.deltas] == [(0,), (1,), (2, 3)]
        assert stream.log.terminal is not None
    assert {stream.log.text for stream in (*streams, late)} == {"<0><1><2><3>"}
    assert len(house.flights) == 0


@pytest.mark.parametrize("text", ["<0><9>", "<0>"], ids=["another text", "a shorter one"])
async def test_another_answer_is_never_joined_to_the_first(text: str) -> None:
    house = House()
    streams = await house.open_many(2)
    house.model.only.say(2)
    house.model.only.log.finish(REPLACED)
    await turn()
    second = house.model.generations[1]
    second.log.append(TokenDelta(0, text, (0,)))
    second.log.finish(ended())
    for stream in streams:
        assert stream.log.text == "<0><1>"
        assert stream.log.terminal is not None
        assert stream.log.terminal.error is not None
        assert stream.log.terminal.error.retryable


async def test_a_new_generation_that_is_refused_ends_those_who_stayed() -> None:
    house = House()
    streams = await house.open_many(2)
    house.model.only.say(2)
    house.model.refusal = Overloaded("full")
    house.model.only.log.finish(REPLACED)
    await turn()
    for stream in streams:
        assert stream.log.terminal is not None
        assert stream.log.terminal.error == Overloaded("full").info
    assert len(house.flights) == 0


async def test_those_who_leave_before_the_new_generation_leave_nothing_running() -> None:
    house = House()
    streams = await house.open_many(2)
    house.model.gate.clear()
    house.model.only.log.finish(REPLACED)
    await turn()
    for stream in streams:
        stream.cancel()
    await turn()
    assert house.model.num_cancelled_openings == 1
    assert len(house.flights) == 0


# ------------------------------------------------------------------ whatever happens

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "join", "drop", "cancel", "say", "end", "fail", "gate", "turn", "move"]
        ),
        st.integers(0, 7),
    ),
    max_size=40,
)


@given(STEPS)
def test_nobody_hangs_and_nothing_runs_for_nobody(steps: list[Step]) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[Step]) -> None:
    house = House()
    model = house.model
    joins: list[asyncio.Task[Stream]] = []
    cancelled: list[Stream] = []

    def streams() -> list[Stream]:
        return [
            task.result()
            for task in joins
            if task.done() and not task.cancelled() and task.exception() is None
        ]

    def alive() -> list[Generation]:
        return [generation for generation in model.generations if generation.log.terminal is None]

    for what, number in steps:
        if what == "join":
            joins.append(asyncio.create_task(house.open()))
        elif what == "drop" and joins:
            joins[number % len(joins)].cancel()
        elif what == "cancel" and streams():
            stream = streams()[number % len(streams())]
            stream.cancel()
            assert stream.log.terminal is not None, "a cancel ends its own reader at once"
            cancelled.append(stream)
        elif what == "gate":
            model.gate.set() if number % 2 else model.gate.clear()
        elif what == "turn":
            await asyncio.sleep(0)
        elif alive():
            if what == "say":
                alive()[-1].say(1 + number % 3)
            elif what == "end":
                alive()[-1].log.finish(ended())
            elif what == "fail":
                alive()[-1].log.finish(ended("error", InternalError("broken").info))
            elif what == "move":
                alive()[-1].log.finish(REPLACED)
        assert len(alive()) <= 1, "one generation at a time"

    model.gate.set()
    await asyncio.wait_for(_settled(joins), PATIENCE_S)
    readers = [stream for stream in streams() if stream.log.terminal is None]
    running = alive()
    assert bool(readers) == bool(running), "it runs exactly while somebody reads"
    assert len(house.flights) == len(running)
    for generation in running:
        generation.say()
        generation.log.finish(ended())
    for stream in streams():
        terminal = stream.log.terminal
        assert terminal is not None, "nobody hangs"
        text = "".join(f"<{seq}>" for seq in range(stream.log.next_seq))
        assert stream.log.text == text, "no gap and nothing twice"
        if stream in readers:
            assert terminal.finish_reason == "stop" or terminal.error is not None
    assert len(house.flights) == 0
    for generation in model.generations:
        if generation.cancels:
            assert generation.log.terminal is not None


async def _settled(joins: list[asyncio.Task[Stream]]) -> None:
    results = await asyncio.gather(*joins, return_exceptions=True)
    assert all(
        isinstance(result, Stream | asyncio.CancelledError | ServingError) for result in results
    )
    await turn()


# ------------------------------------------------------------------ who means the same


async def begin_join(house: House, request: InferenceRequest) -> asyncio.Task[Stream | None]:
    key = flight_key(ask())
    assert key is not None
    joining = asyncio.create_task(house.flights.join(key, request))
    await turn()
    return joining


async def test_who_means_the_same_rides_from_the_first_words_on() -> None:
    house = House()
    leader = await house.open()
    joining = await begin_join(house, ask("hello"))
    assert not joining.done()
    house.model.only.say()
    stream = await joining
    assert stream is not None
    house.model.only.say(2)
    assert stream.log.text == "<0><1><2>"
    # The leader's leaving changes nothing for who is left.
    leader.cancel()
    assert house.model.only.cancels == 0
    house.model.only.log.finish(ended())
    assert stream.log.terminal is not None
    assert stream.log.terminal.finish_reason == "stop"


async def test_nobody_rides_on_what_is_not_there() -> None:
    house = House()
    assert await house.flights.join("none", ask()) is None


@pytest.mark.parametrize("reason", ["error", "cancelled", "length", "tool_calls"])
@pytest.mark.parametrize("words", [0, 2])
async def test_an_answer_that_ends_badly_before_the_ride_is_nobodys(
    reason: str, words: int
) -> None:
    house = House()
    await house.open()
    joining = await begin_join(house, ask("hello"))
    house.model.only.say(words)
    house.model.only.log.finish(
        ended(reason, InternalError("x").info if reason == "error" else None)
    )
    assert await joining is None
    assert len(house.flights) == 0


async def test_a_refused_opening_is_not_the_riders() -> None:
    house = House()
    house.model.gate.clear()
    opening = asyncio.create_task(house.open())
    await turn()
    joining = await begin_join(house, ask("hello"))
    house.model.refusal = Overloaded("full", retry_after_s=1)
    house.model.gate.set()
    with pytest.raises(Overloaded):
        await opening
    assert await joining is None


async def test_who_leaves_while_waiting_for_words_leaves_the_flight() -> None:
    house = House()
    leader = await house.open()
    joining = await begin_join(house, ask("hello"))
    joining.cancel()
    await turn()
    leader.cancel()
    assert house.model.only.cancels == 1
