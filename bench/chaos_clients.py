"""Clients whose connections break all the time: does each still get its answer, once and whole?

    python -m bench.chaos_clients

A server of two ingresses and two model replicas with the scripted engine, whose answers are
known to the letter, on a cluster of its own; before it a relay that cuts, stalls and delays the
clients' connections at random; `app.client` as users have it. Prints Markdown, and exits with 1
when anything was lost, doubled or left out.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.client import ClientStream, ConnectionLost, SeedanceClient
from bench.cluster import ClusterFailed, free_port, serving
from bench.compare import conditions
from bench.fault_injector import FAULTS, FaultInjector, Wire
from bench.scripted_engine import MAX_ANSWER_TOKENS, answer_to
from protocol.errors import ServingError
from protocol.frames import InferAck, InferChunk, ServerFrame

MAX_FAULT_S = 2.0
"""How long a connection is silent or slow at most."""
TOKEN_INTERVAL_S = 0.05
STREAMS_A_CLIENT = 4


@dataclass
class Tally:
    """What happened to all streams.

    Attributes:
        resumed: RESUMEs that were answered.
        doubled, missing: tokens that the server sent twice, or that were never sent.
        wrong: answers that ended as if all was well, and are not the text.
        lost: why streams ended without their end.
    """

    streams: int = 0
    whole: int = 0
    resumed: int = 0
    doubled: int = 0
    missing: int = 0
    wrong: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        return self.whole == self.streams and not (self.doubled or self.missing)

    def watch(self, stream: ClientStream) -> None:
        """Counts what comes for a stream before its client has merged it."""
        take, is_accepted, next_seq = stream.receive, False, 0

        def receive(frame: ServerFrame, **options: Any) -> None:
            nonlocal is_accepted, next_seq
            if isinstance(frame, InferAck):
                self.resumed += is_accepted
                is_accepted = True
            elif isinstance(frame, InferChunk):
                # A character is a token of this engine.
                first = frame.seq + 1 - len(frame.text)
                self.doubled += max(0, next_seq - first)
                self.missing += max(0, first - next_seq)
                next_seq = max(next_seq, frame.seq + 1)
            take(frame, **options)

        stream.receive = receive  # type: ignore[method-assign]


async def ask(client: SeedanceClient, prompt: str, max_tokens: int, tally: Tally) -> None:
    stream = client.stream(prompt=prompt, max_tokens=max_tokens, temperature=0, cache="bypass")
    tally.watch(stream)
    tally.streams += 1
    text = ""
    try:
        async for delta in stream:
            text += delta.text
    except (ServingError, ConnectionLost) as error:
        tally.lost[f"{type(error).__name__}: {error}"[:100]] += 1
        return
    is_whole = text == answer_to(prompt, max_tokens)
    tally.whole += is_whole
    tally.wrong += not is_whole


async def hold_clients(url: str, options: argparse.Namespace, tally: Tally) -> None:
    """All streams, `STREAMS_A_CLIENT` on each connection, until their ends."""
    numbers = iter(range(options.streams))

    async def hold(own: list[int]) -> None:
        async with SeedanceClient(url, window=64) as client, asyncio.TaskGroup() as group:
            for number in own:
                group.create_task(ask(client, f"stream {number}", options.tokens, tally))

    async with asyncio.TaskGroup() as group:
        while own := [number for _, number in zip(range(STREAMS_A_CLIENT), numbers, strict=False)]:
            group.create_task(hold(own))


async def make_trouble(injector: FaultInjector, chance: random.Random, faults_per_s: float) -> None:
    """For ever: a random fault for a random connection."""
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(chance.expovariate(faults_per_s))
            if wires := injector.wires:
                wire: Wire = chance.choice(wires)
                duration_s = chance.uniform(0.0, MAX_FAULT_S)
                group.create_task(injector.inject(wire, chance.choice(FAULTS), duration_s))


async def run(port: int, options: argparse.Namespace) -> tuple[Tally, FaultInjector, float]:
    tally, injector = Tally(), FaultInjector("127.0.0.1", port)
    chance = random.Random(options.seed)
    began_s = time.monotonic()
    async with injector.listening():
        trouble = asyncio.create_task(make_trouble(injector, chance, options.faults_per_s))
        try:
            await hold_clients(f"http://127.0.0.1:{injector.port}", options, tally)
        finally:
            trouble.cancel()
            await asyncio.gather(trouble, return_exceptions=True)
    return tally, injector, time.monotonic() - began_s


def server_config(
    document: dict[str, Any], port: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The operator's config with the scripted engine, two replicas of each kind, and a row a stream."""
    config = copy.deepcopy(document)
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    application = config["applications"][0]
    application["import_path"] = "bench.mock:build"
    args = application.setdefault("args", {})
    args["cache"] = {"enabled": False}
    args["ingress"] = {**args.get("ingress", {}), "num_replicas": 2}
    args["model"] = {
        "backend": "mock",
        "num_replicas": 2,
        "max_num_seqs": options.streams,
        "max_num_batched_tokens": max(512, options.streams + 256),
        "mock_token_interval_s": TOKEN_INTERVAL_S,
    }
    return config


def table(tally: Tally, injector: FaultInjector, took_s: float) -> str:
    """The outcome, as Markdown."""
    cuts = sum(injector.faults[fault] for fault in ("fin", "reset", "vanish"))
    rows = {
        "streams": tally.streams,
        "ended with the whole text": tally.whole,
        "connections": injector.connections,
        "cut (FIN, RST, silence and then RST)": cuts,
        "stalled, then went on": injector.faults["stall"],
        "slow for a while": injector.faults["delay"],
        "resumes": tally.resumed,
        "duplicates": tally.doubled,
        "gaps": tally.missing,
        "wrong text": tally.wrong,
        "lost": sum(tally.lost.values()),
        "seconds": round(took_s),
    }
    lines = ["| what | number |", "|---|---|"]
    lines += [f"| {name} | {number:,} |" for name, number in rows.items()]
    return "\n".join(lines + [f"\nlost: {number} x {why}" for why, number in tally.lost.items()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=600, help="of each answer, at 20 a second")
    parser.add_argument("--faults-per-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not 1 <= options.tokens <= MAX_ANSWER_TOKENS:
        raise SystemExit(f"tokens is {options.tokens}, allowed are 1 to {MAX_ANSWER_TOKENS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document = yaml.safe_load(options.config.read_text())
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        file = Path(folder) / "serve_config.yaml"
        file.write_text(yaml.safe_dump(server_config(document, port, options)))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        try:
            with serving(command, f"http://127.0.0.1:{port}"):
                tally, injector, took_s = asyncio.run(run(port, options))
        except ClusterFailed as error:
            raise SystemExit(str(error)) from error
    print(", ".join(f"{name}: {value}" for name, value in conditions().items()) + "\n")
    print(table(tally, injector, took_s))
    if not tally.is_clean:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
