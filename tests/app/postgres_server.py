"""A real PostgreSQL server of a test's own."""

from __future__ import annotations

import asyncio
import glob
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 60.0
OWNER = "seedance"


def find_programs() -> Path:
    """The folder with `initdb`; the test is skipped where there is none, or no driver."""
    pytest.importorskip("asyncpg")
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += [Path(each).parent for each in glob.glob("/usr/lib/postgresql/*/bin/initdb")]
    if not folders:
        pytest.skip("PostgreSQL is not installed: no initdb in PATH or /usr/lib/postgresql")
    return folders[0]


def _other_user() -> dict[str, Any]:
    """PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL does not run as root, and there is neither postgres nor nobody")


class PostgresServer:
    """A server on a port of its own that can be stopped hard and started again."""

    def __init__(self) -> None:
        self._programs = find_programs()
        self._user = _other_user()
        self._folder = Path(tempfile.mkdtemp(prefix="seedance-pg-"))
        if self._user:
            os.chown(self._folder, self._user["user"], self._user["group"])
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        initdb = str(self._programs / "initdb")
        options = ["-D", str(self._folder / "data"), "-U", OWNER, "-A", "trust", "--no-sync"]
        subprocess.run([initdb, *options], check=True, capture_output=True, cwd="/", **self._user)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{OWNER}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = {"listen_addresses": "127.0.0.1", "port": self.port, "fsync": "off"}
        options |= {"unix_socket_directories": "", "max_connections": 50}
        command: list[Any] = [self._programs / "postgres", "-D", self._folder / "data"]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **self._user
        )
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._run("SELECT 1")
                return
            except Exception:
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < give_up_s, "the server does not start"
                time.sleep(0.1)

    def stop(self) -> None:
        """Breaks every connection and ends."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE_S)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self) -> str:
        """The URL of one that is empty."""
        name = f"d{next(self._numbers)}"
        self._run(f"CREATE DATABASE {name}")
        return self.url(name)

    def _run(self, sql: str) -> None:
        async def run() -> None:
            import asyncpg  # type: ignore[import-untyped]

            connection = await asyncpg.connect(self.url(), timeout=5)
            try:
                await connection.execute(sql)
            finally:
                await connection.close()

        # In a thread of its own: a test may be running a loop here.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, run()).result()
