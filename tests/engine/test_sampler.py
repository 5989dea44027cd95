"""Tokens from logits: parameters, noise, and rows that do not touch each other."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deployments.engine.sampler import (
    LEAST_LOGPROB,
    SampledToken,
    Sampler,
    _Draw,
    _draw,
    _draw_on_cpu,
    _key,
)
from deployments.engine.sequence import Sequence
from protocol.request import SamplingParams
from tests.engine.fakes import sequence

VOCAB_SIZE = 200


def row(**given: Any) -> Sequence:
    """A sequence that samples; `output` are the tokens it has so far."""
    output = given.pop("output", [])
    seq = sequence([3, 4], **({"temperature": 1.0} | given))
    seq.output_token_ids.extend(output)
    return seq


def pick(logits: Tensor, *seqs: Sequence) -> list[int]:
    sampled = Sampler().sample(logits, list(seqs))
    assert all(token is not None for token in sampled)
    return [token.token_id for token in sampled if token is not None]


def random_logits(rows: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * spread


def frequencies(logits: Tensor, draws: int, **given: Any) -> Counter[int]:
    """How often each token is drawn from one row of logits, over many seeds."""
    seqs = [row(seed=seed, **given) for seed in range(draws)]
    return Counter(pick(logits.expand(draws, -1), *seqs))


def kept_by_the_book(logits: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn, computed the slow way."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    if top_k > 0:
        order = order[:top_k]
    weights = {i: math.exp(float(logits[i])) for i in order}
    total = sum(weights.values())
    kept: set[int] = set()
    mass = 0.0
    for i in order:
        if mass >= top_p and kept:
            break
        kept.add(i)
        mass += weights[i] / total
    return {i for i in kept if weights[i] >= min_p * weights[order[0]]}


def test_a_greedy_row_gets_its_best_token() -> None:
    logits = random_logits(5)
    assert pick(logits, *(row(temperature=0.0) for _ in range(5))) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-9}]
)
def test_parameters_that_leave_one_token_are_greedy(narrow: dict[str, float]) -> None:
    logits = random_logits(8)
    seqs = [row(seed=seed, **narrow) for seed in range(8)]
    assert pick(logits, *seqs) == logits.argmax(-1).tolist()


def test_draws_follow_the_softmax_of_the_logits() -> None:
    logits = random_logits(1)[:, :12]
    draws = 20_000
    seen = frequencies(logits, draws)
    expected = logits[0].softmax(-1) * draws
    chi_square = sum((seen[i] - float(e)) ** 2 / float(e) for i, e in enumerate(expected))
    # 11 degrees of freedom; the seeds are fixed, so this either always passes or never.
    assert chi_square < 31.3


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    draws = 20_000
    share = frequencies(logits, draws, temperature=0.5)[0] / draws
    assert share == pytest.approx(1 / (1 + math.exp(-2)), abs=0.01)


def test_a_seed_repeats_and_another_differs() -> None:
    logits = random_logits(1).repeat(40, 1)
    first = pick(logits, *(row(seed=i, top_p=0.95) for i in range(40)))
    assert first == pick(logits, *(row(seed=i, top_p=0.95) for i in range(40)))
    assert first != pick(logits, *(row(seed=i + 1000, top_p=0.95) for i in range(40)))


def test_the_noise_differs_at_each_position() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    picks = [pick(logits, row(seed=5, output=[0] * n))[0] for n in range(20)]
    assert len(set(picks)) > 10


def test_negative_and_huge_seeds_are_seeds() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    picks = [pick(logits, row(seed=seed))[0] for seed in (-(2**63), -1, 0, 2**63 - 1, 2**64 - 1)]
    assert all(0 <= token_id < VOCAB_SIZE for token_id in picks)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_gets_the_same_token_whatever_its_neighbours(data: st.DataObject) -> None:
    params = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
            "top_k": st.sampled_from([0, 1, 5, 100]),
            "top_p": st.sampled_from([1.0, 0.9, 0.3]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "presence_penalty": st.sampled_from([0.0, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "logit_bias": st.sampled_from([None, {7: 5.0}]),
            "min_tokens": st.sampled_from([0, 3]),
            "logprobs": st.sampled_from([None, 0, 4]),
            "seed": st.integers(0, 5),
            "output": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
        }
    )
    given_params = data.draw(st.lists(params, min_size=2, max_size=6))
    spread = data.draw(st.sampled_from([0.1, 3.0]))
    logits = random_logits(len(given_params), seed=data.draw(st.integers(0, 99)), spread=spread)

    together = Sampler().sample(logits, [row(**params) for params in given_params])
    alone = [
        Sampler().sample(logits[i : i + 1], [row(**params)])[0]
        for i, params in enumerate(given_params)
    ]
    assert together == alone


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.5, 0.0), (0, 0.95, 0.0), (5, 1.0, 0.0), (100, 0.9, 0.0), (0, 1.0, 0.05), (20, 0.8, 0.2)],
)
def test_only_tokens_that_the_truncation_keeps_are_drawn(
    spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(1, spread=spread)
    kept = kept_by_the_book(logits[0], top_k, top_p, min_p)
    seen = frequencies(logits, 4000, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(seen) <= kept
    # All the likely ones do come.
    likely = [i for i in kept if float(logits[0, i]) > float(logits[0].max()) - 1.0]
    assert set(likely[:20]) <= set(seen)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_cpu_draws_what_tensors_draw(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 5))
    size = data.draw(st.sampled_from([1, 2, 130, VOCAB_SIZE, 5000]))
    spread = data.draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(num_rows, size, generator=generator) * spread
    if data.draw(st.booleans()):
        # As a grammar or a ban leaves them.
        logits[:, 1::2] = -math.inf
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([1e-9, 0.3, 0.8, 1.0, 2.0]),
        top_k=st.sampled_from([-1, 0, 1, 3, 50, 1000, 10**6]),
        top_p=st.sampled_from([1.0, 0.9993, 0.9013, 0.3017, 1e-6]),
        min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    )
    draws = [
        _Draw(data.draw(params), _key(data.draw(st.integers(0, 2**64)), 5)) for _ in range(num_rows)
    ]
    token_ids = torch.zeros(num_rows, dtype=torch.long)
    _draw_on_cpu(logits, logits.amax(-1), list(range(num_rows)), draws, token_ids)
    assert token_ids.tolist() == _draw(logits, draws).tolist()


def test_repetition_penalty_covers_prompt_and_answer() -> None:
    logits = torch.tensor([[0.0, 0.0, 2.0, 2.5, -1.0, 2.4]])
    # 3 is in the prompt, 5 in the answer: 2.5 / 1.5 and 2.4 / 1.5 fall below the 2.0 of token 2.
    assert pick(logits, row(temperature=0.0, repetition_penalty=1.5, output=[5])) == [2]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.9}])
def test_the_smallest_penalty_still_picks_a_token_that_was_seen(params: dict[str, float]) -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    seq = row(repetition_penalty=5e-324, output=[best], **params)
    assert pick(logits, seq)[0] in {best, *seq.prompt_token_ids}


def test_presence_and_frequency_penalties_cover_the_answer_only() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.2, 0.0]])
    assert pick(logits, row(temperature=0.0, presence_penalty=2.0)) == [3]
    assert pick(logits, row(temperature=0.0, presence_penalty=0.5, output=[3])) == [1]
    assert pick(logits, row(temperature=0.0, frequency_penalty=0.15, output=[3])) == [3]
    assert pick(logits, row(temperature=0.0, frequency_penalty=0.15, output=[3, 3])) == [1]


def test_logit_bias_bans_and_promotes() -> None:
    logits = random_logits(2)
    best = int(logits[0].argmax())
    banned, promoted = pick(
        logits,
        row(temperature=0.0, logit_bias={best: -100.0}),
        row(temperature=0.0, logit_bias={17: 100.0}),
    )
    assert banned != best
    assert promoted == 17


def test_no_end_token_is_picked_before_min_tokens() -> None:
    seq = row(temperature=0.0, min_tokens=2, stop_token_ids=(8,))
    seq.eos_token_ids = frozenset({9})
    logits = torch.zeros(1, 10)
    logits[0, 9], logits[0, 8], logits[0, 1] = 3.0, 2.0, 1.0
    picks = []
    for _ in range(3):
        picks += pick(logits, seq)
        seq.output_token_ids.append(picks[-1])
    assert picks == [1, 1, 9]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "all -inf"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9}, {"logprobs": 2}])
def test_a_poisoned_row_fails_alone(poison: float, params: dict[str, float]) -> None:
    logits = random_logits(3)
    clean = pick(logits, *(row(seed=i, **params) for i in range(3)))
    logits[1, slice(None) if poison == -math.inf else 60] = poison
    sampled = Sampler().sample(logits, [row(seed=i, **params) for i in range(3)])
    assert sampled[1] is None
    assert [token and token.token_id for token in sampled] == [clean[0], None, clean[2]]


def test_constraints_that_raise_fail_their_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Exhausted:
        is_finished = False

        def mask(self, logits: Tensor) -> None:
            raise RuntimeError("no token is left")

    stuck = row(temperature=0.0)
    stuck.grammar = Exhausted()  # type: ignore[assignment]
    sampled = Sampler().sample(random_logits(2), [stuck, row(temperature=0.0)])
    assert sampled[0] is None
    assert isinstance(sampled[1], SampledToken)
    assert "constraints of request" in caplog.text


def test_logprobs_are_those_of_the_model_before_any_parameter() -> None:
    logits = random_logits(1)
    table = logits[0].log_softmax(-1)
    (token,) = Sampler().sample(
        logits, [row(temperature=0.0, logit_bias={17: 100.0}, logprobs=3, repetition_penalty=2.0)]
    )
    assert token is not None
    assert token.logprobs is not None
    assert token.token_id == 17
    assert token.logprobs.logprob == pytest.approx(float(table[17]), abs=1e-5)
    values, ids = table.topk(3)
    assert [i for i, _ in token.logprobs.top] == ids.tolist()
    assert [v for _, v in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_impossible_tokens_have_a_finite_logprob() -> None:
    logits = torch.tensor([[1.0, -math.inf, -math.inf]])
    (token,) = Sampler().sample(logits, [row(temperature=0.0, logprobs=3)])
    assert token is not None
    assert token.logprobs is not None
    assert [v for _, v in token.logprobs.top] == [0.0, LEAST_LOGPROB, LEAST_LOGPROB]


def test_the_logits_given_are_not_changed() -> None:
    logits = random_logits(2)
    before = logits.clone()
    pick(logits, row(top_p=0.5, presence_penalty=1.0, output=[3]), row(min_p=0.5, min_tokens=4))
    assert torch.equal(logits, before)
