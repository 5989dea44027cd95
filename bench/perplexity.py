"""What fewer bits cost: perplexity of the default model on this project's own documentation.

    python -m bench.perplexity [--tokens 3072]

The same tokens in windows of 512, by weights in float32, bfloat16 and int8. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.compare import conditions
from deployments.engine.config import EngineConfig
from deployments.engine.fused import FusedRunner
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.sequence import Sequence
from deployments.engine.weights import DEFAULT_CHAT_MODEL, pull
from protocol.request import SamplingParams

TEXT = Path(__file__).parent.parent / "docs" / "protocol.md"
WINDOW = 512
KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}


class Whole(ScheduledRow):
    """A row with logits behind each of its tokens."""

    @property
    def num_logits(self) -> int:
        return self.end - self.start


def mean_loss(runner: FusedRunner, token_ids: list[int]) -> float:
    """Mean negative log probability of the tokens, each window begun anew."""
    losses = []
    for start in range(0, len(token_ids), WINDOW):
        window = token_ids[start : start + WINDOW]
        seq = Sequence(
            request_id=str(start),
            prompt_token_ids=window,
            sampling=SamplingParams(max_tokens=1),
        )
        runner.place(seq)
        assert runner.reserve(seq, len(window))
        logits = runner.run(StepPlan((Whole(seq, 0, len(window)),)))
        runner.release(seq)
        table = torch.log_softmax(logits[:-1], dim=-1)
        losses += (-table.gather(1, torch.tensor(window[1:]).unsqueeze(1))).flatten().tolist()
    return float(np.mean(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3072)
    args = parser.parse_args()
    folder = pull(DEFAULT_CHAT_MODEL, progress=False).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"][: args.tokens]
    print("; ".join(f"{name}: {value}" for name, value in conditions().items()))
    print(f"\n{len(token_ids)} tokens of docs/{TEXT.name}\n")
    print("| weights | perplexity | against float32 |\n|---|---|---|")
    first = None
    for kind, values in KINDS.items():
        runner = FusedRunner.load(folder, EngineConfig(max_num_seqs=1, **values))
        perplexity = math.exp(mean_loss(runner, token_ids))
        first = first or perplexity
        print(f"| {kind} | {perplexity:.3f} | {perplexity / first - 1:+.2%} |", flush=True)
        runner.close()


if __name__ == "__main__":
    main()
