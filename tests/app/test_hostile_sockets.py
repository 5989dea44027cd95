"""Sockets that are made to hurt, beside fifty honest streams that must not notice."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from app.settings import parse_settings
from app.web import build_web
from app.websocket_protocol import Peers, PeerSettings, WebSocketProtocol
from tests.app.stack import PATIENCE_S, running_stack, served
from tests.app.talker import talking

MIB = 1024 * 1024
CONT, TEXT, BINARY, CLOSE, PING = 0, 1, 2, 8, 9
NUM_SOCKETS, STREAMS_EACH = 10, 5
PROMPTS = {
    f"s{number}": f"Stream {number} says its own words, né 👩\u200d💻! "
    for number in range(STREAMS_EACH)
}
STEP_S = 0.002


class Protocol(WebSocketProtocol):
    """What Serve's servers speak, but for the watch over lost peers."""

    peers = Peers(PeerSettings(keepalive_idle_s=0, unacked_timeout_s=0))


def frame(opcode: int, data: bytes, *, fin: bool = True, rsv1: bool = False) -> bytes:
    """A client's frame, masked with zeros."""
    head = bytes([opcode | 0x80 * fin | 0x40 * rsv1])
    size = len(data)
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 2**16:
        head += struct.pack(">BH", 0x80 | 126, size)
    else:
        head += struct.pack(">BQ", 0x80 | 127, size)
    return head + bytes(4) + data


@dataclass
class Answer:
    """What a hostile client got: the headers, every frame, and the code of the close."""

    headers: str = ""
    frames: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None


class Raw:
    """A client that sends any bytes; blocking, for a thread of its own."""

    def __init__(self, address: tuple[str, int], offers: str = "") -> None:
        self.answer = Answer()
        self._socket = socket.create_connection(address, timeout=PATIENCE_S)
        self._received = b""
        self._socket.sendall(
            b"GET /v1/infer HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            + offers.encode()
            + b"\r\n"
        )
        while b"\r\n\r\n" not in self._received:
            self._received += self._socket.recv(4096)
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        self.answer.headers = head.decode().lower()

    def send(self, *parts: bytes) -> None:
        """Sends as much of it as the server takes before it closes."""
        try:
            for part in parts:
                self._socket.sendall(part)
        except ConnectionError:
            pass

    def read_all(self) -> Answer:
        """Reads until the server closes."""
        while self.answer.code is None and self._read_frame():
            pass
        self._socket.close()
        return self.answer

    def read_frames(self, count: int) -> Answer:
        while len(self.answer.frames) < count and self._read_frame():
            pass
        self._socket.close()
        return self.answer

    def _read_frame(self) -> bool:
        if not self._await(2):
            return False
        size, start = self._received[1] & 0x7F, 2
        if size == 126:
            self._await(4)
            size, start = int.from_bytes(self._received[2:4]), 4
        self._await(start + size)
        opcode = self._received[0] & 0x0F
        data = self._received[start : start + size]
        self._received = self._received[start + size :]
        if opcode == CLOSE:
            self.answer.code = int.from_bytes(data[:2])
        elif opcode in (TEXT, BINARY):
            self.answer.frames.append(json.loads(data if opcode == TEXT else data[6:]))
        return True

    def _await(self, size: int) -> bool:
        while len(self._received) < size:
            try:
                data = self._socket.recv(65536)
            except ConnectionError:
                return False
            if not data:
                return False
            self._received += data
        return True


Attack = Callable[[tuple[str, int]], Answer]


def floods_fragments(data: bytes) -> Attack:
    def attack(address: tuple[str, int]) -> Answer:
        raw = Raw(address)
        raw.send(frame(TEXT, b"{", fin=False), *[frame(CONT, data, fin=False) * 1000] * 300)
        return raw.read_all()

    return attack


def claims(size: int) -> Attack:
    """The header of a frame, of which only a little comes."""

    def attack(address: tuple[str, int]) -> Answer:
        raw = Raw(address)
        raw.send(b"\x81" + struct.pack(">BQ", 0x80 | 127, size) + bytes(4) + b"x" * 1000)
        return raw.read_all()

    return attack


def sends(*frames: bytes, offers: str = "") -> Attack:
    def attack(address: tuple[str, int]) -> Answer:
        raw = Raw(address, offers)
        raw.send(*frames)
        return raw.read_all()

    return attack


def repeats(message: str, times: int = 3) -> Attack:
    """The same message again and again, each of which is answered."""

    def attack(address: tuple[str, int]) -> Answer:
        raw = Raw(address)
        raw.send(*[frame(TEXT, message.encode())] * times)
        return raw.read_frames(1 + times)

    return attack


