"""A prompt that begins as an earlier one did is computed from where they part; nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner, Runner
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.request import Message
from protocol.token_log import TokenDelta
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, FakeClock, run_to_end, sequence


def script(seq: Sequence) -> list[int]:
    return [(sum(seq.prompt_token_ids) + i) % 250 for i in range(12)]


@pytest.fixture(params=["scripted", "model"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner: Runner = (
        ScriptedRunner(script, TOKENIZER, SMALL)
        if request.param == "scripted"
        else ModelRunner(tiny_models.build("llama"), SMALL)
    )
    runner.warm_up()
    yield runner
    runner.close()


@pytest.fixture
def engine(runner: Runner) -> Engine:
    return Engine(runner, TOKENIZER, SMALL, clock=FakeClock())


def asked(prompt: list[int], tenant: str = "t", **sampling: Any) -> Sequence:
    seq = sequence(prompt, **({"max_tokens": 8, "logprobs": 1} | sampling))
    seq.tenant = tenant
    return seq


def deltas(engine: Engine, seq: Sequence) -> list[TokenDelta]:
    return run_to_end(engine, seq)[seq].deltas


def afresh(engine: Engine, prompt: list[int]) -> list[TokenDelta]:
    """The answer of a tenant that has asked nothing before."""
    seq = asked(prompt, tenant=f"nobody {random.random()}")
    got = deltas(engine, seq)
    assert seq.num_cached_tokens == 0
    return got


def test_an_equal_beginning_is_computed_once(engine: Engine) -> None:
    first = asked(list(range(40)))
    run_to_end(engine, first)
    longer = asked([*range(40), 7, 7, 7])
    terminal = run_to_end(engine, longer)[longer].terminal
    assert terminal.usage.cached_tokens == 40
    assert terminal.usage.prompt_tokens == 43
    stats = engine.stats()
    assert stats.prompt_tokens_total == 40 + 3
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (83, 40)


def test_answers_are_the_same_with_a_reused_beginning(engine: Engine) -> None:
    rng = random.Random(3)
    base = [rng.randrange(200) for _ in range(90)]
    for length in (1, 7, 8, 9, 16, 17, 31, 33, 48, 64, 90):
        tail = [rng.randrange(200) for _ in range(rng.randint(0, 20))]
        seq = asked(base[:length] + tail)
        got = deltas(engine, seq)
        assert got == afresh(engine, seq.prompt_token_ids), length
    stats = engine.stats()
    assert stats.prefix_hit_tokens_total > 100


def test_turns_of_a_conversation_reuse_the_turns_before(engine: Engine) -> None:
    rng = random.Random(4)
    history = [rng.randrange(200) for _ in range(10)]
    cached = []
    for _ in range(5):
        seq = asked(history)
        got = deltas(engine, seq)
        cached.append(seq.num_cached_tokens)
        assert got == afresh(engine, history)
        history = history + seq.output_token_ids + [rng.randrange(200) for _ in range(7)]
    assert cached[0] == 0
    assert all(later >= 8 for later in cached[1:])
    assert cached == sorted(cached)


def test_concurrent_prompts_share_what_one_of_them_has_computed(engine: Engine) -> None:
    system = list(range(60, 100))
    first = asked([*system, 1])
    engine.add(first)
    while not first.output_token_ids:
        engine.step()
    others = [asked([*system, i, i]) for i in (2, 3)]
    collector = run_to_end(engine, *others)
    assert [seq.num_cached_tokens for seq in others] == [40, 40]
    for seq in others:
        assert collector[seq].deltas == afresh(engine, seq.prompt_token_ids)


def test_tenants_do_not_learn_of_each_others_prompts(engine: Engine) -> None:
    run_to_end(engine, asked(list(range(40)), "a"))
    other = asked(list(range(40)), "b")
    run_to_end(engine, other)
    assert other.num_cached_tokens == 0


def test_a_cancelled_answer_leaves_its_prompt_and_a_cancelled_prompt_leaves_nothing(
    engine: Engine,
) -> None:
    for steps, cached in ((4, 40), (1, 0)):
        prompt = [steps + 10] * 41
        seq = asked(prompt)
        engine.add(seq)
        for _ in range(steps):
            engine.step()
        seq.is_abandoned = True
        run_to_end(engine)
        again = asked(prompt)
        run_to_end(engine, again)
        assert again.num_cached_tokens == cached


@pytest.mark.parametrize("is_decode_batched", [False, True], ids=["by row", "batched"])
def test_a_poisoned_block_is_never_used_again(is_decode_batched: bool) -> None:
    runner = ModelRunner(tiny_models.build("llama"), SMALL)
    runner.warm_up()
    runner.attention.is_decode_batched = is_decode_batched
    engine = Engine(runner, TOKENIZER, SMALL, clock=FakeClock())
    prompt = list(range(30))
    expected = deltas(engine, asked(prompt, "before"))
    bad = asked(prompt)
    engine.add(bad)
    while not bad.output_token_ids:
        engine.step()
    runner.cache.values[0][runner.pool.blocks(bad)[0] * 8] = float("nan")
    assert run_to_end(engine)[bad].terminal.finish_reason == "error"
    # Four at a time, of many lengths: every block is used, and read beyond its rows.
    for _ in range(2):
        heirs = [asked(prompt[:length], "t") for length in (30, 25, 12, 3)]
        collector = run_to_end(engine, *heirs)
        assert all(collector[seq].terminal.error is None for seq in heirs)
        got, wanted = collector[heirs[0]].deltas, expected
        assert [delta.token_ids for delta in got] == [delta.token_ids for delta in wanted]
    runner.close()


def test_a_step_that_fails_leaves_nothing_to_reuse() -> None:
    faults = iter([True])
    runner = ScriptedRunner(
        script, TOKENIZER, SMALL, fault=lambda seq: "raise" if next(faults, False) else None
    )
    engine = Engine(runner, TOKENIZER, SMALL, clock=FakeClock())
    run_to_end(engine, asked([5] * 10))
    again = asked([5] * 10)
    run_to_end(engine, again)
    assert again.num_cached_tokens == 0
    assert engine.stats().tokens == 0


# The default model


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_conversation_with_the_default_model_is_the_same_with_and_without_reuse(
    dtype: Any, chat_model_folder: Path, chat_tokenizer: ChatTokenizer
) -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=1024, num_threads=1, dtype=dtype)
    runner = ModelRunner.load(chat_model_folder, config)
    runner.warm_up()
    engine = Engine(runner, chat_tokenizer, config, clock=FakeClock())
    messages = [
        Message(role="system", content="You answer questions about rivers, in one sentence. " * 6)
    ]
    cached = 0
    for question in ("Where is the Rhine?", "How long is it?"):
        messages.append(Message(role="user", content=question))
        prompt = chat_tokenizer.encode_chat(messages)
        seqs = [
            sequence(prompt, max_tokens=10, logprobs=1, tokenizer=chat_tokenizer) for _ in range(2)
        ]
        seqs[1].tenant = question
        with_reuse, without = (run_to_end(engine, seq)[seq] for seq in seqs)
        assert with_reuse.deltas == without.deltas
        assert seqs[1].num_cached_tokens == 0
        cached = seqs[0].num_cached_tokens
        messages.append(Message(role="assistant", content=with_reuse.text))
    assert cached >= 64
    runner.close()
