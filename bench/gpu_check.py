"""Figures of the engine on a GPU; `bench/gpu_check.sh` runs this after the tests.

    python -m bench.gpu_check

In this process, without a server. First the same greedy texts as on the CPU, both in float32.
Then tokens per second and CPU time per token, in the device's own precision, with all answers
running at the same time, with steps recorded as CUDA graphs and without. Exits 1 where a text
differs, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from deployments.engine.weights import DEFAULT_CHAT_MODEL, pull
from protocol.request import Message, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences how a bicycle stays upright.",
    "List five animals that live in the desert.",
    "What is 17 times 23? Think step by step.",
    "Translate 'good morning' into German, French and Spanish.",
    "Why is the sky blue?",
    "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
)
PROMPT_TOKENS = 64
NUM_CLIENTS = (1, 32, 128)


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float
    cpu_us_per_token: float


def build(folder: Path, config: EngineConfig) -> Engine:
    engine = Engine(ModelRunner.load(folder, config), ChatTokenizer.load(folder), config)
    engine.warm_up()
    return engine


def ask(engine: Engine, token_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> Sequence:
    seq = Sequence(
        request_id=str(id(token_ids)),
        prompt_token_ids=token_ids,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos),
        eos_token_ids=engine.tokenizer.eos_token_ids,
        arrival_s=engine.clock(),
    )
    engine.add(seq)
    return seq


def answers(engine: Engine, max_tokens: int) -> list[list[int]]:
    """What the model answers to the questions, greedy and all at once."""
    prompts = [
        engine.tokenizer.encode_chat((Message(role="user", content=question),), None)
        for question in QUESTIONS
    ]
    seqs = [ask(engine, prompt, max_tokens, ignore_eos=False) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [seq.output_token_ids for seq in seqs]


def measure(engine: Engine, num_clients: int, max_tokens: int) -> Speed:
    """As many answers as there are clients, until each has all of its tokens."""
    vocab_size = engine.tokenizer.vocab_size
    # No two begin alike, so that none is spared its prompt.
    prompts = [
        [(97 * client + 31 * i + 200) % vocab_size for i in range(PROMPT_TOKENS)]
        for client in range(num_clients)
    ]
    seqs = [ask(engine, prompt, max_tokens, ignore_eos=True) for prompt in prompts]
    while any(not seq.output_token_ids for seq in seqs):
        engine.step()
    before = sum(len(seq.output_token_ids) for seq in seqs)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
    elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    num_tokens = sum(len(seq.output_token_ids) for seq in seqs) - before
    return Speed(num_tokens / elapsed_s, 1e6 * cpu_s / num_tokens)


def check_texts(folder: Path, device: str, config: EngineConfig, max_tokens: int) -> bool:
    """Compares the answers of the CPU and of the device, in float32; prints and returns whether
    all are equal."""
    exact = replace(config, dtype="float32", max_num_seqs=len(QUESTIONS))
    found = {}
    for name, given in (
        ("CPU", replace(exact, device="cpu")),
        ("graphs on", replace(exact, device=device, cuda_graphs=True)),
        ("graphs off", replace(exact, device=device, cuda_graphs=False)),
    ):
        engine = build(folder, given)
        found[name] = answers(engine, max_tokens)
        engine.close()
    is_equal = True
    for name in ("graphs on", "graphs off"):
        equal = sum(ours == cpu for ours, cpu in zip(found[name], found["CPU"], strict=True))
        print(f"same greedy text as on the CPU, float32, {name}: {equal} of {len(QUESTIONS)}")
        is_equal &= equal == len(QUESTIONS)
    return is_equal


def check_speed(
    folder: Path, device: str, config: EngineConfig, clients: tuple[int, ...], max_tokens: int
) -> None:
    """Measures and prints each number of clients, with graphs and without."""
    for cuda_graphs in (True, False):
        given = replace(config, device=device, cuda_graphs=cuda_graphs, max_num_seqs=max(clients))
        started_s = time.perf_counter()
        engine = build(folder, given)
        name = f"graphs {'on' if cuda_graphs else 'off'}"
        print(f"{name}: ready after {time.perf_counter() - started_s:.1f} s")
        for num_clients in clients:
            measure(engine, num_clients, 8)
            speed = measure(engine, num_clients, max_tokens)
            print(
                f"{name}, {num_clients:3} clients: {speed.tokens_per_s:8.0f} tokens/s, "
                f"{speed.cpu_us_per_token:7.0f} us of CPU a token"
            )
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_CHAT_MODEL)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, nargs="+", default=NUM_CLIENTS)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device, nothing was measured")
        sys.exit(2)
    folder = pull(args.model, progress=False).path
    config = EngineConfig(
        max_model_len=2048,
        max_num_seqs=max(args.clients),
        max_num_batched_tokens=4096,
        # As many tokens as steps have rows, whatever an answer repeats.
        speculative_tokens=0,
    )
    is_equal = check_texts(folder, args.device, config, min(64, args.max_tokens))
    check_speed(folder, args.device, config, tuple(args.clients), args.max_tokens)
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
