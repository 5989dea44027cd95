"""How fast a cached answer comes back over WebSocket, against plain uvicorn's echo.

    python -m bench.echo

Every connection asks one and the same question again and again, each time after the last
answer's end; the cache knows the answer by its exact text. Then the same client sends the same
bytes to a plain uvicorn server that sends them back. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]
import yaml

from app.launcher import is_ready
from bench.cluster import ROOT, ClusterFailed, free_port, serving
from bench.compare import conditions
from bench.cpu import own_cpu_s, read_cpu_times
from bench.wire_clients import ConnectionFailed, WebSocketClient, open_websocket

CONNECTIONS = (100, 500)
ANSWER_TOKENS = 4
WARM_UP_S = 1.0
ECHO_WITHIN_S = 20.0
QUESTION = {
    "type": "INFER_REQ",
    "id": "r",
    "prompt": "What is the capital of France?",
    "max_tokens": ANSWER_TOKENS,
    "temperature": 0,
}


@dataclass
class Figures:
    """One measurement. CPU seconds of the server's processes, by kind, and of the client.

    Args:
        latencies_s: from sending a request to its last frame.
        computed: answers among them that the model gave, because the look-up took too long.
    """

    latencies_s: list[float]
    duration_s: float
    server_cpu_s: dict[str, float]
    client_cpu_s: float
    computed: int = 0

    @property
    def requests_per_s(self) -> float:
        """Those that were computed do not count."""
        return (len(self.latencies_s) - self.computed) / self.duration_s

    @property
    def server_us(self) -> float:
        return 1e6 * sum(self.server_cpu_s.values()) / max(1, len(self.latencies_s))

    @property
    def client_us(self) -> float:
        return 1e6 * self.client_cpu_s / max(1, len(self.latencies_s))

    def latency_ms(self, percentile: float) -> float:
        return float(np.percentile(self.latencies_s, percentile)) * 1000


class Asker:
    """One connection that asks again as soon as it has its answer.

    Args:
        is_answer: whether a message ends an answer. May raise `ConnectionFailed`.
    """

    def __init__(
        self, request: bytes, is_answer: Callable[[bytes], bool], clock: Callable[[], float]
    ) -> None:
        self._request = request
        self._is_answer = is_answer
        self._clock = clock
        self._socket: WebSocketClient | None = None
        self._sent_s = 0.0
        self._is_asking = False
        self.latencies_s: list[float] = []
        self.error: str | None = None

    async def open(self, url: str) -> None:
        self._socket = await open_websocket(url, self._take, self._clock)

    def begin(self) -> None:
        self._is_asking = True
        self._ask()

    def close(self) -> None:
        self._is_asking = False
        if self._socket is not None:
            self._socket.close()

    def _ask(self) -> None:
        assert self._socket is not None, "open() comes first"
        self._sent_s = self._clock()
        self._socket.send(self._request)

    def _take(self, payload: bytes, now_s: float) -> None:
        try:
            is_end = self._is_asking and self._is_answer(payload)
        except ConnectionFailed as error:
            self.error = str(error)
            self.close()
            return
        if is_end:
            self.latencies_s.append(now_s - self._sent_s)
            self._ask()


class Cache(msgspec.Struct, frozen=True):
    """What the cache decided."""

    outcome: str = "miss"


class Frame(msgspec.Struct):
    """What is read of a `seedance.v1` frame."""

    type: str
    cache: Cache = Cache()
    code: str = ""
    message: str = ""


class CachedAnswer:
    """Tells the last frame of an answer, and counts those that are not from the cache."""

    def __init__(self) -> None:
        self.computed = 0
        self._decode = msgspec.json.Decoder(Frame).decode

    def __call__(self, payload: bytes) -> bool:
        """Raises `ConnectionFailed` for an error."""
        frame = self._decode(payload)
        if frame.type == "ERROR":
            raise ConnectionFailed(f"{frame.code}: {frame.message}")
        if frame.type != "INFER_DONE":
            return False
        self.computed += frame.cache.outcome != "exact"
        return True


async def ask_for(
    url: str,
    connections: int,
    request: bytes,
    is_answer: CachedAnswer | None,
    processes: Sequence[psutil.Process],
    window_s: float,
) -> Figures:
    """Opens all connections, warms up, and measures.

    Args:
        is_answer: None where every message is an answer.

    Raises:
        ConnectionFailed: a connection was refused, or an answer is not one.
    """
    clock = time.monotonic
    is_end = (lambda payload: True) if is_answer is None else is_answer
    askers = [Asker(request, is_end, clock) for _ in range(connections)]
    try:
        for asker in askers:
            await asker.open(url)
        for asker in askers:
            asker.begin()
        await asyncio.sleep(WARM_UP_S)
        for asker in askers:
            asker.latencies_s.clear()
        before, own_before_s = read_cpu_times(list(processes)), own_cpu_s()
        begun_s, computed = clock(), 0 if is_answer is None else is_answer.computed
        await asyncio.sleep(window_s)
        duration_s = clock() - begun_s
        latencies_s = [latency for asker in askers for latency in asker.latencies_s]
        computed = 0 if is_answer is None else is_answer.computed - computed
        own_s, after = own_cpu_s() - own_before_s, read_cpu_times(list(processes))
    finally:
        for asker in askers:
            asker.close()
    errors = [asker.error for asker in askers if asker.error is not None]
    if errors:
        raise ConnectionFailed(f"{len(errors)} connections failed, such as: {errors[0]}")
    return Figures(latencies_s, duration_s, after.since(before), own_s, computed)


@contextmanager
def echoing() -> Iterator[tuple[str, psutil.Process]]:
    """A plain uvicorn server in a process of its own.

    Raises:
        ClusterFailed: it does not start.
    """
    port = free_port()
    command = [sys.executable, "-m", "bench.echo_server", str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        deadline_s = time.monotonic() + ECHO_WITHIN_S
        while not is_ready(f"http://127.0.0.1:{port}"):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise ClusterFailed("the echo server does not start")
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{port}/", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def measure_echo(connections: Sequence[int], window_s: float) -> dict[int, Figures]:
    """Plain uvicorn, by number of connections."""
    request = msgspec.json.encode(QUESTION)
    with echoing() as (url, process):
        return {
            count: asyncio.run(ask_for(url, count, request, None, [process], window_s))
            for count in connections
        }


def measure_seedance(connections: Sequence[int], window_s: float) -> dict[int, Figures]:
    """Cached answers of Seedance on the scripted engine, by number of connections."""
    port = free_port()
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "seedance",
                "route_prefix": "/",
                "import_path": "bench.mock:build",
                "args": {
                    "model": {"backend": "mock", "mock_token_interval_s": 0.01},
                    "cache": {"semantic": False, "ttl_s": 86_400, "store": {"kind": "memory"}},
                },
            }
        ],
    }
    request = msgspec.json.encode(QUESTION)
    url = f"ws://127.0.0.1:{port}/v1/infer"
    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        with serving(command, f"http://127.0.0.1:{port}") as cluster:
            asyncio.run(answer_once(url, request))
            time.sleep(WARM_UP_S)
            return {
                count: asyncio.run(
                    ask_for(url, count, request, CachedAnswer(), cluster.processes(), window_s)
                )
                for count in connections
            }


async def answer_once(url: str, request: bytes) -> None:
    """Has the question computed, so that the cache knows the answer.

    Raises:
        ConnectionFailed: there is no answer.
    """
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    decode = msgspec.json.Decoder(Frame).decode

    def take(payload: bytes, now_s: float) -> None:
        if decode(payload).type in ("INFER_DONE", "ERROR") and not ended.done():
            ended.set_result(payload)

    socket = await open_websocket(url, take, time.monotonic)
    try:
        socket.send(request)
        async with asyncio.timeout(ECHO_WITHIN_S):
            payload = await ended
    except TimeoutError:
        raise ConnectionFailed("the question is not answered") from None
    finally:
        socket.close()
    if decode(payload).type == "ERROR":
        raise ConnectionFailed(payload.decode())


def table(ours: dict[int, Figures], echo: dict[int, Figures]) -> str:
    """A line for each server and number of connections, and the ratio of their rates."""
    lines = [
        "| connections | server | req/s | p50, ms | p99, ms | server CPU µs | client CPU µs | computed | of echo |",
        "|---" * 9 + "|",
    ]
    for count, figures in ours.items():
        ratio = figures.requests_per_s / echo[count].requests_per_s
        for name, each, share in (
            ("Seedance, cached answer", figures, f"{ratio:.2f}"),
            ("uvicorn echo", echo[count], "1"),
        ):
            lines.append(
                f"| {count} | {name} | {each.requests_per_s:,.0f} | {each.latency_ms(50):.1f} | "
                f"{each.latency_ms(99):.1f} | {each.server_us:.0f} | {each.client_us:.0f} | {each.computed} | {share} |"
            )
    return "\n".join(lines)


def breakdown(ours: dict[int, Figures]) -> str:
    """Seedance's CPU µs a request by process, as one line for each number of connections."""
    lines = []
    for count, figures in ours.items():
        requests = max(1, len(figures.latencies_s))
        kinds = (f"{kind} {1e6 * s / requests:.0f}" for kind, s in figures.server_cpu_s.items())
        lines.append(f"{count} connections: {', '.join(kinds)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.echo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--connections", type=int, nargs="+", default=list(CONNECTIONS))
    parser.add_argument("--window-s", type=float, default=6.0, help="of each measurement")
    options = parser.parse_args()
    if min(options.connections) < 1 or not options.window_s > 0:
        raise SystemExit("connections must be 1 or more, and window-s above 0")
    # The servers are stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        ours = measure_seedance(options.connections, options.window_s)
        echo = measure_echo(options.connections, options.window_s)
    except (ClusterFailed, ConnectionFailed, OSError) as error:
        raise SystemExit(f"bench: {error}") from None
    facts = conditions()
    print(
        f"{options.window_s:g} s each; {facts['processor']}, shared with the client; "
        f"Python {platform.python_version()}, {facts['versions']}; revision {facts['revision']}; "
        f"load average {os.getloadavg()[0]:.1f}.\n\n{table(ours, echo)}\n\n"
        f"Server CPU µs a request, by process:\n\n{breakdown(ours)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
