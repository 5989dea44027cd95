"""The graph: cache first, then the model, and back into the cache; without Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.graph import INFO_MAX_AGE_S, Graph
from app.serving import Stream
from deployments import wire
from protocol.errors import (
    CacheMiss,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServingError,
)
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import CacheOutcome, Terminal, Timing, TokenDelta, TokenLog, Usage
from tests.app.stack import (
    INFO,
    MODEL,
    PATIENCE_S,
    Stack,
    eventually,
    running_stack,
    same_for_all,
    talks_on,
)
from tests.protocol.fakes import FakeClock

QUESTION = "What is the capital of France?"
REWORDED = "Tell me the capital of France."
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


def ask(
    text: str = QUESTION,
    *,
    messages: Iterable[Message] | None = None,
    prompt: str | None = None,
    tenant: str = "red",
    model: str = MODEL,
    **fields: Any,
) -> InferenceRequest:
    """A greedy chat of one turn; `fields` are the request's, or its sampling's."""
    own = {name: fields.pop(name) for name in list(fields) if name in OWN_FIELDS}
    turns = None if prompt is not None else tuple(messages or (Message(role="user", content=text),))
    ask.number += 1  # type: ignore[attr-defined]
    return InferenceRequest(
        request_id=f"r-{ask.number}",  # type: ignore[attr-defined]
        tenant=tenant,
        model=model,
        messages=turns,
        prompt=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, **fields}),
        **own,
    )


ask.number = 0  # type: ignore[attr-defined]
OWN_FIELDS = ("tools", "tool_choice", "response_format", "cache", "priority", "timeout_s")


async def terminal_of(log: TokenLog) -> Terminal:
    async with asyncio.timeout(PATIENCE_S):
        cursor = log.cursor()
        while await cursor.wait():
            pass
    assert log.terminal is not None
    return log.terminal


async def answer(graph: Graph, request: InferenceRequest) -> Stream:
    """The stream, once it has ended and what there is to store is stored."""
    stream = await graph.open_stream(request)
    await terminal_of(stream.log)
    await eventually(lambda: not graph._background)
    return stream


async def mark(stack: Stack, request: InferenceRequest) -> str:
    return (await answer(stack.graph, request)).cache.outcome


# ------------------------------------------------------------------ fakes at the two ports


def accepted(revision: str = INFO.revision) -> wire.StreamRecord:
    first = wire.Accepted(revision=revision, prompt_tokens=3, queue_position=2)
    return wire.StreamRecord(accepted=first)


def said(*texts: str, start: int = 0) -> wire.StreamRecord:
    deltas = tuple(TokenDelta(start + i, text, (i,)) for i, text in enumerate(texts))
    return wire.StreamRecord(deltas=deltas)


def ended(reason: Any = "stop") -> wire.StreamRecord:
    timing = Timing(queue_ms=1.0, ttft_ms=2.0, total_ms=3.0)
    return wire.StreamRecord(terminal=Terminal(finish_reason=reason, usage=USAGE, timing=timing))


HANGS = "hangs"
Step = wire.StreamRecord | Exception | bytes | str


class FakeRecords:
    """Gives its steps one by one: a record, raw bytes, an exception, or `HANGS`."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = list(steps)
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for step in self._steps:
            if step == HANGS:
                await asyncio.Event().wait()
            if isinstance(step, Exception):
                raise step
            yield step if isinstance(step, bytes) else wire.encode(step)


@dataclass
class FakeModel:
    """A model whose next answers are given."""

    steps: list[Step] = field(default_factory=lambda: [accepted(), said("He", "llo"), ended()])
    info_bytes: bytes = field(default_factory=lambda: wire.encode(INFO))
    info_error: Exception | None = None
    num_info_calls: int = 0
    records: list[FakeRecords] = field(default_factory=list)

    def generate(self, payload: bytes) -> FakeRecords:
        wire.decode_request(payload)
        self.records.append(FakeRecords(self.steps))
        return self.records[-1]

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

    async def stats(self) -> list[dict[str, Any]]:
        raise ConnectionError("no cache replica")


MISSED = wire.encode(wire.LookupReply(outcome=CacheOutcome(reason="no equal prompt")))


def graph_over(
    model: FakeModel, cache: FakeCache | None = None, clock: Any = None, **timeouts: float
) -> Graph:
    limits = {"lookup_timeout_s": PATIENCE_S, "accept_timeout_s": PATIENCE_S, **timeouts}
    return Graph(model, cache, **limits, **({} if clock is None else {"clock": clock}))


# ------------------------------------------------------------------ the way of a miss


