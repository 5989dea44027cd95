"""Two machines on this one: network namespaces, with a wire between them that can be cut.

    clients ── head ──┐
       │              ├── router
       └──── worker ──┘

The router drops without a word what it is told to drop, as a broken network does: neither
end sees a link go down, and connections wait. Clients reach both machines by wires of
their own. Needs root on Linux with network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from bench.cpu import kind_of

ROUTER = "router"
ENDED_WITHIN_S = 15.0


@dataclass(frozen=True)
class Machine:
    """A network namespace with two addresses, of which other machines know only the first.

    Attributes:
        network: the first three bytes of its addresses; of the range for network tests
            (RFC 2544), in which nothing else lives.
    """

    name: str
    network: str

    @property
    def address(self) -> str:
        return f"{self.network}.1"

    @property
    def client_address(self) -> str:
        """Where clients outside of the namespaces reach it, whatever is cut."""
        return f"{self.network}.129"

    def command(self, *command: str) -> list[str]:
        """`command`, to be run on this machine."""
        return ["ip", "netns", "exec", self.name, *command]

    def pids(self, kind: str | None = None) -> list[int]:
        """Its living processes, all or those of a kind; see `bench.cpu`."""
        told = _ip("netns", "pids", self.name).split()
        found = []
        for pid in map(int, told):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and kind in (None, kind_of(" ".join(process.cmdline()))):
                    found.append(pid)
        return sorted(found)

    def end(self) -> None:
        """Ends all that runs on it."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)
            deadline_s = time.monotonic() + ENDED_WITHIN_S
            while self.pids() and time.monotonic() < deadline_s:
                time.sleep(0.1)


@dataclass(frozen=True)
class Network:
    """The two machines and what is between them."""

    head: Machine
    worker: Machine
    router: str

    @property
    def machines(self) -> tuple[Machine, Machine]:
        return self.head, self.worker

    def cut(self, *receivers: Machine) -> None:
        """Nothing comes from one machine to the other any more; with one receiver, only there."""
        for machine in receivers or self.machines:
            self._router("route", "add", "blackhole", machine.address)

    def heal(self) -> None:
        """Everything passes again; harmless when nothing was cut."""
        for machine in self.machines:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._router("route", "del", "blackhole", machine.address)

    def _router(self, *arguments: str) -> None:
        _ip("-netns", self.router, *arguments)


def why_no_machines() -> str | None:
    """Why there can be none here, or None."""
    if shutil.which("ip") is None or os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root and iproute2"
    probe = f"sd{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def two_machines() -> Iterator[Network]:
    """Machines without anything on them; whatever was started there ends with the context."""
    prefix = f"sd{os.getpid()}"
    # Two runs at the same time, or what a killed one has left, should not meet.
    own = os.getpid() % 256
    head = Machine(f"{prefix}-head", f"198.18.{own}")
    worker = Machine(f"{prefix}-worker", f"198.19.{own}")
    network = Network(head, worker, f"{prefix}-{ROUTER}")
    try:
        _ip("netns", "add", network.router)
        _ip("-netns", network.router, "link", "set", "lo", "up")
        # Of this namespace alone, as every setting below.
        forward = "sysctl -qw net.ipv4.ip_forward=1"
        _run("ip", "netns", "exec", network.router, *forward.split())
        for number, machine in enumerate(network.machines):
            _wire_up(machine, network.router, f"{prefix}{number}")
        for machine, other in (network.machines, network.machines[::-1]):
            _on(machine, "route", "add", f"{other.network}.0/30", "via", f"{machine.network}.2")
        yield network
    finally:
        for machine in network.machines:
            with contextlib.suppress(subprocess.CalledProcessError):
                machine.end()
        # The wires go with the namespaces that hold their ends.
        for name in (head.name, worker.name, network.router):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _wire_up(machine: Machine, router: str, link: str) -> None:
    _ip("netns", "add", machine.name)
    _on(machine, "link", "set", "lo", "up")
    inside, to_router, outside = f"{link}m", f"{link}r", f"{link}c"
    _ip("link", "add", inside, "netns", machine.name, "type", "veth",
        "peer", "name", to_router, "netns", router)  # fmt: skip
    _on(machine, "address", "add", f"{machine.network}.1/30", "dev", inside)
    _on(machine, "link", "set", inside, "up")
    _ip("-netns", router, "address", "add", f"{machine.network}.2/30", "dev", to_router)
    _ip("-netns", router, "link", "set", to_router, "up")
    _ip("link", "add", outside, "type", "veth", "peer", "name", "clients", "netns", machine.name)
    _on(machine, "address", "add", f"{machine.client_address}/30", "dev", "clients")
    _on(machine, "link", "set", "clients", "up")
    _ip("address", "add", f"{machine.network}.130/30", "dev", outside)
    _ip("link", "set", outside, "up")


def _on(machine: Machine, *arguments: str) -> None:
    _ip("-netns", machine.name, *arguments)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done: Sequence[str] = command
    return subprocess.run(done, check=True, capture_output=True, text=True, timeout=30).stdout
