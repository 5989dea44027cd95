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

from deployments.engine.config import EngineConfig
from deployments.engine.scheduler import StepPlan
from deployments.engine.sequence import Sequence
from deployments.engine.slots import Slots
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
        config: gives `max_num_seqs` and `max_model_len`.
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
        self.max_model_len = config.max_model_len
        self.prefix_block_tokens = config.prefix_block_tokens or BLOCK_TOKENS
        self._slots = Slots(config.max_num_seqs, self.prefix_block_tokens)
        self.held: set[Sequence] = set()
        """Sequences that ran and were not released."""

    def warm_up(self) -> None:
        """Nothing to warm."""

    def run(self, plan: StepPlan) -> Tensor:
        if self._token_interval_s > 0:
            self._sleep(self._token_interval_s)
        self.held.update(row.seq for row in plan.rows)
        seqs = [row.seq for row in plan.sampled_rows]
        logits = torch.full((len(seqs), self._vocab_size), FAR_BELOW)
        if seqs:
            token_ids = torch.tensor([self._next(seq) for seq in seqs])
            logits.scatter_(1, token_ids.unsqueeze(1), 0.0)
        poisoned = [i for i, seq in enumerate(seqs) if self._is_poisoned(seq)]
        logits[poisoned] = float("nan")
        return logits

    def place(self, seq: Sequence) -> int:
        return self._slots.place(seq).num_tokens

    def holds(self, seq: Sequence) -> bool:
        return self._slots.holds(seq)

    def release(self, seq: Sequence, *, is_sound: bool = False) -> None:
        self._slots.free(seq, keep=is_sound)
        self.held.discard(seq)

    def close(self) -> None:
        self.held.clear()

    def _next(self, seq: Sequence) -> int:
        answer = self._script(seq)
        at = len(seq.output_token_ids)
        return answer[at] if at < len(answer) else self._eos_token_id

    def _is_poisoned(self, seq: Sequence) -> bool:
        fault = self._fault(seq)
        if fault == "raise":
            raise RuntimeError(f"scripted fault in {seq.request_id}")
        return fault == "nan"


def text_script(tokenizer: ChatTokenizer, text: str) -> Script:
    """A script that answers every request with the same text."""
    answer = tokenizer.encode_prompt(text)
    return lambda seq: answer
