"""Log probabilities of a prompt's own tokens: the model's, however the prompt is cut and whoever is there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.fused import FusedRunner
from deployments.engine.preparation import prepare
from deployments.engine.runner import ModelRunner, Runner
from deployments.engine.scheduler import StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.request import InferenceRequest, SamplingParams
from protocol.token_log import PromptToken
from tests.engine import tiny_models
from tests.engine.fakes import (
    SMALL,
    TOKENIZER,
    Collector,
    FakeClock,
    run_to_end,
    scripted_engine,
    sequence,
)

ROOMY = replace(SMALL, prefill_slowdown=0, max_waiting=40)
FAMILY = "qwen3"
FUSED = EngineConfig(
    max_model_len=256, max_num_seqs=4, max_num_batched_tokens=132, prefill_chunk_tokens=64,
    num_threads=1, device="cpu", dtype="float32",
)  # fmt: skip


def asked(prompt: list[int] | str, best: int = 2, tenant: str = "t", **sampling: Any) -> Sequence:
    seq = sequence(prompt, **({"max_tokens": 4, "ignore_eos": True} | sampling))
    seq.prompt_logprobs = best
    seq.tenant = seq.share = tenant
    return seq


def told(collector: Collector, seq: Sequence) -> tuple[PromptToken, ...]:
    """The prompt's tokens, which come once and with the first delta."""
    first, *rest = collector[seq].deltas
    assert all(delta.prompt is None for delta in rest)
    assert first.prompt is not None
    assert [token.token_id for token in first.prompt] == seq.prompt_token_ids
    return first.prompt


@pytest.fixture(scope="module", params=["transformers", "fused"])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    runner: Runner
    if request.param == "transformers":
        runner = ModelRunner(tiny_models.build(FAMILY), FUSED)
    else:
        folder = tmp_path_factory.mktemp(FAMILY)
        tiny_models.build(FAMILY).save_pretrained(folder)
        runner = FusedRunner.load(folder, FUSED)
    runner.warm_up()
    yield runner
    runner.close()


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 200])
def test_each_token_has_the_models_own_probability_behind_those_before(
    runner: Runner, length: int
) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(250) for _ in range(length)]
    engine = Engine(runner, TOKENIZER, FUSED, clock=FakeClock())
    seq = asked(prompt, best=3)
    tokens = told(run_to_end(engine, seq), seq)
    with torch.inference_mode():
        logits = tiny_models.build(FAMILY)(torch.tensor([prompt])).logits[0]
    table = torch.log_softmax(logits.float()[:, : TOKENIZER.vocab_size], dim=-1)
    assert (tokens[0].logprob, tokens[0].top) == (None, ())
    for at, token in enumerate(tokens[1:]):
        assert token.logprob == pytest.approx(float(table[at, token.token_id]), abs=2e-3)
        values, ids = table[at].topk(3)
        assert [value for _, _, value in token.top] == pytest.approx(values.tolist(), abs=2e-3)
        if (values[:-1] - values[1:]).min() > 0.01:
            assert [other for other, _, _ in token.top] == ids.tolist()


def test_what_is_told_depends_on_no_company_no_cut_and_nothing_computed_before(
    runner: Runner,
) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(250) for _ in range(150)]
    engine = Engine(runner, TOKENIZER, FUSED, clock=FakeClock())
    alone = asked(prompt)
    expected = told(run_to_end(engine, alone), alone)
    streams = [sequence([9 + i] * 20, max_tokens=60, ignore_eos=True) for i in range(2)]
    again = asked(prompt)
    collector = Collector()
    for seq in streams:
        engine.add(seq)
    for _ in range(5):
        collector.take(engine.step())
    collector_of_all = run_to_end(engine, again)
    assert again.num_cached_tokens == 0, "no place that is asked for is skipped"
    assert told(collector_of_all, again) == expected
    assert again.output_token_ids == alone.output_token_ids


def test_who_asks_for_none_finds_what_one_that_asked_has_computed(runner: Runner) -> None:
    engine = Engine(runner, TOKENIZER, FUSED, clock=FakeClock())
    run_to_end(engine, asked([7] * 100, tenant="x"))
    heir = sequence([7] * 100, max_tokens=1)
    heir.tenant = "x"
    run_to_end(engine, heir)
    assert heir.num_cached_tokens == 96


def test_logits_of_a_chunk_at_most_are_in_memory_however_many_ask() -> None:
    most = 0

    class Noting(ScriptedRunner):
        def run(self, plan: StepPlan) -> torch.Tensor:
            nonlocal most
            most = max(most, sum(row.num_scored for row in plan.rows))
            return super().run(plan)

    config = replace(ROOMY, max_num_batched_tokens=100)
    engine = Engine(Noting(lambda seq: [65] * 90, TOKENIZER, config), TOKENIZER, config)
    seqs = [asked([i] * (30 + i)) for i in range(4)]
    plain = sequence([1] * 60, max_tokens=2)
    for seq in (*seqs, plain):
        engine.add(seq)
    engine.step()
    assert plain.output_token_ids, "others are not held up"
    collector = run_to_end(engine)
    assert 0 < most <= config.prefill_chunk_tokens
    assert all(len(told(collector, seq)) == len(seq.prompt_token_ids) for seq in seqs[1:])