async def test_a_miss_is_generated_and_kept_after_its_natural_end() -> None:
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
        [accepted(), said("He"), ended("cancelled")],
        [accepted(), said("He"), ended("tool_calls")],
        [accepted(), said("He"), ended("error")],
        [accepted(), said("He"), ConnectionError("replica died")],
        [accepted(), said("He")],
        [accepted(revision="rev-2"), said("He"), ended("stop")],
    ],
    ids=["cancelled", "tool calls", "error", "death", "no terminal", "other revision"],
)
async def test_an_answer_that_did_not_end_by_itself_is_not_kept(steps: list[Step]) -> None:
    cache = FakeCache(MISSED)
    await answer(graph_over(FakeModel(steps), cache), ask())
    assert cache.stores == []


async def test_an_answer_that_its_limit_cut_is_kept_as_such() -> None:
    cache = FakeCache(MISSED)
    await answer(graph_over(FakeModel([accepted(), said("He"), ended("length")]), cache), ask())
    assert [stored.is_truncated for stored in cache.stores] == [True]


async def test_an_answer_is_kept_though_the_replica_dies_after_its_last_record() -> None:
    cache = FakeCache(MISSED)
    steps = [accepted(), said("He"), ended(), ConnectionError("replica died")]
    stream = await answer(graph_over(FakeModel(steps), cache), ask())
    assert stream.log.terminal is not None
    assert stream.log.terminal.finish_reason == "stop"
    assert len(cache.stores) == 1


async def test_a_failing_store_leaves_the_answer_alone() -> None:
    graph = graph_over(FakeModel(), FakeCache(MISSED, store_error=ConnectionError("gone")))
    assert (await answer(graph, ask())).log.text == "Hello"
    assert graph.cache_errors_total == 1


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
    policy: str, temperature: float, looks_up: bool, stores: bool
) -> None:
    cache = FakeCache(MISSED)
    await answer(graph_over(FakeModel(), cache), ask(cache=policy, temperature=temperature))
    assert (bool(cache.lookups), bool(cache.stores)) == (looks_up, stores)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_only_from_the_cache_means_no_model(temperature: float) -> None:
    model = FakeModel()
    with pytest.raises(CacheMiss):
        await graph_over(model, FakeCache(MISSED)).open_stream(
            ask(cache="only", temperature=temperature)
        )
    with pytest.raises(CacheMiss):
        await graph_over(model).open_stream(ask(cache="only", temperature=temperature))
    assert model.records == []


# ------------------------------------------------------------------ hits, and caches that fail


def hit(outcome: CacheOutcome) -> bytes:
    stored = wire.StoredStream(
        deltas=(TokenDelta(0, "Bon", (7,)), TokenDelta(2, "jour", (8, 9))),
        terminal=Terminal(finish_reason="stop", usage=USAGE, timing=Timing(total_ms=9e9)),
    )
    return wire.encode(wire.LookupReply(outcome=outcome, stored=wire.encode(stored)))


@pytest.mark.parametrize("outcome", ["exact", "semantic"])
async def test_a_hit_is_replayed_with_its_own_usage_and_the_time_of_now(outcome: Any) -> None:
    clock = FakeClock()
    marked = CacheOutcome(outcome=outcome, tier="L2", similarity=0.97, age_s=5.0)
    model, cache = FakeModel(), FakeCache(hit(marked))

    class LateCache(FakeCache):
        async def lookup(self, payload: bytes) -> bytes:
            clock.now += 0.004
            return await super().lookup(payload)

    cache = LateCache(cache.reply)
    stream = await graph_over(model, cache, clock).open_stream(ask())
    assert stream.log.text == "Bonjour"
    assert [delta.seq for delta in stream.log.deltas] == [0, 2]
    assert stream.cache == marked
    assert stream.log.terminal is not None
    assert stream.log.terminal.usage == USAGE
    assert stream.log.terminal.timing.total_ms == pytest.approx(4.0)
    assert stream.log.terminal.timing.ttft_ms == pytest.approx(4.0)
    assert model.records == []
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
async def test_a_cache_that_fails_is_a_miss(reply: bytes | Exception | None, reason: str) -> None:
    graph = graph_over(FakeModel(), FakeCache(reply), lookup_timeout_s=0.02)
    stream = await answer(graph, ask())
    assert stream.log.text == "Hello"
    assert stream.cache == CacheOutcome(reason=reason)
    assert graph.cache_errors_total == 1


# ------------------------------------------------------------------ models that fail


