"""The Python client through lost connections and draining servers: its readers see a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.client import MAX_DELAY_S, ClientStream, ConnectionLost, SeedanceClient, backoff
from app.client_connection import ClientConnection
from protocol.errors import Overloaded, ResumeExpired, ServingError, Unauthorized
from protocol.token_log import TokenDelta
from tests.app.fake_model import (
    PIECES,
    TEXT,
    FakeIngress,
    FakeModel,
    gateway_on_air,
    gateway_over,
)
from tests.app.fake_server import HELLO, Peer, fake_server
from tests.app.stack import PATIENCE_S, eventually
from tests.protocol.fakes import FakeClock

Script = Callable[[Peer], Awaitable[None]]


def hurried(url: str, **options: Any) -> SeedanceClient:
    """A client that does not wait between two tries."""

    async def no_pause(seconds: float) -> None:
        await asyncio.sleep(0)

    return SeedanceClient(url, **{"sleep": no_pause, **options})


def connection_of(client: SeedanceClient) -> ClientConnection:
    return client._connections[-1]


async def cut(client: SeedanceClient) -> None:
    """Breaks the client's connection, and returns when it has noticed."""
    connection = connection_of(client)
    connection._socket.transport.abort()
    await eventually(lambda: connection.lost is not None)


def one_after_another(*scripts: Script) -> Script:
    """A script for each connection, in their order; what comes after the last is refused."""
    waiting = list(scripts)

    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        await waiting.pop(0)(peer)

    return script


async def begun(peer: Peer, num_chunks: int = 1) -> str:
    """Accepts a request and says `0 1 2 …`; gives its id."""
    id: str = (await peer.expect("INFER_REQ"))["id"]
    await peer.ack(id)
    for seq in range(num_chunks):
        await peer.chunk(id, seq, f"{seq} ")
    await peer.send("PING", ts=1)
    await peer.expect("PONG")
    return id


async def begun_and_cut(peer: Peer) -> None:
    await begun(peer)
    peer.abort()


async def resumed(peer: Peer) -> None:
    """Goes on with a stream after `0 ` and ends it."""
    frame = await peer.expect("RESUME")
    assert (frame["stream"], frame["last_seq"]) == (f"token-{frame['id']}", 0)
    await peer.ack(frame["id"])
    await peer.chunk(frame["id"], 1, "1 ")
    await peer.done(frame["id"], 2)
    await listen(peer)


async def listen(peer: Peer) -> None:
    while True:
        await peer.receive()


async def read(stream: ClientStream, into: list[str]) -> None:
    async for delta in stream:
        into.append(delta.text)


async def text_of(stream: ClientStream) -> str:
    async with asyncio.timeout(PATIENCE_S):
        return "".join([delta.text async for delta in stream])


@asynccontextmanager
async def no_task_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    # What a socket still does after it was closed takes some turns of the loop.
    await eventually(lambda: asyncio.all_tasks() <= before, "tasks are left")


# ------------------------------------------------------------------ wherever it breaks


@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(0, len(PIECES)), max_size=5),
    num_streams=st.integers(1, 4),
    binary=st.booleans(),
)
async def test_the_text_is_whole_wherever_and_how_often_the_connection_breaks(
    cuts: list[int], num_streams: int, binary: bool
) -> None:
    model = FakeModel(is_paced=True)
    gateway = gateway_over(FakeIngress(model))
    async with (
        no_task_left(),
        gateway_on_air(gateway) as url,
        hurried(url, binary=binary) as client,
    ):
        streams = [client.stream(f"{i}") for i in range(num_streams)]
        readers = [asyncio.create_task(text_of(stream)) for stream in streams]
        await eventually(lambda: len(model.runs) == num_streams)
        for pieces in sorted(cuts):
            while any(len(run.log.deltas) < pieces for run in model.runs.values()):
                model.step()
            await eventually(lambda: connection_of(client).is_usable)
            await cut(client)
        await eventually(lambda: model.step() or all(reader.done() for reader in readers))
        assert await asyncio.gather(*readers) == [TEXT] * num_streams
        for stream in streams:
            assert stream.done is not None
            assert stream.done.finish_reason == "stop"
        # Only a request whose acceptance was lost with its connection is sent again.
        assert len(model.runs) <= num_streams * (1 + len(cuts))


