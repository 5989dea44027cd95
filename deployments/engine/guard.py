"""Ends processes that another package started for us when ours dies, however it dies.

A killed process has no last words, and theirs would keep a GPU's memory for ever. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import os, signal, sys
sys.stdin.buffer.read()
for pid, started in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == started:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""
"""Reads until the pipe from our process closes. A number that went to another process since then
has another start."""


class ProcessGuard:
    """A process that waits for the end of ours, and then ends others.

    Args:
        pids: of these.
    """

    def __init__(self, pids: set[int]) -> None:
        arguments = [word for pid in sorted(pids) for word in (str(pid), _started(pid))]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, *arguments],
            stdin=subprocess.PIPE,
            # An interrupt from the keyboard is for ours.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Ends the guard, and nobody else."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def child_pids() -> set[int]:
    """This process's children."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine did."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
