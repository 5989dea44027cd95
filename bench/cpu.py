"""CPU time of a cluster's processes, by what they are."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

KINDS = (
    (r"SERVE_REPLICA::[^#]*#(\w+)", r"replica \1"),
    (r"ServeReplica:[^:]*:(\w+)", r"replica \1"),
    (r"ServeController", "controller"),
    (r"HAProxyManager", "HAProxy manager"),
    (r"ProxyActor", "Python proxy"),
    (r"haproxy", "HAProxy"),
    (r"/raylet/raylet ", "raylet"),
    (r"gcs_server", "GCS"),
    (r"agent\.py|main\.py.*agent", "agents"),
    (r"dashboard", "dashboard"),
    (r"log_monitor|/monitor\.py", "monitors"),
    (r"serve run|ray::", "other Ray"),
)
"""The first pattern that a command line contains names the process."""


def kind_of(command_line: str) -> str:
    """What a process of a Serve cluster is: `replica Model`, `HAProxy`, `raylet`, …"""
    for pattern, name in KINDS:
        if (found := re.search(pattern, command_line)) is not None:
            return found.expand(name)
    return "other"


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds that each process has used since it began, user and system together."""

    of_process: dict[tuple[int, float], float]
    """By pid and time of creation."""
    kinds: dict[tuple[int, float], str]

    def since(self, earlier: CpuTimes) -> dict[str, float]:
        """Seconds used between the two readings, by kind; the most expensive first."""
        used: dict[str, float] = {}
        for process, seconds in self.of_process.items():
            kind = self.kinds[process]
            used[kind] = used.get(kind, 0.0) + seconds - earlier.of_process.get(process, 0.0)
        return dict(sorted(used.items(), key=lambda item: -item[1]))


def read_cpu_times(processes: list[psutil.Process]) -> CpuTimes:
    """Reads the clocks of all that still live."""
    of_process, kinds = {}, {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            key = (process.pid, process.create_time())
            times = process.cpu_times()
            of_process[key] = times.user + times.system
            kinds[key] = kind_of(" ".join(process.cmdline()))
    return CpuTimes(of_process, kinds)


def own_cpu_s() -> float:
    """CPU seconds of this process."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)
