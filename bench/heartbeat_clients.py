"""WebSocket clients that can be stopped, cut off or broken from outside.

    python -m bench.heartbeat_clients < PLAN

holds the connections of a plan, a line of JSON, until a second line comes: it reads them, answers
every ping, and asks again when an answer has ended. Prints `ready` when every stream has begun,
and at the end a JSON object: the connections that were closed, and when.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from bench.ends import NAME_HEADER
from bench.wire_clients import (
    CLOSE,
    HEAD_END,
    KEY,
    PING,
    PONG,
    ConnectionFailed,
    encode_frame,
    split_frames,
)

ANSWER_TOKENS = 4096
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Plan:
    """One connection.

    Args:
        name: by which the ingress notes its end.
        streams: whether it asks.
        receive_buffer: bytes that the system keeps for it unread; None: as many as usual.
    """

    name: str
    streams: bool = False
    receive_buffer: int | None = None


class Peer:
    """One connection that has had its HELLO.

    Raises:
        ConnectionFailed: the server does not accept.
        OSError: nothing listens there, or nothing comes.
    """

    def __init__(self, host: str, port: int, plan: Plan) -> None:
        self.plan = plan
        self.tokens = 0
        self._pending = b""
        self.socket = socket.socket()
        if plan.receive_buffer is not None:
            # Before connecting: the window is agreed on then.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, plan.receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect((host, port))
            self._shake_hands(f"{host}:{port}")
            while not any(frame["type"] == "HELLO" for frame in self.read()):
                pass
        except BaseException:
            self.socket.close()
            raise

    def ask(self) -> None:
        """Starts a stream without credit: it is sent as fast as it is computed."""
        self.send(
            type="INFER_REQ",
            id="r",
            prompt=f"question of {self.plan.name}",
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            cache="bypass",
        )

    def send(self, **frame: Any) -> None:
        self.socket.sendall(encode_frame(json.dumps(frame).encode()))

    def read(self) -> list[dict[str, Any]]:
        """Waits for something and takes it; heartbeats are answered, an ended answer asked again.

        Raises:
            ConnectionFailed: the server has closed.
            OSError: the connection is broken.
        """
        messages, self._pending = split_frames(self._pending)
        if not messages:
            # What came right behind the handshake is here already.
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionFailed("the server has closed")
            messages, self._pending = split_frames(self._pending + data)
        frames: list[dict[str, Any]] = []
        for opcode, payload in messages:
            if opcode == CLOSE:
                raise ConnectionFailed(f"closed with {int.from_bytes(payload[:2])}")
            if opcode == PING:
                self.socket.sendall(encode_frame(payload, PONG))
            else:
                frames.append(json.loads(payload))
                self._take(frames[-1])
        return frames

    def _take(self, frame: dict[str, Any]) -> None:
        if frame["type"] == "INFER_CHUNK":
            self.tokens += 1
        elif frame["type"] == "PING":
            self.send(type="PONG", ts=frame.get("ts"))
        elif frame["type"] == "ERROR":
            raise ConnectionFailed(f"{frame['code']}: {frame['message']}")
        elif frame["type"] == "INFER_DONE" and self.plan.streams:
            self.ask()

    def finish(self) -> None:
        """Sends a FIN, and goes on reading nothing."""
        self.socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Sends an RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _shake_hands(self, host: str) -> None:
        self.socket.sendall(
            f"GET /v1/infer HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: {KEY}\r\n{NAME_HEADER}: {self.plan.name}\r\n"
            "Sec-WebSocket-Protocol: seedance.v1.json\r\n\r\n".encode()
        )
        while HEAD_END not in self._pending:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionFailed("the server does not answer")
            self._pending += data
        head, _, self._pending = self._pending.partition(HEAD_END)
        if not head.startswith(b"HTTP/1.1 101"):
            raise ConnectionFailed(f"the server answered {head.splitlines()[0]!r}")


def hold(peers: Sequence[Peer], commands: TextIO) -> Iterator[dict[str, float]]:
    """Serves all peers until a line comes. Yields when every stream has begun, and at the end.

    Yields:
        the names of those that were closed by now, and when.
    """
    closed: dict[str, float] = {}
    has_begun = False
    with selectors.DefaultSelector() as selector:
        selector.register(commands, selectors.EVENT_READ)
        for peer in peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
            if peer.plan.streams:
                peer.ask()
        is_over = False
        while not is_over:
            if not has_begun and all(peer.tokens for peer in peers if peer.plan.streams):
                has_begun = True
                yield closed
            for key, _ in selector.select():
                peer = key.data
                if peer is None:
                    is_over = True
                    continue
                try:
                    peer.read()
                except (ConnectionFailed, OSError):
                    closed[peer.plan.name] = time.monotonic()
                    selector.unregister(peer.socket)
    yield closed


def main() -> int:
    told = json.loads(sys.stdin.readline())
    plans = [Plan(**plan) for plan in told["plans"]]
    peers = [Peer(told["host"], told["port"], plan) for plan in plans]
    states = hold(peers, sys.stdin)
    next(states)
    print("ready", flush=True)
    print(json.dumps(next(states)), flush=True)
    return 0


def plan_line(host: str, port: int, plans: Sequence[Plan]) -> str:
    """What `main` reads first."""
    return json.dumps({"host": host, "port": port, "plans": [asdict(plan) for plan in plans]})


if __name__ == "__main__":
    sys.exit(main())
