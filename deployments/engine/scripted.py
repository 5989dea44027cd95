"""A runner without a model: it makes the sampler pick given tokens.

Deterministic streams for tests, and the engine of `backend: mock`, where front ends are
built without weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from deployments.engine.blocks import BlockPool
from deployments.engine.config import EngineConfig
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer

Script = Callable[[Sequence], list[int]]
"""The whole answer of a sequence, as token ids; asked anew each step."""

Fault = Literal["raise", "nan"]

BLOCK_TOKENS = 32

FAR_BELOW = -10_000.0
"""Logit of every token but the scripted one: no temperature, bias or penalty reaches over it."""


class ScriptedRunner:
    """Emits scripted tokens, then the end-of-text token, as one-hot logits.

    Args:
        script: what each sequence answers.
        tokenizer: gives the vocabulary's size and the end-of-text token.
        config: gives `max_num_seqs`, `max_model_len` and the number of blocks.
        token_interval_s: how long a step takes, however many rows it has.
        sleep: spends that time.
        fault: for tests: what goes wrong with a sequence's next token, if anything.
    """

    def __init__(
        self,
        script: Script,
        tokenizer: ChatTokenizer,
        config: EngineConfig,
        *,
        token_interval_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        fault: Callable[[Sequence], Fault | None] = lambda seq: None,
    ) -> None:
        self._script = script
        self._vocab_size = tokenizer.vocab_size
        self._eos_token_id = min(tokenizer.eos_token_ids)
        self._token_interval_s = token_interval_s
        self._sleep = sleep
        self._fault = fault
        self.max_num_seqs = config.max_num_seqs
        self.prefix_block_tokens = config.prefix_block_tokens or BLOCK_TOKENS
        self.piece_tokens = self.prefix_block_tokens
        per_seq = -(-config.max_model_len // self.prefix_block_tokens)
        num_blocks = config.num_kv_blocks or config.max_num_seqs * per_seq
        self.max_model_len = min(config.max_model_len, num_blocks * self.prefix_block_tokens)
        self.pool = BlockPool(num_blocks, self.prefix_block_tokens, keeps_answers=True)
        self.held: set[Sequence] = set()
        """Sequences that ran and were not released."""

    def warm_up(self) -> None:
        """Nothing to warm."""

    def run(self, plan: StepPlan) -> Tensor:
        if self._token_interval_s > 0:
            self._sleep(self._token_interval_s)
        for row in plan.rows:
            num_held = len(self.pool.blocks(row.seq)) * self.prefix_block_tokens
            assert row.end <= num_held, "reserve() comes before a plan"
            self.held.add(row.seq)
        token_ids = [token_id for row in plan.rows for token_id in self._next(row)]
        logits = torch.full((len(token_ids), self._vocab_size), FAR_BELOW)
        if token_ids:
            logits.scatter_(1, torch.tensor(token_ids).unsqueeze(1), 0.0)
        seqs = [row.seq for row in plan.rows for _ in range(row.num_logits)]
        poisoned = [i for i, seq in enumerate(seqs) if self._is_poisoned(seq)]
        logits[poisoned] = float("nan")
        return logits

    def place(self, seq: Sequence) -> int:
        return self.pool.place(seq)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        return self.pool.reserve(seq, num_tokens)

    def holds(self, seq: Sequence) -> bool:
        return self.pool.holds(seq)

    def release(self, seq: Sequence, *, is_sound: bool = False) -> None:
        self.pool.free(seq, keep=is_sound)
        self.held.discard(seq)

    def close(self) -> None:
        self.held.clear()

    def _next(self, row: ScheduledRow) -> list[int]:
        """The token behind each of a row's whose logits are wanted; a wrong draft changes none."""
        scored = row.seq.token_ids(row.start + 1, row.start + 1 + row.num_scored)
        if not row.is_sampled:
            return scored
        start = len(row.seq.output_token_ids)
        answer = self._script(row.seq)[start : start + row.num_sampled]
        return scored + answer + [self._eos_token_id] * (row.num_sampled - len(answer))

    def _is_poisoned(self, seq: Sequence) -> bool:
        fault = self._fault(seq)
        if fault == "raise":
            raise RuntimeError(f"scripted fault in {seq.request_id}")
        return fault == "nan"


def text_script(tokenizer: ChatTokenizer, text: str) -> Script:
    """A script that answers every request with the same text."""
    answer = tokenizer.encode_prompt(text)
    return lambda seq: answer
