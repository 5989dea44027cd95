"""How long an answer is still given after it was deleted, by two cache replicas and two ingresses.

    python -m bench.cache_deletion --store sqlite --times 30
    python -m bench.cache_deletion --store redis --through store

Starts a cluster of its own with the mock model. An answer is held by both ingresses (L1) and by
the store; then it is deleted while clients ask both for it all the time: through one ingress, which
tells all cache replicas, or by another process on the same store, of which they hear by its log.
Printed is, over all deletions, the time from the beginning of the deletion to the beginning of the
last request that still got the old answer, and how long the deletion itself took.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from bench.cluster import ROOT, free_port, serving
from cache.prompt_cache import CacheConfig, PromptCache
from cache.stats import EntryFilter
from cache.wall_clock import WallClock
from deployments.cache_store import StoreSpec, open_store

ASKERS = 2
"""Clients at each ingress."""
PAUSE_S = 0.01
NAME = "deletion"
OLD_S = 0.7
"""Age of an answer when it is deleted: what is made anew afterwards is younger."""
WATCHED_S = 2.0
FIELDS = {"model": "seedance-mock", "max_tokens": 4, "temperature": 0}


@dataclass
class Probe:
    """One request for the answer: when it began, where, and what came."""

    began_s: float
    ended_s: float
    tier: str | None
    age_s: float | None


@dataclass
class Asker:
    """Asks one ingress for one answer until it is told to stop."""

    url: str
    question: str
    probes: list[Probe] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as client:
            while not stop.is_set():
                self.probes.append(ask(client, self.question))
                time.sleep(PAUSE_S)


def ask(client: httpx.Client, question: str) -> Probe:
    began_s = time.monotonic()
    body = {**FIELDS, "messages": [{"role": "user", "content": question}]}
    reply = client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    outcome, *rest = reply.headers["x-seedance-cache"].split("; ")
    told = dict(each.split("=", 1) for each in rest)
    is_hit = outcome in ("exact", "semantic")
    return Probe(
        began_s,
        time.monotonic(),
        told.get("tier") if is_hit else None,
        float(told["age"]) if is_hit and "age" in told else None,
    )


Delete = Callable[[str], None]
"""Deletes the answer to a question."""


def delete_once(urls: list[str], question: str, delete: Delete) -> tuple[float, float, str]:
    """For how long the old answer was given, how long the deletion took, and by whom it was."""
    clients = [httpx.Client(base_url=url, timeout=30) for url in urls]
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        while any(ask(client, question).tier != "L1" for client in clients):
            time.sleep(0.05)
        time.sleep(OLD_S)
        askers = [Asker(url, question) for url in urls for _ in range(ASKERS)]
        stop = threading.Event()
        threads = [threading.Thread(target=each.run, args=(stop,)) for each in askers]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        began_s = time.monotonic()
        delete(question)
        took_s = time.monotonic() - began_s
        time.sleep(WATCHED_S)
        stop.set()
        for thread in threads:
            thread.join()
    stale = [
        (probe.began_s - began_s, f"{probe.tier} of {asker.url}")
        for asker in askers
        for probe in asker.probes
        if probe.age_s is not None and probe.age_s > probe.ended_s - began_s + 0.2
        and probe.began_s > began_s
    ]  # fmt: skip
    last_s, where = max(stale, default=(0.0, "nobody"))
    return last_s, took_s, where


def through_ingress(url: str) -> Delete:
    def delete(question: str) -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            deleted = client.delete("/v1/cache/entries", params={"prompt": question})
        assert deleted.json()["deleted"] > 0, deleted.text

    return delete


@contextlib.contextmanager
def through_store(spec: StoreSpec) -> Iterator[Delete]:
    clock = WallClock()
    config = CacheConfig(cold_max_bytes=2**26)
    cache = PromptCache(config, clock=clock, store=open_store(spec, spec.name, clock))

    def delete(question: str) -> None:
        assert cache.delete(EntryFilter(prompt=question)) > 0

    try:
        yield delete
    finally:
        cache.close()


@contextlib.contextmanager
def cluster(store: dict[str, Any]) -> Iterator[list[str]]:
    """Addresses of both ingresses."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sdd-") as folder:
        config["http_options"]["port"] = port
        config["applications"][0]["args"] = {
            "home": folder,
            "model": {"backend": "mock", "mock_token_interval_s": 0.001, "num_cpus": 0.1},
            "ingress": {"num_replicas": 2},
            "cache": {"semantic": False, "num_replicas": 2, "store": store},
        }
        file = Path(folder) / "serve_config.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        with serving(command, f"http://127.0.0.1:{port}") as running:
            yield ingress_urls(running.ingress_ports)


def ingress_urls(ports: range) -> list[str]:
    give_up_s = time.monotonic() + 60
    while True:
        local = [each.laddr for each in psutil.net_connections(kind="tcp")
                 if each.status == psutil.CONN_LISTEN]  # fmt: skip
        listening = {address[1] for address in local if address} & set(ports)
        urls = [f"http://127.0.0.1:{port}" for port in sorted(listening)]
        ready = [url for url in urls if is_ready(url)]
        if len(ready) == 2:
            return ready
        assert time.monotonic() < give_up_s, f"{urls} are not two ingresses"
        time.sleep(0.5)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def redis_server(program: str) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--store", choices=["sqlite", "redis"], default="sqlite")
    parser.add_argument("--redis-server", default="redis-server", metavar="PROGRAM")
    parser.add_argument("--through", choices=["ingress", "store"], default="ingress")
    parser.add_argument("--times", type=int, default=30)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        store: dict[str, Any] = {"kind": args.store, "name": NAME}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.store == "redis":
            store["url"] = stack.enter_context(redis_server(args.redis_server))
        else:
            store["path"] = str(folder / f"{NAME}.sqlite3")
        urls = stack.enter_context(cluster(store))
        delete = through_ingress(urls[0])
        if args.through == "store":
            spec = StoreSpec(args.store, folder, url=store.get("url", ""), name=NAME, timeout_s=5.0)
            delete = stack.enter_context(through_store(spec))
        lasts, tooks = [], []
        for number in range(args.times):
            last_s, took_s, where = delete_once(urls, f"Question {number}?", delete)
            print(f"{number:3} given for {last_s:.3f} s, by {where}; deletion took {took_s:.3f} s")
            sys.stdout.flush()
            lasts.append(last_s)
            tooks.append(took_s)
    print(
        f"{args.store}, through the {args.through}: given on for {statistics.median(lasts):.2f} s in the median, "
        f"{max(lasts):.2f} s at most, over 1 s {sum(last > 1 for last in lasts)} of {len(lasts)}; "
        f"the deletion took {statistics.median(tooks):.2f} s, {max(tooks):.2f} s at most"
    )


if __name__ == "__main__":
    main()
