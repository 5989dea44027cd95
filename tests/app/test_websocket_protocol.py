from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.config import WS_PROTOCOLS
from websockets.asyncio.client import connect

from app.launcher import ENV_FILE, HAPROXY_WRAPPER, read_env_file
from app.peer_watch import Address, TcpState
from app.serve_headers import ServeHeaders
from app.websocket_protocol import (
    PeerSettings,
    install,
    read_ends,
    read_peer_settings,
)

SWITCH = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WS_PROTOCOLS, "auto", WS_PROTOCOLS["auto"])


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """uvicorn as Serve starts it, after `install`."""
    (middleware,) = install()
    assert middleware.cls == ServeHeaders
    assert middleware.kwargs == {"is_ingress": False}, "this is no replica of Serve's"
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def talk(scope: Any, receive: Any, send: Any) -> None:
    websocket = WebSocket(scope, receive, send)
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(await websocket.receive_text())
    except WebSocketDisconnect:
        return


async def test_no_compression_is_agreed_on_though_it_was_offered() -> None:
    async with serving(talk) as port, connect(f"ws://127.0.0.1:{port}/") as client:
        assert client.response is not None
        assert "Sec-WebSocket-Extensions" not in client.response.headers
        await client.send("hello")
        assert await client.recv() == "hello"


async def test_a_client_may_close_between_two_fragments() -> None:
    heard = asyncio.get_running_loop().create_future()

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        heard.set_result(await websocket.receive())

    async with serving(listen) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        masked_with_zero = b"\x80" + bytes(4)
        writer.write(b"\x01" + masked_with_zero)  # a fragment without anything in it
        writer.write(b"\x88\x82" + bytes(4) + (1000).to_bytes(2))
        assert await reader.read() == b"\x88\x02" + (1000).to_bytes(2)
        message = await heard
        writer.close()
    assert (message["type"], message["code"]) == ("websocket.disconnect", 1000)


async def test_a_client_that_acknowledges_nothing_is_dropped_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEEDANCE_UNACKED_TIMEOUT_S", "0.05")
    silent = TcpState(unacked=1, bytes_acked=0, silent_s=60.0, rto_s=0.001)
    monkeypatch.setattr("app.websocket_protocol.own_state", lambda own: silent)
    heard = asyncio.get_running_loop().create_future()

    async def speak(scope: Any, receive: Any, send: Any) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await websocket.send_text("are you there?")
        heard.set_result(await websocket.receive())

    async with serving(speak) as port, connect(f"ws://127.0.0.1:{port}/") as client:
        async with asyncio.timeout(10):
            message = await heard
            await client.wait_closed()
    # Without a reason: the gateway keeps what such a client had for a RESUME.
    assert message == {"type": "websocket.disconnect", "code": 1005}


@pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")
async def test_tcp_asks_a_client_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_KEEPALIVE_PROBES", "7")
    options: list[int] = []

    def note(own: socket.socket, settings: PeerSettings) -> None:
        keep_alive(own, settings)
        options.extend(
            own.getsockopt(*option)
            for option in (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
            )
        )

    import app.websocket_protocol

    keep_alive = app.websocket_protocol.keep_alive
    monkeypatch.setattr(app.websocket_protocol, "keep_alive", note)
    async with serving(talk) as port, connect(f"ws://127.0.0.1:{port}/"):
        assert options == [1, 1, 1, 7]


def test_the_shipped_file_has_serve_call_it_with_the_defaults() -> None:
    pairs = read_env_file(ENV_FILE)
    assert pairs[SWITCH] == "app.websocket_protocol:install"
    assert read_peer_settings(pairs) == read_peer_settings({}) == PeerSettings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SEEDANCE_KEEPALIVE_IDLE_S", "-1"),
        ("SEEDANCE_KEEPALIVE_IDLE_S", "1.5"),
        ("SEEDANCE_KEEPALIVE_INTERVAL_S", "0"),
        ("SEEDANCE_KEEPALIVE_PROBES", "0"),
        ("SEEDANCE_UNACKED_TIMEOUT_S", "soon"),
        ("SEEDANCE_UNACKED_TIMEOUT_S", "-0.1"),
        ("SEEDANCE_UNACKED_TIMEOUT_S", "nan"),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError):
        read_peer_settings({name: value})


def test_the_ends_are_read_as_haproxy_tells_them() -> None:
    told = "198.18.0.2 51234 198.18.0.1 8000"
    assert read_ends(told) == (
        Address.of("198.18.0.2", "51234"),
        Address.of("198.18.0.1", "8000"),
    )
    assert read_ends("::1 5 ::1 80") == (Address.of("::1", "5"), Address.of("::1", "80"))


@pytest.mark.parametrize("told", ["", "a b", "unix:1 0 unix:1 0", "1.2.3.4 5 1.2.3.4", "-1 2 3 4"])
async def test_a_client_that_lies_about_its_ends_is_served(told: str) -> None:
    assert read_ends(told) is None
    headers = {"x-seedance-peer": told}
    async with (
        serving(talk) as port,
        connect(f"ws://127.0.0.1:{port}/", additional_headers=headers) as client,
    ):
        await client.send("hello")
        assert await client.recv() == "hello"


CONFIG = """\
global
    nbthread 1
defaults
    mode http
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend ours
backend ours
    mode http
"""


def wrapped(config: Path, **environment: str) -> list[str]:
    """The lines of a config once HAProxy was started with it, twice as after a reload."""
    config.write_text(CONFIG)
    told = {"SEEDANCE_HAPROXY": "/bin/echo", "PATH": "/usr/bin:/bin", **environment}
    for _ in range(2):
        subprocess.run([HAPROXY_WRAPPER, "-f", config], env=told, check=True, capture_output=True)
    return config.read_text().splitlines()


def test_haproxy_tells_the_ends_of_its_clients_and_asks_silent_ones(tmp_path: Path) -> None:
    lines = wrapped(tmp_path / "haproxy.cfg", SEEDANCE_KEEPALIVE_PROBES="5")
    at = lines.index("    bind 127.0.0.1:8000")
    told = '    http-request set-header x-seedance-peer "%[src] %[src_port] %[dst] %[dst_port]"'
    assert lines[at + 1] == told
    assert lines.count(told) == 1
    at = lines.index("defaults")
    assert lines[at + 1 : at + 5] == [
        "    option clitcpka",
        "    clitcpka-idle 1s",
        "    clitcpka-intvl 1s",
        "    clitcpka-cnt 5",
    ]
    assert lines.count("    option clitcpka") == 1


def test_haproxy_never_asks_when_it_is_told_so(tmp_path: Path) -> None:
    lines = wrapped(tmp_path / "haproxy.cfg", SEEDANCE_KEEPALIVE_IDLE_S="0")
    assert not any("clitcpka" in line for line in lines)
    assert any("x-seedance-peer" in line for line in lines)