async def test_a_connection_that_breaks_while_tokens_flow_doubles_nothing() -> None:
    model = FakeModel()
    model.answer = [TokenDelta(seq, f"{seq} ", (seq,)) for seq in range(2000)]
    async with gateway_on_air(gateway_over(FakeIngress(model))) as url, hurried(url) as client:
        seqs: list[int] = []
        async for delta in client.stream("hi"):
            seqs.append(delta.seq)
            if delta.seq % 301 == 300 and connection_of(client).is_usable:
                await cut(client)
    assert seqs == [*range(2000)]
    assert len(model.runs) == 1


async def test_a_lost_stream_goes_on_over_another_connection() -> None:
    async with fake_server(one_after_another(begun_and_cut, resumed)) as server:
        async with hurried(server.url) as client:
            stream = client.stream("hi", return_token_ids=True)
            assert await text_of(stream) == "0 1 "
            assert stream.queue_position is None
        assert server.peers[1].received[0]["return_token_ids"] is True


@pytest.mark.parametrize("code", [1001, 1011, 1012, 4408, 4410])
async def test_a_server_that_closes_for_a_while_is_come_back_to(code: int) -> None:
    async def closing(peer: Peer) -> None:
        await begun(peer)
        await peer.connection.close(code)

    async with (
        fake_server(one_after_another(closing, resumed)) as server,
        hurried(server.url) as client,
    ):
        assert await text_of(client.stream("hi")) == "0 1 "


@pytest.mark.parametrize("code", [1000, 1002, 1008, 1009, 4406])
async def test_a_server_that_closes_for_good_is_believed(code: int) -> None:
    async def closing(peer: Peer) -> None:
        await begun(peer)
        await peer.connection.close(code)

    async with fake_server(one_after_another(closing)) as server, hurried(server.url) as client:
        with pytest.raises(ConnectionLost) as caught:
            await text_of(client.stream("hi"))
        assert caught.value.code == code


async def test_the_end_alone_may_have_been_missed() -> None:
    async def ended(peer: Peer) -> None:
        frame = await peer.expect("RESUME")
        await peer.ack(frame["id"])
        await peer.done(frame["id"], 1)
        await listen(peer)

    async with (
        fake_server(one_after_another(begun_and_cut, ended)) as server,
        hurried(server.url) as client,
    ):
        assert (await client.complete("hi")).text == "0 "


async def test_a_request_without_an_answer_is_sent_again() -> None:
    async def deaf(peer: Peer) -> None:
        await peer.expect("INFER_REQ")
        peer.abort()

    async def answering(peer: Peer) -> None:
        id = await begun(peer, 2)
        await peer.done(id, 2)
        await listen(peer)

    async with (
        fake_server(one_after_another(deaf, answering)) as server,
        hurried(server.url) as client,
    ):
        assert (await client.complete("hi")).text == "0 1 "


async def test_an_idle_client_connects_again_for_its_next_request() -> None:
    async def answering(peer: Peer) -> None:
        id = await begun(peer)
        await peer.done(id, 1)

    async def gone(peer: Peer) -> None:
        await answering(peer)
        peer.abort()

    async with (
        fake_server(one_after_another(gone, answering)) as server,
        hurried(server.url) as client,
    ):
        for _ in range(2):
            assert (await client.complete("hi")).text == "0 "
            await eventually(lambda: not connection_of(client).is_usable)


# ------------------------------------------------------------------ when it does not go on


async def test_a_stream_that_the_server_gave_up_ends_with_its_error_after_the_text() -> None:
    async def expired(peer: Peer) -> None:
        frame = await peer.expect("RESUME")
        await peer.send("ERROR", id=frame["id"], **error("resume_expired", retryable=False))
        await listen(peer)

    async with (
        fake_server(one_after_another(begun_and_cut, expired)) as server,
        hurried(server.url) as client,
    ):
        stream = client.stream("hi")
        seen: list[str] = []
        with pytest.raises(ResumeExpired):
            await read(stream, seen)
        assert seen == ["0 "]


def error(code: str, *, retryable: bool = True) -> dict[str, Any]:
    return {"code": code, "message": f"it is {code}", "retryable": retryable}


@pytest.mark.parametrize("code", ["overloaded", "internal", "timeout"])
async def test_a_resume_that_may_be_tried_again_is(code: str) -> None:
    async def refusing_once(peer: Peer) -> None:
        frame = await peer.expect("RESUME")
        await peer.send("ERROR", id=frame["id"], **error(code))
        await resumed(peer)

    async with (
        fake_server(one_after_another(begun_and_cut, refusing_once)) as server,
        hurried(server.url) as client,
    ):
        assert await text_of(client.stream("hi")) == "0 1 "


