"""Runs the JavaScript client, in Node or wherever, through a relay that cuts its connections."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.app.stack import PATIENCE_S

FOLDER = Path(__file__).parents[2] / "clients" / "js"
MODULE = FOLDER / "seedance.js"
ASK = """
async ({ SeedanceClient }, { url, options, messages, params, pieces, pauseMs, leaveAfter }) => {
  const pause = () => new Promise((resolve) => setTimeout(resolve, pauseMs));
  async function* paced() {
    for (const piece of pieces) {
      await pause();
      yield piece;
    }
  }
  const client = new SeedanceClient(url, options);
  try {
    const stream = client.stream(messages, { ...params, ...(pieces ? { pieces: paced() } : {}) });
    let text = "";
    const seqs = [];
    for await (const delta of stream) {
      text += delta.text;
      seqs.push(delta.seq);
      if (pauseMs && !pieces) await pause();
      if (seqs.length === leaveAfter) break;
    }
    return { text, seqs, done: stream.done, cache: stream.cache };
  } catch ({ name, code, message, param }) {
    return { error: { name, code, message, param } };
  } finally {
    client.close();
  }
}
"""
"""A JavaScript function of the client's module and a question, to what came of it."""


def node_command() -> list[str]:
    """Node with a WebSocket; skips the test where there is none."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on the PATH")
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(part) for part in told.strip().lstrip("v").split("."))
    if version < (20, 10):
        pytest.skip(f"node {told.strip()} has no WebSocket, 20.10 has one")
    return [node] if version >= (22,) else [node, "--experimental-websocket"]


async def run_node(*arguments: str) -> str:
    """What a Node program prints.

    Raises:
        AssertionError: it failed.
    """
    command = [*node_command(), *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(4 * PATIENCE_S):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out + errors).decode()
    return out.decode()


async def ask_in_node(url: str, messages: Any = None, **question: Any) -> dict[str, Any]:
    """Asks by the client in Node: `params`, `options`, `pieces`, `pauseMs`, `leaveAfter`."""
    given = json.dumps({"url": url, "messages": messages, **question})
    program = (
        f"import * as client from {json.dumps(MODULE.as_uri())};\n"
        f"console.log(JSON.stringify(await ({ASK})(client, {given})));"
    )
    answer: dict[str, Any] = json.loads(await run_node("--input-type=module", "--eval", program))
    return answer


@dataclass
class Relay:
    """A relay to one server.

    Attributes:
        cuts: after so many bytes from the server the next WebSocket is cut, the first of them
            for the first; those beyond are not.
        num_sockets: WebSockets so far.
        num_cut: those that were cut.
    """

    host: str
    port: int
    cuts: Sequence[int] = ()
    url: str = ""
    num_sockets: int = 0
    num_cut: int = 0
    open_writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def cut_all(self) -> None:
        """Cuts the WebSockets that are open now."""
        for writer in self.open_writers:
            self.num_cut += 1
            writer.transport.abort()
        self.open_writers.clear()

    async def serve(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        far, to_far = await asyncio.open_connection(self.host, self.port)
        head = await near.read(65536)
        left = None
        if b"/v1/infer" in head.partition(b"\r\n")[0]:
            left = self.cuts[self.num_sockets] if self.num_sockets < len(self.cuts) else None
            self.num_sockets += 1
            self.open_writers.add(to_near)
        to_far.write(head)
        upstream = asyncio.create_task(_carry(near, to_far))
        with suppress(OSError):
            while data := await far.read(65536):
                if left is not None and (left := left - len(data)) <= 0:
                    self.num_cut += 1
                    to_near.transport.abort()
                    break
                to_near.write(data)
                await to_near.drain()
        self.open_writers.discard(to_near)
        upstream.cancel()
        for writer in (to_near, to_far):
            writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def relay_to(host: str, port: int, *cuts: int) -> AsyncIterator[Relay]:
    relay = Relay(host, port, cuts)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        relay.cut_all()
