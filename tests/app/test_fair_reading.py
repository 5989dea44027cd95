from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.websockets import WebSocket

from app.fair_reading import MAX_UNTAKEN_BYTES, FairReading
from tests.app.stack import PATIENCE_S, eventually, served
from tests.app.test_hostile_sockets import CLOSE, CONT, PING, TEXT, frame

BURST = 65536


class Listener:
    """An application that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        while True:
            await self.may_read.wait()
            message = await websocket.receive()
            self.heard.append(message.get("text", message.get("code")))
            if message["type"] == "websocket.disconnect":
                return


class Peers:
    """The protocols of one server, as they come."""

    def __init__(self) -> None:
        self.all: list[FairReading] = []

    def __call__(self, *args: Any, **kwargs: Any) -> FairReading:
        self.all.append(FairReading(*args, **kwargs))
        return self.all[-1]


@asynccontextmanager
async def listening(
    listener: Listener,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, FairReading]]:
    """A client that has shaken hands, and the server's end of it."""
    peers = Peers()
    async with asyncio.timeout(PATIENCE_S), served(listener, ws=peers) as address:  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(
            b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        yield reader, writer, peers.all[0]
        writer.close()


async def turns_while(data: bytes, protocol: FairReading) -> int:
    """Takes data in one go, as a transport may; returns how often the loop went round meanwhile."""
    protocol.data_received(data)
    turns = 0
    while protocol._unread:
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_a_burst_of_tiny_frames_is_read_in_turns_and_in_order() -> None:
    listener = Listener()
    async with listening(listener) as (_, _, protocol):
        texts = [str(number) for number in range(4000)]
        assert (
            await turns_while(b"".join(frame(TEXT, each.encode()) for each in texts), protocol) > 40
        )
        await eventually(lambda: len(listener.heard) == len(texts))
        assert listener.heard == texts


async def test_large_frames_are_read_as_fast_as_they_come() -> None:
    listener = Listener()
    async with listening(listener) as (_, writer, protocol):
        assert await turns_while(frame(TEXT, b"x" * BURST), protocol) < 40
        started = time.perf_counter()
        writer.write(frame(TEXT, b"y" * 8 * 1024 * 1024))
        await eventually(lambda: len(listener.heard) == 2)
        assert time.perf_counter() - started < 5
        assert list(map(len, listener.heard)) == [BURST, 8 * 1024 * 1024]


async def test_what_comes_before_a_goodbye_is_heard_and_so_is_the_goodbye() -> None:
    listener = Listener()
    async with listening(listener) as (reader, writer, _):
        goodbye = (1000).to_bytes(2)
        writer.write(frame(TEXT, b"x") * 3000 + frame(CLOSE, goodbye))
        writer.write_eof()
        await eventually(lambda: 1000 in listener.heard)
        assert listener.heard == ["x"] * 3000 + [1000]
        assert await reader.read() == b"\x88\x02" + goodbye


async def test_nothing_more_is_read_while_what_came_is_not_taken() -> None:
    listener = Listener()
    async with listening(listener) as (_, _, protocol):
        listener.may_read.clear()
        protocol.data_received(frame(TEXT, b"first"))
        protocol.data_received(frame(TEXT, b"x") * 5000)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not protocol.transport.is_reading()
        assert len(protocol._unread) > 30_000
        listener.may_read.set()
        await eventually(lambda: len(listener.heard) == 5001)
        await eventually(protocol.transport.is_reading)


async def test_a_client_that_pings_and_reads_nothing_costs_a_bounded_memory() -> None:
    listener = Listener()
    async with listening(listener) as (reader, writer, protocol):
        pings = frame(PING, b"p" * 125) * 1000

        async def flood() -> None:
            while True:
                writer.write(pings)
                await writer.drain()

        flooding = asyncio.create_task(flood())
        waiting = protocol.transport.get_write_buffer_size
        await eventually(lambda: waiting() > MAX_UNTAKEN_BYTES)
        for _ in range(200):
            await asyncio.sleep(0)
            assert waiting() < MAX_UNTAKEN_BYTES + 64 * 1024
        assert not protocol.transport.is_reading()
        flooding.cancel()
        # It reads at last: everything is answered, and it is heard again.
        writer.write(frame(TEXT, b"still here"))
        while "still here" not in listener.heard:
            await reader.read(1024 * 1024)


async def test_a_message_in_tiny_fragments_is_refused_and_one_in_many_is_not() -> None:
    listener = Listener()
    async with listening(listener) as (reader, writer, _):
        writer.write(frame(TEXT, b"x" * 64, fin=False))
        writer.write(frame(CONT, b"x" * 64, fin=False) * 4000 + frame(CONT, b"x" * 64))
        writer.write(frame(TEXT, b"", fin=False) + frame(CONT, b"y", fin=False) * 1000)
        writer.write(frame(CONT, b""))
        await eventually(lambda: len(listener.heard) == 2)
        assert listener.heard == ["x" * 64 * 4002, "y" * 1000]
        writer.write(frame(TEXT, b"", fin=False) + frame(CONT, b"z", fin=False) * 5000)
        closed = await reader.read()
        assert closed[2:4] == (1009).to_bytes(2)
        assert b"fragments" in closed
    assert listener.heard[2:] == [1009]
