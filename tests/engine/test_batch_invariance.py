"""Who else is online does not decide the answer: the default model, alone and in company."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.engine.build import load_runner
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner, Runner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.request import Message
from protocol.token_log import TokenDelta
from tests.engine.fakes import sequence

pytestmark = pytest.mark.model

MAX_TOKENS = 24
NEAR_TIE = 0.05
"""Gap of the best two log probabilities below which a first difference is tolerated."""

Load = Callable[[Path, EngineConfig], Runner]
MakeEngine = Callable[[Load, EngineConfig], Engine]

WORDS = ["alpha", "river", "stone", "green", "cloud", "seven", "quick", "lamp"]


CONFIG = EngineConfig(
    max_num_seqs=12,
    max_model_len=1024,
    max_num_batched_tokens=300,
    prefill_chunk_tokens=128,
    max_waiting=64,
    num_threads=1,
    speculative_tokens=0,
)
ALONE = replace(CONFIG, max_num_batched_tokens=1024 + 12)
COMPANIES = {
    "chunks": CONFIG,
    "chunks and drafts": replace(CONFIG, speculative_tokens=4),
    "short memory": replace(CONFIG, num_kv_blocks=20, speculative_tokens=4),
}


@pytest.fixture
def make_engine(chat_model_folder: Path, chat_tokenizer: ChatTokenizer) -> Iterator[MakeEngine]:
    runners: list[Runner] = []

    def make(load: Load, config: EngineConfig) -> Engine:
        runner = load(chat_model_folder, config)
        runner.warm_up()
        runners.append(runner)
        # What a step takes decides what goes into the next: every machine is to make the same ones.
        ticks = itertools.count()
        return Engine(runner, chat_tokenizer, config, clock=lambda: next(ticks) / 1000)

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture(scope="module")
def prompts(chat_tokenizer: ChatTokenizer) -> list[list[int]]:
    """64 questions of about 40 to 300 tokens; every fourth begins as another one does."""
    rng = random.Random(0)
    texts = ["how are you?", "Write a poem about rivers.", "What is 17 times 23?"]
    while len(texts) < 64:
        words = " ".join(rng.choice(WORDS) for _ in range(rng.choice((3, 8, 20, 60, 240))))
        texts.append(f"Tell me about {words}." if len(texts) % 4 else f"{texts[-1]} And {words}?")
    return [chat_tokenizer.encode_chat([Message(role="user", content=text)]) for text in texts]


def run(
    engine: Engine, prompts: list[list[int]], arrivals: random.Random | None = None
) -> list[list[TokenDelta]]:
    """The deltas of greedy answers, each prompt joining at a random step."""
    seqs = [
        sequence(
            prompt, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True, tokenizer=engine.tokenizer
        )
        for prompt in prompts
    ]
    deltas: dict[Sequence, list[TokenDelta]] = {seq: [] for seq in seqs}
    left = list(seqs)
    if arrivals is not None:
        arrivals.shuffle(left)
    while left or engine.has_work:
        for _ in range(len(left) if arrivals is None else arrivals.randint(0, 4)):
            if left:
                engine.add(left.pop())
        for emission in engine.step():
            deltas[emission.seq] += emission.deltas
    return [deltas[seq] for seq in seqs]


def tokens_with_gaps(deltas: list[TokenDelta]) -> list[tuple[int, float]]:
    """Each token, and by how much log probability it led."""
    return [
        (entry.token_id, entry.top[0][2] - entry.top[1][2])
        for delta in deltas
        for entry in delta.logprobs or ()
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("load", "num_prompts"), [(load_runner, 64), (ModelRunner.load, 6)])
def test_greedy_answers_are_the_same_alone_and_in_any_company(
    load: Load, num_prompts: int, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    prompts = prompts[:num_prompts]
    plain = make_engine(load, ALONE)
    alone = [tokens_with_gaps(run(plain, [prompt])[0]) for prompt in prompts]
    num_near_ties = num_preemptions = num_reused = num_accepted = 0
    for name, config in COMPANIES.items():
        engine = make_engine(load, config)
        together = run(engine, prompts, random.Random(name))
        for number, (expected, deltas) in enumerate(zip(alone, together, strict=True)):
            got = tokens_with_gaps(deltas)
            for i, ((token_id, gap), (other, _)) in enumerate(zip(expected, got, strict=True)):
                if token_id != other:
                    assert gap < NEAR_TIE, f"{name}: prompt {number} token {i}, gap {gap:.3f}"
                    num_near_ties += 1
                    break
        stats = engine.stats()
        num_preemptions += stats.preemptions_total
        num_reused += stats.prefix_hit_tokens_total
        num_accepted += stats.accepted_tokens_total
    print(
        f"{num_near_ties} of {3 * len(prompts)} answers differ at a near tie; {num_preemptions} "
        f"preemptions, {num_reused} prompt tokens reused, {num_accepted} drafted tokens accepted"
    )
    assert num_reused > 0
    if num_prompts == 64:
        assert num_preemptions > 0
        assert num_accepted > 0
