"""Replays a trace of requests through the scaling policy, and through others beside it.

    python -m bench.autoscaling --trace AzureLLMInferenceTrace_conv.csv

No server and no clock: replicas are modelled (rows, tokens a second, a start-up time), and the
same trace gives the same table. Without a trace it makes one: a quiet hour with a rush in it.

Traces it reads: `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure's LLM inference traces) and
JSON lines with `timestamp` in ms, `input_length`, `output_length` (Mooncake's).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from deployments.scaling import (
    Fleet,
    ReplicaLoad,
    ScalingRules,
    ScalingState,
    SurgeRule,
    WorkPolicy,
)

STEP_S = 0.25
SAMPLE_S = 2.0
"""How often replicas report and deciders decide."""
LOOK_BACK_SAMPLES = 5
TTFT_WINDOW_S = 60.0
COLUMNS_OVER_TIME = 12
SERVE_TARGET_ONGOING_REQUESTS = 2.0
SERVE_UPSCALE_DELAY_S, SERVE_DOWNSCALE_DELAY_S, SERVE_LOOK_BACK_S = 30.0, 600.0, 30.0
"""Ray Serve 2.60's defaults."""


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, kw_only=True)
class ServiceModel:
    """How fast one replica is.

    Args:
        answer_tokens_per_s: of all rows together, which they share evenly.
        row_tokens_per_s: the most that one answer can get.
        prompt_speedup: a prompt's token costs this many times less than an answer's.
    """

    max_num_seqs: int = 16
    answer_tokens_per_s: float = 500.0
    row_tokens_per_s: float = 60.0
    prompt_speedup: float = 10.0
    startup_s: float = 30.0


@dataclass
class Row:
    """A request in a replica; `prompt_left` and `answer_left` are in tokens."""

    arrival: Arrival
    prompt_left: float
    answer_left: float
    started_s: float | None = None
    first_token_s: float | None = None

    @property
    def tokens(self) -> float:
        return self.prompt_left + self.answer_left


@dataclass
class Replica:
    """Continuous batching as a fluid: running rows share the replica's speed."""

    name: str
    model: ServiceModel
    asked_s: float
    ready_s: float
    running: list[Row] = field(default_factory=list)
    waiting: deque[Row] = field(default_factory=deque)
    is_leaving: bool = False
    busy_s: float = 0.0
    ttfts: deque[tuple[float, float]] = field(default_factory=deque)
    samples: deque[ReplicaLoad] = field(default_factory=lambda: deque(maxlen=LOOK_BACK_SAMPLES))

    @property
    def tokens(self) -> float:
        return sum(row.tokens for row in self.running) + sum(row.tokens for row in self.waiting)

    @property
    def is_empty(self) -> bool:
        return not self.running and not self.waiting

    def advance(self, now_s: float) -> None:
        """Computes from `now_s` for one step."""
        while self.waiting and len(self.running) < self.model.max_num_seqs:
            row = self.waiting.popleft()
            row.started_s = now_s
            self.running.append(row)
        if not self.running:
            return
        self.busy_s += STEP_S
        share = self.model.answer_tokens_per_s * STEP_S / len(self.running)
        for row in self.running:
            self._compute(row, share, now_s + STEP_S)
        self.running = [row for row in self.running if row.answer_left > 0]

    def _compute(self, row: Row, share: float, then_s: float) -> None:
        if row.prompt_left > 0:
            row.prompt_left -= share * self.model.prompt_speedup
            if row.prompt_left > 0:
                return
            row.prompt_left = 0.0
            row.first_token_s = then_s
            self.ttfts.append((then_s, 1000 * (then_s - row.arrival.at_s)))
            row.answer_left -= 1
            return
        row.answer_left -= min(share, self.model.row_tokens_per_s * STEP_S)

    def sample(self, now_s: float) -> None:
        """One report of the load, as a replica would send it."""
        while self.ttfts and self.ttfts[0][0] < now_s - TTFT_WINDOW_S:
            self.ttfts.popleft()
        self.samples.append(
            ReplicaLoad(
                tokens=self.tokens,
                running=len(self.running),
                waiting=len(self.waiting),
                ttft_p95_ms=quantile([ttft for _, ttft in self.ttfts], 0.95),
                cpu_percent=min(100.0, 100 * self.busy_s / SAMPLE_S),
            )
        )
        self.busy_s = 0.0

    @property
    def load(self) -> ReplicaLoad | None:
        """The mean of the last reports; None before the first."""
        if not self.samples:
            return None
        count = len(self.samples)
        return ReplicaLoad(
            tokens=sum(load.tokens for load in self.samples) / count,
            running=sum(load.running for load in self.samples) / count,
            waiting=sum(load.waiting for load in self.samples) / count,
            ttft_p95_ms=sum(load.ttft_p95_ms for load in self.samples) / count,
            cpu_percent=sum(load.cpu_percent for load in self.samples) / count,
        )


