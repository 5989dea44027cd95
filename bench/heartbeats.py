"""How soon the served stack notices that a client is gone, and whether it gives up one that is not.

    python -m bench.heartbeats               # as root, for the network namespaces

A client leaves by FIN, by RST, or without a word: its network is cut, while it waits and while it
is streamed to. Then a thousand clients that live are stopped for seconds, again and again. Last,
heartbeats are timed while the real model prefills long prompts. Each part has a Serve cluster of
its own, behind HAProxy or, with --python-proxy, behind Serve's own proxy. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from app.launcher import HAPROXY_SWITCHES
from bench.cluster import ROOT, ClusterFailed, free_port, serving
from bench.compare import conditions
from bench.ends import ENDS_FILE
from bench.heartbeat_clients import Peer, Plan, plan_line
from bench.scripted_engine import STEPS_FILE
from bench.tunnel import NoTunnel, Tunnel, tunnel
from bench.wire_clients import ConnectionFailed

TOKEN_INTERVAL_S = 0.05
NOTICED_WITHIN_S = 120.0
COME_BACK_S = 8.0
"""Time that a client has to learn what became of its connection."""
IDLE, STREAMING = "idle", "streaming"
WINDOW_BYTES = 4096
"""Of the clients whose window is to be full soon: less than a stopped client is sent."""


@dataclass(frozen=True)
class Server:
    """A cluster on the scripted engine, and what it notes."""

    port: int
    ends: Path
    steps: Path

    def ended(self) -> dict[str, float]:
        """The connections that the ingress has let go of, by name, and when."""
        lines = self.ends.read_text().splitlines() if self.ends.exists() else []
        return {end["name"]: end["at_s"] for end in map(json.loads, lines)}

    def wait_for(self, names: Sequence[str]) -> dict[str, float]:
        """Waits until all of these have ended; those that do not are left out."""
        deadline_s = time.monotonic() + NOTICED_WITHIN_S
        while not set(names) <= set(ended := self.ended()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return {name: ended[name] for name in names if name in ended}

    def last_step(self) -> float:
        """When the engine computed something last, once it computes nothing any more."""
        deadline_s = time.monotonic() + NOTICED_WITHIN_S
        while True:
            size = self.steps.stat().st_size
            time.sleep(10 * TOKEN_INTERVAL_S)
            if size == self.steps.stat().st_size or time.monotonic() > deadline_s:
                return float(json.loads(self.steps.read_text().splitlines()[-1])["at_s"])


def _configured(import_path: str, args: dict[str, Any], port: int) -> str:
    args = {**args, "auth": {"allow_open": True}}
    config = {
        # The clients in a network of their own reach no loopback.
        "http_options": {"host": "0.0.0.0", "port": port},
        "applications": [
            {"name": "seedance", "route_prefix": "/", "import_path": import_path, "args": args}
        ],
    }
    return yaml.safe_dump(config)


@contextmanager
def _cluster(
    import_path: str, args: dict[str, Any], environment: dict[str, str], *, python_proxy: bool
) -> Iterator[int]:
    port = free_port()
    switched = dict.fromkeys(HAPROXY_SWITCHES, "0") if python_proxy else {}
    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(_configured(import_path, args, port))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        url = f"http://127.0.0.1:{port}"
        with serving(command, url, environment={**switched, **environment}):
            yield port


@contextmanager
def scripted_server(*, python_proxy: bool) -> Iterator[Server]:
    """The scripted engine behind the app, which notes what it does."""
    args = {
        "model": {
            "backend": "mock",
            "mock_token_interval_s": TOKEN_INTERVAL_S,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 1024,
        },
        "cache": {"enabled": False},
    }
    with tempfile.TemporaryDirectory(prefix="sdb-") as name:
        ends, steps = Path(name) / "ends", Path(name) / "steps"
        noted = {ENDS_FILE: str(ends), STEPS_FILE: str(steps)}
        with _cluster("bench.noted:build", args, noted, python_proxy=python_proxy) as port:
            yield Server(port, ends, steps)


@dataclass
class Detections:
    """Seconds from each loss to the moment at which the ingress let go, by what happened.

    Attributes:
        stopped_s: to the engine's last step for it, where it was alone.
        missed: losses that were not noticed in time.
    """

    noticed_s: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    stopped_s: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    missed: int = 0

    def take(self, how: str, when: str, lost_s: dict[str, float], ended: dict[str, float]) -> None:
        seen = [ended[name] - at_s for name, at_s in lost_s.items() if name in ended]
        self.missed += len(lost_s) - len(seen)
        self.noticed_s.setdefault((how, when), []).extend(seen)


def measure_goodbyes(server: Server, detections: Detections, times: int) -> None:
    """Clients that leave with a packet that says so, one after the other."""
    leave: dict[str, Callable[[Peer], None]] = {"FIN": Peer.finish, "RST": Peer.abort}
    for how, when in ((how, when) for how in leave for when in (IDLE, STREAMING)):
        for number in range(times):
            plan = Plan(f"{how} {when} {number}", streams=when == STREAMING)
            peer = Peer("127.0.0.1", server.port, plan)
            if plan.streams:
                peer.ask()
                while peer.tokens < 5:
                    peer.read()
            lost_s = time.monotonic()
            leave[how](peer)
            detections.take(how, when, {plan.name: lost_s}, server.wait_for([plan.name]))
            peer.close()
            if plan.streams:
                stopped_s = server.last_step() - lost_s
                detections.stopped_s.setdefault((how, when), []).append(max(0.0, stopped_s))


@contextmanager
def holding(
    host: str, port: int, plans: Sequence[Plan], through: Callable[..., list[str]] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that holds these connections.

    Raises:
        ConnectionFailed: it does not come to hold them all.
    """
    command = [sys.executable, "-m", "bench.heartbeat_clients"]
    holder = subprocess.Popen(
        through(*command) if through else command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        print(plan_line(host, port, plans), file=holder.stdin, flush=True)
        if holder.stdout.readline() != "ready\n":
            raise ConnectionFailed("the clients do not get their streams")
        yield holder
    finally:
        holder.kill()
        holder.wait()


def measure_silence(server: Server, cut_off: Tunnel, detections: Detections, times: int) -> None:
    """Clients whose network is cut and stays so, one after the other."""
    for when in (IDLE, STREAMING):
        for number in range(times):
            plan = Plan(f"silent {when} {number}", streams=when == STREAMING)
            with holding(cut_off.server_address, server.port, [plan], cut_off.command):
                # Each at another moment of the keepalive's second.
                time.sleep(1.0 + number / times)
                cut_s = time.monotonic()
                cut_off.cut()
                noticed = server.wait_for([plan.name])
                detections.take("silence", when, {plan.name: cut_s}, noticed)
                if plan.streams:
                    stopped = detections.stopped_s.setdefault(("silence", when), [])
                    stopped.append(server.last_step() - cut_s)
                cut_off.heal()


@dataclass(frozen=True)
class Gap:
    """What came of clients whose network was cut for a while, half of them streamed to.

    Args:
        given_up: connections that the server ended.
        learnt_s: of those whose client learnt of it soon, from the end of the cut until then.
    """

    clients: int
    gap_s: float
    given_up: int
    learnt_s: list[float]


def measure_gap(server: Server, cut_off: Tunnel, clients: int, gap_s: float) -> Gap:
    """Clients whose network comes back after a while."""
    plans = [Plan(f"gap of {gap_s:g} {n}", streams=n % 2 == 0) for n in range(clients)]
    with holding(cut_off.server_address, server.port, plans, cut_off.command) as holder:
        cut_off.cut()
        time.sleep(gap_s)
        healed_s = time.monotonic()
        cut_off.heal()
        time.sleep(COME_BACK_S)
        given_up = {plan.name for plan in plans} & set(server.ended())
        closed = _closed(holder)
    return Gap(clients, gap_s, len(given_up), [at_s - healed_s for at_s in closed.values()])


def _closed(holder: subprocess.Popen[str]) -> dict[str, float]:
    """Ends a holder; the connections that were closed until now, and when."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    print(file=holder.stdin, flush=True)
    closed: dict[str, float] = json.loads(holder.stdout.readline())
    return closed


@dataclass(frozen=True)
class Stalls:
    """What came of clients that were stopped for a while, all together, again and again."""

    clients: int
    streaming: int
    with_full_window: int
    stop_s: float
    times: int
    closed: int


def measure_stalls(
    server: Server, *, clients: int, streaming: int, stop_s: float, run_s: float, times: int
) -> Stalls:
    """Half of those that stream have so small a window that it is full while they are stopped."""
    plans = [
        Plan(
            f"stalled {number}",
            streams=number < streaming,
            receive_buffer=WINDOW_BYTES if number < streaming // 2 else None,
        )
        for number in range(clients)
    ]
    with holding("127.0.0.1", server.port, plans) as holder:
        for _ in range(times):
            holder.send_signal(signal.SIGSTOP)
            time.sleep(stop_s)
            holder.send_signal(signal.SIGCONT)
            time.sleep(run_s)
        ended = server.ended()
        closed = set(_closed(holder))
    closed |= {plan.name for plan in plans if plan.name in ended}
    return Stalls(clients, streaming, streaming // 2, stop_s, times, len(closed))


@dataclass(frozen=True)
class Prefills:
    """Times of PING to PONG while long prompts were prefilled, and of the prefills."""

    prompt_tokens: list[int]
    ttft_s: list[float]
    answers_s: list[float]


def measure_prefills(*, python_proxy: bool, times: int, words: int) -> Prefills:
    """Long prompts for the real model on one connection, a PING each 20 ms on another."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    args = config["applications"][0]["args"]
    with _cluster("app.main:app", args, {}, python_proxy=python_proxy) as port:
        asking, pinging = (Peer("127.0.0.1", port, Plan(name)) for name in ("asking", "pinging"))
        tokens: list[int] = []
        ttft_s: list[float] = []
        answers_s: list[float] = []
        for number in range(times):
            is_prefilling = threading.Event()
            is_prefilling.set()
            pings = threading.Thread(target=_ping, args=(pinging, is_prefilling, answers_s))
            pings.start()
            asked_s = time.monotonic()
            asking.send(
                type="INFER_REQ", id=f"r{number}", cache="bypass", max_tokens=1, temperature=0,
                prompt=" ".join(f"{number} word {word}" for word in range(words)),
            )  # fmt: skip
            done: dict[str, Any] | None = None
            while done is None:
                for frame in asking.read():
                    if frame["type"] == "INFER_CHUNK" or frame["type"] == "INFER_DONE":
                        is_prefilling.clear()
                    if frame["type"] == "INFER_DONE":
                        done = frame
            ttft_s.append(time.monotonic() - asked_s)
            pings.join()
            tokens.append(int(done["usage"]["prompt_tokens"]))
        asking.close()
        pinging.close()
    return Prefills(tokens, ttft_s, answers_s)


def _ping(peer: Peer, goes_on: threading.Event, answers_s: list[float]) -> None:
    number = 0
    while goes_on.is_set():
        number += 1
        sent_s = time.monotonic()
        peer.send(type="PING", ts=number)
        while not any(
            frame["type"] == "PONG" and frame.get("ts") == number for frame in peer.read()
        ):
            pass
        answers_s.append(time.monotonic() - sent_s)
        time.sleep(0.02)


def detections_table(detections: Detections) -> str:
    """A line for each way to leave and each state of the stream, in milliseconds."""
    lines = [
        "| client leaves by | while | times | noticed, ms: median | most | computing stops, ms: median | most |",
        "|---|---|---|---|---|---|---|",
    ]
    for (how, when), noticed in detections.noticed_s.items():
        stopped = detections.stopped_s.get((how, when), [])
        cells = [how, when, str(len(noticed)), *_median_and_most(noticed)]
        lines.append("| " + " | ".join([*cells, *_median_and_most(stopped)]) + " |")
    if detections.missed:
        lines.append(f"\n{detections.missed} were not noticed within {NOTICED_WITHIN_S:g} s.")
    return "\n".join(lines)


def _median_and_most(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "", ""
    return f"{1000 * statistics.median(seconds):,.0f}", f"{1000 * max(seconds):,.0f}"


def gap_line(gap: Gap) -> str:
    line = (
        f"{gap.clients} clients whose network was cut for {gap.gap_s:g} s, half of them streamed "
        f"to: {gap.given_up} given up"
    )
    if not gap.learnt_s:
        return f"{line}."
    median, most = _median_and_most(gap.learnt_s)
    return (
        f"{line}; {len(gap.learnt_s)} of them learnt of it within {COME_BACK_S:g} s, "
        f"{median} ms (median) and {most} ms (most) after the end of the cut."
    )


def stalls_line(stalls: Stalls) -> str:
    return (
        f"{stalls.clients:,} clients that live, {stalls.streaming} of them streamed to "
        f"({stalls.with_full_window} with a window that is full meanwhile), stopped "
        f"{stalls.times} times for {stalls.stop_s:g} s: {stalls.closed} false closes."
    )


def prefills_line(prefills: Prefills) -> str:
    p50, p99, most = (float(np.percentile(prefills.answers_s, p)) * 1000 for p in (50, 99, 100))
    lengths = ", ".join(f"{tokens:,}" for tokens in prefills.prompt_tokens)
    seconds = ", ".join(f"{ttft:.1f}" for ttft in prefills.ttft_s)
    return (
        f"PING to PONG while the model prefills {lengths} tokens (in {seconds} s): "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {most:.1f} ms of {len(prefills.answers_s)}."
    )


def measure(options: argparse.Namespace) -> Iterator[str]:
    """The paragraphs of the report, each as soon as it is known."""
    if options.only in (None, "losses", "stalls"):
        with scripted_server(python_proxy=options.python_proxy) as server:
            if options.only != "stalls":
                yield from _losses(server, options)
            if options.only != "losses":
                stalls = measure_stalls(
                    server, clients=options.clients, streaming=64, stop_s=options.stop_s,
                    run_s=1.0, times=options.stops,
                )  # fmt: skip
                yield stalls_line(stalls)
    if options.only in (None, "prefills"):
        yield prefills_line(
            measure_prefills(python_proxy=options.python_proxy, times=3, words=options.words)
        )


def _losses(server: Server, options: argparse.Namespace) -> Iterator[str]:
    detections = Detections()
    measure_goodbyes(server, detections, options.times)
    try:
        with tunnel() as cut_off:
            measure_silence(server, cut_off, detections, options.times)
            yield detections_table(detections)
            for gap_s in options.gaps_s:
                yield gap_line(measure_gap(server, cut_off, 2 * options.times, gap_s))
    except NoTunnel as why:
        yield detections_table(detections)
        yield f"A silent client was not measured: {why}."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.heartbeats", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python-proxy", action="store_true", help="without HAProxy")
    parser.add_argument("--only", choices=("losses", "stalls", "prefills"))
    parser.add_argument("--times", type=int, default=10, help="losses of each kind")
    parser.add_argument("--gaps-s", type=float, nargs="+", default=[0.4, 3.0, 6.0], help="cuts")
    parser.add_argument("--clients", type=int, default=1000, help="that live but are stopped")
    parser.add_argument("--stop-s", type=float, default=8.0)
    parser.add_argument("--stops", type=int, default=6)
    parser.add_argument(
        "--words", type=int, default=900, help="of a long prompt, seven tokens each"
    )
    options = parser.parse_args()
    # The servers are stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    facts = conditions()
    proxy = "the Python proxy" if options.python_proxy else "HAProxy"
    print(
        f"Through {proxy}; {facts['processor']}, shared with the clients; {facts['versions']}; "
        f"revision {facts['revision']}.",
        flush=True,
    )
    try:
        for paragraph in measure(options):
            print(f"\n{paragraph}", flush=True)
    except (ClusterFailed, ConnectionFailed, OSError) as error:
        raise SystemExit(f"bench: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