async def test_a_server_that_keeps_nothing_is_not_asked() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**{**HELLO, "resume_window_s": 0})
        await begun_and_cut(peer)

    async with fake_server(script) as server, hurried(server.url) as client:
        with pytest.raises(ConnectionLost, match="1006"):
            await text_of(client.stream("hi"))
        assert len(server.peers) == 1


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_stream_waits_so_long_for_a_server_and_no_longer(is_accepted: bool) -> None:
    async def lost(peer: Peer) -> None:
        if is_accepted:
            await begun_and_cut(peer)
        await peer.expect("INFER_REQ")
        peer.abort()

    clock = FakeClock()
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    options = {"reconnect_timeout_s": 5.0, "clock": clock, "sleep": sleep, "rng": lambda: 1.0}
    async with (
        fake_server(one_after_another(lost)) as server,
        SeedanceClient(server.url, **options) as client,
    ):
        stream = client.stream("hi")
        await stream.start() if is_accepted else None
        server.refuse_with = 502
        with pytest.raises(ConnectionLost, match="could not connect again within 5 s: 64 conn"):
            await text_of(stream)
        # The last pause is what was left of the time.
        assert slept == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 1.85])


async def test_the_pauses_double_up_to_a_bound_and_are_partly_chance() -> None:
    assert list(islice(backoff(lambda: 0.0), 3)) == [0.025, 0.05, 0.1]
    assert list(islice(backoff(lambda: 1.0), 3)) == [0.05, 0.1, 0.2]
    assert max(islice(backoff(lambda: 1.0), 20)) == MAX_DELAY_S


async def test_a_full_server_says_how_long_to_wait() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            server.refuse_with = None

    async with (
        fake_server(one_after_another(begun_and_cut, resumed)) as server,
        SeedanceClient(server.url, sleep=sleep) as client,
    ):
        stream = client.stream("hi")
        await stream.start()
        server.refuse_with = 503
        assert await text_of(stream) == "0 1 "
    assert slept[1] == 5.0


@pytest.mark.parametrize(
    ("status", "expected"), [(401, Unauthorized), (403, Unauthorized), (503, Overloaded)]
)
async def test_what_refuses_the_connection_is_what_the_reader_gets(
    status: int, expected: type[ServingError]
) -> None:
    clock = FakeClock()

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    async with (
        fake_server(one_after_another(begun_and_cut)) as server,
        SeedanceClient(server.url, clock=clock, sleep=sleep) as client,
    ):
        stream = client.stream("hi")
        await stream.start()
        server.refuse_with = status
        with pytest.raises(expected):
            await text_of(stream)


# ------------------------------------------------------------------ cancelling, leaving, closing


async def test_a_stream_that_is_cancelled_without_a_connection_is_cancelled_on_the_next() -> None:
    async def cancelled(peer: Peer) -> None:
        id = (await peer.expect("RESUME"))["id"]
        await peer.ack(id)
        assert await peer.expect("CANCEL") == {"type": "CANCEL", "id": id}
        await peer.done(id, 1, "cancelled")
        await listen(peer)

    gate = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await gate.wait()

    async with (
        fake_server(one_after_another(begun_and_cut, cancelled)) as server,
        SeedanceClient(server.url, sleep=sleep) as client,
    ):
        stream = client.stream("hi")
        await stream.start()
        await eventually(lambda: not connection_of(client).is_usable)
        await stream.cancel()
        gate.set()
        assert await text_of(stream) == "0 "
        assert stream.done is not None
        assert stream.done.finish_reason == "cancelled"


async def test_a_stream_that_is_left_without_a_connection_is_stopped_on_the_next() -> None:
    model = FakeModel(is_paced=True)
    gate = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await gate.wait()

    async with (
        gateway_on_air(gateway_over(FakeIngress(model))) as url,
        SeedanceClient(url, sleep=sleep) as client,
    ):
        async with client.stream("hi"):
            await cut(client)
        assert model.num_running == 1
        gate.set()
        await eventually(lambda: model.num_running == 0)


async def test_closing_does_not_wait_for_a_server_that_is_gone() -> None:
    async with fake_server(one_after_another(begun_and_cut)) as server:
        client = SeedanceClient(server.url)
        await client.__aenter__()
        stream = client.stream("hi")
        await stream.start()
    await eventually(lambda: not connection_of(client).is_usable)
    later = client.stream("later")
    starting = asyncio.create_task(later.start())
    await asyncio.sleep(0)
    async with no_task_left(), asyncio.timeout(PATIENCE_S):
        await client.close()
        for ended in (stream, later):
            with pytest.raises(ConnectionLost, match="the client was closed"):
                await text_of(ended)
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await starting
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await client.complete("again")


