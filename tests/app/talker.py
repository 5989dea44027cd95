"""A client of `seedance.v1` for tests: it sends whatever it is told and keeps all it hears."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.app.stack import PATIENCE_S
from tests.protocol.fakes import framed

Frame = dict[str, Any]
LAST = ("INFER_DONE", "ERROR")


class Talker:
    """One socket; `frames` holds what was heard since HELLO, `hello` the greeting."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.hello: Frame = {}
        self.frames: list[Frame] = []

    async def send(self, type: str, *, binary: bool = False, **fields: Any) -> None:
        text = json.dumps({"type": type, **fields})
        await self.send_raw(framed(text) if binary else text)

    async def send_raw(self, data: str | bytes) -> None:
        await self.connection.send(data)

    async def ask(self, id: str, prompt: str = "hi", **fields: Any) -> None:
        """A greedy completion that asks nothing of the cache; forgets what `id` meant before."""
        self.forget(id)
        own = {"temperature": 0, "cache": "bypass", **fields}
        await self.send("INFER_REQ", id=id, prompt=prompt, **own)

    async def hear(self) -> Frame:
        """The next frame; `form` tells how it came, and `seq` stands where JSON has it."""
        async with asyncio.timeout(PATIENCE_S):
            data = await self.connection.recv()
        frame: Frame = json.loads(data if isinstance(data, str) else data[6:])
        if isinstance(data, bytes):
            version, flags, seq = struct.unpack_from(">BBI", data)
            assert version == 1
            assert bool(flags & 1) == (frame["type"] == "INFER_DONE")
            frame["seq"] = seq
        frame["form"] = "text" if isinstance(data, str) else "binary"
        self.frames.append(frame)
        return frame

    async def until(self, *types: str, id: str | None = None) -> Frame:
        """The next frame of one of these types, of this id if one is given."""
        while True:
            frame = await self.hear()
            if frame["type"] in types and id in (None, frame.get("id")):
                return frame

    async def last_of(self, id: str) -> Frame:
        """The frame that ended a request, heard before or yet to come."""
        heard = [frame for frame in self.of(id) if frame["type"] in LAST]
        return heard[0] if heard else await self.until(*LAST, id=id)

    async def answer(self, id: str, prompt: str = "hi", **fields: Any) -> str:
        """Asks, and returns the whole text of the answer."""
        await self.ask(id, prompt, **fields)
        done = await self.last_of(id)
        assert done["type"] == "INFER_DONE", done
        return self.text(id)

    async def sync(self) -> None:
        """Returns when the server has read all that was sent before."""
        await self.send("PING", ts=(mark := len(self.frames) + 0.5))
        while (await self.until("PONG"))["ts"] != mark:
            pass

    def forget(self, id: str) -> None:
        self.frames = [frame for frame in self.frames if frame.get("id") != id]

    def of(self, id: str) -> list[Frame]:
        return [frame for frame in self.frames if frame.get("id") == id]

    def text(self, id: str) -> str:
        return "".join(frame["text"] for frame in self.of(id) if frame["type"] == "INFER_CHUNK")

    async def closed_with(self) -> int:
        """The code with which the server closes; frames before it are kept."""
        try:
            while True:
                await self.hear()
        except ConnectionClosed:
            assert self.connection.close_code is not None
            return self.connection.close_code

    def reset(self) -> None:
        """Cuts the connection by a RST."""
        raw: socket.socket = self.connection.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.transport.abort()

    def finish(self) -> None:
        """Cuts the connection by a FIN, without a close frame."""
        self.connection.transport.write_eof()


@asynccontextmanager
async def talking(
    url: str, *, subprotocols: tuple[str, ...] = (), key: str | None = None, **options: Any
) -> AsyncIterator[Talker]:
    """Connects, and hears the greeting."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with connect(
        url,
        subprotocols=list(subprotocols) or None,  # type: ignore[arg-type]
        additional_headers=headers,
        ping_interval=None,
        close_timeout=1,
        max_queue=None,
        **options,
    ) as connection:
        talker = Talker(connection)
        talker.hello = await talker.until("HELLO")
        talker.frames.clear()
        yield talker
