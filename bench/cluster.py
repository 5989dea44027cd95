"""A Serve cluster of its own for one measurement: started, waited for, and removed without trace.

Ray's files, HAProxy's files and every port are the cluster's own, so that clusters of other
people on the machine neither disturb it nor notice it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from app.launcher import is_ready, serve_environment

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN_S = 300.0
STOPPED_WITHIN_S = 20.0
LOWEST_PORT, HIGHEST_PORT = 12_000, 32_000
MAX_INGRESSES = 100
DASHBOARD = re.compile(r"dashboard at (?:\x1b\[\d+m|http://)*([\w.]+:\d+)")


class ClusterFailed(Exception):
    """The server did not come up; the message ends with the last lines of its log."""


def free_port(count: int = 1) -> int:
    """The first of so many TCP ports in a row that nothing on this machine uses now.

    Below those that the kernel gives to outgoing connections: one of these may be taken by
    any process between this look and its use.

    Raises:
        OSError: there are none.
    """
    chance = random.SystemRandom()
    for _ in range(200):
        first = chance.randrange(LOWEST_PORT, HIGHEST_PORT - count)
        if all(map(_is_free, range(first, first + count))):
            return first
    raise OSError(f"no {count} free ports in a row from {LOWEST_PORT} to {HIGHEST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what a closed connection leaves behind is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class Cluster:
    """A running cluster: the root of all its processes, what they print, and their files.

    Attributes:
        ingress_ports: replicas that HAProxy reaches directly listen on one of these.
    """

    process: psutil.Process
    log: Path
    folder: Path
    ingress_ports: range

    def processes(self) -> list[psutil.Process]:
        """All that belong to it now, HAProxy included though its starter may have left it."""
        own = [self.process, *self.process.children(recursive=True)]
        known = {process.pid for process in own}
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if process.pid not in known and any(str(self.folder) in part for part in command):
                own.append(process)
        return own

    def dashboard_url(self) -> str:
        """Where `serve deploy` and `serve status` reach it.

        Raises:
            ClusterFailed: the log does not tell.
        """
        found = DASHBOARD.search(self.log.read_text(errors="replace"))
        if found is None:
            raise ClusterFailed(f"no dashboard is named in the log\n{_tail(self.log)}")
        return f"http://{found.group(1)}"


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    url: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Runs `command`, which serves at `url`, for as long as the context lasts.

    Args:
        environment: goes before deploy/serve.env.

    Raises:
        ClusterFailed: the command ended, or `/readyz` was not 200 in time.
    """
    # Unix sockets lie below, and their paths must stay under 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="sdb-", dir="/tmp" if os.name == "posix" else None))
    log = folder / "serve.log"
    first_port = free_port(MAX_INGRESSES)
    ingress_ports = range(first_port, first_port + MAX_INGRESSES)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(folder, ingress_ports, environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, url, log)
            yield Cluster(psutil.Process(process.pid), log, folder, ingress_ports)
        finally:
            _stop(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: Path, ingress_ports: range, extra: Mapping[str, str]) -> dict[str, str]:
    own: Mapping[str, str] = {
        "RAY_TMPDIR": str(folder),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy" / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "haproxy" / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "haproxy" / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder / "haproxy"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "haproxy" / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ingress_ports[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ingress_ports[-1]),
        # Nobody is left to drain when a measurement is over.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
    # An address would make Ray join somebody's cluster instead of starting one.
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return serve_environment({**inherited, **own, **extra})


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not is_ready(url):
        if process.poll() is not None:
            raise ClusterFailed(f"the server ended with {process.returncode}\n{_tail(log)}")
        if time.monotonic() > deadline_s:
            raise ClusterFailed(f"{url} is not ready after {READY_WITHIN_S:g} s\n{_tail(log)}")
        time.sleep(0.5)


def _tail(log: Path, num_lines: int = 40) -> str:
    # Our own polling would otherwise push the cause out of sight.
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if "/readyz" not in line][-num_lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, then force for whoever of the process's descendants is still there."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPPED_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(alive, timeout=5)
