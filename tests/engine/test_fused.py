"""The fast CPU runner: transformers' answers, to the last bit the same in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from deployments.engine.build import load_runner
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.fused import FusedRunner
from deployments.engine.fused_model import find_obstacle
from deployments.engine.linears import supports_int8
from deployments.engine.runner import ModelRunner, UnsupportedModel
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.sequence import Sequence
from protocol.token_log import TokenDelta
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, run_to_end, sequence
from tests.engine.tiny_models import COMMON, VOCAB_SIZE

SIZES = {**COMMON, "hidden_size": 64, "intermediate_size": 96}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, tied": lambda: LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "llama, biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3 positions": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=32, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
}
PROMPT_LENGTHS = (1, 2, 9, 31, 32, 33, 40, 70)
MAX_TOKENS = 10
CONFIG = replace(SMALL, max_num_batched_tokens=40, prefill_chunk_tokens=16)

int8 = pytest.mark.skipif(not supports_int8(), reason="no VNNI here")
KINDS = [
    pytest.param({"dtype": "float32"}, id="float32"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, id="int8", marks=int8),
]


class WideTokenizer:
    """The byte tokenizer with as many ids as the tiny models have."""

    vocab_size = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer = staticmethod(TOKENIZER.detokenizer)
    token_text = staticmethod(TOKENIZER.token_text)


def build(config: Any) -> Any:
    """A random model with weights large enough that its answers do not repeat one token."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.normal_(0.0, 0.4 if "embed" in name else 0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp("model")
        build(config()).save_pretrained(found[name])
    return found


Engines = Callable[..., Engine]


@pytest.fixture
def make_engine(folders: dict[str, Path]) -> Iterator[Engines]:
    runners: list[FusedRunner] = []

    def make(name: str = "llama", config: EngineConfig = CONFIG, **values: Any) -> Engine:
        config = replace(config, **values)
        runner = FusedRunner.load(folders[name], config)
        runner.warm_up()
        runners.append(runner)
        return Engine(runner, WideTokenizer(), config)  # type: ignore[arg-type]

    yield make
    for runner in runners:
        runner.close()


def prompts(seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def asked(prompt: list[int], **sampling: Any) -> Sequence:
    given = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling
    return sequence(prompt, **given)


def answers(engine: Engine, asking: list[list[int]]) -> list[list[int]]:
    seqs = [asked(prompt) for prompt in asking]
    run_to_end(engine, *seqs)
    return [seq.output_token_ids for seq in seqs]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_equal_generate_alone_and_in_any_batch(
    name: str, make_engine: Engines
) -> None:
    asking = prompts(name)
    model = build(CONFIGS[name]())
    expected = [tiny_models.generate(model, prompt, MAX_TOKENS) for prompt in asking]
    engine = make_engine(name)
    assert [answers(engine, [prompt])[0] for prompt in asking] == expected, "alone"
    rng = random.Random(5)
    for _ in range(2):
        order = rng.sample(range(len(asking)), len(asking))
        got = answers(engine, [asking[i] for i in order])
        assert got == [expected[i] for i in order], "together, in chunks, with prefixes reused"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_those_of_transformers(kind: dict[str, Any], make_engine: Engines) -> None:
    tolerance = {"float32": 1e-4, "bfloat16": 0.1}[kind["dtype"]] * (3 if len(kind) > 1 else 1)
    model = build(CONFIGS["llama"]())
    runner = make_engine(**kind)._runner
    for prompt in prompts("near"):
        seq = asked(prompt)
        runner.place(seq)
        assert runner.reserve(seq, len(prompt))
        logits = runner.run(StepPlan((ScheduledRow(seq, 0, len(prompt)),)))[0]
        expected = model(torch.tensor([prompt])).logits[0, -1]
        assert (logits - expected).abs().mean() / expected.std() < tolerance
        runner.release(seq)


def deltas_of(engine: Engine, asking: list[Sequence]) -> list[list[TokenDelta]]:
    told = run_to_end(engine, *asking)
    return [told[seq].deltas for seq in asking]


def joined(deltas: list[TokenDelta]) -> list[Any]:
    """Tokens and their log probabilities, whatever steps they came in."""
    return [entry for delta in deltas for entry in delta.logprobs or ()]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_happens_beside_a_request_changes_a_bit_of_its_answer(
    kind: dict[str, Any], make_engine: Engines
) -> None:
    asking = prompts("bits")
    sampling = [
        {"logprobs": 2, "seed": i, "temperature": 0.0 if i % 2 else 0.9, "max_tokens": 24}
        for i in range(len(asking))
    ]

    def fresh() -> list[Sequence]:
        return [asked(p, **given) for p, given in zip(asking, sampling, strict=True)]

    plain = make_engine(**kind, speculative_tokens=0)
    alone = [joined(deltas_of(plain, [seq])[0]) for seq in fresh()]
    others: list[dict[str, Any]] = [
        {},
        {"speculative_tokens": 4},
        {"num_kv_blocks": 6},
        {"prefill_chunk_tokens": 8, "max_num_batched_tokens": 17},
    ]
    for settings in others:
        engine = make_engine(**kind, **settings)
        for round_ in range(2):
            seqs = fresh()
            order = random.Random(round_).sample(range(len(seqs)), len(seqs))
            told = run_to_end(engine, *(seqs[i] for i in order))
            for i, seq in enumerate(seqs):
                assert joined(told[seq].deltas) == alone[i], (settings, round_, i)


def test_an_answer_is_not_computed_again_in_the_next_turn(make_engine: Engines) -> None:
    engine = make_engine(dtype="bfloat16")
    first = asked(prompts("turns")[5], max_tokens=40)
    run_to_end(engine, first)
    turn = first.prompt_token_ids + first.output_token_ids + [7] * 5
    second = asked(turn, logprobs=1)
    got = deltas_of(engine, [second])[0]
    # All whole blocks of prompt and answer; the last token of the answer was never computed.
    assert second.num_cached_tokens == (first.num_tokens - 1) // 32 * 32 > 32
    afresh = asked(turn, logprobs=1)
    afresh.tenant = "another"
    assert joined(deltas_of(engine, [afresh])[0]) == joined(got)
    assert afresh.num_cached_tokens == 0


def test_a_model_of_another_family_is_left_to_the_generic_runner(tmp_path: Path) -> None:
    tiny_models.build("gemma3").save_pretrained(tmp_path)
    runner = load_runner(tmp_path, SMALL)
    assert isinstance(runner, ModelRunner)
    runner.close()
    with pytest.raises(UnsupportedModel, match="does not compute models of type gemma3_text"):
        load_runner(tmp_path, replace(SMALL, quantization="int8"))


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        (LlamaConfig(**SIZES, hidden_act="gelu"), "the activation gelu"),
        (LlamaConfig(**{**SIZES, "hidden_size": 40}), "no multiples of 16"),
        (MistralConfig(**SIZES, sliding_window=99), "attention within a window"),
        (MistralConfig(**SIZES, sliding_window=100), None),
    ],
)
def test_what_it_does_not_compute_is_known_from_the_config(
    config: Any, obstacle: str | None
) -> None:
    found = find_obstacle(config, max_model_len=100)
    assert found is None if obstacle is None else obstacle in (found or "")


def test_tensors_of_unknown_use_are_not_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.mlp.router.weight": torch.zeros(2)}, path)
    with pytest.raises(UnsupportedModel, match=r"unknown use: model.layers.0.mlp.router.weight"):
        FusedRunner.load(tmp_path, SMALL)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match=r"no tensor model.norm.weight"):
        FusedRunner.load(tmp_path, SMALL)
