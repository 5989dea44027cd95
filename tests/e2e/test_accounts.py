"""Keys made and revoked on a real cluster while it serves, and its usage after its end."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.key_commands import KeyCommands
from app.settings import parse_settings
from tests.e2e.cluster import Server, running_server

pytestmark = pytest.mark.serve

TAKEN_WITHIN_S = 30.0
"""Ten times what it takes, on a machine that has other things to do."""


class Asker:
    """Asks the mock over HTTP."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.url}/v1/completions"

    def ask(self, key: str | None = None, **fields: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"prompt": "hi", "max_tokens": 3, "cache": "bypass", **fields}
        return httpx.post(self._url, json=body, headers=headers, timeout=60)

    def until(self, status: int, key: str | None = None) -> None:
        give_up_s = time.monotonic() + TAKEN_WITHIN_S
        while self.ask(key).status_code != status:
            assert time.monotonic() < give_up_s, f"no {status}"
            time.sleep(0.2)


def made_by(commands: KeyCommands, capsys: pytest.CaptureFixture[str], tenant: str) -> list[str]:
    """The id and the key."""
    commands.create(tenant, [])
    return [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]]


def test_keys_open_and_close_a_running_server_and_the_usage_outlives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "accounts.sqlite3"
    accounts = {"url": f"sqlite:///{file}", "flush_s": 600.0}
    args = {"model": {"backend": "mock", "mock_token_interval_s": 0.01}, "accounts": accounts}
    commands = KeyCommands(parse_settings(args))
    with running_server(**args, auth={}, cache={"enabled": False}) as server:
        asker = Asker(server)
        assert asker.ask().status_code == 200
        assert "Auth:   off" in server.log.read_text()
        red_id, red = made_by(commands, capsys, "red")
        asker.until(401)
        asker.until(200, red)
        _, blue = made_by(commands, capsys, "blue")
        asker.until(200, blue)
        asked = [asker.ask(blue, prompt=f"question {number}") for number in range(3)]
        assert {reply.status_code for reply in asked} == {200}
        commands.revoke(red_id)
        asker.until(401, red)
        assert asker.ask(blue).status_code == 200
    with contextlib.closing(sqlite3.connect(file)) as database:
        rows = database.execute("SELECT tenant, requests, completion_tokens FROM usage_days")
        used = {tenant: (requests, tokens) for tenant, requests, tokens in rows}
    assert used.keys() == {"default", "red", "blue"}
    assert used["blue"] == (5, 15)
