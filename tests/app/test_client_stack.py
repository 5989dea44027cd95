"""The Python client against the real stack, over a wire that breaks at any byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from app.client import SeedanceClient
from tests.app.stack import echo, eventually, on_air, running_stack, talks_on
from tests.app.test_client_resume import hurried, text_of

GREEDY = {"temperature": 0.0, "cache": "bypass"}
QUESTION = "Wo die Züge halten 🚂, 👩‍👩‍👧 steigen aus, und e\u0301iner bleibt. " * 2


@asynccontextmanager
async def breaking_wire(url: str, cuts: list[int], *, upward: bool = False) -> AsyncIterator[str]:
    """An address that leads to `url`; each connection to it breaks after so many bytes.

    Args:
        cuts: bytes that a connection carries after another; those behind the last do not break.
        upward: whether the client's bytes count, and not the server's.
    """
    host, port = url.removeprefix("ws://").split("/")[0].split(":")
    left: Iterator[int] = iter(cuts)
    tasks: set[asyncio.Task[None]] = set()

    async def carry(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(host, int(port))
        limit = next(left, None)

        async def pump(
            source: asyncio.StreamReader, to: asyncio.StreamWriter, limit: int | None
        ) -> None:
            while data := await source.read(4096):
                to.write(data[:limit])
                if limit is not None and len(data) >= limit:
                    await to.drain()
                    return
                limit = None if limit is None else limit - len(data)

        pumps = [
            asyncio.create_task(pump(server, to_client, None if upward else limit)),
            asyncio.create_task(pump(client, to_server, limit if upward else None)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            to_client.transport.abort()
            to_server.transport.abort()

    def accept(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(carry(client, to_client))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        own_port = listener.sockets[0].getsockname()[1]
        yield f"ws://127.0.0.1:{own_port}/v1/infer"
    finally:
        listener.close()
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.wait_closed()


async def in_pieces(text: str, size: int) -> AsyncIterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]
        await asyncio.sleep(0)


@settings(max_examples=8)
@given(
    cuts=st.lists(st.integers(500, 6000), max_size=5),
    window=st.sampled_from([None, 1, 16, 256]),
    binary=st.booleans(),
)
async def test_the_answer_is_whole_at_whatever_byte_the_wire_breaks(
    cuts: list[int], window: int | None, binary: bool
) -> None:
    async with running_stack(echo, with_cache=False) as stack, on_air(stack.graph) as site:
        async with (
            breaking_wire(site.infer_url, cuts) as url,
            hurried(url, window=window, binary=binary) as client,
        ):
            streams = [client.stream(prompt=f"{i} {QUESTION}", **GREEDY) for i in range(2)]
            assert await asyncio.gather(*map(text_of, streams)) == [
                f"{i} {QUESTION}" for i in range(2)
            ]
        await stack.until_idle()


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(300, 2500), max_size=4), size=st.integers(1, 60))
async def test_a_prompt_in_pieces_gets_the_same_answer_at_whatever_byte_the_wire_breaks(
    cuts: list[int], size: int
) -> None:
    async with running_stack(echo, with_cache=False) as stack, on_air(stack.graph) as site:
        async with (
            breaking_wire(site.infer_url, cuts, upward=True) as url,
            hurried(url) as client,
        ):
            pieces = in_pieces(QUESTION, size)
            stream = client.stream(prompt="Hört: ", pieces=pieces, **GREEDY)
            assert await text_of(stream) == "Hört: " + QUESTION
            assert stream.anchor is not None
        await stack.until_idle()


async def test_a_reader_that_stops_reading_holds_the_server_to_its_window() -> None:
    async with (
        running_stack(talks_on, with_cache=False) as stack,
        on_air(stack.graph) as site,
        SeedanceClient(site.infer_url, window=64) as client,
    ):
        async with client.stream(prompt="on and on", max_tokens=700, **GREEDY) as idle:
            await eventually(lambda: stack.num_generated >= 300)
            other = await client.complete(prompt="quick", max_tokens=100, **GREEDY)
            assert other.usage.completion_tokens == 100
            assert idle._inbox.qsize() == 64
            assert len(await text_of(idle)) == 700
        await stack.until_idle()


async def test_leaving_a_prompt_in_the_middle_leaves_nothing_behind() -> None:
    async def endless() -> AsyncIterator[str]:
        while True:
            yield "more "
            await asyncio.sleep(0.001)

    async with running_stack(echo, with_cache=False) as stack, on_air(stack.graph) as site:
        async with SeedanceClient(site.infer_url) as client:
            reading = asyncio.create_task(text_of(client.stream(pieces=endless(), **GREEDY)))
            await eventually(lambda: client.streams and next(iter(client.streams)).anchor)
            reading.cancel()
            await asyncio.wait([reading])
            assert (await client.complete(prompt="still there", **GREEDY)).text == "still there"
        await stack.until_idle()
