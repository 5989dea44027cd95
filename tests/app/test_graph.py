"""The graph: cache first, then the model, and back into the cache; without Serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.front_cache import FrontCache
from app.graph import Graph
from app.model_desk import INFO_MAX_AGE_S
from app.ports import CachePort
from app.serving import Stream
from deployments import wire
from deployments.replica_board import ReplicaBoard, ReplicaGone
from protocol.errors import (
    CacheMiss,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServingError,
)
from protocol.request import InferenceRequest, Message
from protocol.token_log import CacheOutcome, Terminal, Timing, TokenDelta, Usage
from tests.app.bus_fakes import FakeMessages
from tests.app.stack import (
    INFO,
    QUESTION,
    Stack,
    answer,
    ask,
    eventually,
    running_stack,
    same_for_all,
    talks_on,
    terminal_of,
)
from tests.app.stack import graph_over as stack_graph
from tests.protocol.fakes import FakeClock

REWORDED = "Tell me the capital of France."
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


async def mark(stack: Stack, request: InferenceRequest) -> str:
    return (await answer(stack.graph, request)).cache.outcome


# ------------------------------------------------------------------ fakes at the two ports


def accepted(revision: str = INFO.revision) -> wire.SubmitReply:
    first = wire.Accepted(revision=revision, prompt_tokens=3, queue_position=2)
    return wire.SubmitReply(replica="m1", accepted=first)


def refused(error: ServingError) -> wire.SubmitReply:
    return wire.SubmitReply(replica="m1", refused=error.info)


def said(*texts: str, start: int = 0) -> wire.Part:
    return wire.Part("", tuple(TokenDelta(start + i, text, (i,)) for i, text in enumerate(texts)))


def ended(reason: Any = "stop", error: ServingError | None = None) -> wire.Part:
    timing = Timing(queue_ms=1.0, ttft_ms=2.0, total_ms=3.0)
    info = None if error is None else error.info
    return wire.Part("", (), Terminal(finish_reason=reason, usage=USAGE, timing=timing, error=info))


DIES = ReplicaGone("m1 died: secret")
HANGS = "hangs"
Step = wire.Part | Exception
Reply = wire.SubmitReply | Exception | bytes | str


@dataclass
class FakeModel:
    """One replica whose next answers are given: how it replies, and what it says on the bus."""

    steps: list[Step] = field(default_factory=lambda: [said("He", "llo"), ended()])
    reply: Reply = field(default_factory=accepted)
    info_bytes: bytes = field(default_factory=lambda: wire.encode(INFO))
    info_error: Exception | None = None
    num_info_calls: int = 0
    submits: list[wire.Submit] = field(default_factory=list)
    num_given_up: int = 0
    """Submissions whose caller left before the reply."""
    cancels: list[str] = field(default_factory=list)
    _bus: FakeMessages | None = None
    _unsaid: list[str] = field(default_factory=list)

    async def submit(self, payload: bytes, route: wire.Route) -> bytes:
        submit = wire.decode_submit(payload)
        self.submits.append(submit)
        if isinstance(self.reply, Exception):
            raise self.reply
        if isinstance(self.reply, str):
            try:
                await asyncio.Event().wait()
            finally:
                self.num_given_up += 1
        if isinstance(self.reply, bytes):
            return self.reply
        assert isinstance(self.reply, wire.SubmitReply)
        if self.reply.accepted is not None:
            self._unsaid.append(submit.request.request_id)
            self._speak()
        return wire.encode(self.reply)

    def bus(self, ingress: str, positions: dict[str, int], replica: str) -> FakeMessages:
        self._bus = FakeMessages(positions)
        self._speak()
        return self._bus

    def repeat(self, request: InferenceRequest) -> None:
        """Says the steps once more, for a stream that was accepted before."""
        self._unsaid.append(request.request_id)
        self._speak()

    def _speak(self) -> None:
        if self._bus is None:
            return
        while self._unsaid:
            name = self._unsaid.pop(0)
            for step in self.steps:
                if isinstance(step, Exception):
                    self._bus.fail(step)
                else:
                    self._bus.say(wire.Part(name, step.deltas, step.terminal))

    async def cancel(
        self, names: tuple[str, ...], ingress: str, replica: str, *, keep: bool = False
    ) -> None:
        self.cancels += names

    async def renew(self, ingress: str, replica: str) -> None:
        raise NotImplementedError

    async def find(self, name: str, replica: str) -> bytes:
        raise NotImplementedError

    async def attach(self, name: str, ingress: str, replica: str) -> bytes:
        raise NotImplementedError

    async def info(self) -> bytes:
        self.num_info_calls += 1
        if self.info_error is not None:
            raise self.info_error
        return self.info_bytes

    async def stats(self) -> list[dict[str, Any]]:
        return [{"running": 0}]


@dataclass
class FakeCache:
    """A cache that answers every look-up alike, and notes what it is to store."""

    reply: bytes | Exception | None = None
    store_error: Exception | None = None
    lookups: list[wire.LookupCall] = field(default_factory=list)
    stores: list[wire.StoreCall] = field(default_factory=list)

    async def lookup(self, payload: bytes) -> bytes:
        self.lookups.append(wire.decode_lookup_call(payload))
        if self.reply is None:
            await asyncio.Event().wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        assert self.reply is not None
        return self.reply

    async def store(self, payload: bytes) -> None:
        if self.store_error is not None:
            raise self.store_error
        self.stores.append(wire.decode_store_call(payload))

    async def check(self, payload: bytes) -> bytes:
        raise NotImplementedError

    async def manage(self, payload: bytes) -> list[bytes]:
        raise NotImplementedError

    async def epochs(self) -> list[str]:
        raise NotImplementedError

    async def stats(self) -> list[dict[str, Any]]:
        raise ConnectionError("no cache replica")


MISSED = wire.encode(wire.LookupReply(outcome=CacheOutcome(reason="no equal prompt")))


Build = Callable[..., Graph]


@pytest.fixture
async def graph_over() -> AsyncIterator[Callable[..., Graph]]:
    """Builds graphs that are closed after the test; a replica that is lost ends its streams."""
    graphs: list[Graph] = []

    def build(model: FakeModel, cache: CachePort | None = None, **options: Any) -> Graph:
        board = ReplicaBoard()
        board.set_replicas(["m1"])
        graphs.append(stack_graph(model, cache, board, **{"max_failovers": 0, **options}))
        return graphs[-1]

    yield build
    for graph in graphs:
        await graph.close()


# ------------------------------------------------------------------ the way of a miss


async def test_a_miss_is_generated_and_kept_after_its_natural_end(graph_over: Build) -> None:
    model, cache = FakeModel(), FakeCache(MISSED)
    stream = await answer(graph_over(model, cache), ask())
    assert stream.log.text == "Hello"
    assert stream.log.terminal is not None
    assert stream.log.terminal.usage == USAGE
    assert stream.queue_position == 2
    assert stream.cache == CacheOutcome(reason="no equal prompt")
    (call,) = cache.stores
    assert (call.model_revision, call.completion_tokens) == (INFO.revision, 2)
    assert wire.decode_stored(call.stored).deltas == stream.log.deltas


@pytest.mark.parametrize(
    "steps",
    [
        [said("He"), ended("cancelled")],
        [said("He"), ended("tool_calls")],
        [said("He"), ended("error")],
        [said("He"), DIES],
    ],
    ids=["cancelled", "tool calls", "error", "death"],
)
async def test_an_answer_that_did_not_end_by_itself_is_not_kept(
    graph_over: Build, steps: list[Step]
) -> None:
    cache = FakeCache(MISSED)
    await answer(graph_over(FakeModel(steps), cache), ask())
    assert cache.stores == []


async def test_the_answer_of_another_model_than_was_told_is_not_kept(graph_over: Build) -> None:
    cache = FakeCache(MISSED)
    await answer(graph_over(FakeModel(reply=accepted(revision="rev-2")), cache), ask())
    assert cache.stores == []


async def test_an_answer_that_its_limit_cut_is_kept_as_such(graph_over: Build) -> None:
    cache = FakeCache(MISSED)
    await answer(graph_over(FakeModel([said("He"), ended("length")]), cache), ask())
    assert [stored.is_truncated for stored in cache.stores] == [True]


async def test_an_answer_is_kept_though_the_replica_dies_after_its_last_record(
    graph_over: Build,
) -> None:
    cache = FakeCache(MISSED)
    steps: list[Step] = [said("He"), ended(), DIES]
    stream = await answer(graph_over(FakeModel(steps), cache), ask())
    assert stream.log.terminal is not None
    assert stream.log.terminal.finish_reason == "stop"
    assert len(cache.stores) == 1


async def test_a_failing_store_leaves_the_answer_alone(graph_over: Build) -> None:
    graph = graph_over(FakeModel(), FakeCache(MISSED, store_error=ConnectionError("gone")))
    assert (await answer(graph, ask())).log.text == "Hello"
    assert graph.own_stats().cache_call_errors == 1


@pytest.mark.parametrize(
    ("policy", "temperature", "looks_up", "stores"),
    [
        ("auto", 0.0, True, True),
        ("auto", 0.7, False, False),
        ("bypass", 0.0, False, False),
        ("refresh", 0.0, False, True),
        ("sampled", 0.7, True, True),
        ("sampled", 0.0, True, True),
    ],
)
async def test_the_policy_says_who_may_look_up_and_store(
    graph_over: Build, policy: str, temperature: float, looks_up: bool, stores: bool
) -> None:
    cache = FakeCache(MISSED)
    await answer(graph_over(FakeModel(), cache), ask(cache=policy, temperature=temperature))
    assert (bool(cache.lookups), bool(cache.stores)) == (looks_up, stores)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_only_from_the_cache_means_no_model(graph_over: Build, temperature: float) -> None:
    model = FakeModel()
    with pytest.raises(CacheMiss):
        await graph_over(model, FakeCache(MISSED)).open_stream(
            ask(cache="only", temperature=temperature)
        )
    with pytest.raises(CacheMiss):
        await graph_over(model).open_stream(ask(cache="only", temperature=temperature))
    assert model.submits == []


# ------------------------------------------------------------------ hits, and caches that fail


def hit(outcome: CacheOutcome) -> bytes:
    stored = wire.StoredStream(
        deltas=(TokenDelta(0, "Bon", (7,)), TokenDelta(2, "jour", (8, 9))),
        terminal=Terminal(finish_reason="stop", usage=USAGE, timing=Timing(total_ms=9e9)),
    )
    return wire.encode(wire.LookupReply(outcome=outcome, stored=wire.encode(stored)))


@pytest.mark.parametrize("outcome", ["exact", "semantic"])
async def test_a_hit_is_replayed_with_its_own_usage_and_the_time_of_now(
    graph_over: Build, outcome: Any
) -> None:
    clock = FakeClock()
    marked = CacheOutcome(outcome=outcome, tier="L2", similarity=0.97, age_s=5.0)
    model, cache = FakeModel(), FakeCache(hit(marked))

    class LateCache(FakeCache):
        async def lookup(self, payload: bytes) -> bytes:
            clock.now += 0.004
            return await super().lookup(payload)

    cache = LateCache(cache.reply)
    stream = await graph_over(model, cache, clock=clock).open_stream(ask())
    assert stream.log.text == "Bonjour"
    assert [delta.seq for delta in stream.log.deltas] == [0, 2]
    assert stream.cache == marked
    assert stream.log.terminal is not None
    assert stream.log.terminal.usage == USAGE
    assert stream.log.terminal.timing.total_ms == pytest.approx(4.0)
    assert stream.log.terminal.timing.ttft_ms == pytest.approx(4.0)
    assert model.submits == []
    stream.cancel()
    assert stream.log.terminal.finish_reason == "stop"
    assert cache.stores == []


def rubbish_inside() -> bytes:
    reply = wire.LookupReply(outcome=CacheOutcome(outcome="exact"), stored=b"\x00rubbish")
    return wire.encode(reply)


def falling_numbers() -> bytes:
    stored = wire.StoredStream(
        deltas=(TokenDelta(5, "b"), TokenDelta(1, "a")), terminal=Terminal(finish_reason="stop")
    )
    reply = wire.LookupReply(outcome=CacheOutcome(outcome="exact"), stored=wire.encode(stored))
    return wire.encode(reply)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ConnectionError("no replica"), "cache failed"),
        (b"", "cache failed"),
        (b"\xc1rubbish", "cache failed"),
        (rubbish_inside(), "cache failed"),
        (falling_numbers(), "cache failed"),
        (None, "cache timed out"),
    ],
    ids=["down", "empty", "rubbish", "rubbish within", "numbers that fall", "hangs"],
)
async def test_a_cache_that_fails_is_a_miss(
    graph_over: Build, reply: bytes | Exception | None, reason: str
) -> None:
    graph = graph_over(FakeModel(), FakeCache(reply), lookup_timeout_s=0.02)
    stream = await answer(graph, ask())
    assert stream.log.text == "Hello"
    assert stream.cache == CacheOutcome(reason=reason)
    assert graph.own_stats().cache_call_errors == 1


@pytest.mark.parametrize(
    "reply", [ConnectionError("no replica"), b"\xc1rubbish", None], ids=["down", "rubbish", "hangs"]
)
async def test_a_cache_that_goes_on_failing_is_left_alone_until_it_is_well(
    graph_over: Build, reply: bytes | Exception | None
) -> None:
    clock = FakeClock()
    cache = FakeCache(reply)
    graph = graph_over(FakeModel(), cache, clock=clock, lookup_timeout_s=0.05)
    for number in range(10):
        stream = await answer(graph, ask(f"question {number}"))
        assert stream.log.text == "Hello"
        assert stream.cache.outcome == "miss"
    assert len(cache.lookups) == 5
    assert stream.cache.reason == "cache is switched off for a moment"
    assert graph.own_stats().breaker["state"] == "open"
    clock.now += 5
    await answer(graph, ask("is it well again?"))
    await eventually(lambda: graph.own_stats().breaker["state"] == "open")
    await answer(graph, ask("not yet"))
    assert len(cache.lookups) == 6
    clock.now += 10
    cache.reply = hit(CacheOutcome(outcome="exact", tier="L2"))
    for number in range(3):
        stream = await answer(graph, ask(f"question {number}"))
        assert stream.cache.outcome == "exact"
    assert graph.own_stats().breaker["state"] == "closed"
    assert len(cache.lookups) == 9


# ------------------------------------------------------------------ models that fail


async def test_a_refusal_keeps_its_code_and_its_figures(graph_over: Build) -> None:
    error = ContextLengthExceeded("prompt has 9 tokens, the model takes 8", limit=8)
    model = FakeModel(reply=refused(error))
    with pytest.raises(ContextLengthExceeded, match="prompt has 9 tokens") as caught:
        await graph_over(model).open_stream(ask())
    assert caught.value.limit == 8


@pytest.mark.parametrize(
    "reply",
    [ConnectionError("died: secret"), b"\xc1", HANGS, refused(Overloaded("full"))],
    ids=["dies", "rubbish", "hangs", "full"],
)
async def test_a_model_that_does_not_accept_ends_the_request(
    graph_over: Build, reply: Reply
) -> None:
    model = FakeModel(reply=reply)
    with pytest.raises(Overloaded) as caught:
        await graph_over(model, accept_timeout_s=0.02).open_stream(ask())
    assert caught.value.retryable
    assert "secret" not in caught.value.message
    assert model.num_given_up == (reply == HANGS)


@pytest.mark.parametrize(
    "last",
    [DIES, said("again", start=9), ended("error", Overloaded("the engine is shutting down"))],
    ids=["dies", "a hole", "shuts down"],
)
async def test_a_model_that_fails_in_mid_stream_leaves_the_text_and_one_error(
    graph_over: Build, last: Step
) -> None:
    clock = FakeClock()
    model = FakeModel([said("He", "llo")])
    stream = await graph_over(model, clock=clock).open_stream(ask())
    await stream.log.cursor().wait()
    clock.now += 1.5
    model.steps = [last]
    model.repeat(stream.request)
    terminal = await terminal_of(stream.log)
    assert stream.log.text == "Hello"
    assert terminal.finish_reason == "error"
    assert terminal.error is not None
    assert terminal.error.code == "internal"
    assert terminal.error.retryable
    assert "secret" not in terminal.error.message
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert terminal.timing.total_ms == pytest.approx(1500)


async def test_numbers_that_come_again_are_passed_over(graph_over: Build) -> None:
    model = FakeModel([said("He", "llo"), said("He", "llo", "!"), ended()])
    stream = await answer(graph_over(model), ask())
    assert stream.log.text == "Hello!"


async def test_no_more_requests_are_taken_than_may_be_pending(graph_over: Build) -> None:
    model = FakeModel([said("He")])
    graph = graph_over(model, max_pending=2)
    streams = [await graph.open_stream(ask(f"question {i}")) for i in range(2)]
    with pytest.raises(Overloaded, match="2 requests are running or waiting") as caught:
        await graph.open_stream(ask("one more"))
    assert caught.value.limit == 2
    streams[0].cancel()
    await graph.open_stream(ask("one more"))
    assert len(model.submits) == 3


# ------------------------------------------------------------------ cancelling


async def test_a_cancel_before_the_reply_reaches_the_model(graph_over: Build) -> None:
    model = FakeModel(reply=HANGS)
    opening = asyncio.create_task(graph_over(model).open_stream(ask()))
    await eventually(lambda: model.submits)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await eventually(lambda: model.num_given_up == 1)


async def test_a_cancel_in_the_look_up_starts_no_model(graph_over: Build) -> None:
    model, cache = FakeModel(), FakeCache(None)
    opening = asyncio.create_task(graph_over(model, cache).open_stream(ask()))
    await eventually(lambda: cache.lookups)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert model.submits == []


@pytest.mark.parametrize("has_text", [False, True])
async def test_a_cancel_ends_the_log_at_once_and_for_good(
    graph_over: Build, has_text: bool
) -> None:
    model = FakeModel([said("He", "llo")] if has_text else [])
    cache = FakeCache(MISSED)
    graph = graph_over(model, cache)
    stream = await graph.open_stream(ask())
    if has_text:
        await stream.log.cursor().wait()
    stream.cancel()
    terminal = stream.log.terminal
    assert terminal is not None
    assert terminal.finish_reason == "cancelled"
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=2 if has_text else 0)
    stream.cancel()
    await eventually(lambda: model.cancels == [stream.request.request_id])
    assert stream.log.terminal is terminal
    assert stream.log.next_seq == terminal.usage.completion_tokens
    assert cache.stores == []


async def test_a_cancel_after_the_end_changes_nothing(graph_over: Build) -> None:
    cache = FakeCache(MISSED)
    stream = await answer(graph_over(FakeModel(), cache), ask())
    stream.cancel()
    assert stream.log.terminal is not None
    assert stream.log.terminal.finish_reason == "stop"
    assert len(cache.stores) == 1


# ------------------------------------------------------------------ which model


async def test_another_model_is_not_found(graph_over: Build) -> None:
    model = FakeModel()
    with pytest.raises(ModelNotFound, match="maker/other") as caught:
        await graph_over(model).open_stream(ask(model="maker/other"))
    assert caught.value.param == "model"
    assert model.submits == []


OTHER_INFO = wire.ModelInfo(id="new", revision="r", context_length=1, created=1, backend="mock")


async def test_the_model_is_asked_what_it_is_now_and_then(graph_over: Build) -> None:
    model, clock = FakeModel(), FakeClock()
    graph = graph_over(model, clock=clock)
    for _ in range(3):
        await answer(graph, ask())
    assert model.num_info_calls == 1
    clock.now += INFO_MAX_AGE_S
    model.info_bytes = wire.encode(OTHER_INFO)
    assert (await graph.model_info()).id == "new"
    assert model.num_info_calls == 2


async def test_what_the_model_was_holds_while_nobody_tells_what_it_is(
    graph_over: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.model_desk.INFO_PATIENCE_S", 0.01)
    model, clock = FakeModel(), FakeClock()
    graph = graph_over(model, clock=clock)
    await answer(graph, ask())
    clock.now += INFO_MAX_AGE_S
    model.info_error = ConnectionError("no replica")
    assert (await answer(graph, ask())).log.text == "Hello"
    told = asyncio.Event()

    async def hang() -> bytes:
        model.num_info_calls += 1
        await told.wait()
        return wire.encode(OTHER_INFO)

    model.info = hang  # type: ignore[method-assign]
    num_calls = model.num_info_calls
    for _ in range(3):
        assert (await answer(graph, ask())).log.text == "Hello"
    assert model.num_info_calls == num_calls + 1
    told.set()
    await eventually(lambda: graph._model_desk._asking is None)
    assert (await graph.model_info()).id == "new"


async def test_readiness_asks_every_time_and_tells_of_a_model_that_does_not_answer(
    graph_over: Build,
) -> None:
    model = FakeModel()
    graph = graph_over(model)
    await graph.check_ready()
    await graph.check_ready()
    assert model.num_info_calls == 2
    model.info_error = ConnectionError("no replica")
    with pytest.raises(Overloaded):
        await graph.check_ready()


async def test_stats_leave_out_who_does_not_answer(graph_over: Build) -> None:
    stats = await graph_over(FakeModel(), FakeCache()).stats()
    assert (list(stats.models), list(stats.caches)) == ([{"running": 0}], [])


# ------------------------------------------------------------------ on the real engine and cache


async def test_the_second_time_is_an_exact_hit_and_a_rewording_a_semantic_one() -> None:
    async with running_stack() as stack:
        first = await answer(stack.graph, ask())
        second = await answer(stack.graph, ask())
        third = await answer(stack.graph, ask(REWORDED))
    assert QUESTION in first.log.text
    assert [stream.cache.outcome for stream in (first, second, third)] == [
        "miss",
        "exact",
        "semantic",
    ]
    assert first.log.text == second.log.text == third.log.text
    assert first.log.terminal is not None
    assert second.log.terminal is not None
    assert first.log.terminal.usage == second.log.terminal.usage
    assert second.request.request_id != first.request.request_id
    assert third.cache.tier == "L2"
    assert third.cache.similarity == pytest.approx(1.0)


async def test_an_answer_cut_by_its_length_is_not_an_answer() -> None:
    async with running_stack() as stack:
        short = await answer(stack.graph, ask(max_tokens=5))
        full = await answer(stack.graph, ask())
        reworded = await answer(stack.graph, ask(REWORDED))
        tight = await answer(stack.graph, ask(max_tokens=6))
    assert short.log.terminal is not None
    assert short.log.terminal.finish_reason == "length"
    assert full.cache.outcome == "miss"
    assert len(full.log.text) > len(short.log.text)
    assert reworded.log.text == full.log.text
    # Neither is a whole answer given to one who asked for less.
    assert tight.cache.outcome == "miss"
    assert tight.log.terminal is not None
    assert tight.log.terminal.usage.completion_tokens == 6


async def test_a_refused_prompt_is_refused_again() -> None:
    async with running_stack(max_model_len=64) as stack:
        for _ in range(2):
            with pytest.raises(ContextLengthExceeded):
                await stack.graph.open_stream(ask("long " * 100))
        assert (await answer(stack.graph, ask("short"))).cache.outcome == "miss"


async def test_what_was_refused_for_lack_of_room_is_computed_afresh_later() -> None:
    async with running_stack(
        talks_on, token_interval_s=0.002, max_num_seqs=1, max_waiting=0
    ) as stack:
        long = await stack.graph.open_stream(ask("Speak."))
        with pytest.raises(Overloaded) as caught:
            await stack.graph.open_stream(ask())
        assert caught.value.retry_after_s is not None
        long.cancel()
        await stack.until_idle()
        later = await answer(stack.graph, ask(max_tokens=3))
        assert later.cache.outcome == "miss"
        assert later.log.next_seq == 3


async def test_a_cancelled_answer_is_not_kept_and_its_slot_is_free() -> None:
    async with running_stack(talks_on, token_interval_s=0.002) as stack:
        stream = await stack.graph.open_stream(ask())
        await stream.log.cursor().wait()
        stream.cancel()
        await stack.until_idle()
        generated = stack.num_generated
        assert await mark(stack, ask(max_tokens=2)) == "miss"
        assert stack.num_generated == generated + 2


async def test_a_cancel_while_queued_frees_the_place() -> None:
    async with running_stack(
        talks_on, token_interval_s=0.002, max_num_seqs=1, max_waiting=1
    ) as stack:
        first = await stack.graph.open_stream(ask("Speak."))
        queued = await stack.graph.open_stream(ask("Speak too."))
        assert queued.queue_position is not None
        queued.cancel()
        await eventually(lambda: stack.num_live == 1)
        assert first.log.terminal is None
        first.cancel()
        await stack.until_idle()


async def test_a_request_that_cannot_be_tokenised_harms_nobody() -> None:
    async with running_stack() as stack:
        with pytest.raises(InvalidRequest):
            await stack.graph.open_stream(ask(stop_token_ids=(10**6,)))
        assert QUESTION in (await answer(stack.graph, ask())).log.text


# ------------------------------------------------------------------ partitions

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
PLAIN: dict[str, Any] = {"max_tokens": 512}
CHANGES: dict[str, dict[str, Any]] = {
    "stop": {"stop": ("\x00",)},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "min_tokens": {"min_tokens": 1},
    "seed": {"seed": 4},
    "logit_bias": {"logit_bias": {65: 1.0}},
    "logprobs": {"logprobs": 1},
    "stop_token_ids": {"stop_token_ids": (0,)},
    "sampled": {"temperature": 1.2, "seed": 3, "cache": "sampled"},
    "sampled with another seed": {"temperature": 1.2, "seed": 4, "cache": "sampled"},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "none"},
    "response_format": {"response_format": {"type": "text"}},
}


async def test_every_changed_parameter_is_a_miss() -> None:
    async with running_stack() as stack:
        await answer(stack.graph, ask(**PLAIN))
        assert await mark(stack, ask(**PLAIN)) == "exact"
        for name, change in CHANGES.items():
            assert await mark(stack, ask(**PLAIN | change)) == "miss", name
            assert await mark(stack, ask(REWORDED, **PLAIN | change)) == "semantic", name
        for name, change in CHANGES.items():
            assert await mark(stack, ask(**PLAIN | change)) == "exact", name


@pytest.mark.parametrize("policy", ["auto", "refresh"])
async def test_sampled_answers_are_not_replayed_unless_asked_for(policy: str) -> None:
    async with running_stack() as stack:
        marks = [await mark(stack, ask(temperature=1.0, cache=policy)) for _ in range(3)]
    assert marks == ["miss"] * 3


async def test_bypass_reads_nothing_and_leaves_nothing() -> None:
    async with running_stack() as stack:
        assert await mark(stack, ask(cache="bypass")) == "miss"
        assert await mark(stack, ask()) == "miss"
        assert await mark(stack, ask(cache="bypass")) == "miss"
        assert await mark(stack, ask(cache="refresh")) == "miss"
        assert await mark(stack, ask(cache="only")) == "exact"


def surroundings(text: str) -> list[InferenceRequest]:
    """One question in five surroundings."""
    turn = Message(role="user", content=text)

    def under(system: str) -> InferenceRequest:
        return ask(messages=[Message(role="system", content=system), turn])

    return [
        ask(text),
        under("You are a pirate."),
        under("You are a lawyer."),
        ask(text, response_format={"type": "json_object"}),
        ask(text, tools=[TOOL]),
    ]


SYSTEMS = 5


@pytest.mark.parametrize("stored", range(SYSTEMS))
async def test_an_entry_is_reused_only_in_equal_surroundings(stored: int) -> None:
    def json_answer(seq: Any) -> list[int]:
        return list(b'{"a": "b"}')

    async with running_stack(json_answer) as stack:
        assert await mark(stack, surroundings(QUESTION)[stored]) == "miss"
        reworded = await asyncio.gather(
            *(stack.graph.open_stream(request) for request in surroundings(REWORDED))
        )
        outcomes = [stream.cache.outcome for stream in reworded]
        assert outcomes == ["semantic" if i == stored else "miss" for i in range(SYSTEMS)]


async def test_earlier_turns_keep_the_same_last_question_apart() -> None:
    def after(reply: str) -> InferenceRequest:
        turns = [("user", "Name a city."), ("assistant", reply), ("user", "How large is it?")]
        return ask(messages=[Message(role=role, content=text) for role, text in turns])  # type: ignore[arg-type]

    async with running_stack() as stack:
        assert await mark(stack, after("Paris.")) == "miss"
        assert await mark(stack, after("Rome.")) == "miss"
        assert await mark(stack, after("Paris.")) == "exact"


async def test_a_raw_prompt_hits_by_every_character_or_not_at_all() -> None:
    async with running_stack() as stack:
        assert await mark(stack, ask(prompt="Once upon")) == "miss"
        assert await mark(stack, ask(prompt="Once upon ")) == "miss"
        assert await mark(stack, ask("Once upon")) == "miss"
        assert await mark(stack, ask(prompt="Once upon")) == "exact"


async def test_a_tenant_never_receives_what_another_stored() -> None:
    secret = "My account code is ORCHID-7. Describe how I should store it."
    async with running_stack() as stack:
        await answer(stack.graph, ask(secret, tenant="a"))
        for text in (
            secret,
            "My account code. Describe how I should store it.",
            f"Please: {secret}",
        ):
            reply = await answer(stack.graph, ask(text, tenant="b"))
            assert reply.cache.outcome == "miss"
            assert ("ORCHID" in reply.log.text) == ("ORCHID" in text)
        assert await mark(stack, ask(secret, tenant="a")) == "exact"


async def test_tenant_names_are_data() -> None:
    names = [
        "blue",
        "red|blue",
        "re*",
        "red} @x:{blue",
        "Red",
        "red ",
        " red",
        "team:eu/1",
        "r\0ed",
    ]
    async with running_stack() as stack:
        assert await mark(stack, ask(tenant="red")) == "miss"
        for name in names:
            assert await mark(stack, ask(tenant=name)) == "miss", name
            assert await mark(stack, ask(REWORDED, tenant=name)) == "semantic", name
        for name in ("red", *names):
            assert await mark(stack, ask(tenant=name)) == "exact", name
        assert stack.graph.own_stats().cache_call_errors == 0


async def test_opposite_and_recounted_questions_are_told_apart_however_alike() -> None:
    pairs = [
        ("How do I turn on automatic backups?", "How do I turn off automatic backups?"),
        ("How do I enable automatic backups?", "How do I disable automatic backups?"),
        ("What is 17 times 23?", "What is 17 times 28?"),
        ("Convert 5 miles to kilometres", "Convert 5 metres to kilometres"),
        ("What changed in Python 3.8?", "What changed in Python 3.9?"),
        ("Remind me in 10 minutes", "Remind me in 10 hours"),
    ]
    assert float(same_for_all @ same_for_all) == 1.0
    async with running_stack() as stack:
        both_orders = (*pairs, *((second, first) for first, second in pairs))
        for seed, pair in enumerate(both_orders):
            for text in pair:
                reply = await answer(stack.graph, ask(text, seed=seed))
                assert reply.cache.outcome == "miss", (text, reply.cache)
                assert text in reply.log.text


async def test_one_who_asks_again_at_once_hits_though_the_store_is_slow(graph_over: Build) -> None:
    stored = asyncio.Event()

    class SlowStore:
        def __init__(self) -> None:
            self.kept: bytes | None = None

        async def lookup(self, payload: bytes) -> bytes:
            if self.kept is None:
                return wire.encode(wire.LookupReply(outcome=CacheOutcome(reason="nothing yet")))
            call = wire.decode_store_call(self.kept)
            outcome = CacheOutcome(outcome="exact", tier="L2", similarity=1.0)
            return wire.encode(wire.LookupReply(outcome=outcome, stored=call.stored))

        async def store(self, payload: bytes) -> None:
            await stored.wait()
            self.kept = payload

        async def stats(self) -> list[dict[str, Any]]:
            return []

    graph = graph_over(FakeModel(), SlowStore())
    first = await graph.open_stream(ask())
    await terminal_of(first.log)
    again = asyncio.create_task(graph.open_stream(ask()))
    await asyncio.sleep(0)
    stored.set()
    stream = await again
    assert stream.cache.outcome == "exact"
    assert stream.log.text == first.log.text


async def test_an_equal_question_is_answered_by_the_ingress_itself() -> None:
    front = FrontCache(2**20, 900, time.monotonic)
    async with running_stack() as stack:
        graph = stack_graph(stack.model, stack.cache, stack.model.board, front=front)

        async def hear(**fields: Any) -> Stream:
            stream = await graph.open_stream(ask(**fields))
            await eventually(lambda: stream.log.terminal is not None)
            return stream

        first, second = await hear(), await hear()
        assert (first.cache.outcome, second.cache.outcome) == ("miss", "exact")
        assert second.cache.tier == "L1"
        assert second.log.text == first.log.text
        assert second.log.terminal is not None
        assert first.log.terminal is not None
        assert second.log.terminal.usage == first.log.terminal.usage
        assert second.request.request_id != first.request.request_id
        # What is not equal to the byte is the cache's to decide.
        assert (await hear(tenant="other")).cache.outcome == "miss"
        assert (await hear(timeout_s=60.0)).cache.tier == "L2"
        before = stack.num_generated
        assert (await hear(cache="refresh")).cache.outcome == "miss"
        assert stack.num_generated > before
        assert (await hear()).cache.tier == "L1"
        assert (await hear(cache="bypass")).cache.outcome == "miss"
        await graph.close()
