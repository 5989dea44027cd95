"""An answer that was begun on a lost replica goes on as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.preparation import prepare
from deployments.engine.runner import ModelRunner
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import InvalidRequest
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import TokenDelta
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, Answer, FakeClock, run_to_end, sequence

(EOS,) = TOKENIZER.eos_token_ids
TEXT = "né🙂, XY and XYZ é"

JSON_ANSWER = json.dumps({"name": "Zoë", "age": 7}, ensure_ascii=False)
JSON_SCHEMA = {
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

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a stop string": {"stop": ("XYZ",)},
    "two stop strings that overlap": {"stop": ("d XYQ", " XY")},
    "a limit inside a character": {"max_tokens": 5},
    "logprobs": {"logprobs": 2, "stop": ("YZ",)},
    "min tokens": {"min_tokens": 20, "max_tokens": 30, "stop": ("and",)},
    "ignore eos": {"ignore_eos": True, "max_tokens": 30},
    "a stop token": {"stop_token_ids": (TOKENIZER.encode_prompt("a")[0],)},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.4,
        "logprobs": 1,
    },
    "sampled": {"temperature": 1.0, "seed": 11, "top_p": 0.9},
    "sampled with penalties": {
        "temperature": 0.8,
        "seed": 5,
        "top_k": 40,
        "min_p": 0.01,
        "frequency_penalty": 0.3,
        "logprobs": 3,
    },
}


def request(
    prompt: tuple[int, ...],
    request_id: str = "r",
    response_format: dict[str, Any] | None = None,
    **sampling: Any,
) -> InferenceRequest:
    return InferenceRequest(
        request_id=request_id,
        tenant="t",
        model="m",
        prompt=prompt,
        response_format=response_format,
        sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 32} | sampling)),
    )


def begun(
    engine: Engine, asked: InferenceRequest, output_token_ids: list[int] | tuple[int, ...] = ()
) -> Sequence:
    rng = random.Random(1)
    return prepare(
        asked, engine.tokenizer, engine.config, FakeClock(), rng, output_token_ids=output_token_ids
    )


def answer(engine: Engine, seq: Sequence) -> Answer:
    return run_to_end(engine, seq)[seq]


def end_of(got: Answer) -> tuple[Any, ...]:
    terminal = got.terminal
    return (
        terminal.finish_reason,
        terminal.error,
        terminal.usage.prompt_tokens,
        terminal.usage.completion_tokens,
    )


def from_token(deltas: list[TokenDelta], position: int) -> list[TokenDelta]:
    return [delta for delta in deltas if delta.seq >= position]


def check_every_cut(engine: Engine, asked: InferenceRequest) -> Answer:
    """Compares the answer continued after each of its tokens with the undisturbed one."""
    first = begun(engine, asked)
    whole = answer(engine, first)
    for cut in range(1, len(first.output_token_ids) + 1):
        rest = answer(engine, begun(engine, asked, first.output_token_ids[:cut]))
        assert rest.deltas == from_token(whole.deltas, cut), f"cut after {cut} tokens"
        assert end_of(rest) == end_of(whole), f"cut after {cut} tokens"
    return whole


def script_engine(text: str) -> Engine:
    token_ids = TOKENIZER.encode_prompt(text)
    runner = ScriptedRunner(lambda seq: token_ids, TOKENIZER, SMALL)
    return Engine(runner, TOKENIZER, SMALL, clock=FakeClock())


@pytest.fixture(scope="module")
def model_engine() -> Iterator[Callable[[str], Engine]]:
    """Engines on tiny random models, which repeat and surprise as real ones do."""
    runners: dict[str, ModelRunner] = {}

    def engine(family: str) -> Engine:
        if family not in runners:
            runners[family] = ModelRunner(tiny_models.build(family), SMALL)
            runners[family].warm_up()
        return Engine(runners[family], TOKENIZER, SMALL, clock=FakeClock())

    yield engine
    for runner in runners.values():
        runner.close()


@pytest.mark.parametrize("case", CASES)
def test_a_scripted_answer_goes_on_after_each_of_its_tokens(case: str) -> None:
    whole = check_every_cut(script_engine(TEXT), request((1, 2, 3), **CASES[case]))
    assert whole.deltas


@pytest.mark.parametrize("case", CASES)
def test_a_models_answer_goes_on_bit_for_bit(
    case: str, model_engine: Callable[[str], Engine]
) -> None:
    prompt = tuple(range(40, 61))
    check_every_cut(model_engine("llama"), request(prompt, **CASES[case]))


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral with a window", "cohere2"])
def test_answers_of_other_families_go_on_too(
    family: str, model_engine: Callable[[str], Engine]
) -> None:
    check_every_cut(model_engine(family), request((7, 8, 9), max_tokens=12, logprobs=0))


def test_an_answer_in_a_grammar_goes_on_in_it() -> None:
    asked = request((1, 2), response_format=JSON_SCHEMA, stop=("nothing",))
    whole = check_every_cut(script_engine(JSON_ANSWER), asked)
    assert json.loads(whole.text) == {"name": "Zoë", "age": 7}


def test_a_models_sampled_json_goes_on_in_its_grammar(
    model_engine: Callable[[str], Engine],
) -> None:
    asked = request(
        (3, 4, 5), response_format=JSON_SCHEMA, temperature=1.0, seed=3, max_tokens=25, logprobs=1
    )
    check_every_cut(model_engine("llama"), asked)


@given(
    text=st.text(alphabet="aXYé🙂", max_size=12),
    stop=st.lists(st.text(alphabet="aXYé🙂", min_size=1, max_size=4), max_size=2),
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 8),
)
def test_any_answer_goes_on_after_each_of_its_tokens(
    text: str, stop: list[str], max_tokens: int, min_tokens: int
) -> None:
    asked = request(
        (1,), stop=tuple(stop), max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens)
    )
    check_every_cut(script_engine(text), asked)


def test_it_goes_on_in_any_company(model_engine: Callable[[str], Engine]) -> None:
    engine = model_engine("llama")
    asked = request(tuple(range(50, 90)), max_tokens=20, logprobs=1)
    first = begun(engine, asked)
    whole = answer(engine, first)
    rng = random.Random(2)
    for cut in (1, 7, 13):
        rest = begun(engine, asked, first.output_token_ids[:cut])
        others = [
            sequence([rng.randrange(250) for _ in range(rng.randint(1, 60))]) for _ in range(3)
        ]
        assert run_to_end(engine, *others, rest)[rest].deltas == from_token(whole.deltas, cut)


def test_it_can_be_continued_again_and_again(model_engine: Callable[[str], Engine]) -> None:
    engine = model_engine("llama")
    asked = request((5, 6, 7), max_tokens=12, temperature=1.0, seed=4)
    whole = answer(engine, begun(engine, asked))
    deltas: list[TokenDelta] = []
    while True:
        seq = begun(engine, asked, [token for delta in deltas for token in delta.token_ids])
        engine.add(seq)
        emissions = [emission for _ in range(3) for emission in engine.step()]
        deltas += [delta for emission in emissions for delta in emission.deltas]
        if any(emission.terminal for emission in emissions):
            break
        seq.is_abandoned = True  # the replica dies
        run_to_end(engine)
    assert deltas == whole.deltas


# What comes in


def test_a_continued_request_counts_what_it_brought() -> None:
    engine = script_engine("hello")
    seq = begun(engine, request((1, 2, 3)), TOKENIZER.encode_prompt("hel"))
    engine.add(seq)
    assert engine.stats().tokens == 3 + 32 - 3
    engine.step()
    assert engine.stats().tokens == 32 - 4
    got = answer_from(engine, seq)
    assert got.terminal.usage.completion_tokens == 6
    assert engine.stats().generated_tokens_total == 3
    assert engine.stats().prompt_tokens_total == 3


def answer_from(engine: Engine, seq: Sequence) -> Answer:
    return run_to_end(engine)[seq]


def test_tokens_that_no_delta_can_have_carried_are_made_again() -> None:
    engine = script_engine("n🙂")
    half = TOKENIZER.encode_prompt("n🙂")[:3]
    seq = begun(engine, request((1,), logprobs=0), half)
    assert seq.output_token_ids == half[:1]
    (delta,) = answer(engine, seq).deltas
    assert (delta.seq, delta.text, len(delta.token_ids)) == (4, "🙂", 4)
    assert delta.logprobs is not None
    assert len(delta.logprobs) == 4


@pytest.mark.parametrize(
    ("sampling", "output", "reason"),
    [
        ({"max_tokens": 3}, TOKENIZER.encode_prompt("abc"), "length"),
        ({}, [*TOKENIZER.encode_prompt("abc"), EOS], "stop"),
        ({"stop": ("b",)}, TOKENIZER.encode_prompt("ab"), "stop"),
        ({"stop": ("b",)}, TOKENIZER.encode_prompt("abcdef"), "stop"),
    ],
    ids=["limit", "end token", "stop string", "more than the answer"],
)
def test_a_complete_answer_ends_at_once(
    sampling: dict[str, Any], output: list[int], reason: str
) -> None:
    engine = script_engine("never asked")
    seq = begun(engine, request((1,), **sampling), output)
    engine.add(seq)
    assert engine.has_work
    (emission,) = engine.step()
    assert emission.deltas == []
    assert emission.terminal is not None
    assert emission.terminal.finish_reason == reason
    assert emission.terminal.usage.completion_tokens == min(len(output), len(seq.output_token_ids))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.tokens, stats.steps_total) == (0, 0, 0, 0)
    assert stats.finished_total == {reason: 1}
    assert not engine.has_work


def test_a_complete_answer_that_nobody_waits_for_is_cancelled_once() -> None:
    engine = script_engine("never asked")
    seq = begun(engine, request((1,), max_tokens=1), [70])
    engine.add(seq)
    seq.is_abandoned = True
    (emission,) = engine.step()
    assert emission.terminal is not None
    assert emission.terminal.finish_reason == "cancelled"
    assert engine.step() == []


@pytest.mark.parametrize(
    ("output", "limit", "given"),
    [
        ([999_999], TOKENIZER.vocab_size - 1, {}),
        ([-1], TOKENIZER.vocab_size - 1, {}),
        ([70, 71, 72], 2, {"max_tokens": 2}),
        ([70], None, {"response_format": JSON_SCHEMA}),
    ],
    ids=["beyond the vocabulary", "negative", "beyond the limit", "outside the grammar"],
)
def test_tokens_that_cannot_be_the_answer_are_refused(
    output: list[int], limit: int | None, given: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        begun(script_engine(""), request((1,), **given), output)
    assert (refusal.value.param, refusal.value.limit) == ("output_token_ids", limit)


# The default model

PROMPTS = ("how are you?", "Write a poem about rivers.", "List five animals, in German.")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def real_engine(
    request: pytest.FixtureRequest, chat_model_folder: Path, chat_tokenizer: ChatTokenizer
) -> Iterator[Engine]:
    config = EngineConfig(max_num_seqs=8, max_model_len=1024, num_threads=1, dtype=request.param)
    runner = ModelRunner.load(chat_model_folder, config)
    runner.warm_up()
    yield Engine(runner, chat_tokenizer, config, clock=FakeClock())
    runner.close()


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 17}], ids=["greedy", "sampled"]
)
def test_the_default_models_answers_go_on_bit_for_bit(
    sampling: dict[str, Any], real_engine: Engine
) -> None:
    tokenizer = real_engine.tokenizer
    prompts = [tokenizer.encode_chat((Message(role="user", content=text),)) for text in PROMPTS]
    wanted = [
        request(tuple(prompt), f"r{i}", logprobs=1, max_tokens=24, **sampling)
        for i, prompt in enumerate(prompts)
    ]
    firsts = [begun(real_engine, asked) for asked in wanted]
    whole = run_to_end(real_engine, *firsts)
    for cut in (1, 2, 9, 23):
        rests = [
            begun(real_engine, asked, first.output_token_ids[:cut])
            for asked, first in zip(wanted, firsts, strict=True)
        ]
        continued = run_to_end(real_engine, *rests)
        for text, first, rest in zip(PROMPTS, firsts, rests, strict=True):
            assert continued[rest].deltas == from_token(whole[first].deltas, cut), (text, cut)
            assert end_of(continued[rest]) == end_of(whole[first]), (text, cut)
