"""The guard: what was started for a process goes with it, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import cast

import pytest

from deployments.engine.guard import ProcessGuard, child_pids

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

WAIT_S = 20.0
PARENT = """
import subprocess, sys, time
from deployments.engine.guard import ProcessGuard, child_pids
before = child_pids()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(pid,) = child_pids() - before
guard = ProcessGuard({pid})
print(pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_what_a_killed_process_had_started_is_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))


def test_a_guard_that_is_dismissed_ends_nobody() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        assert child.pid in child_pids()
        guard = ProcessGuard({child.pid})
        guard.dismiss()
        assert guard._process.returncode is not None
        assert is_alive(child.pid)
        os.kill(child.pid, signal.SIGKILL)


def test_a_process_that_got_the_number_of_a_dead_one_is_spared() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        guard = ProcessGuard({child.pid})
        *command, pid, started = cast(list[str], guard._process.args)
        assert int(pid) == child.pid
        guard.dismiss()
        later = [*command, pid, str(int(started) + 1)]
        subprocess.run(later, stdin=subprocess.DEVNULL, check=True)
        assert is_alive(child.pid)
        os.kill(child.pid, signal.SIGKILL)
