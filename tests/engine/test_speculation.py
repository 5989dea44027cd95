"""Drafts make answers arrive in fewer steps, and change nothing in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deployments.engine.build import load_runner
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.preparation import prepare
from deployments.engine.runner import ModelRunner, Runner
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.speculation import (
    LONGEST_PAUSE,
    MOST_CANDIDATES,
    MOST_MATCH,
    PATIENCE,
    Drafter,
    PromptLookup,
)
from deployments.engine.structured import grammar_for
from deployments.engine.tokenizer import ChatTokenizer
from protocol.request import InferenceRequest, Message, SamplingParams
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, Answer, Collector, FakeClock, run_to_end, sequence

DRAFTED = replace(
    SMALL, max_model_len=256, max_num_batched_tokens=64, speculative_tokens=7, max_waiting=40
)
PLAIN = replace(DRAFTED, speculative_tokens=0)

VERSE = "row, row, row your boat, gently down the stream. "
SONG = VERSE * 3
UNREPEATED = "".join(chr(65 + i % 58) + chr(65 + i * 7 % 57) for i in range(40))


# Where a text repeats


def looked_up(token_ids: list[int]) -> PromptLookup:
    lookup = PromptLookup()
    lookup.extend(token_ids)
    return lookup


def test_what_followed_the_same_tokens_is_proposed() -> None:
    lookup = looked_up([1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert lookup.propose(3) == [3, 4, 5]
    lookup.extend([3, 4])
    assert lookup.propose(2) == [5, 6]
    lookup.extend([7])
    assert lookup.propose(2) == []


def test_the_place_that_reads_alike_the_longest_counts_before_the_latest() -> None:
    assert looked_up([5, 1, 2, 3, 8, 1, 2, 4, 5, 1, 2]).propose(1) == [3]
    assert looked_up([5, 1, 2, 3, 5, 1, 2, 4, 5, 1, 2]).propose(1) == [4]


def test_a_text_that_repeats_itself_to_its_end_is_taken_to_go_on() -> None:
    assert looked_up([1, 2, 3, 1, 2, 3, 1, 2]).propose(5) == [3, 1, 2, 3, 1]
    assert looked_up([4, 4, 4]).propose(3) == [4, 4, 4]


@pytest.mark.parametrize("token_ids", [[], [1], [1, 1], [1, 2, 3]])
def test_too_short_or_new_a_text_proposes_nothing(token_ids: list[int]) -> None:
    assert looked_up(token_ids).propose(4) == []


def by_search(tokens: list[int]) -> int:
    """Where to go on from, found by comparing every earlier place; 0 is none."""

    def num_alike(at: int) -> int:
        length = 0
        while length < min(MOST_MATCH, at) and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    places = [at for at in range(len(tokens) - 1, 1, -1) if num_alike(at) >= 2]
    return max(places[:MOST_CANDIDATES], key=num_alike, default=0)


@given(pieces=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=6))
def test_looking_up_finds_what_searching_finds(pieces: list[list[int]]) -> None:
    lookup = PromptLookup()
    tokens: list[int] = []
    for piece in pieces:
        lookup.extend(piece)
        tokens += piece
        start = by_search(tokens)
        continued = list(tokens)
        for _ in range(6 if start else 0):
            continued.append(continued[start + len(continued) - len(tokens)])
        assert lookup.propose(6) == continued[len(tokens) :]


# How much is guessed


def drafting(text: list[int], most: int = 8) -> tuple[Drafter, Sequence]:
    return Drafter(most), sequence(text, max_tokens=100_000)


def test_wrong_drafts_become_short_and_then_rare() -> None:
    drafter, seq = drafting([1, 2])
    lengths = []
    for number in range(1000):
        draft = drafter.propose(seq, 8)
        lengths.append(len(draft))
        # After 1 and 2 always something else comes.
        seq.output_token_ids += [number + 10, 1, 2]
        if draft:
            drafter.observe(seq, len(draft), 0)
    drafted = [length for length in lengths if length]
    assert drafted[:5] == [8, 4, 2, 1, 1]
    assert sum(lengths[PATIENCE + 1 :]) <= 12 + 3 * 1000 // LONGEST_PAUSE


def test_a_right_draft_after_wrong_ones_makes_them_long_again() -> None:
    drafter, seq = drafting([1, 2, 3] * 20)
    for _ in range(3):
        drafter.observe(seq, 1, 0)
    assert len(drafter.propose(seq, 8)) == 1
    drafter.observe(seq, 1, 1)
    assert len(drafter.propose(seq, 8)) == 8
    drafter.observe(seq, 8, 3)
    assert len(drafter.propose(seq, 8)) == 4


class WatchedRunner(ScriptedRunner):
    """A scripted runner that remembers its plans."""

    def __init__(self, script: Callable[[Sequence], str], config: EngineConfig) -> None:
        super().__init__(lambda seq: TOKENIZER.encode_prompt(script(seq)), TOKENIZER, config)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> Tensor:
        self.plans.append(plan)
        return super().run(plan)


def engine_of(
    answers: Callable[[Sequence], str] | str, config: EngineConfig = DRAFTED
) -> tuple[Engine, WatchedRunner]:
    runner = WatchedRunner((lambda seq: answers) if isinstance(answers, str) else answers, config)
    return Engine(runner, TOKENIZER, config, clock=FakeClock()), runner


def test_an_answer_that_repeats_takes_a_fraction_of_the_steps() -> None:
    engine, runner = engine_of(SONG)
    seq = sequence(VERSE, max_tokens=200)
    assert run_to_end(engine, seq)[seq].text == SONG
    stats = engine.stats()
    assert stats.steps_total < len(SONG) / 4
    assert stats.generated_tokens_total == len(SONG) + 1
    assert 0.8 * len(SONG) < stats.accepted_tokens_total <= stats.draft_tokens_total
    assert stats.draft_tokens_total == sum(
        len(row.drafts) for plan in runner.plans for row in plan.rows
    )


def test_an_answer_that_does_not_repeat_gets_no_drafts() -> None:
    engine, _ = engine_of(UNREPEATED)
    seq = sequence("hi", max_tokens=200)
    assert run_to_end(engine, seq)[seq].text == UNREPEATED
    assert engine.stats().draft_tokens_total <= 7


@pytest.mark.parametrize("config", [PLAIN, replace(DRAFTED, max_speculative_rows=0)])
def test_it_can_be_switched_off(config: EngineConfig) -> None:
    engine, _ = engine_of(SONG, config)
    run_to_end(engine, sequence(VERSE, max_tokens=200))
    assert engine.stats().draft_tokens_total == 0
    assert engine.stats().steps_total == len(SONG) + 1


@pytest.mark.parametrize("name", ["speculative_tokens", "max_speculative_rows"])
def test_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1, the least is 0"):
        replace(SMALL, **{name: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 4])
def test_drafts_fill_a_step_to_its_rows_and_no_further(num_seqs: int) -> None:
    engine, runner = engine_of(SONG, replace(DRAFTED, max_speculative_rows=4))
    run_to_end(engine, *(sequence(f"{i}{VERSE}", max_tokens=200) for i in range(num_seqs)))
    together = [plan for plan in runner.plans if len(plan.rows) == num_seqs]
    decodes = [plan for plan in together if all(row.is_decode for row in plan.rows)]
    assert max(plan.num_decodes for plan in decodes) == 4
    assert any(row.drafts for plan in decodes for row in plan.rows) == (num_seqs < 4)


def test_those_that_decode_together_share_the_drafts() -> None:
    engine, runner = engine_of(SONG, replace(DRAFTED, max_speculative_rows=8))
    run_to_end(engine, *(sequence(VERSE, max_tokens=100) for _ in range(3)))
    lengths = [tuple(len(row.drafts) for row in plan.rows) for plan in runner.plans]
    assert (1, 2, 2) in lengths or (2, 2, 1) in lengths


def test_a_piece_of_a_prompt_fits_beside_drafts() -> None:
    # 20 tokens a step: the stream's, 16 of a prompt, and 3 for drafts.
    engine, runner = engine_of(
        SONG, replace(SMALL, max_model_len=256, speculative_tokens=7, prefill_slowdown=0)
    )
    stream = sequence(VERSE, max_tokens=150)
    engine.add(stream)
    while not stream.output_token_ids:
        engine.step()
    run_to_end(engine, sequence([*range(100)], max_tokens=1))
    beside = [plan for plan in runner.plans if len(plan.rows) == 2]
    assert len(beside) == 7
    assert all(plan.rows[1].num_tokens == 16 for plan in beside[:-1])
    assert any(plan.rows[0].drafts for plan in beside)
    assert all(plan.num_tokens <= 20 for plan in runner.plans)


@pytest.mark.parametrize(
    "given_",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"min_tokens": 200},
    ],
)
def test_answers_whose_odds_change_with_each_token_get_none(given_: dict[str, Any]) -> None:
    engine, _ = engine_of(SONG)
    seq = sequence(VERSE, max_tokens=200, **given_)
    assert run_to_end(engine, seq)[seq].text.startswith(SONG)
    assert engine.stats().draft_tokens_total == 0


def test_answers_in_a_grammar_get_none() -> None:
    text = '{"a": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}'
    engine, _ = engine_of(text)
    seq = sequence("hi", max_tokens=100)
    seq.grammar = grammar_for({"type": "json_object"}, TOKENIZER)
    assert run_to_end(engine, seq)[seq].text == text
    assert engine.stats().draft_tokens_total == 0


def test_drafts_begin_once_the_least_length_is_reached() -> None:
    engine, runner = engine_of(SONG)
    seq = sequence(VERSE, max_tokens=200, min_tokens=60)
    run_to_end(engine, seq)
    starts = [row.start for plan in runner.plans for row in plan.rows if row.drafts]
    assert min(starts) == len(VERSE) + 59


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_draft_goes_beyond_the_limit_of_an_answer(max_tokens: int) -> None:
    engine, runner = engine_of("la" * 20)
    seq = sequence("lalala", max_tokens=max_tokens)
    answer = run_to_end(engine, seq)[seq]
    assert (answer.text, answer.terminal.finish_reason) == (("la" * 20)[:max_tokens], "length")
    assert answer.terminal.usage.completion_tokens == max_tokens
    assert max(row.end for plan in runner.plans for row in plan.rows) <= 6 + max_tokens - 1


def test_no_draft_goes_beyond_the_context() -> None:
    engine, runner = engine_of("la" * 60, replace(DRAFTED, max_model_len=40))
    seq = sequence("lalala", max_tokens=34)
    assert run_to_end(engine, seq)[seq].terminal.finish_reason == "length"
    assert max(row.end for plan in runner.plans for row in plan.rows) <= 40


def test_drafts_count_as_decoding_and_never_as_a_prompt() -> None:
    seq, other = sequence([1] * 10), sequence([2] * 10)
    plan = StepPlan(
        (ScheduledRow(seq, 10, 14, (5, 6, 7)), ScheduledRow(other, 9, 10), ScheduledRow(seq, 2, 8))
    )
    assert (plan.num_tokens, plan.num_decodes) == (11, 5)


def test_a_prompt_is_computed_ahead_beside_drafts() -> None:
    engine, runner = engine_of(SONG)
    stream = sequence(VERSE, max_tokens=200)
    engine.add(stream)
    while len(stream.output_token_ids) < 4:
        engine.step()
    warm_up = sequence([*range(64)], max_tokens=1)
    warm_up.is_warm_up = True
    run_to_end(engine, warm_up)
    assert engine.stats().warm_up_tokens_total == 64
    assert any(plan.warm_up and plan.rows[0].drafts for plan in runner.plans)


# The same answer


def told(answer: Answer) -> tuple[Any, ...]:
    terminal = answer.terminal
    return answer.deltas, terminal.finish_reason, terminal.usage.completion_tokens


@given(
    text=st.text(alphabet="aXYé🙂", max_size=30),
    stop=st.lists(st.text(alphabet="aXYé🙂", min_size=1, max_size=4), max_size=2),
    max_tokens=st.integers(1, 60),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.sampled_from([(), tuple(TOKENIZER.encode_prompt("X"))]),
)
def test_an_answer_ends_at_the_same_token_by_the_same_deltas(
    text: str, stop: list[str], max_tokens: int, min_tokens: int, stop_token_ids: tuple[int, ...]
) -> None:
    def answer(config: EngineConfig) -> tuple[Any, ...]:
        engine, _ = engine_of(text, config)
        seq = sequence(
            "aXYé🙂aX",
            stop=tuple(stop),
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stop_token_ids,
            logprobs=1,
        )
        return told(run_to_end(engine, seq)[seq])

    assert answer(DRAFTED) == answer(PLAIN)


def test_what_came_before_a_failure_in_a_step_is_told() -> None:
    engine, _ = engine_of("la" * 20)
    seq = sequence("lalala", max_tokens=40)
    append = engine._append

    def failing(seq: Sequence, token: Any) -> Any:
        if len(seq.output_token_ids) == 5:
            raise RuntimeError("broken")
        return append(seq, token)

    engine._append = failing  # type: ignore[method-assign]
    answer = run_to_end(engine, seq)[seq]
    assert (answer.text, answer.terminal.finish_reason) == ("lalal", "error")


def oracle(
    answers: dict[str, list[int]], rng: random.Random
) -> Callable[[Drafter, Sequence, int], tuple[int, ...]]:
    """Drafts that are right but for some tokens, in place of those looked up."""

    def propose(_: Drafter, seq: Sequence, most: int) -> tuple[int, ...]:
        at = len(seq.output_token_ids)
        right = answers[seq.request_id][at : at + rng.randint(0, most)]
        return tuple(rng.randrange(250) if rng.random() < 0.2 else token for token in right)

    return propose


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "logit_bias": {70: 4.0, 71: -3.0}, "logprobs": 0},
    {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"logprobs": 1, "stop": ("ab", "e")},
]


def crowd(rng: random.Random) -> list[Sequence]:
    """Sequences of any kind, the same for the same state of `rng`."""
    seqs = []
    for number in range(rng.randint(1, 9)):
        seq = sequence(
            [rng.randrange(40, 60) for _ in range(rng.randint(1, 40))],
            request_id=f"r{number}",
            seed=rng.getrandbits(32),
            max_tokens=rng.randint(1, 24),
            **rng.choice(SAMPLINGS),
        )
        seq.priority = rng.choice([0, 0, 0, -5, 5])
        seqs.append(seq)
    return seqs


def run_crowd(engine: Engine, seqs: list[Sequence], rng: random.Random) -> Collector:
    """The sequences come at random steps, and some of them are given up."""
    collector = Collector()
    left = list(seqs)
    abandoned = {seq: rng.randint(1, 10) for seq in seqs if rng.random() < 0.15}
    while left or engine.has_work:
        if left and rng.random() < 0.6:
            engine.add(left.pop())
        collector.take(engine.step())
        for seq, length in abandoned.items():
            if len(seq.output_token_ids) >= length:
                seq.is_abandoned = True
    return collector


def check_crowd(build: Callable[[EngineConfig], Engine], state: int) -> int:
    """Compares answers with drafts, partly wrong ones, in company with those without, alone.

    Returns:
        How many drafts were right.
    """
    alone = Collector()
    plain, engine = crowd(random.Random(state)), build(PLAIN)
    for seq in plain:
        engine.add(seq)
        while engine.has_work:
            alone.take(engine.step())
    answers = {seq.request_id: seq.output_token_ids for seq in plain}
    drafted, engine = crowd(random.Random(state)), build(DRAFTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "propose", oracle(answers, random.Random(state)))
        together = run_crowd(engine, drafted, random.Random(state))
    for seq, other in zip(plain, drafted, strict=True):
        if other.is_abandoned:
            deltas = together[other].deltas
            assert deltas == alone[seq].deltas[: len(deltas)]
        else:
            assert told(together[other]) == told(alone[seq])
    stats = engine.stats()
    assert (stats.tokens, stats.running, stats.waiting, engine.admission.num_held) == (0, 0, 0, 0)
    return stats.accepted_tokens_total


@given(state=st.integers(0, 2**32))
@settings(max_examples=60)
def test_scripted_answers_are_the_same_with_drafts_of_any_kind(state: int) -> None:
    def build(config: EngineConfig) -> Engine:
        return engine_of(lambda seq: f"{sum(seq.prompt_token_ids)} né🙂 " * 9, config)[0]

    check_crowd(build, state)


@pytest.fixture(scope="module")
def tiny_runner() -> Iterator[Callable[[str], Runner]]:
    runners: dict[str, ModelRunner] = {}

    def runner(family: str) -> Runner:
        if family not in runners:
            runners[family] = ModelRunner(tiny_models.build(family), DRAFTED)
            runners[family].warm_up()
        return runners[family]

    yield runner
    for built in runners.values():
        built.close()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral with a window"])
def test_a_models_answers_are_the_same_to_the_last_bit_with_drafts_of_any_kind(
    family: str, tiny_runner: Callable[[str], Runner]
) -> None:
    def build(config: EngineConfig) -> Engine:
        return Engine(tiny_runner(family), TOKENIZER, config, clock=FakeClock())

    assert sum(check_crowd(build, state) for state in range(8)) > 50


def test_an_answer_that_went_on_elsewhere_is_drafted_too() -> None:
    engine, _ = engine_of(SONG)
    asked = InferenceRequest(
        request_id="r",
        tenant="t",
        model="m",
        prompt=VERSE,
        sampling=SamplingParams(temperature=0.0, max_tokens=200),
    )
    begun = TOKENIZER.encode_prompt(SONG)[:60]
    seq = prepare(
        asked, TOKENIZER, engine.config, FakeClock(), random.Random(1), output_token_ids=begun
    )
    assert run_to_end(engine, seq)[seq].text == SONG[60:]
    assert engine.stats().steps_total < 40


def test_one_that_lost_its_place_is_drafted_again_when_it_goes_on() -> None:
    engine, _ = engine_of(SONG, replace(DRAFTED, max_num_seqs=1))
    seq, urgent = sequence(VERSE, max_tokens=200), sequence(max_tokens=3)
    urgent.priority = 1
    collector = Collector()
    engine.add(seq)
    while len(seq.output_token_ids) < 60:
        collector.take(engine.step())
    engine.add(urgent)
    while engine.has_work:
        collector.take(engine.step())
    assert collector[seq].text == SONG
    assert engine.stats().preemptions_total == 1
    assert engine.stats().steps_total < len(SONG) / 3


# The default model

CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""
QUESTIONS = (
    f"Repeat this code, with the class renamed to Pile:\n\n{CODE}",
    f"Add a comment to every line of this code:\n\n{CODE}",
    "Summarize: the river is long, the river is wide, and the river is cold in winter.",
    "What is the capital of France?",
)


Load = Callable[[Path, EngineConfig], Runner]


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("load", "given_"),
    [
        (load_runner, {"dtype": "bfloat16"}),
        (load_runner, {"dtype": "float32"}),
        (load_runner, {"quantization": "int8"}),
        (ModelRunner.load, {"dtype": "bfloat16"}),
        (ModelRunner.load, {"dtype": "float32"}),
    ],
    ids=["bfloat16", "float32", "int8", "transformers bfloat16", "transformers float32"],
)
def test_the_default_models_answers_are_the_same_to_the_last_bit(
    load: Load, given_: dict[str, Any], chat_model_folder: Path, chat_tokenizer: ChatTokenizer
) -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=1024, num_threads=1, device="cpu", **given_)
    runner = load(chat_model_folder, config)
    runner.warm_up()
    prompts = [chat_tokenizer.encode_chat([Message(role="user", content=q)]) for q in QUESTIONS]

    def answers(config: EngineConfig, **sampling: Any) -> tuple[list[Any], int]:
        engine = Engine(runner, chat_tokenizer, config, clock=FakeClock())
        seqs = [
            sequence(
                prompt, seed=3, max_tokens=64, logprobs=1, tokenizer=chat_tokenizer, **sampling
            )
            for prompt in prompts
        ]
        told_ = run_to_end(engine, *seqs)
        return [told(told_[seq]) for seq in seqs], engine.stats().accepted_tokens_total

    for sampling in ({}, {"temperature": 0.8, "top_p": 0.95}):
        drafted, num_accepted = answers(config, **sampling)
        plain, _ = answers(replace(config, speculative_tokens=0), **sampling)
        assert drafted == plain
        assert num_accepted > 0
    runner.close()
