"""Small things the engine's tests share: a clock to advance, sequences, a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Emission, Engine
from deployments.engine.scripted import Fault, ScriptedRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer, byte_tokenizer
from protocol.request import SamplingParams
from protocol.token_log import Terminal, TokenDelta

TOKENIZER: ChatTokenizer = byte_tokenizer()

SMALL = EngineConfig(
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=20,
    prefill_chunk_tokens=16,
    prefix_block_tokens=8,
    max_waiting=8,
    num_threads=1,
    device="cpu",
    dtype="float32",
)

_numbers = count()


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def sequence(
    prompt: str | list[int] = "hi",
    *,
    request_id: str | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
    arrival_s: float = 0.0,
    tokenizer: ChatTokenizer = TOKENIZER,
    **sampling: Any,
) -> Sequence:
    """A sequence as `prepare` makes it; greedy unless told otherwise."""
    ids = prompt if isinstance(prompt, list) else tokenizer.encode_prompt(prompt)
    return Sequence(
        request_id=request_id or f"r{next(_numbers)}",
        prompt_token_ids=ids,
        sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 32} | sampling)),
        eos_token_ids=tokenizer.eos_token_ids,
        seed=seed,
        deadline_s=deadline_s,
        arrival_s=arrival_s,
    )


@dataclass
class Answer:
    """What an engine told about one sequence."""

    deltas: list[TokenDelta] = field(default_factory=list)
    terminals: list[Terminal] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def terminal(self) -> Terminal:
        (terminal,) = self.terminals
        return terminal


class Collector:
    """Files emissions by sequence, and checks what must hold of every stream."""

    def __init__(self) -> None:
        self._answers: dict[Sequence, Answer] = {}

    def __getitem__(self, seq: Sequence) -> Answer:
        return self._answers.setdefault(seq, Answer())

    def take(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            answer = self[emission.seq]
            assert not answer.terminals, "nothing comes after the terminal"
            for delta in emission.deltas:
                assert not answer.deltas or delta.seq > answer.deltas[-1].seq
                answer.deltas.append(delta)
            if emission.terminal is not None:
                answer.terminals.append(emission.terminal)


def scripted_engine(
    answers: Callable[[Sequence], str] | str,
    *,
    config: EngineConfig = SMALL,
    clock: Callable[[], float] | None = None,
    fault: Callable[[Sequence], Fault | None] = lambda seq: None,
) -> tuple[Engine, ScriptedRunner]:
    """An engine whose model answers with the given texts."""
    answer_of = (lambda seq: answers) if isinstance(answers, str) else answers
    runner = ScriptedRunner(
        lambda seq: TOKENIZER.encode_prompt(answer_of(seq)), TOKENIZER, config, fault=fault
    )
    return Engine(runner, TOKENIZER, config, clock=clock or FakeClock()), runner


def run_to_end(engine: Engine, *seqs: Sequence, max_steps: int = 1000) -> Collector:
    """Adds the sequences and steps until nothing is left."""
    collector = Collector()
    for seq in seqs:
        engine.add(seq)
    for _ in range(max_steps):
        if not engine.has_work:
            return collector
        collector.take(engine.step())
    raise AssertionError(f"still at work after {max_steps} steps")