class Scaler(Protocol):
    """Decides how many replicas there should be."""

    def decide(self, now_s: float, asked: int, loads: dict[str, ReplicaLoad | None]) -> int: ...


class Fixed:
    """Always as many as at the start."""

    def decide(self, now_s: float, asked: int, loads: dict[str, ReplicaLoad | None]) -> int:
        return asked


@dataclass
class ByWork:
    """The policy that ships."""

    rules: ScalingRules
    max_replicas: int
    target_requests_per_replica: float
    state: ScalingState = field(default_factory=ScalingState)

    def decide(self, now_s: float, asked: int, loads: dict[str, ReplicaLoad | None]) -> int:
        fleet = Fleet(
            replicas=asked,
            loads=loads,
            min_replicas=1,
            max_replicas=self.max_replicas,
            target_requests_per_replica=self.target_requests_per_replica,
        )
        decision, self.state = WorkPolicy(self.rules).decide(fleet, self.state, now_s)
        return decision.replicas


@dataclass
class ServeDefault:
    """Ray Serve's default: mean ongoing requests over the look-back against its target, and an
    answer that must stay the same way for a delay.

    Idle sockets and open buses, which it would count too, are left out here.
    """

    max_replicas: int
    target_ongoing_requests: float = SERVE_TARGET_ONGOING_REQUESTS
    totals: deque[float] = field(
        default_factory=lambda: deque(maxlen=round(SERVE_LOOK_BACK_S / SAMPLE_S))
    )
    direction: int = 0
    since_s: float = 0.0

    def decide(self, now_s: float, asked: int, loads: dict[str, ReplicaLoad | None]) -> int:
        self.totals.append(sum(load.running + load.waiting for load in loads.values() if load))
        mean = sum(self.totals) / len(self.totals)
        desired = math.ceil(mean / self.target_ongoing_requests)
        desired = max(1, min(desired, self.max_replicas))
        direction = (desired > asked) - (desired < asked)
        if direction != self.direction:
            self.direction, self.since_s = direction, now_s
        delay_s = SERVE_UPSCALE_DELAY_S if direction > 0 else SERVE_DOWNSCALE_DELAY_S
        if direction == 0 or now_s - self.since_s < delay_s:
            return asked
        self.direction = 0
        return desired


@dataclass(frozen=True)
class Result:
    """What a trace came to under one scaler; times in seconds."""

    name: str
    counts: list[int]
    """Replicas asked for, at the start and after each decision."""
    waits_s: list[float]
    """From arrival to the first computing, of every request."""
    ttfts_s: list[float]
    replica_seconds: float
    """Of all replicas, their start-up and their last answers with them."""

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.counts, self.counts[1:], strict=False))


