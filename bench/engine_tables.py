"""The tables that `bench.engine` prints, and the targets it holds the figures against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.engine_loads import Figures, Mode
from bench.limits import Limits, ModelSize

OURS = "seedance"
BATCHES_FROM = 8
"""Clients from which the matrix products, and not the memory, are taken for the limit."""


@dataclass
class Result:
    """What was measured of one engine, up to where it failed."""

    name: str
    module: str
    precision: str
    loads: dict[tuple[int, Mode], Figures] = field(default_factory=dict)
    starts_s: list[float] = field(default_factory=list)
    """From the start of the process to the first token, each time."""
    peak_rss_gib: float = float("nan")
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Greedy ones of the closed loops, by request."""
    agreement: float = float("nan")
    """With static batching; see `engine_loads.agreement`."""
    facts: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    """Because no request of a load was answered."""
    failure: str | None = None


@dataclass(frozen=True)
class Target:
    """A ratio of ours to a peer's that has been promised; `at_most` for times.

    Attributes:
        load: clients and mode; None for cold starts.
        figure: a field of `Figures`.
    """

    peer: str
    load: tuple[int, Mode] | None
    figure: str
    limit: float
    at_most: bool = False

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.limit if self.at_most else ratio >= self.limit


def _targets() -> tuple[Target, ...]:
    targets = []
    modes: tuple[Mode, ...] = ("poisson", "closed")
    for mode in modes:
        for clients in (8, 32):
            targets.append(Target("static", (clients, mode), "requests_per_s", 3.0))
            targets.append(Target("static", (clients, mode), "latency_ms_p99", 0.4, at_most=True))
        for peer, clients, limit in (
            ("transformers", 8, 1.5),
            ("transformers", 32, 3.0),
            ("vllm", 1, 1.3),
            ("vllm", 8, 1.0),
            ("vllm", 32, 1.0),
            ("openvino", 32, 1.3),
            ("ctranslate2", 1, 0.9),
            ("ctranslate2", 32, 2.3),
        ):
            targets.append(Target(peer, (clients, mode), "tokens_per_s", limit))
    targets.append(Target("vllm", (32, "top_p"), "tokens_per_s", 1.3))
    targets.append(Target("vllm", None, "starts_s", 10.0))
    return tuple(targets)


TARGETS = _targets()


def ratio_of(target: Target, ours: Result, theirs: Result) -> float | None:
    """Ours to theirs; a cold start: how many times faster ours is. None where one is not measured."""
    if target.load is None:
        if not ours.starts_s or not theirs.starts_s:
            return None
        # Caches that a first start leaves behind are there for the last.
        return theirs.starts_s[-1] / ours.starts_s[-1]
    if target.load not in ours.loads or target.load not in theirs.loads:
        return None
    mine = float(getattr(ours.loads[target.load], target.figure))
    other = float(getattr(theirs.loads[target.load], target.figure))
    return mine / other if other else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    return "—" if value is None or value != value else f"{value:,.{digits}f}"


COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("tokens/s", lambda f: number(f.tokens_per_s, 1)),
    ("a CPU-s", lambda f: number(f.tokens_per_cpu_s, 1)),
    ("requests/s", lambda f: number(f.requests_per_s, 2)),
    ("latency p50", lambda f: number(f.latency_ms_p50)),
    ("p99", lambda f: number(f.latency_ms_p99)),
    ("TTFT p50", lambda f: number(f.ttft_ms_p50)),
    ("p99", lambda f: number(f.ttft_ms_p99)),
    ("ITL p50", lambda f: number(f.itl_ms_p50)),
    ("p99", lambda f: number(f.itl_ms_p99)),
    ("in flight", lambda f: number(f.in_flight, 1)),
    ("PSS GiB", lambda f: number(f.pss_gib, 2)),
    ("others' cores", lambda f: number(f.others_cores, 2)),
    ("errors", lambda f: str(sum(f.errors.values()))),
)


def load_table(results: Sequence[Result], load: tuple[int, Mode]) -> str:
    """One row an engine; times in milliseconds."""
    rows = [
        [result.name, *(write(result.loads[load]) for _, write in COLUMNS)]
        for result in results
        if load in result.loads
    ]
    return table(["engine", *(name for name, _ in COLUMNS)], rows)


def summary_table(results: Sequence[Result]) -> str:
    """Starts and memory."""
    rows = []
    for result in results:
        facts = ", ".join(f"{name} {value}" for name, value in result.facts.items())
        rows.append(
            [
                result.name,
                result.precision,
                ", ".join(number(start, 1) for start in result.starts_s) or "—",
                number(result.peak_rss_gib, 2),
                number(result.agreement * 100),
                str(result.restarts),
                facts or "—",
            ]
        )
    header = [
        "engine",
        "weights",
        "starts, s",
        "peak RSS, GiB",
        "as `generate()`, %",
        "restarts",
        "version",
    ]
    return table(header, rows)


def limits_table(
    results: Sequence[Result],
    limits: Sequence[Limits],
    size: ModelSize,
    clients: Sequence[int],
) -> str:
    """How much of what the processor allows each engine reaches in the closed loop.

    Args:
        limits: the bound is the best of them, as the memory may give one thread more than two.
    """
    rows = []
    for count in clients:
        for result in results:
            if (count, "closed") not in result.loads:
                continue
            figures = result.loads[(count, "closed")]
            if count < BATCHES_FROM:
                kind = "memory"
                bound = max(size.bound_alone(each, result.precision) for each in limits)
            else:
                kind = "matrix products"
                share = figures.prompt_tokens / max(1, figures.completion_tokens)
                bound = max(size.bound_in_batches(each, result.precision, share) for each in limits)
            reached = figures.tokens_per_s / bound
            rows.append(
                [
                    str(count), result.name, kind, number(bound),
                    number(figures.tokens_per_s, 1), f"{reached:.0%}",
                ]
            )  # fmt: skip
    return table(["clients", "engine", "limit", "tokens/s at most", "tokens/s", "reached"], rows)


def targets_table(results: Sequence[Result]) -> str:
    """Each target against each of our own variants; a cell holds the ratio and whether it is met."""
    ours = [result for result in results if result.module == OURS]
    peers: Mapping[str, Result] = {
        result.module: result for result in reversed(results) if result.module != OURS
    }
    rows = []
    for target in TARGETS:
        peer = peers.get(target.peer)
        cells = []
        for mine in ours:
            ratio = None if peer is None else ratio_of(target, mine, peer)
            verdict = "—"
            if ratio is not None:
                verdict = f"{ratio:.2f} {'met' if target.is_met(ratio) else '**not met**'}"
            cells.append(verdict)
        where = "cold start to the first token, times faster"
        if target.load is not None:
            clients, mode = target.load
            where = f"{target.figure}, {clients} clients, {mode}"
        sign = "≤" if target.at_most else "≥"
        rows.append([target.peer, where, f"{sign} {target.limit:g}", *cells])
    return table(["against", "figure", "target", *(mine.name for mine in ours)], rows)
