"""Runners: one contract for all of them, and the model runner against transformers' own `generate`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, Phi3Config, T5Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.kv_cache import KVCache, LayerShape, PoolSize, fit_pool
from deployments.engine.runner import (
    ModelRunner,
    Runner,
    UnsupportedModel,
    available_cores,
    check_supported,
    choose_dtype,
    context_length,
)
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, run_to_end, sequence

PROMPT_LENGTHS = (1, 2, 5, 9, 17, 33, 40, 60)
MAX_TOKENS = 10


def plan(*rows: tuple[Sequence, int, int]) -> StepPlan:
    return StepPlan(tuple(ScheduledRow(*row) for row in rows))


def whole(seq: Sequence) -> tuple[Sequence, int, int]:
    return (seq, seq.num_computed_tokens, seq.num_tokens)


def run(runner: Runner, *rows: tuple[Sequence, int, int]) -> Any:
    """Runs rows; those that begin are placed first."""
    for seq, start, end in rows:
        if start == 0:
            assert runner.place(seq) == 0
        assert runner.reserve(seq, end)
    return runner.run(plan(*rows))


@pytest.fixture
def build_model_runner() -> Iterator[Callable[..., ModelRunner]]:
    """Builds warm runners, and closes them after the test."""
    built: list[ModelRunner] = []

    def build(model: Any, config: EngineConfig = SMALL) -> ModelRunner:
        runner = ModelRunner(model, config)
        built.append(runner)
        runner.warm_up()
        return runner

    yield build
    for runner in built:
        runner.close()


# The contract


@pytest.fixture(params=["scripted", "model"])
def runner(request: pytest.FixtureRequest, build_model_runner: Any) -> Runner:
    if request.param == "scripted":
        return ScriptedRunner(lambda seq: seq.prompt_token_ids, TOKENIZER, SMALL)
    model: Runner = build_model_runner(tiny_models.build("llama"))
    return model


def test_logits_come_for_the_sampled_rows_only_and_in_order(runner: Runner) -> None:
    short, long = sequence([4, 5, 6]), sequence([7] * 20)
    logits = run(runner, (long, 0, 16), whole(short))
    assert logits.dtype == torch.float32
    assert logits.shape[0] == 1
    alone = sequence([4, 5, 6])
    assert torch.allclose(run(runner, whole(alone))[0], logits[0], atol=1e-4)


def test_a_step_without_a_sampled_row_has_no_logits(runner: Runner) -> None:
    assert run(runner, (sequence([7] * 20), 0, 16)).shape[0] == 0


def test_released_places_can_be_used_again(runner: Runner) -> None:
    for _ in range(3):
        seqs = [sequence([i + 1, 2]) for i in range(runner.max_num_seqs)]
        assert run(runner, *map(whole, seqs)).shape[0] == len(seqs)
        for seq in seqs:
            runner.release(seq)


def test_releasing_a_sequence_that_never_ran_is_harmless(runner: Runner) -> None:
    runner.release(sequence([1]))


def test_a_place_remembers_nothing_of_its_former_owner(runner: Runner) -> None:
    fresh = sequence([9, 8, 7])
    expected = run(runner, whole(fresh))
    runner.release(fresh)
    former = sequence([3] * 12)
    run(runner, whole(former))
    runner.release(former)
    assert torch.equal(run(runner, whole(sequence([9, 8, 7]))), expected)


# Any decoder


@cache
def reference(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Random prompts, and transformers' greedy answers to each alone."""
    rng = random.Random(family)
    model = tiny_models.build(family)
    prompts = [
        [rng.randrange(TOKENIZER.vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS
    ]
    return prompts, [tiny_models.generate(model, prompt, MAX_TOKENS) for prompt in prompts]


class WideTokenizer:
    """The byte tokenizer with as many ids as the tiny models have."""

    vocab_size = tiny_models.VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer = staticmethod(TOKENIZER.detokenizer)
    token_text = staticmethod(TOKENIZER.token_text)


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    seqs = [sequence(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    run_to_end(engine, *seqs)
    return [seq.output_token_ids for seq in seqs]


@pytest.mark.parametrize("is_decode_batched", [False, True], ids=["by row", "batched"])
@pytest.mark.parametrize("family", list(tiny_models.CONFIGS))
def test_greedy_answers_equal_generate_alone_and_in_any_batch(
    family: str, is_decode_batched: bool, build_model_runner: Any
) -> None:
    prompts, expected = reference(family)
    runner = build_model_runner(tiny_models.build(family))
    # The form for CUDA, computed here on the CPU.
    runner.attention.is_decode_batched = is_decode_batched
    engine = Engine(runner, WideTokenizer(), SMALL)  # type: ignore[arg-type]
    assert [answers(engine, [prompt])[0] for prompt in prompts] == expected, "alone"
    rng = random.Random(5)
    for _ in range(2):
        order = rng.sample(range(len(prompts)), len(prompts))
        got = answers(engine, [prompts[i] for i in order])
        assert got == [expected[i] for i in order], "together, prompts cut into chunks"


def test_a_nan_in_one_row_reaches_neither_neighbours_nor_the_next_owner_of_its_place(
    build_model_runner: Any,
) -> None:
    for is_decode_batched in (False, True):
        runner = build_model_runner(tiny_models.build("llama"))
        runner.attention.is_decode_batched = is_decode_batched
        good = sequence([5, 6, 7])
        expected = run(runner, whole(good))
        runner.release(good)

        bad, good = sequence([1] * 9), sequence([5, 6, 7])
        run(runner, (bad, 0, 8))
        for tensor in runner.cache.keys + runner.cache.values:
            for block in runner.pool.blocks(bad):
                tensor[block * 8 : block * 8 + 8] = float("nan")
        logits = run(runner, (bad, 8, 9), whole(good))
        assert logits[0].isnan().any()
        assert torch.allclose(logits[1:], expected, atol=1e-4)
        runner.release(good)
        runner.release(bad)

        # A long neighbour makes the batched form read behind the row's end under its mask.
        heir, long = sequence([5, 6, 7]), sequence([2] * 30)
        run(runner, (heir, 0, 2), (long, 0, 29))
        logits = run(runner, (heir, 2, 3), (long, 29, 30))
        assert torch.allclose(logits[:1], expected, atol=1e-4)


def test_bfloat16_rows_are_bit_for_bit_the_same_alone_and_together(
    build_model_runner: Any,
) -> None:
    runner = build_model_runner(tiny_models.build("llama").to(torch.bfloat16))
    seqs = [sequence([7 + i] * (3 + i)) for i in range(4)]
    together = run(runner, *map(whole, seqs))
    for seq in seqs:
        runner.release(seq)
    alone = [run(runner, whole(seq)) for seq in seqs]
    assert torch.equal(torch.cat(alone), together)


# What is refused


def test_a_model_whose_layers_do_not_use_the_attention_interface_is_refused() -> None:
    from transformers import MambaForCausalLM

    model = MambaForCausalLM(
        MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    )
    with pytest.raises((UnsupportedModel, ValueError)):
        ModelRunner(model, SMALL)


def test_a_model_that_ignores_its_positions_is_refused_at_warm_up() -> None:
    model = tiny_models.build("llama")
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(
        x, torch.arange(x.shape[1]).unsqueeze(0)
    )
    runner = ModelRunner(model, SMALL)
    with pytest.raises(UnsupportedModel, match="answers differently when its prompt is cut"):
        runner.warm_up()
    runner.close()


def test_models_that_would_be_run_wrongly_are_refused_by_their_config() -> None:
    with pytest.raises(UnsupportedModel, match="not decoder-only"):
        check_supported(T5Config())
    chunked = LlamaConfig(**tiny_models.COMMON, layer_types=["full_attention"] * 3)
    check_supported(chunked)
    chunked.layer_types = ["chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention, supported are"):
        check_supported(chunked)


def test_weights_load_from_a_safetensors_folder_and_from_nothing_else(
    tmp_path: Path, build_model_runner: Any
) -> None:
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    seq = sequence([5, 6, 7])
    expected = run(build_model_runner(model), whole(seq))
    loaded = ModelRunner.load(tmp_path, SMALL)
    assert torch.equal(run(loaded, whole(seq)), expected)
    loaded.close()

    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        ModelRunner.load(tmp_path, SMALL)


# Sizes


def test_close_takes_the_attention_function_out_again() -> None:
    before = set(ALL_ATTENTION_FUNCTIONS)
    runner = ModelRunner(tiny_models.build("llama"), SMALL)
    assert set(ALL_ATTENTION_FUNCTIONS) != before
    runner.close()
    assert set(ALL_ATTENTION_FUNCTIONS) == before


def test_the_context_is_what_the_models_positions_hold() -> None:
    runner = ModelRunner(tiny_models.build("llama"), replace(SMALL, max_model_len=10_000))
    assert runner.max_model_len == 256
    engine = Engine(runner, TOKENIZER, replace(SMALL, max_model_len=10_000))
    assert engine.config.max_model_len == 256
    runner.close()


def test_embeddings_that_depend_on_the_longest_neighbour_are_held_to_the_fixed_range() -> None:
    plain = LlamaConfig(**tiny_models.COMMON)
    assert context_length(plain) == 256
    dynamic = LlamaConfig(
        **tiny_models.COMMON,
        rope_parameters={
            "rope_type": "dynamic",
            "factor": 4.0,
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 64,
        },
    )
    assert context_length(dynamic) == 64
    longrope = Phi3Config(
        **tiny_models.COMMON,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    )
    assert context_length(longrope) == 64


def test_blocks_are_as_many_as_the_memory_holds_and_one_sequence_fits() -> None:
    def fit(budget_bytes: int, num_kv_blocks: int | None = None) -> PoolSize:
        return fit_pool(
            replace(SMALL, max_num_seqs=8, max_num_batched_tokens=24, num_kv_blocks=num_kv_blocks),
            max_model_len=1000,
            block_tokens=30,
            bytes_per_token=10,
            budget_bytes=budget_bytes,
        )

    assert fit(100_000) == PoolSize(8 * 34, 1000)
    assert fit(35_000) == PoolSize(116, 1000)
    assert fit(5_000) == PoolSize(16, 480)
    assert fit(100_000, num_kv_blocks=3) == PoolSize(3, 90)
    with pytest.raises(ValueError, match="KV memory of 290 bytes holds no block of 30 tokens"):
        fit(290)


def test_unused_kv_memory_is_not_taken_from_the_machine() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    before = resident_bytes()
    cache = KVCache(
        [LayerShape(4, 64, 64)] * 8,
        4096,
        32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert sum(tensor.nbytes for tensor in cache.keys + cache.values) == 2**31
    assert resident_bytes() - before < 2**28


def test_threads_leave_a_core_for_the_rest(build_model_runner: Any) -> None:
    assert available_cores() >= 1
    runner = ModelRunner(tiny_models.build("llama"), replace(SMALL, num_threads=None))
    assert runner.num_threads == max(1, available_cores() - 1)
    runner.close()


def test_a_dtype_that_was_asked_for_is_used() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype(replace(SMALL, dtype="float16"), cpu) is torch.float16
    assert choose_dtype(replace(SMALL, dtype="auto"), torch.device("cuda")) is torch.bfloat16
    assert choose_dtype(replace(SMALL, dtype="auto"), cpu) in (torch.bfloat16, torch.float32)