async def test_a_refusal_keeps_its_code_and_its_figures() -> None:
    refusal = ContextLengthExceeded("prompt has 9 tokens, the model takes 8", limit=8).info
    model = FakeModel([wire.StreamRecord(refused=refusal)])
    with pytest.raises(ContextLengthExceeded, match="prompt has 9 tokens") as caught:
        await graph_over(model).open_stream(ask())
    assert caught.value.limit == 8


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([ConnectionError("died")], Overloaded),
        ([], Overloaded),
        ([HANGS], Overloaded),
        ([b"\xc1"], InternalError),
        ([said("no acceptance")], InternalError),
    ],
    ids=["dies", "says nothing", "hangs", "rubbish", "does not accept"],
)
async def test_a_model_that_does_not_accept_ends_the_request_at_once(
    steps: list[Step], error: type[ServingError]
) -> None:
    model = FakeModel(steps)
    with pytest.raises(error) as caught:
        await graph_over(model, accept_timeout_s=0.02).open_stream(ask())
    assert caught.value.retryable
    assert (caught.value.retry_after_s is not None) == (error is Overloaded)
    assert model.records[0].cancels > 0


@pytest.mark.parametrize(
    "last",
    [ConnectionError("died: secret"), b"\xc1", said("again"), None],
    ids=["dies", "rubbish", "numbers that fall", "no terminal"],
)
async def test_a_model_that_fails_in_mid_stream_leaves_the_text_and_one_error(
    last: Step | None,
) -> None:
    clock = FakeClock()
    steps: list[Step] = [accepted(), said("He", "llo"), *([] if last is None else [last])]
    model = FakeModel(steps)
    stream = await graph_over(model, clock=clock).open_stream(ask())
    clock.now += 1.5
    terminal = await terminal_of(stream.log)
    assert stream.log.text == "Hello"
    assert terminal.finish_reason == "error"
    assert terminal.error is not None
    assert terminal.error.code == "internal"
    assert terminal.error.retryable
    assert "secret" not in terminal.error.message
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert terminal.timing.total_ms == pytest.approx(1500)
    assert model.records[0].cancels > 0


# ------------------------------------------------------------------ cancelling


async def test_a_cancel_before_the_first_record_reaches_the_model() -> None:
    model = FakeModel([HANGS])
    opening = asyncio.create_task(graph_over(model).open_stream(ask()))
    await eventually(lambda: model.records)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert model.records[0].cancels > 0


async def test_a_cancel_in_the_look_up_starts_no_model() -> None:
    model, cache = FakeModel(), FakeCache(None)
    opening = asyncio.create_task(graph_over(model, cache).open_stream(ask()))
    await eventually(lambda: cache.lookups)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert model.records == []


@pytest.mark.parametrize("has_text", [False, True])
async def test_a_cancel_ends_the_log_at_once_and_for_good(has_text: bool) -> None:
    model = FakeModel([accepted(), said("He", "llo"), HANGS])
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
    await eventually(lambda: not graph._background)
    assert stream.log.terminal is terminal
    assert stream.log.next_seq == terminal.usage.completion_tokens
    assert model.records[0].cancels > 0
    assert cache.stores == []


async def test_a_cancel_after_the_end_changes_nothing() -> None:
    cache = FakeCache(MISSED)
    stream = await answer(graph_over(FakeModel(), cache), ask())
    stream.cancel()
    assert stream.log.terminal is not None
    assert stream.log.terminal.finish_reason == "stop"
    assert len(cache.stores) == 1


# ------------------------------------------------------------------ which model


async def test_another_model_is_not_found() -> None:
    model = FakeModel()
    with pytest.raises(ModelNotFound, match="maker/other") as caught:
        await graph_over(model).open_stream(ask(model="maker/other"))
    assert caught.value.param == "model"
    assert model.records == []


async def test_the_model_is_asked_what_it_is_now_and_then() -> None:
    model, clock = FakeModel(), FakeClock()
    graph = graph_over(model, clock=clock)
    for _ in range(3):
        await answer(graph, ask())
    assert model.num_info_calls == 1
    clock.now += INFO_MAX_AGE_S
    model.info_bytes = wire.encode(
        wire.ModelInfo(id="new", revision="r", context_length=1, created=1, backend="mock")
    )
    assert (await graph.model_info()).id == "new"
    assert model.num_info_calls == 2


async def test_readiness_asks_every_time_and_tells_of_a_model_that_does_not_answer() -> None:
    model = FakeModel()
    graph = graph_over(model)
    await graph.check_ready()
    await graph.check_ready()
    assert model.num_info_calls == 2
    model.info_error = ConnectionError("no replica")
    with pytest.raises(Overloaded):
        await graph.check_ready()


async def test_stats_leave_out_who_does_not_answer() -> None:
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
        assert stack.graph.cache_errors_total == 0


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


async def test_one_who_asks_again_at_once_hits_though_the_store_is_slow() -> None:
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

    graph = Graph(
        FakeModel(), SlowStore(), lookup_timeout_s=PATIENCE_S, accept_timeout_s=PATIENCE_S
    )
    first = await graph.open_stream(ask())
    await terminal_of(first.log)
    again = asyncio.create_task(graph.open_stream(ask()))
    await asyncio.sleep(0)
    stored.set()
    stream = await again
    assert stream.cache.outcome == "exact"
    assert stream.log.text == first.log.text
