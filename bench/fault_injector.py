"""A TCP relay that does to connections what tunnels, lifts and bad access points do.

Each connection through it is relayed to one address, until a `Fault` befalls it: cut at once
(with FIN or with RST), silent for a while and then going on, silent for good, or slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Fault = Literal["fin", "reset", "stall", "vanish", "delay"]
FAULTS: tuple[Fault, ...] = ("fin", "reset", "stall", "vanish", "delay")
CHUNK_BYTES = 65536
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on and 0 s: closing resets the connection."""


class Wire:
    """One relayed connection."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._ends = (near, far)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.delay_s = 0.0
        self.is_broken = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relays one direction until its end, or until the wire breaks."""
        with contextlib.suppress(ConnectionError, OSError):
            while data := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self.delay_s)
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
        self.close()

    def close(self, *, reset: bool = False) -> None:
        self.is_broken = True
        self._is_open.set()
        for end in self._ends:
            if reset:
                raw = end.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.transport.abort()
            else:
                end.close()

    async def suffer(self, fault: Fault, duration_s: float) -> None:
        """Goes through a fault; `duration_s` is how long the passing ones take."""
        if fault in ("fin", "reset"):
            self.close(reset=fault == "reset")
        elif fault == "delay":
            self.delay_s = duration_s / 10
            await asyncio.sleep(duration_s)
            self.delay_s = 0.0
        else:
            self._is_open.clear()
            await asyncio.sleep(duration_s)
            if fault == "vanish":
                # Both ends hear of it only now, and neither in words.
                self.close(reset=True)
            self._is_open.set()


class FaultInjector:
    """The relay; enter `listening` to start it."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._wires: set[Wire] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.faults: Counter[Fault] = Counter()
        self.connections = 0

    @property
    def wires(self) -> list[Wire]:
        """Connections that are whole now."""
        return [wire for wire in self._wires if not wire.is_broken]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FaultInjector]:
        server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for wire in self.wires:
                wire.close(reset=True)
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def inject(self, wire: Wire, fault: Fault, duration_s: float) -> None:
        self.faults[fault] += 1
        await wire.suffer(fault, duration_s)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(
        self, near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            near_writer.close()
            return
        self.connections += 1
        wire = Wire(near_writer, far_writer)
        self._wires.add(wire)
        try:
            await asyncio.gather(
                wire.carry(near_reader, far_writer), wire.carry(far_reader, near_writer)
            )
        finally:
            self._wires.discard(wire)
