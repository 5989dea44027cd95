"""From logits to token ids, a whole step at a time, each row by its own parameters.

A row's result depends on its logits, its parameters, its seed and its position alone, never
on its neighbours: the noise is a hash of (seed, position, token id), not the state of a
generator. Only rows that ask for a feature pay for it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deployments.engine import draws as cpu_draws
from deployments.engine.cuda import to_device, to_host
from deployments.engine.sequence import Sequence
from protocol.request import SamplingParams

logger = logging.getLogger(__name__)

LEAST_TEMPERATURE = 1e-6
"""A lower one is as good as this one, and no division by it overflows."""

LARGEST_LOGIT = 1e30
"""Bound on a penalised logit: a repetition penalty near 0 would make infinities of them."""

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities by the model's own distribution, before any parameter changed it."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: Logprobs | None = None


class _Draw(NamedTuple):
    """By what a row is drawn: its parameters, and the key of its noise."""

    sampling: SamplingParams
    key: int


class Sampler:
    """Stateless; a class only so that an engine can be given another one."""

    def warm_up(self) -> None:
        """Compiles what draws on a CPU, or reads it from the disk."""
        plain, drawn = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=1)
        _draw_on_cpu(
            torch.zeros(2, 8),
            torch.zeros(2),
            [0, 1],
            [_Draw(plain, 0), _Draw(drawn, 0)],
            torch.zeros(2, dtype=torch.long),
        )

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, seqs: list[Sequence], positions: list[int] | None = None
    ) -> list[SampledToken | None]:
        """Picks one token a row.

        Args:
            logits: (R, V) float32, not changed.
            seqs: the R sequences; one may have several rows.
            positions: how many tokens of the answer come before each row's; None is what the
                sequences have. What a sequence's tokens change in the logits goes by those it has.

        Returns:
            None for a row from which nothing can be picked: its logits hold a NaN or an
            infinity, or its constraints leave no token.
        """
        best, token_ids = logits.max(dim=-1)
        # A NaN anywhere in a row is its maximum; so is +inf; -inf when nothing is left.
        is_good = best.isfinite()
        changed = [i for i, seq in enumerate(seqs) if _changes_logits(seq)]
        work = logits
        if changed:
            work = logits.clone()
            for i in changed:
                try:
                    _change_logits(work[i], seqs[i])
                except Exception:
                    # A grammar that allows nothing more: this row fails, its neighbours do not.
                    logger.exception("constraints of request %s failed", seqs[i].request_id)
                    work[i] = math.nan
            best, token_ids = work.max(dim=-1)
            is_good = is_good & best.isfinite()
        drawn = [i for i, seq in enumerate(seqs) if not seq.sampling.is_greedy]
        if drawn:
            if positions is None:
                positions = [len(seq.output_token_ids) for seq in seqs]
            draws = [_Draw(seqs[i].sampling, _key(seqs[i].seed, positions[i])) for i in drawn]
            if work.is_cuda:
                _put(token_ids, drawn, _draw(_rows(work, drawn), draws))
            else:
                _draw_on_cpu(work, best, drawn, draws, token_ids)
        asked = [i for i, seq in enumerate(seqs) if seq.sampling.logprobs is not None]
        # The step's one wait for the device.
        picked, good, *table = to_host(
            token_ids, is_good, *(_logprob_table(logits, token_ids, seqs, asked) if asked else ())
        )
        logprobs = _logprobs(seqs, asked, *table) if asked else {}
        return [
            SampledToken(token_id, logprobs.get(i)) if is_usable else None
            for i, (token_id, is_usable) in enumerate(zip(picked, good, strict=True))
        ]


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a tensor, which may be the tensor itself where these are all."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, to_device(rows, torch.long, tensor.device))


def _put(tensor: Tensor, rows: list[int], values: Tensor) -> None:
    """Sets some rows, in place."""
    tensor.index_copy_(0, to_device(rows, torch.long, tensor.device), values)


def _changes_logits(seq: Sequence) -> bool:
    sampling = seq.sampling
    return (
        seq.grammar is not None
        or bool(sampling.logit_bias)
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or len(seq.output_token_ids) < sampling.min_tokens
    )


def _change_logits(row: Tensor, seq: Sequence) -> None:
    """Applies penalties, bias and masks to one row (V,), in place."""
    _penalize(row, seq)
    if bias := seq.sampling.logit_bias:
        # In one go: a bias on every token of a vocabulary must not hold up the neighbours.
        row[to_device([*bias], torch.long, row.device)] += to_device(
            [*bias.values()], row.dtype, row.device
        )
    if seq.grammar is not None:
        # The grammar decides when the answer may end, so that `min_tokens` cannot contradict it.
        seq.grammar.mask(row)
    elif len(seq.output_token_ids) < seq.sampling.min_tokens:
        ends = [*seq.eos_token_ids, *seq.sampling.stop_token_ids]
        known = [token_id for token_id in ends if token_id < row.shape[0]]
        row.index_fill_(0, to_device(known, torch.long, row.device), -math.inf)


def _penalize(row: Tensor, seq: Sequence) -> None:
    """Repetition penalty (Keskar et al. 2019) over prompt and answer; OpenAI's over the answer."""
    sampling = seq.sampling
    if sampling.repetition_penalty != 1.0:
        distinct = {*seq.prompt_token_ids, *seq.output_token_ids}
        seen = to_device([*distinct], torch.long, row.device)
        values = row[seen]
        penalty = sampling.repetition_penalty
        penalised = torch.where(values > 0, values / penalty, values * penalty)
        row[seen] = penalised.clamp_(max=LARGEST_LOGIT)
    if seq.output_token_ids and (sampling.frequency_penalty or sampling.presence_penalty):
        times = Counter(seq.output_token_ids)
        seen = to_device([*times], torch.long, row.device)
        counts = to_device([*times.values()], torch.long, row.device)
        row[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _draw_on_cpu(
    logits: Tensor, best: Tensor, rows: list[int], draws: list[_Draw], token_ids: Tensor
) -> None:
    """Sets the token ids of some rows; `best` (R,) holds the largest logit of each row."""
    parameters = [
        (
            max(sampling.temperature, LEAST_TEMPERATURE),
            max(sampling.top_k, 0),
            sampling.top_p,
            sampling.min_p,
        )
        for sampling, _ in draws
    ]
    cpu_draws.draw(
        logits.contiguous().numpy(),
        best.numpy(),
        np.array(rows, np.int64),
        np.array(parameters, np.float64),
        np.array([(key & _MASK_32, key >> 32) for _, key in draws], np.uint32),
        token_ids.numpy(),
    )


def _draw(logits: Tensor, draws: list[_Draw]) -> Tensor:
    """(R,) token ids drawn from (R, V) logits by the Gumbel-max trick over each row's candidates."""
    # Relative to the best, so that no temperature, however small, makes two infinities.
    temperature = _column(
        draws, logits, lambda sampling: max(sampling.temperature, LEAST_TEMPERATURE)
    )
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    token_ids = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    plain = [i for i, draw in enumerate(draws) if not _truncates(draw.sampling)]
    if plain:
        # Changed in place: of rows that nobody else needs, or a copy.
        rows = _rows(scaled, plain)
        _keep_min_p(rows, rows.amax(-1, keepdim=True), [draws[i] for i in plain])
        every_id = torch.arange(logits.shape[1], device=logits.device).expand_as(rows)
        noise = _noise(every_id, [draws[i] for i in plain])
        _put(token_ids, plain, (rows + noise).argmax(-1))
    truncated = [i for i, draw in enumerate(draws) if _truncates(draw.sampling)]
    if truncated:
        picked = _draw_truncated(_rows(scaled, truncated), [draws[i] for i in truncated])
        _put(token_ids, truncated, picked)
    return token_ids


def _truncates(sampling: SamplingParams) -> bool:
    return sampling.top_p < 1.0 or sampling.top_k > 0


def _draw_truncated(scaled: Tensor, draws: list[_Draw]) -> Tensor:
    """Draws rows with `top_k` or `top_p`.

    Of the whole vocabulary: on a device a sort is cheaper than to wait for how much would do.
    """
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    return _pick(values, ids, scaled.logsumexp(-1, keepdim=True), draws)


def _pick(values: Tensor, ids: Tensor, log_total: Tensor, draws: list[_Draw]) -> Tensor:
    """Draws from (R, K) candidates, best first, with the parameters of each row.

    `top_k` first, then `top_p` over what it kept, as in the Hugging Face and vLLM samplers.
    """
    rank = torch.arange(values.shape[1], device=values.device)
    is_cut = rank >= _column(draws, values, _top_k_or_all)
    values = values.masked_fill(is_cut, -math.inf)
    # With top_k the candidates renormalise; without, the whole vocabulary is the total.
    total = torch.where(is_cut.any(-1, keepdim=True), values.logsumexp(-1, keepdim=True), log_total)
    probability = (values - total).exp()
    before = probability.cumsum(-1) - probability
    top_p = _column(draws, values, _top_p_or_all)
    # The best token is always kept: nothing comes before it.
    values = values.masked_fill((before >= top_p) & (rank > 0), -math.inf)
    _keep_min_p(values, values[:, :1], draws)
    choice = (values + _noise(ids, draws)).argmax(-1, keepdim=True)
    return ids.gather(1, choice).squeeze(1)


def _top_k_or_all(sampling: SamplingParams) -> float:
    return sampling.top_k if sampling.top_k > 0 else math.inf


def _top_p_or_all(sampling: SamplingParams) -> float:
    # A cumulative sum of float32 may pass 1.0 before its end.
    return sampling.top_p if sampling.top_p < 1.0 else math.inf


def _keep_min_p(values: Tensor, best: Tensor, draws: list[_Draw]) -> None:
    """Drops, in place, tokens less likely than `min_p` times the best one."""
    if any(draw.sampling.min_p > 0 for draw in draws):
        floor = best + _column(
            draws,
            values,
            lambda sampling: math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        )
        values.masked_fill_(values < floor, -math.inf)


def _column(draws: list[_Draw], like: Tensor, read: Callable[[SamplingParams], float]) -> Tensor:
    """(R, 1) of one parameter."""
    return to_device([[read(draw.sampling)] for draw in draws], torch.float32, like.device)


def _noise(ids: Tensor, draws: list[_Draw]) -> Tensor:
    """Gumbel noise for (R, K) token ids, a pure function of each row's key and the token id.

    A counter-based generator in the sense of Salmon et al. 2011, with murmur3's finaliser
    as the mixing function, in 32-bit integers because these vectorise on every CPU.
    """
    low = [[_signed(key & _MASK_32)] for _, key in draws]
    high = [[_signed(key >> 32)] for _, key in draws]
    mixed = ids.to(torch.int32) * _signed(0x9E3779B1)
    for words in (low, high):
        mixed = _mix(mixed.bitwise_xor_(to_device(words, torch.int32, ids.device)))
    # 24 bits, moved to the middle of their interval: never 0, never 1.
    uniform = (mixed.bitwise_and_(0xFFFFFF).float() + 0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def _mix(state: Tensor) -> Tensor:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state ^= (state >> shift) & ((1 << (32 - shift)) - 1)
        state *= _signed(factor)
    state ^= (state >> 16) & 0xFFFF
    return state


_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def _signed(word: int) -> int:
    """The 32-bit word as torch's int32 reads it."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _key(seed: int, position: int) -> int:
    """64 well-mixed bits of (seed, position): splitmix64 (Steele, Lea, Flood 2014), twice."""
    return _splitmix64(_splitmix64(seed & _MASK_64) ^ position)


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _logprob_table(
    logits: Tensor, token_ids: Tensor, seqs: list[Sequence], asked: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """For the rows that asked: (rows,) of the token, (rows, most) of the best and their ids."""
    table = torch.log_softmax(_rows(logits, asked), dim=-1).clamp_min_(LEAST_LOGPROB)
    chosen = table.gather(1, _rows(token_ids, asked).unsqueeze(1)).squeeze(1)
    most = max(seqs[i].sampling.logprobs or 0 for i in asked)
    values, ids = table.topk(min(most, table.shape[1]), dim=-1)
    return chosen, values, ids


def _logprobs(
    seqs: list[Sequence],
    asked: list[int],
    chosen: list[float],
    values: list[list[float]],
    ids: list[list[int]],
) -> dict[int, Logprobs]:
    """Log probabilities of the rows that asked for them, by row."""
    counts = [seqs[i].sampling.logprobs or 0 for i in asked]
    return {
        row: Logprobs(logprob, tuple(zip(top_ids[:n], top_values[:n], strict=True)))
        for row, logprob, n, top_ids, top_values in zip(
            asked, chosen, counts, ids, values, strict=True
        )
    }