async def test_closing_in_the_middle_of_a_handshake_leaves_nothing() -> None:
    async def silent(peer: Peer) -> None:
        await listen(peer)

    async def script(peer: Peer) -> None:
        await (one_after_another(begun_and_cut)(peer) if len(server.peers) == 1 else silent(peer))

    async with fake_server(script) as server, no_task_left():
        client = hurried(server.url)
        await client.__aenter__()
        stream = client.stream("hi")
        await stream.start()
        await eventually(lambda: len(server.peers) == 2)
        async with asyncio.timeout(PATIENCE_S):
            await client.close()
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await text_of(stream)


# ------------------------------------------------------------------ draining


async def test_a_draining_server_keeps_what_it_has_and_the_rest_goes_elsewhere() -> None:
    async def draining(peer: Peer) -> None:
        id = await begun(peer)
        await peer.send("DRAIN", deadline_s=60.0)
        await drained.wait()
        await peer.chunk(id, 1, "old ")
        await peer.done(id, 2)
        await listen(peer)

    async def fresh(peer: Peer) -> None:
        id = await begun(peer)
        await peer.done(id, 1)
        drained.set()
        await listen(peer)

    drained = asyncio.Event()
    async with (
        fake_server(one_after_another(draining, fresh)) as server,
        no_task_left(),
        hurried(server.url) as client,
    ):
        stream = client.stream("old")
        await stream.start()
        await eventually(lambda: not connection_of(client).is_usable)
        assert (await client.complete("new")).text == "0 "
        assert await text_of(stream) == "0 old "
        await eventually(lambda: server.peers[0].connection.close_code == 1000)
        assert server.peers[1].connection.close_code is None


async def test_a_request_that_crosses_a_drain_goes_to_the_next_server() -> None:
    async def draining(peer: Peer) -> None:
        id = (await peer.expect("INFER_REQ"))["id"]
        await peer.send("DRAIN", deadline_s=60.0)
        await peer.send("ERROR", id=id, retry_after_s=0, **error("overloaded"))
        await listen(peer)

    async def fresh(peer: Peer) -> None:
        id = await begun(peer)
        await peer.done(id, 1)
        await listen(peer)

    async with (
        fake_server(one_after_another(draining, fresh)) as server,
        hurried(server.url) as client,
    ):
        assert (await client.complete("hi")).text == "0 "
        await eventually(lambda: server.peers[0].connection.close_code == 1000)


async def test_an_idle_client_leaves_a_draining_server() -> None:
    async def draining(peer: Peer) -> None:
        await peer.send("DRAIN", deadline_s=60.0)
        await listen(peer)

    async with fake_server(one_after_another(draining)) as server, hurried(server.url):
        await eventually(lambda: server.peers[0].connection.close_code == 1000)


async def test_a_rolling_update_is_a_pause() -> None:
    """Two real ingresses: the first drains under load, with no time for its streams to end."""
    model = FakeModel(is_paced=True)
    gateways = [gateway_over(FakeIngress(model)) for _ in range(2)]
    async with (
        no_task_left(),
        gateway_on_air(gateways[0]) as first,
        gateway_on_air(gateways[1]) as second,
        hurried(first) as client,
    ):
        streams = [client.stream(f"{i}") for i in range(20)]
        readers = [asyncio.create_task(text_of(stream)) for stream in streams]
        await eventually(lambda: all(stream.token for stream in streams))
        model.step(3)
        # What a load balancer does.
        client.url = second
        await gateways[0].drain(0.1)
        await eventually(lambda: gateways[1].live_requests == 20)
        model.step(len(PIECES) + 1)
        assert await asyncio.gather(*readers) == [TEXT] * 20
        assert len(model.runs) == 20


async def test_without_resume_a_client_ends_with_its_connection() -> None:
    async def draining(peer: Peer) -> None:
        await begun(peer)
        await peer.send("DRAIN", deadline_s=0.0)
        await peer.connection.close(1001)

    async with (
        fake_server(one_after_another(draining)) as server,
        SeedanceClient(server.url, resume=False) as client,
    ):
        stream = client.stream("hi")
        with pytest.raises(ConnectionLost) as caught:
            await text_of(stream)
        assert caught.value.code == 1001
        with pytest.raises(ConnectionLost):
            await client.complete("again")
        assert len(server.peers) == 1
