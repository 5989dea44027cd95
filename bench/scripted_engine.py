"""A scripted engine whose answers differ with the prompt. Knows nothing of Ray.

Each token is one printable ASCII character, so that one who knows the prompt knows every
character of the answer and where it stands. Answers have no end of their own: they are as long
as `max_tokens` says. A prompt that begins with `AT_ONCE` is answered as fast as the engine can;
while any other one runs, a step comes once an interval.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO
from weakref import WeakKeyDictionary

from torch import Tensor

from deployments.engine.async_engine import AsyncEngine
from deployments.engine.build import EngineSpec
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.scheduler import StepPlan
from deployments.engine.scripted import ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer, byte_tokenizer

AT_ONCE = "at once: "
STEPS_FILE = "SEEDANCE_BENCH_STEPS"
"""Environment variable with the file in which a replica notes its paced steps; unset: none."""
MAX_ANSWER_TOKENS = 4096
# No quote and no backslash: a character of the answer is a character of the frame.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:-+*=()<>!?#"


@lru_cache(maxsize=4096)
def answer_to(prompt: str, num_tokens: int) -> str:
    """What the scripted engine answers: the first `num_tokens` characters."""
    blocks = (
        hashlib.blake2b(f"{block} {prompt}".encode()).digest()
        for block in range(-(-num_tokens // 64))
    )
    letters = itertools.chain.from_iterable(blocks)
    return "".join(LETTERS[byte % len(LETTERS)] for byte in itertools.islice(letters, num_tokens))


class PromptRunner(ScriptedRunner):
    """Answers each prompt in its own words; notes when each paced step was computed.

    Args:
        steps: gets a line a step: `{"at_s": …, "new": [prompts whose first token this is]}`.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        config: EngineConfig,
        *,
        interval_s: float,
        steps: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(self._answer, tokenizer, config)
        self._interval_s = interval_s
        self._steps = steps
        self._clock = clock
        self._sleep_for = sleep
        self._last_s = 0.0
        self._answers: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()
        self._prompts: WeakKeyDictionary[Sequence, str] = WeakKeyDictionary()

    def run(self, plan: StepPlan) -> Tensor:
        is_paced = any(not self._prompt(row.seq).startswith(AT_ONCE) for row in plan.rows)
        if is_paced:
            # By the schedule, not by the interval: what a step costs does not slow the next.
            self._sleep_for(max(0.0, self._last_s + self._interval_s - self._clock()))
            self._last_s = self._clock()
        logits = super().run(plan)
        if is_paced and self._steps is not None:
            new = [
                self._prompt(row.seq) for row in plan.sampled_rows if not row.seq.output_token_ids
            ]
            print(json.dumps({"at_s": self._clock(), "new": new}), file=self._steps, flush=True)
        return logits

    def _answer(self, seq: Sequence) -> list[int]:
        answer = self._answers.get(seq)
        if answer is None:
            # In the byte vocabulary an ASCII character's token is its own number.
            text = answer_to(self._prompt(seq), MAX_ANSWER_TOKENS)
            answer = self._answers[seq] = list(text.encode())
        return answer

    def _prompt(self, seq: Sequence) -> str:
        prompt = self._prompts.get(seq)
        if prompt is None:
            content = bytes(id for id in seq.prompt_token_ids if id < 256)
            prompt = self._prompts[seq] = content.decode(errors="replace")
        return prompt


def build_mock(spec: EngineSpec) -> AsyncEngine:
    """Stands in for `build_engine`."""
    tokenizer = byte_tokenizer()
    path = os.environ.get(STEPS_FILE)
    steps = Path(path).open("a") if path else None  # noqa: SIM115 (as long as the replica lives)
    # A step gives one token, as the interval says.
    config = replace(spec.config, speculative_tokens=0)
    runner = PromptRunner(tokenizer, config, interval_s=spec.mock_token_interval_s, steps=steps)
    return AsyncEngine(Engine(runner, tokenizer, config))
