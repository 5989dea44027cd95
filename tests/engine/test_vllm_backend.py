"""vLLM behind our interface: what it is asked for, and what becomes of its answers and faults.

What it has in common with our own engine is in test_front_contract.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.engine.build import EngineSpec, build_engine
from deployments.engine.config import EngineConfig
from deployments.engine.sampler import LEAST_LOGPROB
from deployments.engine.sequence import Sequence
from deployments.engine.structured import grammar_for
from deployments.engine.vllm_backend import (
    VllmEngine,
    engine_arguments,
    load_vllm,
    sampling_arguments,
)
from protocol.errors import InvalidRequest, Overloaded
from protocol.request import SamplingParams
from protocol.token_log import Terminal
from tests.engine.fake_vllm import API, DELTA, Call, FakeAsyncLLM, FakeClientError
from tests.engine.fakes import SMALL, TOKENIZER, sequence
from tests.engine.test_front_contract import JSON_ANSWER, JSON_FORMAT, end_of, read, request

(EOS,) = TOKENIZER.eos_token_ids
PROMPT = tuple(TOKENIZER.encode_prompt("hi"))


@asynccontextmanager
async def started(
    answer: str = "hello", config: EngineConfig = SMALL, **client: Any
) -> AsyncIterator[tuple[VllmEngine, FakeAsyncLLM]]:
    llm = FakeAsyncLLM(lambda call: TOKENIZER.encode_prompt(answer), EOS, **client)
    front = VllmEngine(llm, API, TOKENIZER, config, rng=random.Random(1), health_period_s=0.01)
    await front.start()
    llm.calls.clear()
    llm.entered.clear()
    try:
        yield front, llm
    finally:
        llm.release()
        await front.close()


async def ask(front: VllmEngine, *args: Any, **given: Any) -> tuple[Sequence, Terminal]:
    seq = await front.prepare(request(*args, **given))
    assert front.admit([seq]) == [None]
    await read(front, seq)
    return seq, end_of(front, seq)


def test_every_sampling_parameter_is_passed_on() -> None:
    asked: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {4: -1.0},
        "ignore_eos": True,
        "logprobs": 2,
    }
    seq = sequence(seed=11)
    seq.sampling = SamplingParams(**asked, stop=("x",), stop_token_ids=(7, 3))
    assert set(SamplingParams.__struct_fields__) == {*asked, "stop", "stop_token_ids"}
    assert sampling_arguments(seq) == asked | {"stop_token_ids": [3, 7], "detokenize": False}


def test_the_end_tokens_of_our_tokenizer_end_an_answer() -> None:
    assert sampling_arguments(sequence(stop_token_ids=(3,)))["stop_token_ids"] == [3, EOS]


@pytest.mark.parametrize("top_k", [0, -1])
def test_all_tokens_are_kept_where_top_k_is_off(top_k: int) -> None:
    assert sampling_arguments(sequence(top_k=top_k))["top_k"] == 0


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_a_seed_becomes_one_that_vllm_takes(seed: int) -> None:
    seq = sequence(seed=seed)
    seq.sampling = SamplingParams(seed=seed, max_tokens=4)
    assert 0 <= sampling_arguments(seq)["seed"] < 2**63


def test_a_row_without_a_seed_is_drawn_together_with_the_others() -> None:
    assert sampling_arguments(sequence(seed=17))["seed"] is None


def test_an_answer_that_goes_on_has_less_to_go_and_other_noise() -> None:
    seq = sequence(max_tokens=9, min_tokens=2)
    seq.sampling = SamplingParams(max_tokens=9, min_tokens=4, seed=5)
    seq.seed = 5
    before = sampling_arguments(seq)
    seq.output_token_ids += [1, 2, 3]
    after = sampling_arguments(seq)
    assert (after["max_tokens"], after["min_tokens"]) == (6, 1)
    assert after["seed"] != before["seed"]


def test_our_configuration_is_told_in_vllms_terms() -> None:
    config = replace(SMALL, device="auto", kv_cache_gib=1.5, cuda_graphs=False)
    told = engine_arguments(Path("/models/m"), config)
    assert told["model"] == "/models/m"
    assert told["max_model_len"] == SMALL.max_model_len
    assert told["max_num_seqs"] == SMALL.max_num_seqs
    assert told["kv_cache_memory_bytes"] == 3 * 2**29
    assert told["enforce_eager"]
    assert not told["trust_remote_code"]


@pytest.mark.parametrize("given", [{"device": "cpu"}, {"device": "auto", "quantization": "int8"}])
def test_what_vllm_decides_itself_is_refused_by_name(given: dict[str, Any]) -> None:
    name = list(given)[-1]
    with pytest.raises(ValueError, match=f"{name} is {given[name]}, backend vllm takes"):
        engine_arguments(Path("/models/m"), replace(SMALL, **given))


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RuntimeError, match=r"seedance\[vllm\]"):
        load_vllm()
    with pytest.raises(RuntimeError, match=r"seedance\[vllm\]"):
        build_engine(EngineSpec(config=SMALL, folder=tmp_path, is_vllm=True))


async def test_vllm_sees_tokens_a_salt_and_a_priority() -> None:
    async with started() as (front, llm):
        await ask(front, priority=3, tenant="alice", sampling={"stop": ("zz",)})
        (call,) = llm.calls
        assert call.prompt == {"prompt_token_ids": list(PROMPT), "cache_salt": "alice"}
        assert call.priority == -3, "vllm serves the lowest number first"
        assert call.params.output_kind == DELTA


async def test_without_a_tenant_there_is_no_salt() -> None:
    async with started() as (front, llm):
        await ask(front, tenant="")
        assert "cache_salt" not in llm.calls[0].prompt


async def test_what_vllm_had_cached_is_told() -> None:
    async with started(num_cached_tokens=1) as (front, _):
        _, terminal = await ask(front)
        assert terminal.usage.cached_tokens == 1
        stats = front.stats()
        assert (stats.prefix_hit_tokens_total, stats.prefix_query_tokens_total) == (1, 2)
        assert stats.prompt_tokens_total == 1


async def test_several_tokens_at_once_are_taken_one_by_one() -> None:
    async with started("one two three", tokens_at_once=4) as (front, _):
        seq, terminal = await ask(front, sampling={"stop": ("three",)})
        assert front.follow(seq).text == "one two "
        assert terminal.usage.completion_tokens == len("one two three")


async def test_a_stop_string_makes_vllm_drop_the_request() -> None:
    async with started("abc" * 30) as (front, llm):
        await ask(front, sampling={"stop": ("ca",), "max_tokens": 90})
        await front.close()
        assert [call.is_aborted for call in llm.calls] == [True]


async def test_no_more_than_max_num_seqs_compute_at_a_time() -> None:
    async with started(config=replace(SMALL, max_num_seqs=2)) as (front, llm):
        llm.hold()
        seqs = [await front.prepare(request(f"r{i}")) for i in range(6)]
        assert front.admit(seqs) == [None] * 6
        await asyncio.to_thread(llm.entered.wait)
        assert (front.stats().running, front.stats().waiting) == (2, 4)
        assert len(llm.calls) <= 2
        llm.release()
        for seq in seqs:
            assert await read(front, seq) == "hello"


async def test_log_probabilities_are_those_of_the_token_and_of_the_best() -> None:
    async with started("a", num_cached_tokens=0) as (front, _):
        for asked, num_best in ((0, 0), (1, 1), (2, 2), (3, 3)):
            seq, _ = await ask(front, f"r{asked}", sampling={"logprobs": asked})
            (delta,) = front.follow(seq).deltas
            assert delta.logprobs is not None
            (told,) = delta.logprobs
            token = TOKENIZER.encode_prompt("a")[0]
            assert (told.token_id, told.token, told.logprob) == (token, "a", -1.5)
            assert len(told.top) == num_best
            assert [token_id for token_id, *_ in told.top] == [token ^ 1, token, token ^ 2][:asked]
        assert told.top[2][2] == LEAST_LOGPROB, "JSON has no infinity"


async def test_a_schema_is_given_so_that_vllm_reads_the_grammar_we_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_as: list[str] = []
    compile_schema = LLMatcher.grammar_from_json_schema

    def spy(schema: str, **given: Any) -> str:
        read_as.append(compile_schema(schema, **given))
        return read_as[-1]

    monkeypatch.setattr(LLMatcher, "grammar_from_json_schema", spy)
    grammar_for(JSON_FORMAT, TOKENIZER)
    async with started(JSON_ANSWER) as (front, llm):
        await ask(front, response_format=JSON_FORMAT, sampling={"max_tokens": 60})
        structured = llm.calls[0].params.structured_outputs
        assert structured is not None
        theirs = compile_schema(json.dumps(structured.json), defaults={"whitespace_flexible": True})
        ours, theirs = json.loads(read_as[0]), json.loads(theirs)
        (ours,), (theirs,) = ours["grammars"], theirs["grammars"]
        for key, value in ours["json_schema"]["x-guidance"].items():
            assert theirs["json_schema"]["x-guidance"][key] == value
        del ours["json_schema"]["x-guidance"], theirs["json_schema"]["x-guidance"]
        assert theirs == ours


async def test_a_pattern_and_a_choice_are_given_to_vllm() -> None:
    async with started("ab") as (front, llm):
        await ask(front, response_format={"type": "regex", "regex": "[a-c]+"})
        await ask(front, response_format={"type": "choice", "choice": ["ab", "c"]})
        given = [call.params.structured_outputs for call in llm.calls]
        assert [call and (call.json, call.regex, call.choice) for call in given] == [
            (None, "[a-c]+", None),
            (None, None, ["ab", "c"]),
        ]


async def test_an_answer_outside_its_grammar_fails_alone() -> None:
    async with started("no json") as (front, _):
        _, terminal = await ask(front, response_format=JSON_FORMAT)
        assert terminal.error is not None
        assert terminal.error.code == "internal"
        seq, _ = await ask(front, "plain")
        assert front.follow(seq).text == "no json"


async def test_a_constrained_answer_that_goes_on_is_refused_by_name() -> None:
    async with started() as (front, _):
        with pytest.raises(InvalidRequest, match="cannot go on elsewhere") as refused:
            await front.prepare(
                request(response_format=JSON_FORMAT), TOKENIZER.encode_prompt('{"name":')
            )
        assert refused.value.param == "response_format"


@pytest.mark.parametrize("fields", [{"is_prompt_only": True}, {"prompt_logprobs": 0}])
async def test_a_prompt_that_has_to_be_echoed_by_the_model_is_refused_by_name(
    fields: dict[str, Any],
) -> None:
    async with started() as (front, _):
        with pytest.raises(InvalidRequest) as refused:
            await front.prepare(request(**fields))
        assert refused.value.param == "echo"


async def test_an_answer_goes_on_behind_prompt_and_answer() -> None:
    async with started("lo") as (front, llm):
        seq = await front.prepare(request(), TOKENIZER.encode_prompt("hel"))
        front.admit([seq])
        assert await read(front, seq) == "lo"
        assert llm.calls[0].prompt["prompt_token_ids"] == TOKENIZER.encode_prompt("hihel")


@pytest.mark.parametrize(("reason", "told"), [("stop", "stop"), ("length", "length")])
async def test_an_end_that_only_vllm_knows_ends_the_answer(reason: str, told: str) -> None:
    class Impatient(FakeAsyncLLM):
        def _tokens(self, call: Call) -> tuple[list[int], str]:
            return TOKENIZER.encode_prompt("hel"), reason

    llm = Impatient(lambda call: [], EOS)
    front = VllmEngine(llm, API, TOKENIZER, SMALL)
    await front.start()
    seq, terminal = await ask(front)
    assert (front.follow(seq).text, terminal.finish_reason) == ("hel", told)
    await front.close()


@pytest.mark.parametrize("tokens", [[], TOKENIZER.encode_prompt("he")])
async def test_an_answer_that_vllm_breaks_off_is_an_error(tokens: list[int]) -> None:
    class Broken(FakeAsyncLLM):
        def _tokens(self, call: Call) -> tuple[list[int], str]:
            return tokens, "abort"

    front = VllmEngine(Broken(lambda call: [], EOS), API, TOKENIZER, SMALL)
    await front.start()
    _, terminal = await ask(front)
    assert terminal.error is not None
    assert terminal.error.code == "internal"
    assert front.stats().finished_total == {"internal": 1}
    await front.close()


def fault_of(name: str, fault: Exception) -> Callable[[str], Exception | None]:
    return lambda request_id: fault if request_id == name else None


async def test_a_fault_ends_its_request_alone_and_shows_an_incident_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started(fault=fault_of("bad", RuntimeError("secret detail"))) as (front, _):
        _, terminal = await ask(front, "bad")
        assert terminal.error is not None
        assert terminal.error.code == "internal"
        assert "secret" not in terminal.error.message
        assert "secret detail" in caplog.text
        seq, _ = await ask(front, "good")
        assert front.follow(seq).text == "hello"
        assert front.stats().running == 0


async def test_what_vllm_refuses_is_the_requests_fault() -> None:
    fault = fault_of("bad", FakeClientError("the schema nests too deeply"))
    async with started(fault=fault) as (front, _):
        _, terminal = await ask(front, "bad")
        assert terminal.error is not None
        assert terminal.error.code == "invalid_request"
        assert "nests too deeply" in terminal.error.message


async def test_a_dead_process_ends_every_request_and_is_unhealthy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started(config=replace(SMALL, max_num_seqs=1)) as (front, llm):
        llm.hold()
        seqs = [await front.prepare(request(f"r{i}")) for i in range(2)]
        front.admit(seqs)
        await asyncio.to_thread(llm.entered.wait)
        llm.death = RuntimeError("killed")
        for seq in seqs:
            await read(front, seq)
            error = end_of(front, seq).error
            assert error is not None
            assert error.code == "internal"
        assert not front.is_healthy
        late = await front.prepare(request("late"))
        assert isinstance(front.admit([late])[0], Overloaded)
    assert "vllm is dead" in caplog.text


async def test_a_process_that_is_dead_at_the_start_says_so() -> None:
    llm = FakeAsyncLLM(lambda call: [], EOS)
    llm.death = RuntimeError("no device")
    front = VllmEngine(llm, API, TOKENIZER, SMALL)
    with pytest.raises(RuntimeError, match="no device"):
        await front.start()
    await front.close()


async def test_what_log_probabilities_need_is_compiled_before_anyone_asks_for_them() -> None:
    llm = FakeAsyncLLM(lambda call: [], EOS)
    front = VllmEngine(llm, API, TOKENIZER, SMALL)
    await front.start()
    assert [call.params.logprobs for call in llm.calls] == [1]
    assert front.stats().finished_total == {}
    await front.close()


async def test_close_shuts_vllm_down_once() -> None:
    async with started() as (front, llm):
        await front.close()
    assert llm.num_shutdowns == 1
