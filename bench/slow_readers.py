"""What clients that never read cost: memory, and the pace of those who do.

    python -m bench.slow_readers

A server with the scripted engine at 20 tokens/s a stream, on a cluster of its own. First the
honest clients alone, then with the others beside them, who each ask for long answers on one
socket and take nothing. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import yaml
from websockets.sync.client import connect

from app.client import SeedanceClient
from bench.chaos_clients import server_config
from bench.cluster import Cluster, ClusterFailed, free_port, serving
from bench.compare import conditions

ANSWER_TOKENS = 1000
SETTLE_S = 3.0


@dataclass(frozen=True)
class Pace:
    """How tokens came to the honest clients, and the server's memory meanwhile."""

    tokens: int
    gaps_ms: tuple[float, float, float]
    rss_mib: float


async def measure(cluster: Cluster, url: str, readers: int, seconds: float, name: str) -> Pace:
    gaps: list[float] = []

    async def read(client: SeedanceClient, number: int) -> None:
        last_s: float | None = None
        stream = client.stream(
            f"{name}, reader {number}", max_tokens=4096, cache="bypass", boundary="utf8"
        )
        async for _ in stream:
            now_s = time.monotonic()
            if last_s is not None:
                gaps.append(now_s - last_s)
            last_s = now_s

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(SeedanceClient(url)) for _ in range(readers)]
        reading = [asyncio.create_task(read(client, i)) for i, client in enumerate(clients)]
        await asyncio.sleep(SETTLE_S)
        gaps.clear()
        peak_mib = 0.0
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            await asyncio.sleep(1.0)
            peak_mib = max(peak_mib, rss_mib(cluster))
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    p50, p99, most = (float(np.percentile(gaps, p)) * 1000 for p in (50, 99, 100))
    return Pace(len(gaps), (p50, p99, most), peak_mib)


def rss_mib(cluster: Cluster) -> float:
    """Memory of HAProxy, the ingresses and the model replicas."""
    total = 0
    for process in cluster.processes():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "ServeReplica" in command or "haproxy" in command:
                total += process.memory_info().rss
    return total / 2**20


@contextlib.contextmanager
def never_reading(url: str, clients: int, requests: int) -> Iterator[None]:
    """Sockets that ask, and take nothing of what comes."""
    with contextlib.ExitStack() as stack:
        for number in range(clients):
            address = f"{url.replace('http', 'ws', 1)}/v1/infer"
            # Its library reads no further than this one frame.
            connecting = connect(address, max_queue=1, ping_interval=None, close_timeout=0)
            connection = stack.enter_context(connecting)
            for turn in range(requests):
                asked = {
                    "type": "INFER_REQ",
                    "id": f"r{turn}",
                    "prompt": f"never read {number} {turn}",
                    "max_tokens": ANSWER_TOKENS,
                    "cache": "bypass",
                }
                connection.send(json.dumps(asked))
        yield


def run(cluster: Cluster, url: str, options: argparse.Namespace) -> tuple[Pace, Pace]:
    alone = asyncio.run(measure(cluster, url, options.readers, options.seconds, "alone"))
    with never_reading(url, options.idle_clients, options.requests):
        beside = asyncio.run(measure(cluster, url, options.readers, options.seconds, "beside"))
    return alone, beside


def table(alone: Pace, beside: Pace) -> str:
    rows = [("alone", alone), ("beside those who never read", beside)]
    lines = ["| honest clients | tokens | gap p50 ms | p99 | most | server's memory, MiB |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, pace in rows:
        p50, p99, most = pace.gaps_ms
        lines.append(
            f"| {name} | {pace.tokens:,} | {p50:.0f} | {p99:.0f} | {most:.0f} | {pace.rss_mib:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--idle-clients", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1, help="of each client that never reads")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.streams = options.readers + options.idle_clients * options.requests
    document: dict[str, Any] = yaml.safe_load(options.config.read_text())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        file = Path(folder) / "serve_config.yaml"
        file.write_text(yaml.safe_dump(server_config(document, port, options)))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        try:
            with serving(command, url) as cluster:
                alone, beside = run(cluster, url, options)
        except ClusterFailed as error:
            raise SystemExit(str(error)) from error
    print(", ".join(f"{name}: {value}" for name, value in conditions().items()) + "\n")
    print(table(alone, beside))


if __name__ == "__main__":
    main()
