"""What `bench.engine` asks, in which order and when, and the figures of what came back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import psutil  # type: ignore[import-untyped]

from bench.peers.process import Sample, Used
from bench.peers.stdio import Request
from bench.workload import ASKED, TOPICS, make_arrivals

Clock = Callable[[], float]
Conversation = list[dict[str, str]]
Mode = Literal["closed", "poisson", "top_p"]

SHARED_DATA = Path("../shared/data")
SHIPPED = Path(__file__).resolve().parent / "data" / "conversations.jsonl"
METER_S = 0.5
"""How often memory is read during a load."""
TOP_P, TEMPERATURE = 0.9, 0.8
FIRST_ID_OF_WARM_UP = 1_000_000


@dataclass(frozen=True)
class Prompts:
    """Conversations that end with a user's turn, and where they come from."""

    source: str
    conversations: list[Conversation]


def read_prompts(data: Path) -> Prompts:
    """The conversations and questions of the data folder, or those that the repository holds."""
    pairs = data / "pairs"
    if (pairs / "fow_conversations.jsonl").exists():
        rows = _lines(pairs / "fow_conversations.jsonl")
        conversations = [row[side] for row in rows for side in ("a", "b")]
        questions = [row[side] for row in _lines(pairs / "fow.jsonl") for side in ("a", "b")]
        source = f"fow-cache's conversations and questions in {data}"
    else:
        conversations = [row["messages"] for row in _lines(SHIPPED)]
        questions = [pattern.format(topic=topic) for pattern in ASKED for topic in TOPICS]
        source = f"{SHIPPED.name} and the questions of bench.workload"
    return Prompts(
        source,
        conversations + [[{"role": "user", "content": question}] for question in questions],
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


@dataclass(frozen=True)
class Load:
    """So many clients: each asks when its answer ended, or all together by a Poisson process."""

    clients: int
    mode: Mode
    requests: tuple[Request, ...]

    @property
    def title(self) -> str:
        kinds = {"closed": "closed loop", "poisson": "Poisson", "top_p": f"closed, top_p {TOP_P}"}
        return f"{self.clients} clients, {kinds[self.mode]}"


def make_loads(
    prompts: Sequence[list[int]],
    counts: dict[int, int],
    top_p_clients: Iterable[int],
    *,
    seed: int,
    min_tokens: int,
    max_tokens: int,
) -> list[Load]:
    """The loads of one engine, the same for every engine.

    No prompt comes twice before all were asked once. The two loops of one number of clients have
    answers of the same lengths.

    Args:
        prompts: token ids.
        counts: requests by number of clients.
        top_p_clients: numbers of clients that ask once more, with sampling.
    """
    order = _order(prompts, seed)
    modes: list[tuple[int, Mode]] = [
        (clients, mode) for clients in counts for mode in ("closed", "poisson")
    ]
    modes += [(clients, "top_p") for clients in top_p_clients]
    loads, next_id = [], 0
    for clients, mode in modes:
        lengths = random.Random(f"{seed} {clients}")
        requests = []
        for _ in range(counts[clients]):
            requests.append(
                Request(
                    next_id,
                    list(prompts[order[next_id % len(order)]]),
                    lengths.randint(min_tokens, max_tokens),
                    temperature=TEMPERATURE if mode == "top_p" else 0.0,
                    top_p=TOP_P if mode == "top_p" else 1.0,
                    seed=next_id,
                )
            )
            next_id += 1
        loads.append(Load(clients, mode, tuple(requests)))
    return loads


def make_warm_up(
    prompts: Sequence[list[int]], count: int, max_tokens: int, seed: int
) -> list[Request]:
    """Short requests with the prompts that the loads ask last."""
    order = _order(prompts, seed)
    return [
        Request(FIRST_ID_OF_WARM_UP + n, list(prompts[order[-1 - n % len(order)]]), max_tokens)
        for n in range(count)
    ]


def _order(prompts: Sequence[list[int]], seed: int) -> list[int]:
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return order


class Asked(Protocol):
    """Whoever answers: a `Fleet`, or a test's."""

    async def ask(self, request: Request, begun_s: float) -> Sample: ...

    def used(self) -> Used: ...


@dataclass(frozen=True)
class Run:
    """All samples of a load, from its first request to its last end, and what it used."""

    samples: list[Sample]
    duration_s: float
    cpu_s: float
    pss: int
    others_cores: float
    """Cores that were busy with something else: neither the workers nor this process."""


async def run_load(
    asked: Asked,
    load: Load,
    rate_per_s: float | None,
    seed: int,
    *,
    patience_s: float,
    clock: Clock = time.monotonic,
) -> Run:
    """Runs one load.

    Args:
        rate_per_s: of Poisson arrivals, which the mode `poisson` needs.

    Raises:
        TimeoutError: it took longer than `patience_s`.
    """
    busy_s, own_s, used = _busy_s(), _own_cpu_s(), asked.used()
    meter = asyncio.create_task(_meter(asked))
    begun_s = clock()
    try:
        async with asyncio.timeout(patience_s):
            if load.mode == "poisson":
                assert rate_per_s is not None, "measured in the closed loop, or given"
                samples = await _poisson(asked, load, rate_per_s, seed, clock)
            else:
                samples = await _closed(asked, load, clock)
    finally:
        meter.cancel()
    ended_s = max([s.ended_s for s in samples if s.ended_s is not None], default=clock())
    duration_s = ended_s - begun_s
    last = asked.used()
    cpu_s = last.cpu_s - used.cpu_s
    others_s = _busy_s() - busy_s - cpu_s - (_own_cpu_s() - own_s)
    peak_pss = max([last.pss, *await _measured(meter)])
    return Run(samples, duration_s, cpu_s, peak_pss, max(0.0, others_s) / (clock() - begun_s))


async def _closed(asked: Asked, load: Load, clock: Clock) -> list[Sample]:
    waiting = iter(load.requests)
    samples: list[Sample] = []

    async def work() -> None:
        for request in waiting:
            samples.append(await asked.ask(request, clock()))

    await asyncio.gather(*(work() for _ in range(load.clients)))
    return samples


async def _poisson(
    asked: Asked, load: Load, rate_per_s: float, seed: int, clock: Clock
) -> list[Sample]:
    begun_s = clock()

    async def arrive(request: Request, after_s: float) -> Sample:
        await asyncio.sleep(begun_s + after_s - clock())
        return await asked.ask(request, begun_s + after_s)

    arrivals = make_arrivals(len(load.requests), seed, rate_per_s)
    return await asyncio.gather(
        *(arrive(*each) for each in zip(load.requests, arrivals, strict=True))
    )


async def _meter(asked: Asked) -> list[int]:
    """Reads the memory until it is cancelled; bytes."""
    readings: list[int] = []
    try:
        while True:
            await asyncio.sleep(METER_S)
            readings.append(asked.used().pss)
    except asyncio.CancelledError:
        return readings


async def _measured(meter: asyncio.Task[list[int]]) -> list[int]:
    try:
        return await meter
    except asyncio.CancelledError:  # Before it began.
        return []


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True)
class Figures:
    """The figures of one load. Times in milliseconds, memory in GiB.

    ITL is the gap between one piece and the next of the same answer: several tokens that come
    at once are one piece. Times of a Poisson load count from the arrival.
    """

    requests: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    requests_per_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float
    latency_ms_p50: float
    latency_ms_p99: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    in_flight: float
    """Requests at a time, on average."""
    pss_gib: float
    others_cores: float


