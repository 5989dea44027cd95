"""A network for clients that can be cut: neither end is told, as when a phone enters a tunnel.

Needs root on Linux with network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class NoTunnel(Exception):
    """There can be none here; the message says why."""


@dataclass(frozen=True)
class Tunnel:
    """A network namespace for clients, behind a router that drops without a word when told to.

    ours ── router ── clients
    """

    name: str
    router: str
    server_address: str
    client_address: str

    def command(self, *command: str) -> list[str]:
        """`command`, to be run among the clients."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        for address in (self.server_address, self.client_address):
            _ip("-netns", self.router, "route", "add", "blackhole", address)

    def heal(self) -> None:
        """Harmless when nothing was cut."""
        for address in (self.server_address, self.client_address):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("-netns", self.router, "route", "del", "blackhole", address)


@contextmanager
def tunnel() -> Iterator[Tunnel]:
    """Of the addresses for network tests (RFC 2544); nothing of it is left afterwards.

    Raises:
        NoTunnel: there can be none here.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoTunnel("cutting a network needs root and iproute2")
    prefix, own = f"sdh{os.getpid()}", os.getpid() % 200
    outer, inner = f"198.18.{own}", f"198.19.{own}"
    made = Tunnel(f"{prefix}-clients", f"{prefix}-router", f"{outer}.1", f"{inner}.1")
    try:
        for name in (made.router, made.name):
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            f"{prefix}o",
            "type",
            "veth",
            "peer",
            "name",
            "outer",
            "netns",
            made.router,
        )
        _ip("link", "add", "inner", "netns", made.router, "type", "veth",
            "peer", "name", "inside", "netns", made.name)  # fmt: skip
        _ip("address", "add", f"{outer}.1/30", "dev", f"{prefix}o")
        _ip("link", "set", f"{prefix}o", "up")
        _ip("-netns", made.router, "address", "add", f"{outer}.2/30", "dev", "outer")
        _ip("-netns", made.router, "link", "set", "outer", "up")
        _ip("-netns", made.router, "address", "add", f"{inner}.2/30", "dev", "inner")
        _ip("-netns", made.router, "link", "set", "inner", "up")
        _ip("-netns", made.name, "address", "add", f"{inner}.1/30", "dev", "inside")
        _ip("-netns", made.name, "link", "set", "inside", "up")
        _ip("-netns", made.name, "route", "add", "default", "via", f"{inner}.2")
        _ip("route", "add", f"{inner}.0/30", "via", f"{outer}.2")
        _ip("netns", "exec", made.router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    except subprocess.CalledProcessError as error:
        _remove(made)
        raise NoTunnel(f"no network namespaces here: {error.stderr.strip()}") from None
    try:
        yield made
    finally:
        _remove(made)


def _remove(made: Tunnel) -> None:
    # The wires and the routes over them go with the namespaces that hold their ends.
    for name in (made.name, made.router):
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
