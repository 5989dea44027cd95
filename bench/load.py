"""Load on one server: N clients, mixed lengths, and what each of them saw.

    python -m bench.load --clients 16 --requests 64 --seed 1 ws://127.0.0.1:8000/v1/infer

Closed loop (the default): every client asks its next question when its last answer ended.
Poisson (`--rate R`): requests arrive at R a second whether or not earlier ones ended, and
wait on the client's account: times count from the arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from bench.targets import Answered, Connection, RequestFailed, Target, target_at
from bench.workload import Ask, make_arrivals, make_asks

Clock = Callable[[], float]


@dataclass(frozen=True)
class Load:
    """How hard to push, and with what."""

    clients: int = 16
    requests: int = 64
    seed: int = 1
    rate_per_s: float | None = None
    """Arrivals a second; None is the closed loop."""
    min_tokens: int = 8
    max_tokens: int = 128
    ignore_eos: bool = True
    timeout_s: float = 600.0
    """Longest wait for one answer; past it the request counts as an error."""

    def asks(self) -> list[Ask]:
        return make_asks(
            self.requests,
            self.seed,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )

    def warm_up(self, requests: int) -> Load:
        """A short round of other questions."""
        return replace(
            self,
            requests=requests,
            seed=self.seed + 1_000_003,
            rate_per_s=None,
            min_tokens=4,
            max_tokens=4,
        )


@dataclass
class Sample:
    """What the client saw of one request; clock readings in seconds."""

    begun_s: float
    pieces_s: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended_s: float = 0.0
    answered: Answered | None = None
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """All samples of one load, and how long it took from the first request to the last answer."""

    samples: list[Sample]
    duration_s: float


@dataclass(frozen=True)
class Report:
    """The figures of one or more runs of one server. Times in milliseconds.

    ITL is the gap between one piece of text and the next of the same answer, as the
    user sees it. Only answered requests count, except in `errors`.
    """

    requests: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    requests_per_s: float
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    latency_ms_p50: float
    latency_ms_p99: float


def report(runs: Sequence[Run]) -> Report:
    """Pools the samples of all `runs`."""
    samples = [sample for run in runs for sample in run.samples]
    good = [sample for sample in samples if sample.answered is not None]
    ends = [sample.answered for sample in samples if sample.answered is not None]
    duration_s = sum(run.duration_s for run in runs)
    completion_tokens = sum(end.completion_tokens for end in ends)
    ttfts = [sample.pieces_s[0] - sample.begun_s for sample in good if sample.pieces_s]
    itls = [gap for sample in good for gap in np.diff(sample.pieces_s)]
    latencies = [sample.ended_s - sample.begun_s for sample in good]
    return Report(
        requests=len(samples),
        errors=dict(Counter(sample.error for sample in samples if sample.error is not None)),
        duration_s=duration_s,
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        completion_tokens=completion_tokens,
        requests_per_s=len(good) / duration_s,
        tokens_per_s=completion_tokens / duration_s,
        ttft_ms_p50=_percentile_ms(ttfts, 50),
        ttft_ms_p99=_percentile_ms(ttfts, 99),
        itl_ms_p50=_percentile_ms(itls, 50),
        itl_ms_p99=_percentile_ms(itls, 99),
        latency_ms_p50=_percentile_ms(latencies, 50),
        latency_ms_p99=_percentile_ms(latencies, 99),
    )


def _percentile_ms(seconds: Sequence[float], q: float) -> float:
    return float(np.percentile(seconds, q)) * 1000 if seconds else float("nan")


async def run_load(target: Target, load: Load, clock: Clock = time.perf_counter) -> Run:
    """Connects all clients, then starts them together."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(target.open()) for _ in range(load.clients)]
        begun_s = clock()
        if load.rate_per_s is None:
            samples = await _closed_loop(connections, load, clock)
        else:
            samples = await _poisson(connections, load, load.rate_per_s, clock)
        return Run(samples, max(sample.ended_s for sample in samples) - begun_s)


async def _closed_loop(connections: list[Connection], load: Load, clock: Clock) -> list[Sample]:
    asks = iter(load.asks())
    samples: list[Sample] = []

    async def work(connection: Connection) -> None:
        for ask in asks:
            samples.append(await _ask(connection, ask, clock(), load.timeout_s, clock))

    await asyncio.gather(*map(work, connections))
    return samples


