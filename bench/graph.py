"""What the Serve graph costs a token, with an engine that costs next to nothing.

    python -m bench.graph

Three servers, one after the other, each on a cluster of its own, with the same scripted engine
in the same number of rows, asked by the same client for the same streams:

    seedance    the app as it is
    handles     the app's web room over one streaming handle call a request (gRPC, HAProxy)
    documented  Ray's documented pattern: StreamingResponse over a handle call, Serve's defaults

Each streams at 20 tokens/s a stream, then as fast as it can. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from bench.cluster import Cluster, ClusterFailed, free_port, serving
from bench.compare import conditions
from bench.cpu import own_cpu_s, read_cpu_times
from bench.scripted_engine import AT_ONCE, MAX_ANSWER_TOKENS, STEPS_FILE, PromptRunner
from bench.streams import Streams, added_latencies, begin_all, read_steps, stream_at
from bench.wire_clients import ConnectionFailed
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import byte_tokenizer
from protocol.request import SamplingParams

DEFAULTS_OF_SERVE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
}
"""What deploy/serve.env changes, as Ray has it."""
IDLE_S = 3.0
SETTLE_S = 1.0
ANSWER_TOKENS = {"paced": 400, "flat out": 256}


@dataclass(frozen=True)
class Variant:
    """One of the servers: what `serve run` gets, and how it is asked."""

    name: str
    import_path: str
    args: dict[str, Any]
    scheme: str
    path: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Figures:
    """One measurement. CPU in seconds; `server_cpu_s` by kind of process.

    Args:
        idle_cores: CPU seconds a second of the same processes before anyone asked.
        latencies_s: added latency of each token; empty where it was not measured.
    """

    tokens: int
    duration_s: float
    server_cpu_s: dict[str, float]
    client_cpu_s: float
    idle_cores: float
    latencies_s: list[float]
    errors: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def server_us(self) -> float:
        """CPU of all server processes, a token."""
        return 1e6 * sum(self.server_cpu_s.values()) / max(1, self.tokens)

    @property
    def busy_us(self) -> float:
        """The same without what an idle cluster uses anyway."""
        return self.server_us - 1e6 * self.idle_cores * self.duration_s / max(1, self.tokens)

    @property
    def client_us(self) -> float:
        return 1e6 * self.client_cpu_s / max(1, self.tokens)

    @property
    def server_cores(self) -> float:
        return sum(self.server_cpu_s.values()) / self.duration_s

    @property
    def tokens_per_core_s(self) -> float:
        """Tokens for each second of one core that the server used."""
        return 1e6 / self.server_us if self.server_us else float("nan")

    def latency_ms(self, percentile: float) -> float:
        if not self.latencies_s:
            return float("nan")
        return float(np.percentile(self.latencies_s, percentile)) * 1000


Results = dict[str, dict[str, Figures]]
"""By variant, then by mode: `paced` or `flat out`."""


def variants(streams: int, interval_s: float) -> list[Variant]:
    """The three servers, each with a row for every stream."""
    model = {
        "backend": "mock",
        "max_num_seqs": streams,
        "max_num_batched_tokens": max(512, streams + 256),
        "mock_token_interval_s": interval_s,
    }
    # The baselines have no cache, and every request would pass it by.
    seedance = {"model": model, "cache": {"enabled": False}}
    baseline = {"rows": streams, "interval_s": interval_s}
    return [
        Variant("seedance", "bench.mock:build", seedance, "ws", "/v1/infer", {}),
        Variant("handles", "bench.baseline_handles:app", baseline, "ws", "/v1/infer", {}),
        Variant(
            "documented",
            "bench.baseline_stream:app",
            baseline,
            "http",
            "/generate",
            DEFAULTS_OF_SERVE,
        ),
    ]


def measure(variant: Variant, streams: int, window_s: float) -> dict[str, Figures]:
    """Starts one server, streams from it in both modes, and stops it.

    Raises:
        ClusterFailed: it does not start.
        ConnectionFailed: it does not stream.
    """
    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        port = free_port()
        application = {
            # The name is Seedance's, so that the processes are called the same everywhere.
            "name": "seedance",
            "route_prefix": "/",
            "import_path": variant.import_path,
            "args": variant.args,
        }
        config = {"http_options": {"host": "127.0.0.1", "port": port}}
        file = Path(folder) / "serve.yaml"
        file.write_text(yaml.safe_dump(config | {"applications": [application]}))
        steps = Path(folder) / "steps"
        steps.touch()
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        address = f"127.0.0.1:{port}"
        with serving(
            command,
            f"http://{address}",
            environment={STEPS_FILE: str(steps)} | variant.environment,
        ) as cluster:
            url = f"{variant.scheme}://{address}{variant.path}"
            time.sleep(2 * SETTLE_S)
            idle_cores = idle(cluster)
            return {
                mode: asyncio.run(
                    stream_for(cluster, url, mode, streams, window_s, idle_cores, steps)
                )
                for mode in ANSWER_TOKENS
            }


def idle(cluster: Cluster) -> float:
    """CPU seconds a second that the cluster uses for nothing."""
    processes = cluster.processes()
    before = read_cpu_times(processes)
    time.sleep(IDLE_S)
    return sum(read_cpu_times(processes).since(before).values()) / IDLE_S


async def stream_for(
    cluster: Cluster,
    url: str,
    mode: str,
    num_streams: int,
    window_s: float,
    idle_cores: float,
    steps: Path,
) -> Figures:
    """Opens all streams, lets them settle, and measures for `window_s`."""
    clock = time.monotonic
    streams = Streams(clock, is_paced=mode == "paced", num_tokens=ANSWER_TOKENS[mode])
    clients = [stream_at(url, streams) for _ in range(num_streams)]
    try:
        for client in clients:
            await client.open()
        await begin_all(clients, streams, spread_s=0.005)
        await asyncio.sleep(SETTLE_S)
        processes = cluster.processes()
        before, own_before_s = read_cpu_times(processes), own_cpu_s()
        begun_s, begun_tokens = clock(), streams.tokens
        await asyncio.sleep(window_s)
        ended_s, tokens = clock(), streams.tokens - begun_tokens
        own_s, after = own_cpu_s() - own_before_s, read_cpu_times(processes)
    finally:
        for client in clients:
            client.close()
    await asyncio.sleep(SETTLE_S)
    latencies = (
        added_latencies(streams.readings, *read_steps(steps), since_s=begun_s, until_s=ended_s)
        if streams.is_paced
        else []
    )
    return Figures(
        tokens=tokens,
        duration_s=ended_s - begun_s,
        server_cpu_s=after.since(before),
        client_cpu_s=own_s,
        idle_cores=idle_cores,
        latencies_s=latencies,
        errors=len(streams.errors),
    )


def engine_alone_us(streams: int, steps: int = 200) -> float:
    """CPU a token of the scripted engine's steps, with nobody to send to."""
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    config = EngineConfig(max_num_seqs=streams, max_num_batched_tokens=max(512, streams + 256))
    engine = Engine(PromptRunner(tokenizer, config, interval_s=0.0), tokenizer, config)
    for number in range(streams):
        engine.add(
            Sequence(
                request_id=f"{number}",
                prompt_token_ids=list(f"{AT_ONCE}question {number}".encode()),
                sampling=SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0),
            )
        )
    while engine.stats().generated_tokens_total < 2 * streams:
        engine.step()
    before_s, before = time.process_time(), engine.stats().generated_tokens_total
    for _ in range(steps):
        engine.step()
    made = engine.stats().generated_tokens_total - before
    return 1e6 * (time.process_time() - before_s) / made