def figures(run: Run) -> Figures:
    """Counts answered requests only, but in `requests` and `errors`."""
    good = [sample for sample in run.samples if sample.error is None]
    tokens = sum(len(sample.token_ids) for sample in good)
    latencies = [s.ended_s - s.begun_s for s in good if s.ended_s is not None]
    ttfts = [sample.pieces[0][0] - sample.begun_s for sample in good if sample.pieces]
    gaps = [b[0] - a[0] for sample in good for a, b in pairwise(sample.pieces)]
    return Figures(
        requests=len(run.samples),
        errors=dict(Counter(s.error for s in run.samples if s.error is not None)),
        duration_s=run.duration_s,
        prompt_tokens=sum(len(sample.request.prompt_token_ids) for sample in good),
        completion_tokens=tokens,
        requests_per_s=_ratio(len(good), run.duration_s),
        tokens_per_s=_ratio(tokens, run.duration_s),
        tokens_per_cpu_s=_ratio(tokens, run.cpu_s),
        latency_ms_p50=percentile_ms(latencies, 50),
        latency_ms_p99=percentile_ms(latencies, 99),
        ttft_ms_p50=percentile_ms(ttfts, 50),
        ttft_ms_p99=percentile_ms(ttfts, 99),
        itl_ms_p50=percentile_ms(gaps, 50),
        itl_ms_p99=percentile_ms(gaps, 99),
        in_flight=_ratio(sum(latencies), run.duration_s),
        pss_gib=run.pss / 2**30,
        others_cores=run.others_cores,
    )


def percentile_ms(seconds: Sequence[float], q: float) -> float:
    """Interpolates between samples; NaN without any."""
    return float(np.percentile(seconds, q)) * 1000 if seconds else float("nan")


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else float("nan")


def agreement(answers: dict[int, list[int]], others: dict[int, list[int]]) -> float:
    """Mean share of an answer before the first token in which it differs from the other's, by request."""
    shares = []
    for request_id in answers.keys() & others.keys():
        pairs = list(zip(answers[request_id], others[request_id], strict=True))
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        shares.append(equal / len(pairs))
    return float(np.mean(shares)) if shares else float("nan")
