"""A Serve cluster of two Ray nodes, each on a machine of its own, by the config that operators copy."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.accounts import hash_key
from app.launcher import is_ready, serve_environment
from bench.cluster import ROOT
from tests.chaos.house import KEY
from tests.chaos.machines import Machine, Network, two_machines
from tests.chaos.rubbish import RUBBISH_SWITCH

CONFIG = ROOT / "deploy" / "multi_node" / "serve_config.yaml"
START_NODE = CONFIG.with_name("start_node.py")
READY_WITHIN_S = 180.0
GCS_PORT = 6379
PROXY_PORT, INGRESS_PORT = 8000, 30_000
"""On every machine; at the second, clients meet the ingress of that machine and no other."""
OBJECT_STORE_BYTES = 100_000_000


@dataclass(frozen=True)
class Nodes:
    """A running cluster; the controller is on the head."""

    network: Network
    folder: Path
    token: str

    @property
    def head(self) -> Machine:
        return self.network.head

    @property
    def worker(self) -> Machine:
        return self.network.worker

    def url(self, machine: Machine) -> str:
        """Of the machine's own proxy."""
        return f"http://{machine.client_address}:{PROXY_PORT}"

    def ws_url(self, machine: Machine, port: int = PROXY_PORT) -> str:
        return f"ws://{machine.client_address}:{port}/v1/infer"

    def metric(self, machine: Machine, name: str) -> float:
        """Summed over its labels, told by whichever ingress the machine's proxy takes.

        Raises:
            httpx.HTTPError: none answers.
        """
        reply = httpx.get(f"{self.url(machine)}/metrics", timeout=5)
        reply.raise_for_status()
        families = text_string_to_metric_families(reply.text)
        samples = (sample for family in families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    def run(self, machine: Machine, *command: str) -> str:
        """What a command on one of the machines prints.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            machine.command(*command),
            cwd=ROOT,
            env=_environment(self, machine),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def until(self, is_so: Callable[[], bool], within_s: float, what: str) -> float:
        """Waits for something; returns how many seconds it took. No answer is no.

        Raises:
            AssertionError: it took longer than `within_s`.
        """
        begun_s = time.monotonic()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if is_so():
                    return time.monotonic() - begun_s
            waited_s = time.monotonic() - begun_s
            assert waited_s < within_s, f"not within {within_s:g} s: {what}\n{self.log_ends()}"
            time.sleep(0.1)

    def log_ends(self) -> str:
        """The last of what the nodes printed."""
        return "\n".join(
            f"{log.name}: {log.read_text(errors='replace')[-2000:]}"
            for log in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def running_nodes(import_path: str, **args: Any) -> Iterator[Nodes]:
    """A cluster whose proxies both answer; nothing of it is left afterwards."""
    # Unix sockets lie below, and their paths must stay under 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="sdn-", dir="/tmp"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with two_machines() as network:
            try:
                nodes = Nodes(network, folder, secrets.token_hex(32))
                _form(nodes, processes, import_path, args)
                yield nodes
            finally:
                for machine in network.machines:
                    machine.end()
                for process in processes:
                    process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _form(
    nodes: Nodes,
    processes: list[subprocess.Popen[bytes]],
    import_path: str,
    args: Mapping[str, Any],
) -> None:
    head, worker = nodes.network.machines
    as_head = ("--head", f"--port={GCS_PORT}", f"--temp-dir={nodes.folder / 'ray'}")
    for machine, arguments in (
        (head, as_head),
        (worker, (f"--address={head.address}:{GCS_PORT}",)),
    ):
        processes.append(_start(nodes, machine, *arguments))
        _until_it_has(nodes, machine, "raylet")
    _deploy(nodes, import_path, args)
    for machine in nodes.network.machines:
        _until_ready(nodes, machine)


def _until_it_has(nodes: Nodes, machine: Machine, kind: str) -> None:
    nodes.until(lambda: bool(machine.pids(kind)), READY_WITHIN_S, f"{machine.name} has a {kind}")


def _until_ready(nodes: Nodes, machine: Machine) -> None:
    url = nodes.url(machine)
    nodes.until(lambda: is_ready(url), READY_WITHIN_S, f"{url}/readyz")


def _start(nodes: Nodes, machine: Machine, *arguments: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, str(START_NODE), *arguments, f"--node-ip-address={machine.address}",
        "--num-cpus=2", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", "--block",
    ]  # fmt: skip
    with (nodes.folder / f"{machine.name}.log").open("wb") as log:
        return subprocess.Popen(
            machine.command(*command),
            cwd=ROOT,
            env=_environment(nodes, machine),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _deploy(nodes: Nodes, import_path: str, args: Mapping[str, Any]) -> None:
    config = yaml.safe_load(CONFIG.read_text())
    application = config["applications"][0]
    application["import_path"] = import_path
    for section, changes in args.items():
        application["args"].setdefault(section, {}).update(changes)
    application["args"]["auth"] = {"keys": [{"tenant": "a", "sha256": hash_key(KEY)}]}
    file = nodes.folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    nodes.run(nodes.head, _tool("serve"), "deploy", str(file))


def _environment(nodes: Nodes, machine: Machine) -> dict[str, str]:
    """What the README says, with a home and HAProxy's files for each machine alone."""
    own = nodes.folder / ("head" if machine == nodes.head else "worker")
    own.mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return serve_environment(
        {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "HOME": str(own),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": nodes.token,
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(own / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(own / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(own / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(own),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(own / "server-state"),
            RUBBISH_SWITCH: str(nodes.folder / "rubbish"),
        }
    )


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
