"""The Python client's flow control: credit for answers, prompts in pieces, silent servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import client_stream
from app.client import ConnectionLost, SeedanceClient
from protocol.errors import InputTooLarge, InvalidRequest
from tests.app.fake_server import HELLO, Frame, Peer, crediting, fake_server
from tests.app.stack import PATIENCE_S, eventually
from tests.app.test_client_resume import (
    begun,
    begun_and_cut,
    hurried,
    listen,
    no_task_left,
    one_after_another,
    text_of,
)

Script = Callable[[Peer], Awaitable[None]]


def acks(peer: Peer, id: str = "r1") -> list[int]:
    return [frame["seq"] for frame in of_type(peer, "ACK") if frame["id"] == id]


def of_type(peer: Peer, type: str) -> list[Frame]:
    return [frame for frame in peer.received if frame["type"] == type]


def pieces_of(peer: Peer) -> list[tuple[int, str, bool]]:
    return [
        (frame["input_id"], frame["text"], frame.get("is_last", False))
        for frame in of_type(peer, "INPUT_CHUNK")
    ]


async def the(*texts: str) -> AsyncIterator[str]:
    for text in texts:
        yield text


async def received(peer: Peer) -> str:
    """Reads a chunked prompt to its end; gives the id of its request."""
    id: str = (await peer.expect("INFER_REQ"))["id"]
    while not (await peer.expect("INPUT_CHUNK")).get("is_last"):
        pass
    return id


async def answered(peer: Peer, id: str) -> None:
    await peer.ack(id)
    await peer.chunk(id, 0, "ok")
    await peer.done(id, 1)
    await listen(peer)


async def taking_all(peer: Peer) -> None:
    await answered(peer, await received(peer))


# ------------------------------------------------------------------ credit


@pytest.mark.parametrize("window", [1, 3, 16, 256])
async def test_a_reader_gives_credit_in_steps_and_gets_everything(window: int) -> None:
    script = crediting(num_tokens=1000)
    async with (
        fake_server(script) as server,
        SeedanceClient(server.url, window=window) as client,
    ):
        seqs = [delta.seq async for delta in client.stream("hi")]
        assert seqs == [*range(1000)]
        given = acks(server.peers[0])
        step = max(1, min(window // 4, client_stream.MAX_ACK_STEP))
        assert given == sorted(set(given))
        assert len(given) <= 1000 / step
        assert server.peers[0].received[0]["window"] == window
        assert server.peers[0].most_outstanding <= window


async def test_who_does_not_read_holds_up_his_own_stream_alone() -> None:
    script = crediting(num_tokens=1000)
    async with (
        fake_server(script) as server,
        SeedanceClient(server.url) as client,
        client.stream("slow") as slow,
    ):
        peer = server.peers[0]
        await eventually(lambda: peer.sent.get("r1") == 255)
        for _ in range(3):
            assert len((await client.complete("quick")).text.split()) == 1000
        assert slow._inbox.qsize() == 256
        assert acks(peer, "r1") == []
        assert len((await text_of(slow)).split()) == 1000


async def test_a_reader_that_lags_acknowledges_no_more_often() -> None:
    async with fake_server(crediting(num_tokens=200)) as server:
        async with SeedanceClient(server.url, window=64) as client:
            async for _ in client.stream("hi"):
                await asyncio.sleep(0.001)
        assert len(acks(server.peers[0])) <= 200 / 16


async def test_what_was_read_is_acknowledged_when_nothing_more_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a server whose next chunk is larger than what is left of the window would wait for ever."""
    monkeypatch.setattr(client_stream, "STALLED_S", 0.01)

    async def script(peer: Peer) -> None:
        id = await begun(peer, 3)
        assert await peer.expect("ACK") == {"type": "ACK", "id": id, "seq": 2}
        await peer.chunk(id, 2 + 256, "big")
        await peer.done(id, 3 + 256)
        await listen(peer)

    async with (
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        assert await text_of(client.stream("hi")) == "0 1 2 big"


async def test_without_a_window_nothing_is_acknowledged() -> None:
    async with (
        fake_server(crediting(num_tokens=600)) as server,
        SeedanceClient(server.url, window=None) as client,
    ):
        assert len((await client.complete("hi")).text.split()) == 600
        assert "window" not in server.peers[0].received[0]
        await client.complete("hi", window=64)
        assert server.peers[0].received[1]["window"] == 64
        assert acks(server.peers[0], "r1") == []
        assert acks(server.peers[0], "r2") != []


async def test_a_resumed_stream_says_its_wishes_again_and_goes_on_acknowledging() -> None:
    async def script(peer: Peer) -> None:
        frame = await peer.expect("RESUME")
        wishes = {"window": 8, "boundary": "utf8", "anchor": "sha256"}
        assert frame == {
            "type": "RESUME",
            "id": "r1",
            "stream": "token-r1",
            "last_seq": 0,
            **wishes,
        }
        await peer.ack("r1")
        for seq in (1, 2):
            await peer.chunk("r1", seq, f"{seq} ")
        assert (await peer.expect("ACK"))["seq"] == 2
        await peer.done("r1", 3)
        await listen(peer)

    async with (
        fake_server(one_after_another(begun_and_cut, script)) as server,
        hurried(server.url, window=8) as client,
    ):
        stream = client.stream("hi", boundary="utf8", anchor="sha256")
        assert await text_of(stream) == "0 1 2 "


async def test_what_a_resume_has_told_is_not_acknowledged_again() -> None:
    async def cut_after_ten(peer: Peer) -> None:
        await begun(peer, 10)
        peer.abort()

    async def script(peer: Peer) -> None:
        assert (await peer.expect("RESUME"))["last_seq"] == 9
        await peer.ack("r1")
        for seq in range(10, 20):
            await peer.chunk("r1", seq, f"{seq} ")
        while (await peer.expect("ACK"))["seq"] < 19:
            pass
        await peer.done("r1", 20)
        await listen(peer)

    async with (
        fake_server(one_after_another(cut_after_ten, script)) as server,
        hurried(server.url, window=8) as client,
    ):
        stream = client.stream("hi")
        await stream.start()
        await eventually(lambda: stream._inbox.qsize() == 20)
        async for _ in stream:
            await asyncio.sleep(0)
        assert min(acks(server.peers[1])) > 9


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
async def test_a_stream_can_be_resumed_behind_every_token(binary: bool) -> None:
    num_tokens = 12

    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        frame = await peer.receive()
        first = frame.get("last_seq", -1) + 1
        await peer.ack("r1")
        if first < num_tokens:
            await peer.chunk("r1", first, f"{first} ")
            await peer.send("PING", ts=1)
            await peer.until("PONG", reading=True)
            peer.abort()
        await peer.done("r1", num_tokens)
        await listen(peer)

    async with (
        no_task_left(),
        fake_server(script) as server,
        hurried(server.url, binary=binary) as client,
    ):
        assert await text_of(client.stream("hi")) == "".join(f"{i} " for i in range(num_tokens))
        assert len(server.peers) == num_tokens + 1


# ------------------------------------------------------------------ prompts in pieces


@pytest.mark.parametrize(
    "start",
    [
        {},
        {"prompt": "Once "},
        {"messages": [{"role": "user", "content": "Tell: "}]},
    ],
)
async def test_a_prompt_goes_out_in_numbered_pieces_and_then_its_end(start: Frame) -> None:
    async with fake_server(one_after_another(taking_all)) as server:
        async with SeedanceClient(server.url) as client:
            messages = start.pop("messages", None)
            stream = client.stream(messages, pieces=the("a ", "", "b ", "c"), **start)
            assert await text_of(stream) == "ok"
        peer = server.peers[0]
        request = peer.received[0]
        assert request["input"] == "chunked"
        assert (request.get("messages"), request.get("prompt")) == (messages, start.get("prompt"))
        assert pieces_of(peer) == [
            (0, "a ", False),
            (1, "b ", False),
            (2, "c", False),
            (3, "", True),
        ]


async def test_the_answer_can_be_awaited_while_the_prompt_is_still_to_come() -> None:
    said: asyncio.Queue[str | None] = asyncio.Queue()

    async def speech() -> AsyncIterator[str]:
        while (word := await said.get()) is not None:
            yield word

    async with (
        fake_server(one_after_another(taking_all)) as server,
        SeedanceClient(server.url) as client,
    ):
        reading = asyncio.create_task(text_of(client.stream(pieces=speech())))
        for number, word in enumerate(["so ", "it ", "is"]):
            said.put_nowait(word)
            await eventually(lambda number=number: len(pieces_of(server.peers[0])) == number + 1)
        assert not reading.done()
        said.put_nowait(None)
        assert await reading == "ok"


async def test_a_full_server_holds_up_the_pieces_and_whoever_makes_them() -> None:
    made: list[str] = []

    async def source() -> AsyncIterator[str]:
        for number in range(6):
            made.append(str(number))
            yield str(number)

    async def script(peer: Peer) -> None:
        state = {"id": "r1", "buffered": 9, "capacity": 10}
        await peer.expect("INFER_REQ")
        await peer.expect("INPUT_CHUNK")
        await peer.send("INPUT_STATE", **state, level="high")
        await peer.send("PING", ts=1)
        await peer.until("PONG", reading=True)
        num_sent = len(pieces_of(peer))
        # One waits at the client for the server, and none behind it is asked for.
        assert len(made) <= num_sent + 1
        await peer.send("PING", ts=2)
        await peer.expect("PONG")
        assert len(made) <= num_sent + 1
        await peer.send("INPUT_STATE", **state, level="ok")
        while not (await peer.expect("INPUT_CHUNK")).get("is_last"):
            pass
        await answered(peer, "r1")

    async with (
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        assert await text_of(client.stream(pieces=source())) == "ok"
        assert "".join(text for _, text, _ in pieces_of(server.peers[0])) == "012345"


async def test_a_long_piece_is_cut_and_the_server_asked_in_between_whether_it_is_full() -> None:
    text = "é🎉ab" * 8000

    async def script(peer: Peer) -> None:
        blind = 0
        while True:
            frame = await peer.receive()
            if frame["type"] == "PING":
                blind = 0
                await peer.send("PONG", ts=frame["ts"])
            elif frame["type"] == "INPUT_CHUNK":
                blind += len(frame["text"].encode())
                # What is left of the default buffer of 256 KiB when it becomes high.
                assert blind <= 0.2 * 256 * 1024
                if frame.get("is_last"):
                    break
        await answered(peer, "r1")

    async with (
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        assert await text_of(client.stream(pieces=the(text))) == "ok"
        sent = pieces_of(server.peers[0])
        assert "".join(piece for _, piece, _ in sent) == text
        assert [number for number, _, _ in sent] == [*range(len(sent))]


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 4), max_size=4))
async def test_a_prompt_that_is_cut_off_is_sent_again_from_its_beginning(cuts: list[int]) -> None:
    async def cutting(peer: Peer, after: int) -> None:
        await peer.expect("INFER_REQ")
        for _ in range(after):
            await peer.expect("INPUT_CHUNK")
        peer.abort()

    def cut_after(number: int) -> Script:
        return lambda peer: cutting(peer, number)

    scripts = [*map(cut_after, cuts), taking_all]
    async with no_task_left(), fake_server(one_after_another(*scripts)) as server:
        async with hurried(server.url) as client:
            assert await text_of(client.stream(pieces=the("a", "b", "c", "d"))) == "ok"
        pieces = pieces_of(server.peers[-1])
        assert [text for _, text, _ in pieces] == ["a", "b", "c", "d", ""]
        assert [number for number, _, _ in pieces] == [0, 1, 2, 3, 4]


