"""A real Redis or Valkey server of a test's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

PATIENCE_S = 20.0


def find_server() -> str:
    """The program; the test is skipped where there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    return found


class RedisServer:
    """A server on a port of its own that can be stopped hard and started again."""

    def __init__(self, folder: Path) -> None:
        self._program = find_server()
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts with what the file of a former run holds."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        with open(self._folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(
                [self._program, *options, "--save", "", "--appendonly", "yes"],
                stdout=log,
                stderr=log,
            )
        give_up_s = time.monotonic() + PATIENCE_S
        with redis.Redis.from_url(self.url, socket_timeout=1) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert time.monotonic() < give_up_s, "the server does not start"
                    time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
