"""Seedance's engine against others on this processor: the same prompts, one after the other.

    python -m bench.engine --venv vllm=PEERS/vllm --venv ctranslate2=PEERS/ctranslate2 \\
        --venv openvino=PEERS/openvino --models PEERS/models

Every engine is a worker process that gets token ids and gives tokens; none stands behind a server.
Answers are greedy and have lengths of their own, which no engine may end earlier. For each number
of clients there is a closed loop, then Poisson arrivals at a rate that keeps about as many in
flight in the first engine of the list, the same arrivals for all. Prints Markdown.

An engine is NAME or NAME+OPTION+…: `int8`, `bf16` or `fp32` are the weights, `2x1` is two processes
of one thread that share the load. Peers are installed once; see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from bench.compare import conditions
from bench.engine_loads import (
    SHARED_DATA,
    Load,
    Prompts,
    agreement,
    figures,
    make_loads,
    make_warm_up,
    read_prompts,
    run_load,
)
from bench.engine_tables import (
    Result,
    limits_table,
    load_table,
    number,
    summary_table,
    table,
    targets_table,
)
from bench.limits import Limits, measure, size_of
from bench.peers.process import EngineSpec, Fleet, WorkerFailed
from bench.peers.stdio import Request
from deployments.engine.runner import available_cores
from deployments.engine.weights import DEFAULT_CHAT_MODEL, pull

DEFAULT_ENGINES = (
    "seedance,seedance+2x1,seedance+int8,seedance+int8+2x1,"
    "static,transformers,vllm,ctranslate2,openvino"
)
PRECISIONS = {
    "seedance": ("bf16", "int8", "fp32"),
    "static": ("bf16", "fp32"),
    "transformers": ("bf16", "fp32"),
    "vllm": ("bf16", "fp32"),
    "ctranslate2": ("int8",),
    "openvino": ("int8",),
}
"""Which weights each engine has; the first is the default."""
OWN_FORMAT = ("ctranslate2", "openvino")
OWN_PYTHON = ("vllm", "ctranslate2", "openvino")
STARTED_AGAIN = ("seedance", "vllm")
REQUESTS = {1: 4, 8: 16, 32: 64}
MAX_SEQS = 32
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """What every engine goes through."""

    loads: list[Load]
    warm_up: tuple[Request, ...]
    seed: int
    load_factor: float
    patience_s: float
    starts: int


def engine_spec(
    text: str, *, model: Path, models: Path | None, venvs: dict[str, Path], cores: int
) -> EngineSpec:
    """Reads NAME+OPTION+….

    Raises:
        ValueError: there is no such engine or option, or it is not given where it is installed.
    """
    name, *options = text.split("+")
    if name not in PRECISIONS:
        raise ValueError(f"engine is {name}, allowed are {', '.join(PRECISIONS)}")
    precision, processes, threads = PRECISIONS[name][0], 1, cores
    for option in options:
        if (shape := re.fullmatch(r"(\d+)x(\d+)", option)) is not None:
            processes, threads = int(shape[1]), int(shape[2])
        elif option in PRECISIONS[name]:
            precision = option
        else:
            raise ValueError(
                f"option of {name} is {option}, allowed are "
                f"{', '.join(PRECISIONS[name])} and PROCESSESxTHREADS"
            )
    if min(processes, threads) < 1:
        raise ValueError(f"{text} has no process or no thread, the least is 1x1")
    python = Path(sys.executable)
    if name in OWN_PYTHON:
        if name not in venvs:
            raise ValueError(f"not installed: --venv {name}=FOLDER says where")
        python = venvs[name] / "bin" / "python"
    folder = model
    if name in OWN_FORMAT:
        if models is None:
            raise ValueError("no converted model: --models FOLDER says where")
        folder = models / name
        if not folder.is_dir():
            raise ValueError(f"no converted model in {folder}")
    return EngineSpec(
        text, name, str(python), str(folder), precision, processes, threads, max_seqs=MAX_SEQS
    )


async def measure_engine(
    spec: EngineSpec,
    plan: Plan,
    rates: dict[int, float],
    result: Result,
) -> None:
    """Starts one engine, runs all loads, and stops it; what was measured is in `result`.

    Args:
        rates: Poisson arrivals a second by number of clients; the first engine adds what is missing.

    Raises:
        WorkerFailed: the engine did not start, or ended.
        TimeoutError: a load took too long.
    """
    fleet = await start(spec, plan, result)
    try:
        await run_warm_up(fleet, plan)
        for load in plan.loads:
            rate_per_s = rates.get(load.clients)
            run = await run_load(fleet, load, rate_per_s, plan.seed, patience_s=plan.patience_s)
            if all(sample.error for sample in run.samples):
                # An engine may be dead though its worker lives: it gets one more.
                progress(f"  {load.title}: {run.samples[0].error}{fleet.log_end()}")
                await fleet.stop()
                fleet = await start(spec, plan, result)
                await run_warm_up(fleet, plan)
                run = await run_load(fleet, load, rate_per_s, plan.seed, patience_s=plan.patience_s)
                result.restarts += 1
            seen = figures(run)
            result.loads[load.clients, load.mode] = seen
            result.peak_rss_gib = fleet.used().peak_rss / 2**30
            rates.setdefault(load.clients, seen.requests_per_s * plan.load_factor)
            if load.mode == "closed":
                result.answers |= {s.request.id: s.token_ids for s in run.samples if not s.error}
            errors = "".join(f"\n    {n} x {text}" for text, n in seen.errors.items())
            progress(
                f"  {load.title}: {number(seen.tokens_per_s, 1)} tokens/s, "
                f"p99 {number(seen.latency_ms_p99)} ms, {seen.duration_s:.0f} s{errors}"
            )
            if fleet.failure is not None:
                raise WorkerFailed(fleet.failure)
    finally:
        await fleet.stop()
    for _ in range(plan.starts - 1 if spec.module in STARTED_AGAIN else 0):
        await (await start(spec, plan, result)).stop()


async def start(spec: EngineSpec, plan: Plan, result: Result) -> Fleet:
    """Starts an engine, and notes how long it took to its first token."""
    fleet = await Fleet.start(spec)
    first = await fleet.ask(replace(plan.warm_up[0], max_tokens=1), fleet.begun_s)
    if first.error is not None:
        await fleet.stop()
        raise WorkerFailed(first.error)
    result.starts_s.append(first.pieces[0][0] - first.begun_s)
    result.facts = fleet.facts
    progress(f"  first token {result.starts_s[-1]:.1f} s after the start of the process")
    return fleet


async def run_warm_up(fleet: Fleet, plan: Plan) -> None:
    """All rows at once, then one alone."""
    asks = [fleet.ask(request, 0.0) for request in plan.warm_up[1:]]
    async with asyncio.timeout(plan.patience_s):
        await asyncio.gather(*asks)
        await fleet.ask(plan.warm_up[0], 0.0)


async def measure_all(
    specs: Sequence[EngineSpec], plan: Plan, rates: dict[int, float]
) -> list[Result]:
    """One engine after the other; one that fails is noted, and the next has its turn."""
    results = []
    for spec in specs:
        result = Result(spec.name, spec.module, spec.precision)
        results.append(result)
        progress(f"\n{spec.name} (load average {os.getloadavg()[0]:.1f})")
        try:
            await measure_engine(spec, plan, rates, result)
        except WorkerFailed as failed:
            result.failure = str(failed)
        except TimeoutError:
            result.failure = f"a load or a start took longer than {plan.patience_s:g} s"
        if result.failure is not None:
            progress(f"  failed: {result.failure}")
    plain = next((each.answers for each in results if each.module == "static"), {})
    for result in results:
        result.agreement = agreement(result.answers, plain)
    return results


def make_plan(prompts: Prompts, options: argparse.Namespace, model: Path) -> Plan:
    """Tokenises the prompts with the model's chat template and deals them out."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    token_ids = [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        for conversation in prompts.conversations
    ]
    counts = {clients: REQUESTS.get(clients, 2 * clients) for clients in options.clients}
    counts = {clients: max(1, round(n * options.scale)) for clients, n in counts.items()}
    loads = make_loads(
        token_ids, counts, [max(counts)], seed=options.seed,
        min_tokens=options.min_tokens, max_tokens=options.max_tokens,
    )  # fmt: skip
    warm_up = tuple(make_warm_up(token_ids, 1 + max(options.clients), WARM_UP_TOKENS, options.seed))
    return Plan(loads, warm_up, options.seed, options.load, options.patience_s, options.starts)


