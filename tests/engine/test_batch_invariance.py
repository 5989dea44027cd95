"""Who else is online does not decide the answer: the default model, alone and in company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.request import Message
from protocol.token_log import TokenDelta
from tests.engine.fakes import sequence

pytestmark = pytest.mark.model

MAX_TOKENS = 24
NEAR_TIE = 0.05
"""Gap of the best two log probabilities below which a first difference is tolerated."""

WORDS = ["alpha", "river", "stone", "green", "cloud", "seven", "quick", "lamp"]


@pytest.fixture(scope="module")
def runner(chat_model_folder: Path) -> Iterator[ModelRunner]:
    config = EngineConfig(
        max_num_seqs=8,
        max_model_len=1024,
        max_num_batched_tokens=300,
        prefill_chunk_tokens=128,
        num_threads=1,
    )
    runner = ModelRunner.load(chat_model_folder, config)
    runner.warm_up()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def engine(runner: ModelRunner, chat_tokenizer: ChatTokenizer) -> Engine:
    config = EngineConfig(
        max_num_seqs=8,
        max_model_len=1024,
        max_num_batched_tokens=300,
        prefill_chunk_tokens=128,
    )
    return Engine(runner, chat_tokenizer, config)


@pytest.fixture(scope="module")
def prompts(chat_tokenizer: ChatTokenizer) -> list[list[int]]:
    """'how are you?' first, then seven others of about 40 to 450 tokens."""
    rng = random.Random(0)
    texts = ["how are you?", "Write a poem about rivers.", "What is 17 times 23?"]
    texts += [
        f"Tell me about {' '.join(rng.choice(WORDS) for _ in range(length))}."
        for length in (5, 20, 60, 140, 400)
    ]
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


@pytest.mark.timeout(600)
def test_greedy_answers_are_the_same_alone_and_in_any_company(
    engine: Engine, prompts: list[list[int]]
) -> None:
    # The shortest, and the longest, which is cut into chunks.
    watched = [0, 1, len(prompts) - 1]
    alone = {i: tokens_with_gaps(run(engine, [prompts[i]])[0]) for i in watched}
    for round_ in range(3):
        together = run(engine, prompts, random.Random(round_))
        for watched_row, expected in alone.items():
            got = tokens_with_gaps(together[watched_row])
            for i, ((token_id, gap), (other, _)) in enumerate(zip(expected, got, strict=True)):
                if token_id != other:
                    assert gap < NEAR_TIE, f"round {round_}: token {i} differs, gap {gap:.3f}"
                    assert i > 2, f"round {round_}: one of the first tokens differs"
                    break