class Simulation:
    """One deployment from the first arrival until the last answer."""

    def __init__(
        self, trace: Sequence[Arrival], model: ServiceModel, scaler: Scaler, *, replicas: int
    ) -> None:
        self._model = model
        self._scaler = scaler
        self._arrivals = deque(trace)
        self._held: deque[Row] = deque()
        self._rows: list[Row] = []
        self._replicas: list[Replica] = []
        self._asked = 0
        self._made = 0
        self._replica_seconds = 0.0
        self._ask_for(replicas, now_s=0.0, startup_s=0.0)
        self._counts = [replicas]

    def run(self, name: str) -> Result:
        steps_a_sample = round(SAMPLE_S / STEP_S)
        step = 0
        while self._arrivals or self._held or any(not r.is_empty for r in self._replicas):
            now_s = step * STEP_S
            self._arrive(now_s)
            for replica in self._replicas:
                replica.advance(now_s)
            self._leave()
            step += 1
            if step % steps_a_sample == 0:
                self._decide(step * STEP_S)
            self._replica_seconds += STEP_S * len(self._replicas)
        return Result(
            name=name,
            counts=self._counts,
            waits_s=[
                row.started_s - row.arrival.at_s for row in self._rows if row.started_s is not None
            ],
            ttfts_s=[
                row.first_token_s - row.arrival.at_s
                for row in self._rows
                if row.first_token_s is not None
            ],
            replica_seconds=self._replica_seconds,
        )

    def _ready(self, now_s: float) -> list[Replica]:
        return [r for r in self._replicas if not r.is_leaving and r.ready_s <= now_s]

    def _arrive(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0].at_s <= now_s:
            arrival = self._arrivals.popleft()
            row = Row(arrival, float(arrival.prompt_tokens), float(arrival.answer_tokens))
            self._rows.append(row)
            self._held.append(row)
        ready = self._ready(now_s)
        while self._held and ready:
            min(ready, key=lambda replica: replica.tokens).waiting.append(self._held.popleft())

    def _decide(self, now_s: float) -> None:
        ready = self._ready(now_s)
        for replica in ready:
            replica.sample(now_s)
        loads = {replica.name: replica.load for replica in ready}
        wanted = self._scaler.decide(now_s, self._asked, loads)
        self._ask_for(wanted, now_s, self._model.startup_s)
        self._counts.append(self._asked)

    def _ask_for(self, wanted: int, now_s: float, startup_s: float) -> None:
        for _ in range(wanted - self._asked):
            name = f"r{self._made}"
            self._made += 1
            self._replicas.append(Replica(name, self._model, now_s, now_s + startup_s))
        for _ in range(self._asked - wanted):
            staying = [replica for replica in self._replicas if not replica.is_leaving]
            # One that is still starting has done nothing yet; else the one with least to finish.
            min(staying, key=lambda r: (r.ready_s <= now_s, r.tokens)).is_leaving = True
        self._asked = wanted

    def _leave(self) -> None:
        self._replicas = [r for r in self._replicas if not (r.is_leaving and r.is_empty)]


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals from the trace's first one on.

    Raises:
        ValueError: a line is not of a known form.
    """
    with path.open() as lines:
        if path.suffix == ".jsonl":
            found = [_from_json(json.loads(line)) for line in lines if line.strip()]
        else:
            found = [_from_csv(row) for row in csv.DictReader(lines)]
    found.sort(key=lambda arrival: arrival.at_s)
    start_s = found[0].at_s if found else 0.0
    return [replace(arrival, at_s=arrival.at_s - start_s) for arrival in found]


def _from_json(row: dict[str, float]) -> Arrival:
    try:
        return Arrival(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]))
    except KeyError as exc:
        raise ValueError(f"a line has no {exc}") from None


def _from_csv(row: dict[str, str]) -> Arrival:
    try:
        # Seven digits of a second; Python reads six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        return Arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    except KeyError as exc:
        raise ValueError(f"the table has no column {exc}") from None


def make_rush(seed: int = 1, *, duration_s: float = 3600.0) -> list[Arrival]:
    """Poisson arrivals: 0.5 a second, and 6 a second in the third and fourth sixth of the time."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = 0.0
    while True:
        is_rush = duration_s / 3 <= at_s < duration_s * 2 / 3
        at_s += rng.expovariate(6.0 if is_rush else 0.5)
        if at_s >= duration_s:
            return arrivals
        arrivals.append(Arrival(at_s, rng.randint(20, 1500), rng.randint(10, 400)))


