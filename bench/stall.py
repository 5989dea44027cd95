"""How long running streams wait between their tokens while a long prompt is computed.

    python -m bench.stall --streams 4 --prompt-tokens 3000

One engine in this process, without a server: the streams alone, then the same while the prompt
is computed, with a short prompt that comes after it. Prints the median and the p99 of the time
between two tokens for both, and when each prompt had its first token.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from deployments.engine.build import load_runner
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from deployments.engine.weights import DEFAULT_CHAT_MODEL, pull
from protocol.request import SamplingParams

SHORT_TOKENS = 64


class Streams:
    """An engine, and when each of its sequences got its tokens."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self._rng = rng
        self._arrived_s: dict[Sequence, list[float]] = {}

    def add(self, num_tokens: int, max_tokens: int) -> Sequence:
        """Queues a prompt that shares nothing with another."""
        vocab_size = self.engine.tokenizer.vocab_size
        seq = Sequence(
            request_id=str(len(self._arrived_s)),
            prompt_token_ids=[self._rng.randrange(100, vocab_size) for _ in range(num_tokens)],
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            arrival_s=self.engine.clock(),
        )
        self.engine.add(seq)
        self._arrived_s[seq] = []
        return seq

    def step_while(self, is_on: Callable[[], bool]) -> None:
        while is_on():
            now_counts = {seq: len(seq.output_token_ids) for seq in self._arrived_s}
            self.engine.step()
            for seq, count in now_counts.items():
                if len(seq.output_token_ids) > count:
                    self._arrived_s[seq].append(self.engine.clock())

    def gaps_ms(self, seqs: list[Sequence], since_s: float) -> np.ndarray:
        """Times between two tokens of each sequence that began after a moment."""
        return np.array(
            [
                1000 * (b - a)
                for seq in seqs
                for a, b in pairwise(self._arrived_s[seq])
                if a >= since_s
            ]
        )


def measure(streams: Streams, num_streams: int, prompt_tokens: int, quiet_steps: int) -> None:
    """Runs the streams alone, then beside the prompts, and prints both."""
    seqs = [streams.add(32, 2000) for _ in range(num_streams)]
    streams.step_while(lambda: min(len(seq.output_token_ids) for seq in seqs) < 10)
    since_s = streams.engine.clock()
    until = len(seqs[0].output_token_ids) + quiet_steps
    streams.step_while(lambda: len(seqs[0].output_token_ids) < until)
    alone = streams.gaps_ms(seqs, since_s)
    since_s = streams.engine.clock()
    long = streams.add(prompt_tokens, 1)
    streams.step_while(lambda: long.num_computed_tokens < prompt_tokens // 4)
    short = streams.add(SHORT_TOKENS, 1)
    streams.step_while(lambda: long.first_token_s is None or short.first_token_s is None)
    beside = streams.gaps_ms(seqs, since_s)
    for name, gaps in (("alone", alone), ("beside a long prompt", beside)):
        p50, p99 = np.percentile(gaps, [50, 99])
        print(f"{name:22} p50 {p50:6.0f} ms  p99 {p99:6.0f} ms  ({len(gaps)} times)")
    print(f"p99 ratio {np.percentile(beside, 99) / np.percentile(alone, 99):.2f}")
    for name, seq in (("long", long), ("short", short)):
        assert seq.first_token_s is not None, "both were computed"
        print(f"{name} prompt: first token after {seq.first_token_s - seq.arrival_s:.1f} s")
    for seq in seqs:
        streams.engine.abort(seq.request_id)
    streams.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--quiet-steps", type=int, default=60)
    parser.add_argument("--slowdown", type=float, default=EngineConfig.prefill_slowdown)
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this thread; for a busy machine"
    )
    parser.add_argument("--block-tokens", type=int, help="least piece, by the generic runner")
    args = parser.parse_args()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    folder = pull(DEFAULT_CHAT_MODEL, progress=False).path
    config = EngineConfig(
        max_num_seqs=args.streams + 2,
        max_num_batched_tokens=384,
        num_threads=1,
        prefix_block_tokens=args.block_tokens,
        prefill_slowdown=args.slowdown,
    )
    engine = Engine(
        (ModelRunner.load if args.block_tokens else load_runner)(folder, config),
        ChatTokenizer.load(folder),
        config,
        clock=clock,
    )
    engine.warm_up()
    streams = Streams(engine, random.Random(0))
    measure(streams, args.streams, args.prompt_tokens, args.quiet_steps)
    engine.close()


if __name__ == "__main__":
    main()
