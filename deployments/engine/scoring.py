"""Log probabilities of a prompt's own tokens, piece by piece as it is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from deployments.engine.sampler import LEAST_LOGPROB
from deployments.engine.scheduler import ScheduledRow
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from protocol.token_log import PromptToken, TokenDelta

ROWS_AT_ONCE = 64
"""Rows whose log probabilities are in memory together: 12 MB of a vocabulary of 49,152."""


class LogitRows(NamedTuple):
    """Which of a step's logits are for what: rows of the tensor that the runner returned.

    Attributes:
        sampled: those that tokens are sampled from, in the order of the plan.
        scored: for each row of the plan that has any, those behind which the prompt goes on.
    """

    sampled: list[int]
    scored: list[tuple[ScheduledRow, slice]]


def divide(rows: Iterable[ScheduledRow]) -> LogitRows:
    """Tells the logits of a plan's rows apart."""
    sampled: list[int] = []
    scored = []
    at = 0
    for row in rows:
        if row.seq.is_scored:
            scored.append((row, slice(at, at + row.num_scored)))
        at += row.num_logits
        sampled += range(at - row.num_sampled, at)
    return LogitRows(sampled, scored)


class PromptScores:
    """What is known of one prompt's tokens; complete once its last token is computed."""

    def __init__(self, seq: Sequence, tokenizer: ChatTokenizer) -> None:
        assert seq.prompt_logprobs is not None
        self._token_ids = seq.prompt_token_ids
        self._num_best = seq.prompt_logprobs
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._num_chars = 0
        self.tokens: list[PromptToken] = []
        self._add(None, ())

    @torch.inference_mode()
    def note(self, logits: Tensor) -> bool:
        """Takes the logits, (R, V) float32, behind the next R tokens.

        Returns:
            Whether they are sound: none is NaN or an infinity but minus infinity.
        """
        for at in range(0, len(logits), ROWS_AT_ONCE):
            part, start = logits[at : at + ROWS_AT_ONCE], len(self.tokens)
            wanted = torch.tensor(self._token_ids[start : start + len(part)], device=part.device)
            table = torch.log_softmax(part, dim=-1).clamp_min_(LEAST_LOGPROB)
            # A NaN anywhere in a row, or an infinity, makes all of it NaN.
            chosen = table.gather(1, wanted.unsqueeze(1)).squeeze(1)
            if not bool(chosen.isfinite().all()):
                return False
            best, ids = table.topk(min(self._num_best, table.shape[1]), dim=-1)
            for logprob, values, token_ids in zip(
                chosen.tolist(), best.tolist(), ids.tolist(), strict=True
            ):
                self._add(logprob, zip(token_ids, values, strict=True))
        return True

    def _add(self, logprob: float | None, best: Iterable[tuple[int, float]]) -> None:
        """Adds the next token."""
        text = self._tokenizer.token_text
        token_id = self._token_ids[len(self.tokens)]
        top = tuple((other, text(other), value) for other, value in best)
        self.tokens.append(PromptToken(token_id, text(token_id), self._num_chars, logprob, top))
        self._num_chars += len(self._detokenizer.push(token_id))


def note_scores(
    rows: Iterable[tuple[ScheduledRow, slice]], logits: Tensor, tokenizer: ChatTokenizer
) -> list[Sequence]:
    """Notes what a step tells of prompts, on their sequences; returns those whose logits are NaN."""
    failed = []
    for row, at in rows:
        seq = row.seq
        if row.start == 0:
            # Also of one that was preempted, and begins anew.
            seq.prompt_scores = PromptScores(seq, tokenizer)
        assert seq.prompt_scores is not None
        if not seq.prompt_scores.note(logits[at]):
            failed.append(seq)
    return failed


def with_prompt(seq: Sequence, deltas: list[TokenDelta], *, is_end: bool) -> list[TokenDelta]:
    """The next deltas of a sequence; the first of all of them brings the prompt's tokens.

    Args:
        is_end: no more will come: where there is no delta, one is made.
    """
    scores = seq.prompt_scores
    if scores is None or not (deltas or is_end):
        return deltas
    seq.prompt_scores = None
    if not deltas:
        deltas = [TokenDelta(seq=max(0, len(seq.output_token_ids) - 1), text="")]
    first = deltas[0]
    told = TokenDelta(
        first.seq, first.text, first.token_ids, first.logprobs, prompt=tuple(scores.tokens)
    )
    return [told, *deltas[1:]]