DEFLATE = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"
DEEP = '{"type":"PING","x":' + "[" * 400_000 + "]" * 400_000 + "}"
MARKS = '{"type":"' + "e" + "\u0301" * 40_000 + '"}'
IN_HALVES = (
    frame(TEXT, '{"type":"PING","x":"é'.encode()[:-1], fin=False),
    frame(CONT, b"\xc3\xa9", fin=True),
)
WIDE = '{"type":"PING","x":[' + "[]," * 300_000 + "[]]}"

CLOSED: dict[str, tuple[Attack, int, str | None]] = {
    "fragments of one byte": (floods_fragments(b"x"), 1009, None),
    "empty fragments": (floods_fragments(b""), 1009, None),
    "a frame of 16 MiB": (sends(frame(TEXT, b"x" * 16 * MIB)), 1009, "input_too_large"),
    "a message of 16 MiB in fragments": (
        sends(
            frame(BINARY, b"\x01" * MIB, fin=False),
            *[frame(CONT, b"\x01" * MIB, fin=False)] * 14,
            frame(CONT, b"\x01" * MIB),
        ),
        1009,
        "input_too_large",
    ),
    "a frame above 16 MiB": (claims(16 * MIB + 1), 1009, None),
    "a frame that claims exabytes": (claims(2**62), 1009, None),
    "a compressed frame": (
        sends(frame(TEXT, b"\xaa" * 1000, rsv1=True), offers=DEFLATE),
        1002,
        None,
    ),
    "UTF-8 that breaks between fragments": (sends(*IN_HALVES), 1007, None),
}
REFUSED = {
    "bombs of lists": (repeats(DEEP), "invalid_request"),
    "very many lists": (repeats(WIDE), "invalid_request"),
    "NaN": (
        repeats('{"type":"INFER_REQ","id":"a","prompt":"x","top_p":NaN}', 200),
        "invalid_request",
    ),
    "lone surrogates": (repeats('{"type":"CANCEL","id":"\\ud800"}', 200), "invalid_request"),
    "stacked marks": (repeats(MARKS), "invalid_frame"),
}


@asynccontextmanager
async def honest_streams() -> AsyncIterator[tuple[tuple[str, int], Callable[[], Any]]]:
    """A server, and a function that has fifty streams answered and checks each."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_stack(max_num_seqs=64, token_interval_s=STEP_S)
        )
        web = build_web(running.graph, parse_settings({"limits": {"resume_window_s": 0}}))
        address = await stack.enter_async_context(served(web, ws=Protocol))
        url = f"ws://{address[0]}:{address[1]}/v1/infer"
        talkers = [await stack.enter_async_context(talking(url)) for _ in range(NUM_SOCKETS)]

        async def stream() -> float:
            """Returns how long it took, in seconds."""

            async def talk(number: int) -> None:
                talker = talkers[number]
                for id, prompt in PROMPTS.items():
                    await talker.ask(id, f"{number}: {prompt}")
                for id, prompt in PROMPTS.items():
                    done = await talker.last_of(id)
                    assert done["finish_reason"] == "stop"
                    assert talker.text(id) == f"{number}: {prompt}"

            started = time.monotonic()
            await asyncio.gather(*map(talk, range(NUM_SOCKETS)))
            return time.monotonic() - started

        yield address, stream
        await running.until_idle()


async def beside_honest_streams(attacks: Mapping[str, Attack]) -> dict[str, Answer]:
    """The answers to attacks that run all at a time, beside honest streams before, during and after."""
    async with honest_streams() as (address, stream):
        alone_s = await stream()
        attacking = [
            asyncio.create_task(asyncio.to_thread(each, address)) for each in attacks.values()
        ]
        beside_s = await stream()
        async with asyncio.timeout(PATIENCE_S):
            answers = dict(zip(attacks, await asyncio.gather(*attacking), strict=True))
        assert beside_s < 10 * max(alone_s, 1.0)
        await stream()
    for answer in answers.values():
        assert answer.frames.pop(0)["type"] == "HELLO"
    return answers


async def test_sockets_that_hurt_are_closed_with_their_codes_and_nobody_notices() -> None:
    answers = await beside_honest_streams({name: attack for name, (attack, *_) in CLOSED.items()})
    got = {
        name: (answer.code, *(each["code"] for each in answer.frames))
        for name, answer in answers.items()
    }
    assert got == {name: tuple(filter(None, codes)) for name, (_, *codes) in CLOSED.items()}
    assert not any("permessage-deflate" in answer.headers for answer in answers.values())


async def test_messages_that_hurt_are_refused_one_by_one_and_nobody_notices() -> None:
    answers = await beside_honest_streams({name: attack for name, (attack, _) in REFUSED.items()})
    got = {name: {each["code"] for each in answer.frames} for name, answer in answers.items()}
    assert got == {name: {code} for name, (_, code) in REFUSED.items()}
    assert {answer.code for answer in answers.values()} == {None}