async def _poisson(
    connections: list[Connection], load: Load, rate_per_s: float, clock: Clock
) -> list[Sample]:
    begun_s = clock()

    async def arrive(index: int, ask: Ask, after_s: float) -> Sample:
        await asyncio.sleep(begun_s + after_s - clock())
        connection = connections[index % len(connections)]
        return await _ask(connection, ask, begun_s + after_s, load.timeout_s, clock)

    arrivals = make_arrivals(load.requests, load.seed, rate_per_s)
    planned = enumerate(zip(load.asks(), arrivals, strict=True))
    return await asyncio.gather(*(arrive(index, *request) for index, request in planned))


async def _ask(
    connection: Connection, ask: Ask, begun_s: float, timeout_s: float, clock: Clock
) -> Sample:
    sample = Sample(begun_s)
    try:
        async with asyncio.timeout(timeout_s), aclosing(connection.ask(ask)) as events:
            async for event in events:
                if isinstance(event, Answered):
                    sample.answered = event
                else:
                    sample.pieces_s.append(clock())
    except RequestFailed as exc:
        sample.error = str(exc)
    except TimeoutError:
        sample.error = f"no answer within {timeout_s:g} s"
    sample.ended_s = clock()
    return sample


def describe(figures: Report) -> str:
    """The report as lines of text."""
    f = figures
    errors = "".join(f"\n  {count} x {text}" for text, count in f.errors.items())
    return (
        f"requests     {f.requests - sum(f.errors.values())} answered, {sum(f.errors.values())} "
        f"errors, {f.duration_s:.1f} s, {f.prompt_tokens} prompt tokens, "
        f"{f.completion_tokens} answer tokens\n"
        f"throughput   {f.requests_per_s:.2f} req/s   {f.tokens_per_s:.1f} tokens/s\n"
        f"TTFT         p50 {f.ttft_ms_p50:.0f} ms   p99 {f.ttft_ms_p99:.0f} ms\n"
        f"ITL          p50 {f.itl_ms_p50:.1f} ms   p99 {f.itl_ms_p99:.1f} ms\n"
        f"latency      p50 {f.latency_ms_p50:.0f} ms   p99 {f.latency_ms_p99:.0f} ms{errors}"
    )


def as_json(figures: Report) -> dict[str, Any]:
    """The report as JSON values; a figure without samples is null."""
    return {name: None if value != value else value for name, value in asdict(figures).items()}


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """The options that make a `Load`."""
    defaults = Load()
    parser.add_argument("--clients", type=int, default=defaults.clients)
    parser.add_argument("--requests", type=int, default=defaults.requests, help="in all")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--min-tokens", type=int, default=defaults.min_tokens)
    parser.add_argument("--max-tokens", type=int, default=defaults.max_tokens)
    parser.add_argument(
        "--natural-ends",
        action="store_true",
        help="let answers end where the model ends them (default: exactly as long as asked, "
        "so that every server does the same work)",
    )


def load_from(options: argparse.Namespace) -> Load:
    """Reads what `add_load_options` added.

    Raises:
        SystemExit: a value is out of range.
    """
    for name in ("clients", "requests", "min_tokens"):
        if getattr(options, name) < 1:
            raise SystemExit(f"{name} is {getattr(options, name)}, the least is 1")
    if options.max_tokens < options.min_tokens:
        raise SystemExit(f"max_tokens is {options.max_tokens}, below {options.min_tokens}")
    return Load(
        clients=options.clients,
        requests=options.requests,
        seed=options.seed,
        min_tokens=options.min_tokens,
        max_tokens=options.max_tokens,
        ignore_eos=not options.natural_ends,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "target",
        nargs="?",
        default="ws://127.0.0.1:8000/v1/infer",
        help="ws://…/v1/infer (Seedance) or http://…/generate (the baseline)",
    )
    add_load_options(parser)
    parser.add_argument(
        "--rate", type=float, help="Poisson arrivals a second (default: closed loop)"
    )
    parser.add_argument("--no-warm-up", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args()
    if options.rate is not None and not options.rate > 0:
        raise SystemExit(f"rate is {options.rate}, it must be above 0")
    load = replace(load_from(options), rate_per_s=options.rate)

    async def measure() -> Run:
        target = target_at(options.target)
        if not options.no_warm_up:
            await run_load(target, load.warm_up(load.clients))
        return await run_load(target, load)

    figures = report([asyncio.run(measure())])
    if options.json:
        print(json.dumps({"target": options.target, "load": asdict(load)} | as_json(figures)))
    else:
        print(describe(figures))
    return 1 if figures.errors else 0


if __name__ == "__main__":
    sys.exit(main())
