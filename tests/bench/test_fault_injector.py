from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.fault_injector import FaultInjector


@asynccontextmanager
async def echo_behind() -> AsyncIterator[FaultInjector]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1024):
                writer.write(data)
        writer.close()
        ended.release()

    ended = asyncio.Semaphore(0)
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    injector = FaultInjector("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        async with injector.listening():
            yield injector
    finally:
        server.close()
        for _ in range(injector.connections):
            await ended.acquire()


async def test_bytes_go_both_ways_until_the_end() -> None:
    async with echo_behind() as injector:
        reader, writer = await asyncio.open_connection("127.0.0.1", injector.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert len(injector.wires) == 1
        writer.close()
        assert await reader.read() == b""


@pytest.mark.parametrize("fault", ["fin", "reset", "vanish"])
async def test_a_cut_is_felt_and_another_connection_is_whole(fault: str) -> None:
    async with echo_behind() as injector:
        reader, writer = await asyncio.open_connection("127.0.0.1", injector.port)
        writer.write(b"x")
        await reader.readexactly(1)
        (wire,) = injector.wires
        await injector.inject(wire, fault, 0.0)  # type: ignore[arg-type]
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            assert fault != "fin"
        writer.close()
        assert injector.wires == []
        reader, writer = await asyncio.open_connection("127.0.0.1", injector.port)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        writer.close()


async def test_a_stalled_connection_loses_nothing() -> None:
    async with echo_behind() as injector:
        reader, writer = await asyncio.open_connection("127.0.0.1", injector.port)
        writer.write(b"x")
        await reader.readexactly(1)
        (wire,) = injector.wires
        stall = asyncio.create_task(injector.inject(wire, "stall", 0.05))
        await asyncio.sleep(0)
        writer.write(b"later")
        assert await reader.readexactly(5) == b"later"
        assert stall.done()
        writer.close()
