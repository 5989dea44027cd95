"""Seedance against the baseline, in one run on one machine, by turns: A B A B.

    python -m bench.compare --clients 16

Both serve the same weights in the same number format on the same number of CPU threads, run at
most the same number of rows at a time, stand behind the same kind of proxy, and get the same
questions. Never more than one of them is up.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from app.launcher import read_config
from app.settings import Settings, SettingsError
from bench.cluster import ROOT, ClusterFailed, free_port, serving
from bench.load import (
    Load,
    Report,
    Run,
    add_load_options,
    as_json,
    describe,
    load_from,
    report,
    run_load,
)
from bench.targets import target_at
from deployments.engine.config import EngineConfig
from deployments.engine.runner import available_cores, choose_dtype
from deployments.engine.weights import resolve

CONTENDERS = ("seedance", "baseline")
BATCH_WAIT_S = 60.0
"""The baseline's `batch_wait_timeout_s`, longer than any batch runs: its best case under this
load. Ray forms the next batch while one runs, and a short window makes many small ones."""
HIGHER_IS_BETTER = ("requests_per_s", "tokens_per_s")
LOWER_IS_BETTER = (
    "ttft_ms_p50",
    "ttft_ms_p99",
    "itl_ms_p50",
    "itl_ms_p99",
    "latency_ms_p50",
    "latency_ms_p99",
)


@dataclass(frozen=True)
class Contender:
    """One of the two servers: how to start it and where to ask it."""

    name: str
    command: list[str]
    url: str
    ask_url: str


def contenders(
    document: dict[str, Any], settings: Settings, rows: int, batch_wait_s: float, folder: Path
) -> list[Contender]:
    """Seedance and the baseline, with their config files written to `folder`.

    Args:
        rows: the baseline's `max_batch_size`.
        batch_wait_s: the baseline's `batch_wait_timeout_s`.

    Raises:
        SettingsError: the model is not prepared.
    """
    threads = settings.model.num_threads or max(1, available_cores() - 1)
    on_cpu = EngineConfig(dtype=settings.model.dtype)
    dtype = str(choose_dtype(on_cpu, torch.device("cpu"))).removeprefix("torch.")
    home = settings.home.expanduser()
    model = resolve(settings.model.name, home)
    if model is None:
        raise SettingsError(
            f"{settings.model.name} is not prepared in {home}: seedance models pull"
        )
    seedance = copy.deepcopy(document)
    args = seedance["applications"][0].setdefault("args", {})
    args.setdefault("model", {}).update(device="cpu", dtype=dtype, num_threads=threads)
    baseline = {
        "applications": [
            {
                "name": "baseline",
                "route_prefix": "/",
                "import_path": "bench.baseline_static:app",
                "args": {
                    "model_folder": str(model.path),
                    "dtype": dtype,
                    "num_threads": threads,
                    "max_batch_size": rows,
                    "batch_wait_timeout_s": batch_wait_s,
                },
            }
        ]
    }
    serve = str(Path(sys.executable).with_name("serve"))
    seedance_command = [sys.executable, "-c", "from app.cli import main; main()", "serve"]
    return [
        _contender("seedance", seedance, seedance_command, "ws", "/v1/infer", folder),
        _contender("baseline", baseline, [serve, "run"], "http", "/generate", folder),
    ]


def _contender(
    name: str, config: dict[str, Any], command: list[str], scheme: str, path: str, folder: Path
) -> Contender:
    address = f"127.0.0.1:{(port := free_port())}"
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return Contender(
        name, [*command, str(file)], f"http://{address}", f"{scheme}://{address}{path}"
    )


def measure(contender: Contender, load: Load, rows: int) -> Run:
    """Starts the server, warms it up, loads it, stops it."""
    target = target_at(contender.ask_url)

    async def warm_up_and_run() -> Run:
        await run_load(target, load.warm_up(rows))
        return await run_load(target, load)

    with serving(contender.command, contender.url):
        return asyncio.run(warm_up_and_run())


def better_by(figure: str, seedance: Report, baseline: Report) -> float:
    """How many times better Seedance is; below 1 it is worse."""
    ours, theirs = float(getattr(seedance, figure)), float(getattr(baseline, figure))
    above, below = (ours, theirs) if figure in HIGHER_IS_BETTER else (theirs, ours)
    return above / below if below else float("nan")


def table(runs: dict[str, list[Run]]) -> str:
    """One line a figure: both servers over all rounds, the ratio, and the ratio of each round."""
    ours, theirs = report(runs["seedance"]), report(runs["baseline"])
    rounds = [
        (report([mine]), report([other]))
        for mine, other in zip(runs["seedance"], runs["baseline"], strict=True)
    ]
    lines = [f"{'':16}{'seedance':>12}{'baseline':>12}{'better by':>12}   in each round"]
    for figure in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
        each = "  ".join(f"{better_by(figure, *pair):.2f}" for pair in rounds)
        lines.append(
            f"{figure:16}{getattr(ours, figure):12.2f}{getattr(theirs, figure):12.2f}"
            f"{better_by(figure, ours, theirs):12.2f}   {each}"
        )
    return "\n".join(lines)


def conditions() -> dict[str, str]:
    """What a reader needs in order to judge the figures: hardware, versions, revision."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "processor": f"{_processor()}, {available_cores()} cores",
        "system": platform.platform(terse=True),
        "versions": ", ".join(
            f"{name} {version(name)}" for name in ("ray", "torch", "transformers")
        ),
        "revision": git.stdout.strip() or "unknown",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if "model name" in line), "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_load_options(parser)
    parser.add_argument("--rounds", type=int, default=2, help="times that each server is measured")
    parser.add_argument("--config", type=Path, default=ROOT / "serve_config.yaml")
    parser.add_argument(
        "--batch-wait-s",
        type=float,
        default=BATCH_WAIT_S,
        help="the baseline's @serve.batch window",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    if options.rounds < 1:
        raise SystemExit(f"rounds is {options.rounds}, the least is 1")
    load = load_from(options)
    # The servers are stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: dict[str, list[Run]] = {name: [] for name in CONTENDERS}
    progress = sys.stderr if options.json else sys.stdout
    try:
        document, settings = read_config(options.config)
        rows = min(load.clients, settings.model.max_num_seqs)
        if load.requests % rows:
            # The baseline would wait for its last batch to fill, which it never does.
            raise SystemExit(f"requests is {load.requests}, it must be a multiple of {rows}")
        with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
            pair = contenders(document, settings, rows, options.batch_wait_s, Path(folder))
            for turn in range(options.rounds):
                for contender in pair:
                    run = measure(contender, load, rows)
                    runs[contender.name].append(run)
                    busy = f"load average {os.getloadavg()[0]:.1f}"
                    print(f"\n{contender.name}, round {turn + 1} ({busy})", file=progress)
                    print(describe(report([run])), file=progress, flush=True)
    except (SettingsError, ClusterFailed) as error:
        raise SystemExit(f"bench: {error}") from None
    if options.json:
        figures = {name: as_json(report(each)) for name, each in runs.items()}
        print(json.dumps({"load": dataclasses.asdict(load), **conditions(), **figures}))
    else:
        facts = "\n".join(f"{name:12} {value}" for name, value in conditions().items())
        print(f"\n{facts}\nload         {load}\n\n{table(runs)}")
    return 1 if any(report(each).errors for each in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