async def test_an_accepted_prompt_is_resumed_and_not_sent_again() -> None:
    async def taken(peer: Peer) -> None:
        await peer.ack(await received(peer))
        await peer.chunk("r1", 0, "0 ")
        await peer.send("PING", ts=1)
        await peer.expect("PONG")
        peer.abort()

    async def resuming(peer: Peer) -> None:
        await peer.expect("RESUME")
        await peer.ack("r1")
        await peer.done("r1", 1)
        await listen(peer)

    async with fake_server(one_after_another(taken, resuming)) as server:
        async with hurried(server.url) as client:
            assert await text_of(client.stream(pieces=the("a"))) == "0 "
        assert pieces_of(server.peers[1]) == []


async def test_what_the_pieces_raise_cancels_the_request_and_is_raised() -> None:
    async def broken() -> AsyncIterator[str]:
        yield "so far"
        raise OSError("the microphone is gone")

    async def script(peer: Peer) -> None:
        await peer.expect("INFER_REQ")
        await listen(peer)

    async with (
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        with pytest.raises(OSError, match="the microphone is gone"):
            await text_of(client.stream(pieces=broken()))
        await server.peers[0].until("CANCEL")


async def test_a_piece_that_is_not_unicode_cancels_the_request() -> None:
    async def script(peer: Peer) -> None:
        await peer.expect("INFER_REQ")
        await listen(peer)

    async with (
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
            await text_of(client.stream(pieces=the("a", "\ud800")))
        await server.peers[0].until("CANCEL")


async def never_ending(ended: list[str]) -> AsyncIterator[str]:
    try:
        yield "a"
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


@pytest.mark.parametrize("has_id", [True, False])
async def test_a_refusal_in_the_middle_of_a_prompt_stops_who_makes_it(has_id: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.expect("INFER_REQ")
        await peer.expect("INPUT_CHUNK")
        name = {"id": "r1"} if has_id else {}
        error = {"code": "input_too_large", "message": "too much", "retryable": False}
        await peer.send("ERROR", **name, **error)
        await listen(peer)

    ended: list[str] = []
    async with (
        no_task_left(),
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        with pytest.raises(InputTooLarge, match="too much"):
            await text_of(client.stream(pieces=never_ending(ended)))
        await eventually(lambda: ended)
        if not has_id:
            # The server may be receiving it still.
            await server.peers[0].until("CANCEL")


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_prompt_can_be_given_up_in_the_middle(leaves: bool) -> None:
    async def script(peer: Peer) -> None:
        while (await peer.receive())["type"] != "CANCEL":
            pass
        await peer.done("r1", 0, "cancelled")
        await listen(peer)

    ended: list[str] = []
    async with (
        no_task_left(),
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        stream = client.stream(pieces=never_ending(ended))
        reading = asyncio.create_task(text_of(stream))
        await eventually(lambda: server.peers and pieces_of(server.peers[0]))
        if leaves:
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await stream.cancel()
            assert await reading == ""
            assert stream.done is not None
            assert stream.done.finish_reason == "cancelled"
        await eventually(lambda: ended)
        await server.peers[0].until("CANCEL")


async def test_the_newest_anchor_can_be_looked_at() -> None:
    async def script(peer: Peer) -> None:
        id = await begun(peer)
        await peer.send("ANCHOR", id=id, input_id=-1, offset=0, ts=1)
        await peer.send("ANCHOR", id=id, input_id=-1, offset=1, ts=2, sha256="00ff")
        await peer.done(id, 1)
        await listen(peer)

    async with (
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url) as client,
    ):
        stream = client.stream("hi", anchor="sha256")
        assert stream.anchor is None
        await text_of(stream)
        assert stream.anchor is not None
        assert (stream.anchor.offset, stream.anchor.sha256) == (1, "00ff")
        assert server.peers[0].received[0]["anchor"] == "sha256"


# ------------------------------------------------------------------ heartbeat


async def test_a_server_that_falls_silent_is_taken_for_lost() -> None:
    async def silent(peer: Peer) -> None:
        if len(server.peers) == 1:
            await peer.send(**{**HELLO, "heartbeat_s": 0.1})
            await begun(peer)
            await listen(peer)
        await peer.send(**HELLO)
        frame = await peer.expect("RESUME")
        assert frame["last_seq"] == 0
        await peer.ack("r1")
        await peer.chunk("r1", 1, "1 ")
        await peer.done("r1", 2)
        await listen(peer)

    async with fake_server(silent) as server, hurried(server.url) as client:
        assert await text_of(client.stream("hi")) == "0 1 "


async def test_a_server_that_only_pings_is_there() -> None:
    async def pinging(peer: Peer) -> None:
        await peer.send(**{**HELLO, "heartbeat_s": 0.5})
        id = await begun(peer)
        for number in range(15):
            await asyncio.sleep(0.1)
            await peer.send("PING", ts=number)
            await peer.expect("PONG")
        await peer.done(id, 1)
        await listen(peer)

    async with fake_server(pinging) as server, SeedanceClient(server.url, resume=False) as client:
        assert await text_of(client.stream("hi", window=None)) == "0 "


async def test_a_ping_tells_how_long_an_answer_takes() -> None:
    now_s = 5.0

    async def script(peer: Peer) -> None:
        nonlocal now_s
        for _ in range(2):
            frame = await peer.expect("PING")
            now_s += 0.25
            await peer.send("PONG", ts=frame["ts"])
        await peer.expect("PING")
        peer.abort()

    async with (
        fake_server(one_after_another(script)) as server,
        SeedanceClient(server.url, clock=lambda: now_s) as client,
    ):
        assert [await client.ping() for _ in range(2)] == [0.25, 0.25]
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2):
                with pytest.raises(ConnectionLost):
                    await client.ping()
    with pytest.raises(ConnectionLost, match="async with"):
        await SeedanceClient(server.url).ping()
