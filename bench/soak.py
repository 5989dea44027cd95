"""Memory of an engine with the default model: at 32 streams, and over many short requests.

    python -m bench.soak [--requests 10000] [--quantization int8]

Requests of 12 to 40 random tokens with answers of 2 to 8, 32 at a time, each prompt a new one, in
this process. Prints the resident memory after 1,000 requests and at the end, and the time from
the start of loading to the first token.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import count

import psutil

from bench.compare import conditions
from deployments.engine.build import load_runner
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import ChatTokenizer
from deployments.engine.weights import DEFAULT_CHAT_MODEL, pull
from protocol.request import SamplingParams

STREAMS = 32
SETTLED = 1000


def request(number: int, rng: random.Random) -> Sequence:
    return Sequence(
        request_id=str(number),
        prompt_token_ids=[rng.randrange(1000, 40_000) for _ in range(rng.randint(12, 40))],
        sampling=SamplingParams(max_tokens=rng.randint(2, 8), temperature=0.0),
    )


def resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


def soak(engine: Engine, num_requests: int) -> list[tuple[int, float]]:
    """Ended requests and resident MiB, each time another 1,000 have ended."""
    rng, numbers, seen = random.Random(0), count(), []
    num_ended = num_open = 0
    while num_ended < num_requests:
        while num_open < min(STREAMS, num_requests - num_ended):
            engine.add(request(next(numbers), rng))
            num_open += 1
        for emission in engine.step():
            if emission.terminal is None:
                continue
            assert emission.terminal.error is None, emission.terminal.error
            num_ended, num_open = num_ended + 1, num_open - 1
            if num_ended % SETTLED == 0:
                seen.append((num_ended, resident_mib()))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--quantization", default="none")
    args = parser.parse_args()
    folder = pull(DEFAULT_CHAT_MODEL, progress=False).path
    config = EngineConfig(
        max_num_seqs=STREAMS, quantization=args.quantization, num_threads=1, max_model_len=2048
    )
    started_s = time.perf_counter()
    runner = load_runner(folder, config)
    engine = Engine(runner, ChatTokenizer.load(folder), config)
    engine.warm_up()
    engine.add(request(-1, random.Random(1)))
    while not engine.step():
        pass
    first_token_s = time.perf_counter() - started_s
    while engine.has_work:
        engine.step()
    seen = soak(engine, args.requests)
    print("; ".join(f"{name}: {value}" for name, value in conditions().items()))
    print(f"\nfirst token {first_token_s:.1f} s after loading began\n")
    print("| requests ended | resident MiB |\n|---|---|")
    for num_ended, mib in seen:
        print(f"| {num_ended} | {mib:.0f} |")
    print(f"\n{seen[-1][1] / seen[0][1] - 1:+.1%} since the first {SETTLED}")


if __name__ == "__main__":
    main()
