"""What drafts save: three kinds of questions with and without them.

    python -m bench.speculation --data ../shared/data --streams 1

One engine in this process, without a server. Chat questions come from `gptcache_mock_data.json`
of the data folder, code to be edited and texts to be summed up from this repository. Prints for
each kind how many tokens a step gave, how many drafts a token took and which part of them was
right, the CPU time of an answer's token with and without drafts, without that of prompts, and
whether both gave the same tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.fused import FusedRunner
from deployments.engine.runner import ModelRunner, Runner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from deployments.engine.weights import DEFAULT_CHAT_MODEL, pull
from protocol.request import Message, SamplingParams

ROOT = Path(__file__).parents[1]
RUNNERS: dict[str, type[FusedRunner] | type[ModelRunner]] = {
    "fused": FusedRunner,
    "transformers": ModelRunner,
}
CODE = (
    ("deployments/engine/stop.py", "class _Matcher"),
    ("deployments/engine/pacing.py", "class PrefillPace"),
    ("deployments/engine/admission.py", "class _Tenant"),
    ("deployments/engine/sampler.py", "class Logprobs"),
    ("deployments/engine/detokenizer.py", "class "),
    ("deployments/engine/sequence.py", "    def token_ids"),
)
CODE_LINES = 28
LEAST_PARAGRAPH = 700


@dataclass
class Measured:
    """What the questions of one kind took, prompts left out."""

    num_tokens: int = 0
    num_steps: int = 0
    cpu_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0


def questions(data: Path, count: int, rng: random.Random) -> dict[str, list[str]]:
    """By kind; `count` chat questions, as many texts at the most, and all of the code."""
    pairs = json.loads((data / "pairs" / "gptcache_mock_data.json").read_text())
    paragraphs = (ROOT / "docs" / "engine.md").read_text().split("\n\n")
    texts = [text for text in paragraphs if len(text) >= LEAST_PARAGRAPH][:count]
    return {
        "chat": [pair["origin"] for pair in rng.sample(pairs, count)],
        "edit": list(_edits()),
        "summary": [f"Summarize this text:\n\n{text}" for text in texts],
    }


def _edits() -> Iterator[str]:
    for number, (path, begins) in enumerate(CODE):
        lines = (ROOT / path).read_text().splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(begins))
        code = "\n".join(lines[start : start + CODE_LINES])
        wish = (
            "Repeat this code with comments added"
            if number % 2
            else "Rename the class in this code to Thing and repeat the whole code"
        )
        yield f"{wish}:\n\n```python\n{code}\n```"


def answer(
    engine: Engine, prompts: list[list[int]], num_streams: int, sampling: SamplingParams
) -> tuple[Measured, list[list[int]]]:
    """Answers the prompts, so many at a time; returns what it took, and the answers' tokens."""
    measured = Measured()
    outputs = []
    for first in range(0, len(prompts), num_streams):
        seqs = [
            Sequence(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling=sampling,
                eos_token_ids=engine.tokenizer.eos_token_ids,
                seed=number,
            )
            for number, prompt in enumerate(prompts[first : first + num_streams], first)
        ]
        for seq in seqs:
            engine.add(seq)
        while any(seq.first_token_s is None for seq in seqs):
            engine.step()
        before, begun_s = engine.stats(), time.thread_time()
        while engine.has_work:
            engine.step()
        measured.cpu_s += time.thread_time() - begun_s
        after = engine.stats()
        measured.num_tokens += after.generated_tokens_total - before.generated_tokens_total
        measured.num_steps += after.steps_total - before.steps_total
        measured.num_drafted += after.draft_tokens_total - before.draft_tokens_total
        measured.num_accepted += after.accepted_tokens_total - before.accepted_tokens_total
        outputs += [seq.output_token_ids for seq in seqs]
    return measured, outputs


def compare(runner: Runner, tokenizer: ChatTokenizer, args: argparse.Namespace) -> None:
    """Prints a line for each kind of question and of sampling."""
    drafted = config_of(args)
    engines = [
        Engine(runner, tokenizer, config)
        for config in (drafted, replace(drafted, speculative_tokens=0))
    ]
    print("question  sampling  tokens  tokens/step  drafts/token  right  ms/token  without  times")
    for kind, texts in questions(args.data, args.questions, random.Random(1)).items():
        prompts = [tokenizer.encode_chat([Message(role="user", content=text)]) for text in texts]
        for temperature in (0.0, 0.7):
            sampling = SamplingParams(
                temperature=temperature, top_p=0.95, max_tokens=args.max_tokens
            )
            (with_, outputs), (without, others) = (
                answer(engine, prompts, args.streams, sampling) for engine in engines
            )
            ms, ms_without = (
                1000 * measured.cpu_s / measured.num_tokens for measured in (with_, without)
            )
            print(
                f"{kind:8}  {'greedy' if temperature == 0 else f'T={temperature}':8}"
                f"  {with_.num_tokens:6}  {with_.num_tokens / with_.num_steps:11.2f}"
                f"  {with_.num_drafted / with_.num_tokens:12.2f}"
                f"  {with_.num_accepted / max(1, with_.num_drafted):5.2f}"
                f"  {ms:8.1f}  {ms_without:7.1f}  {ms_without / ms:5.2f}"
                + ("" if outputs == others else "  answers differ"),
                flush=True,
            )


def config_of(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=max(2, args.streams),
        max_model_len=2048,
        num_threads=1,
        device="cpu",
        speculative_tokens=args.tokens,
        max_speculative_rows=args.rows,
        quantization=args.quantization,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--runner", choices=RUNNERS, default="fused")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--streams", type=int, default=1, help="answers at the same time")
    parser.add_argument("--questions", type=int, default=8, help="of each kind, at the most")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=EngineConfig.speculative_tokens)
    parser.add_argument("--rows", type=int, default=EngineConfig.max_speculative_rows)
    args = parser.parse_args()
    folder = pull(DEFAULT_CHAT_MODEL, progress=False).path
    runner = RUNNERS[args.runner].load(folder, config_of(args))
    runner.warm_up()
    compare(runner, ChatTokenizer.load(folder), args)
    runner.close()


if __name__ == "__main__":
    main()