def report(
    results: Sequence[Result],
    plan: Plan,
    facts: dict[str, str],
    limits: Sequence[Limits],
    model: Path,
) -> str:
    """Everything that was measured, as Markdown."""
    parts = ["\n".join(f"- {name}: {value}" for name, value in facts.items())]
    if failures := [(each.name, each.failure) for each in results if each.failure]:
        parts.append("\n".join(f"- **{name} failed**: {failure}" for name, failure in failures))
    for load in plan.loads:
        tokens = sum(request.max_tokens for request in load.requests)
        parts.append(
            f"**{load.title}**: {len(load.requests)} requests, {tokens:,} tokens; milliseconds\n\n"
            + load_table(results, (load.clients, load.mode))
        )
    parts.append(summary_table(results))
    clients = sorted({load.clients for load in plan.loads})
    if limits:
        rows = [
            [
                str(each.threads),
                number(each.read_gib_per_s, 1),
                number(each.bf16_gflops),
                number(each.int8_gflops),
            ]
            for each in limits
        ]
        parts.append(table(["threads", "memory, GiB/s", "bf16, GFLOP/s", "int8, Gop/s"], rows))
        parts.append(limits_table(results, limits, size_of(model), clients))
    parts.append(targets_table(results))
    return "\n\n".join(parts)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", default=DEFAULT_ENGINES, help=f"default: {DEFAULT_ENGINES}")
    parser.add_argument("--clients", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument(
        "--scale", type=float, default=1.0, help=f"times the requests of {REQUESTS} by clients"
    )
    parser.add_argument("--venv", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--models", type=Path, help="converted models, one folder an engine")
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-tokens", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument(
        "--load",
        type=float,
        default=1.0,
        help="Poisson arrivals as a multiple of the first engine's requests/s in the closed loop",
    )
    parser.add_argument(
        "--rate", action="append", default=[], metavar="CLIENTS=R", help="arrivals a second instead"
    )
    parser.add_argument(
        "--patience-s", type=float, default=240.0, help="longest load; past it an engine has failed"
    )
    parser.add_argument(
        "--starts", type=int, default=2, help=f"times that {', '.join(STARTED_AGAIN)} are started"
    )
    parser.add_argument("--no-limits", action="store_true", help="do not measure the processor")
    parser.add_argument("--json", type=Path, help="write all figures to this file as well")
    options = parser.parse_args()
    for name in ("min_tokens", "starts", "scale", "load", "patience_s"):
        if getattr(options, name) <= 0:
            parser.error(f"{name} is {getattr(options, name)}, it must be above 0")
    if options.max_tokens < options.min_tokens:
        parser.error(f"max_tokens is {options.max_tokens}, below {options.min_tokens}")
    if min(options.clients) < 1:
        parser.error(f"clients is {min(options.clients)}, the least is 1")
    return options


def main() -> int:
    options = read_options()
    # Workers are stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model = pull(DEFAULT_CHAT_MODEL, progress=False).path
    venvs = {
        name: Path(folder) for name, _, folder in (each.partition("=") for each in options.venv)
    }
    cores = available_cores()
    specs, left_out = [], []
    for text in options.engines.split(","):
        try:
            specs.append(
                engine_spec(text, model=model, models=options.models, venvs=venvs, cores=cores)
            )
        except ValueError as error:
            left_out.append(f"{text}: {error}")
            progress(f"left out: {left_out[-1]}")
    if not specs:
        raise SystemExit("bench: no engine is left")
    prompts = read_prompts(options.data)
    plan = make_plan(prompts, options, model)
    rates = {
        int(clients): float(rate)
        for clients, _, rate in (each.partition("=") for each in options.rate)
    }
    facts = conditions() | {
        "prompts": prompts.source,
        "load average before": f"{os.getloadavg()[0]:.1f}",
    }
    limits = [] if options.no_limits else [measure(n) for n in sorted({1, cores})]
    results = asyncio.run(measure_all(specs, plan, rates))
    facts["Poisson arrivals a second"] = ", ".join(
        f"{number(rate, 2)} ({clients} clients)" for clients, rate in rates.items()
    )
    if left_out:
        facts["left out"] = "; ".join(left_out)
    print(report(results, plan, facts, limits, model))
    if options.json:
        document = {
            "facts": facts,
            "limits": [asdict(each) for each in limits],
            "results": [
                asdict(replace(each, answers={}))
                | {"loads": {f"{c} {mode}": asdict(f) for (c, mode), f in each.loads.items()}}
                for each in results
            ],
        }
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if any(each.failure for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
