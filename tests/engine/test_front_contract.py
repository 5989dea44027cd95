"""What an event loop may expect of an engine, whoever computes: ours, and vLLM behind the same front."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from deployments.engine.async_engine import AsyncEngine
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.front import EngineFront
from deployments.engine.scripted import Fault, ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.vllm_backend import VllmEngine
from protocol.errors import DuplicateId, InvalidRequest, Overloaded
from protocol.request import InferenceRequest, SamplingParams
from protocol.token_log import Terminal
from tests.engine.fake_vllm import API, Call, FakeAsyncLLM
from tests.engine.fakes import SMALL, TOKENIZER, FakeClock

WAIT_S = 20.0
(EOS,) = TOKENIZER.eos_token_ids
ENDLESS = replace(SMALL, max_model_len=100_100)
JSON_ANSWER = json.dumps({"name": "Zoë", "age": 7}, ensure_ascii=False)
JSON_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
}


@dataclass
class Backend:
    """An engine and the brake of its model: `hold` stops it before the next token."""

    front: EngineFront
    hold: Callable[[], None]
    release: Callable[[], None]
    entered: threading.Event


@asynccontextmanager
async def ours(
    answer: str, config: EngineConfig, clock: Callable[[], float]
) -> AsyncIterator[Backend]:
    opened, entered = threading.Event(), threading.Event()
    opened.set()

    def wait(seq: Sequence) -> Fault | None:
        entered.set()
        assert opened.wait(WAIT_S)
        return None

    def script(seq: Sequence) -> list[int]:
        return TOKENIZER.encode_prompt(answer)

    runner = ScriptedRunner(script, TOKENIZER, config, fault=wait)
    front = AsyncEngine(Engine(runner, TOKENIZER, config, clock=clock), rng=random.Random(1))
    await front.start()
    try:
        yield Backend(front, opened.clear, opened.set, entered)
    finally:
        opened.set()
        await front.close()


@asynccontextmanager
async def vllm(
    answer: str, config: EngineConfig, clock: Callable[[], float]
) -> AsyncIterator[Backend]:
    tokens = TOKENIZER.encode_prompt(answer)
    num_prompt = len(TOKENIZER.encode_prompt("hi"))

    def rest(call: Call) -> list[int]:
        return tokens[len(call.prompt["prompt_token_ids"]) - num_prompt :]

    client = FakeAsyncLLM(rest, EOS)
    front = VllmEngine(client, API, TOKENIZER, config, clock=clock, rng=random.Random(1))
    await front.start()
    client.entered.clear()
    try:
        yield Backend(front, client.hold, client.release, client.entered)
    finally:
        client.release()
        await front.close()


Start = Callable[..., Any]


@pytest.fixture(params=[ours, vllm], ids=["ours", "vllm"])
def start(request: pytest.FixtureRequest) -> Start:
    def begin(
        answer: str = "hello",
        config: EngineConfig = SMALL,
        clock: Callable[[], float] = time.monotonic,
    ) -> Any:
        return request.param(answer, config, clock)

    return begin


def request(request_id: str = "r", **given: Any) -> InferenceRequest:
    sampling = SamplingParams(**({"temperature": 0.0} | given.pop("sampling", {})))
    asked = {"request_id": request_id, "tenant": "t", "model": "m", "prompt": "hi"} | given
    return InferenceRequest(**asked, sampling=sampling)


async def read(front: EngineFront, seq: Sequence) -> str:
    log = front.follow(seq)
    cursor = log.cursor()
    async with asyncio.timeout(WAIT_S):
        while not cursor.is_at_end:
            await cursor.wait()
    return log.text


async def answer(front: EngineFront, asked: InferenceRequest) -> tuple[str, Terminal]:
    seq = await front.prepare(asked)
    assert front.admit([seq]) == [None]
    text = await read(front, seq)
    return text, end_of(front, seq)


def end_of(front: EngineFront, seq: Sequence) -> Terminal:
    terminal = front.follow(seq).terminal
    assert terminal is not None
    return terminal


async def entered(backend: Backend) -> None:
    assert await asyncio.to_thread(backend.entered.wait, WAIT_S)


async def test_requests_are_answered_and_all_gauges_are_zero_at_the_end(start: Start) -> None:
    async with start() as backend:
        front = backend.front
        seqs = [await front.prepare(request(f"r{i}")) for i in range(6)]
        assert front.admit(seqs) == [None] * 6
        assert await asyncio.gather(*(read(front, seq) for seq in seqs)) == ["hello"] * 6
        stats = front.stats()
        assert (stats.running, stats.waiting, stats.tokens, stats.waiting_tokens) == (0, 0, 0, 0)
        assert stats.finished_total == {"stop": 6}
        assert stats.generated_tokens_total == 6 * len("hello.")
        usage = end_of(front, seqs[0]).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, len("hello."))


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a limit": ({"max_tokens": 3}, "one", "length"),
    "a stop string over several tokens": ({"stop": ("wo t",)}, "one t", "stop"),
    "two that overlap": ({"stop": ("two th", "o t")}, "one ", "stop"),
    "a stop string before min_tokens": (
        {"stop": ("one",), "min_tokens": 5},
        "one two thrée 🙂",
        "stop",
    ),
    "a stop token": ({"stop_token_ids": (TOKENIZER.encode_prompt("w")[0],)}, "one t", "stop"),
    "a limit in half a character": ({"max_tokens": 12}, "one two thr\ufffd", "length"),
    "to its end": ({}, "one two thrée 🙂", "stop"),
}


@pytest.mark.parametrize("case", CASES)
async def test_an_answer_ends_as_asked(start: Start, case: str) -> None:
    sampling, text, reason = CASES[case]
    async with start("one two thrée 🙂") as backend:
        got, terminal = await answer(backend.front, request(sampling=sampling))
        assert (got, terminal.finish_reason) == (text, reason)


@pytest.mark.parametrize(
    "sampling",
    [*(sampling for sampling, *_ in CASES.values()), {"logprobs": 0, "stop": ("thr",)}],
    ids=str,
)
async def test_both_tell_the_same_deltas(sampling: dict[str, Any]) -> None:
    told = []
    for begin in (ours, vllm):
        async with begin("one two thrée 🙂", SMALL, time.monotonic) as backend:
            seq = await backend.front.prepare(request(sampling=sampling))
            backend.front.admit([seq])
            await read(backend.front, seq)
            deltas = backend.front.follow(seq).deltas
            terminal = end_of(backend.front, seq)
            told.append(
                (
                    [(delta.seq, delta.text, delta.token_ids) for delta in deltas],
                    [len(delta.logprobs or ()) for delta in deltas],
                    terminal.usage.completion_tokens,
                    terminal.finish_reason,
                )
            )
    assert told[0] == told[1]


async def test_the_end_token_is_text_where_it_is_to_be_ignored(start: Start) -> None:
    async with start("ab") as backend:
        sampling = {"ignore_eos": True, "max_tokens": 5}
        text, terminal = await answer(backend.front, request(sampling=sampling))
        assert (text, terminal.finish_reason) == ("ab", "length")
        assert terminal.usage.completion_tokens == 5


async def test_a_constrained_answer_ends_when_it_is_complete(start: Start) -> None:
    async with start(JSON_ANSWER + " and more") as backend:
        asked = request(response_format=JSON_FORMAT, sampling={"max_tokens": 60})
        text, terminal = await answer(backend.front, asked)
        assert (text, terminal.finish_reason) == (JSON_ANSWER, "stop")


async def test_an_answer_goes_on_behind_what_was_answered_elsewhere(start: Start) -> None:
    async with start() as backend:
        front = backend.front
        seq = await front.prepare(request(), TOKENIZER.encode_prompt("hel"))
        assert front.admit([seq]) == [None]
        assert await read(front, seq) == "lo"
        assert front.follow(seq).deltas[0].seq == 3
        assert end_of(front, seq).usage.completion_tokens == len("hello.")


async def test_an_answer_that_was_complete_elsewhere_only_ends(start: Start) -> None:
    async with start() as backend:
        front = backend.front
        seq = await front.prepare(request(), [*TOKENIZER.encode_prompt("hello"), EOS])
        assert front.admit([seq]) == [None]
        assert await read(front, seq) == ""
        assert end_of(front, seq).finish_reason == "stop"
        assert front.stats().running == front.stats().waiting == 0


async def test_a_sequence_abandoned_before_admission_is_dropped(start: Start) -> None:
    async with start() as backend:
        front = backend.front
        dead, alive = [await front.prepare(request(name)) for name in ("dead", "alive")]
        front.abort(dead)
        assert front.admit([dead, alive]) == [None, None]
        assert end_of(front, dead).finish_reason == "cancelled"
        assert await read(front, alive) == "hello"
        assert front.stats().finished_total == {"cancelled": 1, "stop": 1}


async def test_abort_ends_a_stream_once_and_its_place_goes_to_the_next(start: Start) -> None:
    async with start("x" * 100_000, replace(ENDLESS, max_num_seqs=1)) as backend:
        front = backend.front
        first, second = [
            await front.prepare(request(f"r{i}", sampling={"max_tokens": limit}))
            for i, limit in enumerate((90_000, 2))
        ]
        front.admit([first, second])
        async with asyncio.timeout(WAIT_S):
            await front.follow(first).cursor().wait()
        front.abort(first)
        assert await read(front, second) == "xx"
        await read(front, first)
        assert end_of(front, first).finish_reason == "cancelled"
        front.abort(first)
        assert front.stats().finished_total == {"cancelled": 1, "length": 1}


async def test_a_queued_request_that_is_aborted_never_starts(start: Start) -> None:
    async with start(config=replace(SMALL, max_num_seqs=1)) as backend:
        front = backend.front
        backend.hold()
        first, queued = [await front.prepare(request(f"r{i}")) for i in range(2)]
        front.admit([first, queued])
        await entered(backend)
        assert front.stats().waiting == 1
        front.abort(queued)
        backend.release()
        assert await read(front, first) == "hello"
        await read(front, queued)
        assert end_of(front, queued).finish_reason == "cancelled"
        assert queued.first_scheduled_s is None


async def test_a_request_too_many_is_refused_and_ends_its_log(start: Start) -> None:
    async with start(config=replace(SMALL, max_num_seqs=1, max_waiting=1)) as backend:
        front = backend.front
        backend.hold()
        seqs = [await front.prepare(request(f"r{i}")) for i in range(3)]
        refusals = front.admit(seqs)
        assert [type(refusal) for refusal in refusals] == [type(None), type(None), Overloaded]
        error = end_of(front, seqs[2]).error
        assert error is not None
        assert error.code == "overloaded"
        assert front.stats().refused_total == 1
        backend.release()
        assert [await read(front, seq) for seq in seqs[:2]] == ["hello", "hello"]


async def test_a_live_request_id_is_refused(start: Start) -> None:
    async with start() as backend:
        front = backend.front
        backend.hold()
        seqs = [await front.prepare(request("same")) for _ in range(2)]
        assert [type(refusal) for refusal in front.admit(seqs)] == [type(None), DuplicateId]
        backend.release()
        assert await read(front, seqs[0]) == "hello"


async def test_a_bad_request_is_refused_when_it_is_prepared(start: Start) -> None:
    async with start() as backend:
        front = backend.front
        for asked in (request(prompt=""), request(sampling={"stop_token_ids": (10**6,)})):
            with pytest.raises(InvalidRequest):
                await front.prepare(asked)
        assert front.stats().refused_total == 2


async def test_a_deadline_ends_running_and_queued_requests(start: Start) -> None:
    async with start("x" * 100_000, replace(ENDLESS, max_num_seqs=1)) as backend:
        front = backend.front
        seqs = [
            await front.prepare(
                request(f"r{i}", timeout_s=0.1, sampling={"max_tokens": 90_000}),
            )
            for i in range(2)
        ]
        front.admit(seqs)
        for seq in seqs:
            await read(front, seq)
            error = end_of(front, seq).error
            assert error is not None
            assert (error.code, error.param, error.limit) == ("timeout", "timeout_s", 0.1)
        assert front.stats().finished_total == {"timeout": 2}


async def test_tenants_take_turns_and_the_higher_priority_goes_first(start: Start) -> None:
    async with start(config=replace(SMALL, max_num_seqs=1)) as backend:
        front = backend.front
        backend.hold()
        asked = [
            request("a1", tenant="a"),
            request("a2", tenant="a"),
            request("a3", tenant="a", priority=1),
            request("b1", tenant="b"),
        ]
        seqs = [await front.prepare(each) for each in asked]
        assert front.admit(seqs[:1]) == [None]
        await entered(backend)
        assert front.admit(seqs[1:]) == [None] * 3
        backend.release()
        for seq in seqs:
            await read(front, seq)
        order = sorted(seqs, key=lambda seq: seq.first_scheduled_s or 0.0)
        assert [seq.request_id for seq in order if seq.tenant == "a"][1:] == ["a3", "a2"]
        assert order.index(seqs[3]) < 3


async def test_the_first_token_is_told_with_its_time(start: Start) -> None:
    async with start() as backend:
        told: list[float] = []
        backend.front.on_first_token = told.append
        await answer(backend.front, request())
        assert len(told) == 1


async def test_only_an_engine_that_stands_still_with_work_is_unhealthy(start: Start) -> None:
    clock = FakeClock()
    async with start(clock=clock) as backend:
        front = backend.front
        clock.advance(1000)
        assert front.is_healthy
        backend.hold()
        seq = await front.prepare(request())
        front.admit([seq])
        await entered(backend)
        clock.advance(SMALL.stall_after_s + 1)
        assert front.heartbeat_age_s() == front.stats().stalled_s == SMALL.stall_after_s + 1
        assert not front.is_healthy
        backend.release()
        await read(front, seq)
        assert front.is_healthy


async def test_a_warm_up_is_no_request(start: Start) -> None:
    async with start() as backend:
        async with asyncio.timeout(WAIT_S):
            await backend.front.warm(request("w", prompt="written so far " * 3))
        assert backend.front.stats().finished_total == {}


async def test_close_ends_the_logs_that_are_still_open(start: Start) -> None:
    async with start("x" * 100_000, replace(ENDLESS, max_num_seqs=1)) as backend:
        front = backend.front
        seqs = [
            await front.prepare(request(f"r{i}", sampling={"max_tokens": 90_000})) for i in range(2)
        ]
        front.admit(seqs)
        async with asyncio.timeout(WAIT_S):
            await front.follow(seqs[0]).cursor().wait()
            await front.close()
        for seq in seqs:
            await read(front, seq)
            error = end_of(front, seq).error
            assert error is not None
            assert error.code == "overloaded"
        assert not front.is_healthy
        late = same_again(seqs[0])
        assert isinstance(front.admit([late])[0], Overloaded)
        await front.close()


def same_again(like: Sequence) -> Sequence:
    return Sequence(
        request_id="late",
        prompt_token_ids=like.prompt_token_ids,
        sampling=like.sampling,
        eos_token_ids=like.eos_token_ids,
    )
