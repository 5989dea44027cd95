"""A real local Serve cluster, started as users start it: `seedance serve CONFIG`."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from app.accounts import hash_key
from app.launcher import is_ready

ROOT = Path(__file__).resolve().parents[2]
KEY_A, KEY_B = "sk-test-a", "sk-test-b"
READY_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


@dataclass(frozen=True)
class Server:
    """A running server; `process` is the root of all processes of its cluster."""

    url: str
    log: Path
    process: psutil.Process

    @property
    def ws_url(self) -> str:
        return f"{self.url.replace('http', 'ws', 1)}/v1/infer"

    def replica_pids(self, deployment: str) -> list[int]:
        """Processes of a deployment's replicas."""
        title = f"ServeReplica:seedance:{deployment}"
        pids = []
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(title in part for part in child.cmdline()):
                    pids.append(child.pid)
        return pids


def config_for(port: int, **args: Any) -> dict[str, Any]:
    """serve_config.yaml on another port, with the keys of two tenants."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    keys = [{"tenant": name, "sha256": hash_key(key)} for name, key in (("a", KEY_A), ("b", KEY_B))]
    application = config["applications"][0]
    application["args"] |= {"auth": {"keys": keys, "allow_anonymous": True}} | args
    return config


@contextlib.contextmanager
def running_server(**args: Any) -> Iterator[Server]:
    """A server whose model is ready; nothing of it is left afterwards."""
    # Short, because Ray puts Unix sockets below it and their paths are bounded.
    folder = Path(tempfile.mkdtemp(prefix="sd-", dir="/tmp"))
    first, *ports = _free_ports(4)
    config = folder / "serve_config.yaml"
    config.write_text(yaml.safe_dump(config_for(first, **args)))
    environment = os.environ | {
        "RAY_TMPDIR": str(folder),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("RAY_ADDRESS", None)
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("seedance")), "serve", str(config)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    root = psutil.Process(process.pid)
    try:
        url = f"http://127.0.0.1:{first}"
        _wait_until_ready(url, process, log)
        yield Server(url=url, log=log, process=root)
    finally:
        _stop(process, root)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not is_ready(url):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-8000:]}")
        time.sleep(0.3)


def _stop(process: subprocess.Popen[bytes], root: psutil.Process) -> None:
    """Asks the launcher to end, then ends whatever of its processes is left."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = root.children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    if process.poll() is None:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