def test_one_that_was_preempted_on_its_way_tells_each_token_once() -> None:
    config = replace(ROOMY, max_num_seqs=1)
    engine, _ = scripted_engine("hello", config=config)
    seq = asked([5, 6, 7] * 20)
    engine.add(seq)
    engine.step()
    assert 0 < seq.num_computed_tokens < 60
    urgent = asked([1] * 5)
    urgent.priority = 1
    collector = run_to_end(engine, urgent)
    assert seq.num_preemptions == 1
    assert [token.logprob for token in told(collector, seq)] == [None, *[0.0] * 59]


def test_offsets_count_the_characters_before_each_token() -> None:
    engine, _ = scripted_engine("x")
    seq = asked("aé🙂b")
    tokens = told(run_to_end(engine, seq), seq)
    # A byte a token: those that end no character begin where it does.
    assert [token.offset for token in tokens] == [0, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("best", [None, 0, 2])
def test_a_request_for_the_prompt_alone_answers_nothing(best: int | None) -> None:
    engine, runner = scripted_engine("never said")
    request = InferenceRequest(
        request_id="r", tenant="t", model="m", prompt="abc", is_prompt_only=True,
        prompt_logprobs=best, sampling=SamplingParams(max_tokens=9, min_tokens=3),
    )  # fmt: skip
    seq = prepare(request, TOKENIZER, engine.config, FakeClock(), random.Random())
    answer = run_to_end(engine, seq)[seq]
    assert answer.terminal.finish_reason == "length"
    assert answer.terminal.usage.prompt_tokens == 3
    assert answer.terminal.usage.completion_tokens == 0
    assert (answer.text, answer.token_ids) == ("", [])
    prompts = [delta.prompt for delta in answer.deltas]
    if best is None:
        assert prompts == []
    else:
        (tokens,) = prompts
        assert tokens is not None
        assert [token.logprob for token in tokens] == [None, 0.0, 0.0]
        assert [len(token.top) for token in tokens] == [0, best, best]
    stats = engine.stats()
    assert (stats.tokens, stats.generated_tokens_total) == (0, 0)
    assert runner.pool.num_used == 0


def test_an_answer_without_any_text_still_brings_its_prompt() -> None:
    engine, _ = scripted_engine("")
    seq = asked("abc", ignore_eos=False)
    collector = run_to_end(engine, seq)
    assert collector[seq].terminal.finish_reason == "stop"
    assert len(told(collector, seq)) == 3


def test_an_answer_that_goes_on_elsewhere_tells_its_prompt_no_second_time() -> None:
    engine, _ = scripted_engine("abcd")
    request = InferenceRequest(
        request_id="r", tenant="t", model="m", prompt="hi", prompt_logprobs=1,
        sampling=SamplingParams(max_tokens=4, temperature=0),
    )  # fmt: skip
    seq = prepare(
        request,
        TOKENIZER,
        engine.config,
        FakeClock(),
        random.Random(),
        TOKENIZER.encode_prompt("ab"),
    )
    answer = run_to_end(engine, seq)[seq]
    assert answer.text == "cd"
    assert all(delta.prompt is None for delta in answer.deltas)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_prompt_without_probabilities_fails_alone(is_whole: bool) -> None:
    class Broken(ScriptedRunner):
        def run(self, plan: StepPlan) -> torch.Tensor:
            logits = super().run(plan)
            if any(row.seq is bad for row in plan.rows):
                # The first of the rows is its: only one prompt is asked for at a time.
                logits[0, 3] = float("nan")
            return logits

    config = replace(ROOMY, max_num_seqs=1)
    engine = Engine(Broken(lambda seq: [65], TOKENIZER, config), TOKENIZER, config)
    bad = asked([1] * (10 if is_whole else 60))
    good = asked([2] * 10)
    collector = run_to_end(engine, bad, good)
    assert collector[bad].terminal.finish_reason == "error"
    assert len(told(collector, good)) == 10
    assert engine.stats().tokens == 0


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_default_model_finds_sense_likelier_than_nonsense(
    chat_model_folder: Path, chat_tokenizer: ChatTokenizer
) -> None:
    config = EngineConfig(max_num_seqs=2, max_model_len=512, num_threads=1)
    runner = FusedRunner.load(chat_model_folder, config)
    runner.warm_up()
    engine = Engine(runner, chat_tokenizer, config, clock=FakeClock())
    means = []
    for text in (
        "The sky is blue and the grass is green.",
        "Green is the and grass blue the sky is.",
    ):
        seq = asked(chat_tokenizer.encode_prompt(text), tokenizer=chat_tokenizer)
        tokens = told(run_to_end(engine, seq), seq)
        assert "".join(token.token for token in tokens) == text
        scores = [token.logprob for token in tokens if token.logprob is not None]
        assert len(scores) == len(tokens) - 1
        means.append(sum(scores) / len(scores))
    assert means[0] > means[1] + 1
    runner.close()