ROWS: dict[str, tuple[tuple[str, Callable[[Figures], float], str], ...]] = {
    "paced": (
        ("tokens/s", lambda f: f.tokens_per_s, "{:,.0f}"),
        ("server CPU µs a token", lambda f: f.server_us, "{:,.0f}"),
        ("… without the idle cluster's", lambda f: f.busy_us, "{:,.0f}"),
        ("client CPU µs a token", lambda f: f.client_us, "{:,.0f}"),
        ("added latency p50, ms", lambda f: f.latency_ms(50), "{:,.1f}"),
        ("added latency p99, ms", lambda f: f.latency_ms(99), "{:,.1f}"),
    ),
    "flat out": (
        ("tokens/s", lambda f: f.tokens_per_s, "{:,.0f}"),
        ("server cores used", lambda f: f.server_cores, "{:,.2f}"),
        ("server CPU µs a token", lambda f: f.server_us, "{:,.0f}"),
        ("tokens/s a server core", lambda f: f.tokens_per_core_s, "{:,.0f}"),
        ("client CPU µs a token", lambda f: f.client_us, "{:,.0f}"),
    ),
}
HIGHER_IS_BETTER = {"tokens/s", "tokens/s a server core"}


def table(results: Results) -> str:
    """Figures and ratios; above 1 always means that Seedance is better."""
    others = [name for name in results if name != "seedance" and "seedance" in results]
    header = ["", *results, *(f"better than {name}" for name in others)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for mode, rows in ROWS.items():
        for name, figure, form in rows:
            values = {variant: figure(modes[mode]) for variant, modes in results.items()}
            cells = [form.format(value) for value in values.values()]
            for other in others:
                ratio = better_by(name, values["seedance"], values[other])
                cells.append("" if ratio is None else f"{ratio:,.1f}×")
            lines.append(f"| {mode}: {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def better_by(name: str, ours: float, theirs: float) -> float | None:
    """How many times better Seedance is at this figure; None for one that is neither."""
    if name == "server cores used":
        return None
    above, below = (ours, theirs) if name in HIGHER_IS_BETTER else (theirs, ours)
    return above / below if below > 0 and above > 0 else None


def breakdown(results: Results) -> str:
    """Server CPU µs a token, by kind of process."""
    columns = [(name, mode) for name in results for mode in ROWS]
    kinds: dict[str, None] = {}
    for name, mode in columns:
        kinds |= dict.fromkeys(results[name][mode].server_cpu_s)
    lines = [
        "| process | " + " | ".join(f"{name}, {mode}" for name, mode in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for kind in kinds:
        cells = []
        for name, mode in columns:
            figures = results[name][mode]
            seconds = figures.server_cpu_s.get(kind, 0.0)
            cells.append(f"{1e6 * seconds / max(1, figures.tokens):,.1f}")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.graph", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [variant.name for variant in variants(1, 1.0)]
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens/s of a paced stream")
    parser.add_argument("--window-s", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="servers")
    options = parser.parse_args()
    if not 1 <= options.streams <= 1024:
        raise SystemExit(f"streams is {options.streams}, allowed are 1 to 1024")
    if not (options.rate > 0 and options.window_s > 0):
        raise SystemExit("rate and window-s must be above 0")
    # The servers are stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    alone_us = engine_alone_us(options.streams)
    results: Results = {}
    try:
        for variant in variants(options.streams, 1 / options.rate):
            if variant.name in options.only:
                print(f"{variant.name} …", file=sys.stderr, flush=True)
                results[variant.name] = measure(variant, options.streams, options.window_s)
    except (ClusterFailed, ConnectionFailed, OSError) as error:
        raise SystemExit(f"bench: {error}") from None
    facts = conditions()
    print(
        f"{options.streams} streams, paced at {options.rate:g} tokens/s each and flat out, "
        f"{options.window_s:g} s each; {facts['processor']}, Python {platform.python_version()}, "
        f"{facts['versions']}; revision {facts['revision']}; load average "
        f"{os.getloadavg()[0]:.1f}. The engine's own steps are {alone_us:.0f} µs a token of each.\n\n"
        f"{table(results)}\n\nServer CPU µs a token, by process:\n\n{breakdown(results)}"
    )
    failed = {
        f"{name}, {mode}": figures.errors
        for name, modes in results.items()
        for mode, figures in modes.items()
        if figures.errors
    }
    if failed:
        print(f"\nfailed requests: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