def quantile(values: Iterable[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def compare(
    trace: Sequence[Arrival], model: ServiceModel, rules: ScalingRules, *, max_replicas: int
) -> list[Result]:
    """The trace under every scaler; the last is as many fixed replicas as the policy's cost buys."""
    rows = float(model.max_num_seqs)
    scalers: list[tuple[str, int, Scaler]] = [
        ("fixed at 1", 1, Fixed()),
        (f"fixed at {max_replicas}", max_replicas, Fixed()),
        ("Serve default (2 a replica)", 1, ServeDefault(max_replicas)),
        (f"Serve default ({rows:g} a replica)", 1, ServeDefault(max_replicas, rows)),
        ("work", 1, ByWork(rules, max_replicas, rows)),
    ]
    results = [
        Simulation(trace, model, scaler, replicas=replicas).run(name)
        for name, replicas, scaler in scalers
    ]
    even = math.ceil(results[-1].replica_seconds / (SAMPLE_S * len(results[-1].counts)))
    results.append(
        Simulation(trace, model, Fixed(), replicas=even).run(f"fixed at {even}, for the same cost")
    )
    return results


def table(results: Sequence[Result]) -> str:
    """One line a scaler, with the replica count over the trace's time."""
    header = (
        f"{'scaler':32} {'replicas':>13} {'changes':>7} {'wait p50':>8} {'wait p95':>8} "
        f"{'TTFT p95':>8} {'replica-s':>9}  replicas over time"
    )
    units = f"{'':32} {'min/mean/max':>13} {'':7} {'s':>8} {'s':>8} {'s':>8}"
    return "\n".join([header, units, *(_line(result) for result in results)])


def _line(result: Result) -> str:
    counts = result.counts
    mean = sum(counts) / len(counts)
    spread = f"{min(counts)}/{mean:.1f}/{max(counts)}"
    places = [len(counts) * index // COLUMNS_OVER_TIME for index in range(COLUMNS_OVER_TIME)]
    over_time = " ".join(f"{counts[place]:2}" for place in places)
    return (
        f"{result.name:32} {spread:>13} {result.changes:7} "
        f"{quantile(result.waits_s, 0.5):8.2f} {quantile(result.waits_s, 0.95):8.2f} "
        f"{quantile(result.ttfts_s, 0.95):8.2f} {result.replica_seconds:9.0f}  {over_time}"
    )


def _parser() -> argparse.ArgumentParser:
    model, rules = ServiceModel(), ScalingRules()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a .csv or .jsonl file; none: a made-up rush")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the trace to replay")
    parser.add_argument("--seed", type=int, default=1, help="of the made-up rush")
    parser.add_argument("--max-replicas", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=model.max_num_seqs)
    parser.add_argument("--answer-tokens-per-s", type=float, default=model.answer_tokens_per_s)
    parser.add_argument("--row-tokens-per-s", type=float, default=model.row_tokens_per_s)
    parser.add_argument("--prompt-speedup", type=float, default=model.prompt_speedup)
    parser.add_argument("--startup-s", type=float, default=model.startup_s)
    parser.add_argument("--target-tokens", type=float, default=16_384)
    parser.add_argument("--upscale-cooldown-s", type=float, default=rules.upscale_cooldown_s)
    parser.add_argument("--downscale-cooldown-s", type=float, default=rules.downscale_cooldown_s)
    parser.add_argument("--no-surge", action="store_true", help="leave the surge rule out")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    trace = make_rush(args.seed) if args.trace is None else read_trace(args.trace)
    trace = [arrival for arrival in trace if arrival.at_s < 60 * args.minutes]
    if not trace:
        print("the trace has no request in that time", file=sys.stderr)
        return 1
    model = ServiceModel(
        max_num_seqs=args.max_num_seqs,
        answer_tokens_per_s=args.answer_tokens_per_s,
        row_tokens_per_s=args.row_tokens_per_s,
        prompt_speedup=args.prompt_speedup,
        startup_s=args.startup_s,
    )
    rules = ScalingRules(
        target_tokens_per_replica=args.target_tokens,
        upscale_cooldown_s=args.upscale_cooldown_s,
        downscale_cooldown_s=args.downscale_cooldown_s,
        surge=None if args.no_surge else SurgeRule(),
    )
    print(f"{len(trace)} requests in {trace[-1].at_s:.0f} s; {model}")
    print(table(compare(trace, model, rules, max_replicas=args.max_replicas)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
