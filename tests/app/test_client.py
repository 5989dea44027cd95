"""The Python client against a server that does exactly what each test says."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.client import ClientStream, ConnectionLost, SeedanceClient
from app.client_connection import infer_url
from protocol.errors import (
    BadState,
    InternalError,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unauthorized,
)
from protocol.frames import InferChunk, InferReq
from protocol.token_log import CacheOutcome, TokenDelta, TokenLogprob
from tests.app.fake_server import HELLO, REPLY, Peer, answering, fake_server

both_forms = pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def one_request(
    reply: Callable[[Peer, str], Awaitable[None]],
) -> Callable[[Peer], Awaitable[None]]:
    """A script that greets, accepts one request, replies, and reads until the client leaves."""

    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await reply(peer, request["id"])
        while True:
            await peer.receive()

    return script


async def read(stream: ClientStream, into: list[str]) -> None:
    async for delta in stream:
        into.append(delta.text)


async def texts(stream: ClientStream) -> list[str]:
    return [delta.text async for delta in stream]


@both_forms
async def test_a_stream_yields_its_deltas_and_then_how_it_ended(binary: bool) -> None:
    async def reply(peer: Peer, id: str) -> None:
        top = [{"token_id": 2, "token": "b", "logprob": -1.5}]
        entry = {"token_id": 1, "token": "a", "logprob": -0.5, "top": top}
        await peer.chunk(id, 0, "a", token_ids=[1], logprob=-0.5, logprobs=[entry])
        await peer.chunk(id, 2, "é🎉")
        await peer.done(id, 3, "length")

    async with fake_server(one_request(reply)) as server:
        async with SeedanceClient(server.url, binary=binary) as client:
            assert client.hello is not None
            assert client.hello.model == "fake-1"
            stream = client.stream("hi")
            assert (stream.ack, stream.done, stream.ttft_s) == (None, None, None)
            deltas = [delta async for delta in stream]
        logprob = TokenLogprob(1, "a", -0.5, ((2, "b", -1.5),))
        assert deltas == [TokenDelta(0, "a", (1,), (logprob,)), TokenDelta(2, "é🎉")]
        assert stream.ack == CacheOutcome(outcome="miss")
        assert stream.done is not None
        assert stream.done.finish_reason == "length"
        assert stream.done.usage.completion_tokens == 3
        assert stream.done.timing.ttft_ms == 2.0
        assert set(server.peers[0].received_forms) == {bytes if binary else str}


@both_forms
async def test_complete_gives_the_whole_answer_and_what_the_cache_did(binary: bool) -> None:
    async with (
        fake_server(answering) as server,
        SeedanceClient(server.url, binary=binary) as client,
    ):
        first = await client.complete("hi", temperature=0.0)
        second = await client.complete("hi", temperature=0.0)
    assert first.text == second.text == "".join(REPLY)
    assert first.finish_reason == "stop"
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (5, 4)
    assert (first.cache.outcome, second.cache.outcome) == ("miss", "exact")
    assert (second.cache.tier, second.cache.age_s) == ("L2", 3.2)


async def test_a_string_is_a_user_message_and_a_prompt_stays_raw() -> None:
    async with fake_server(answering) as server:
        async with SeedanceClient(server.url) as client:
            await client.complete("hi", max_tokens=5, stop=None, temperature=0.0)
            stream = client.stream(prompt="once upon", temperature=3.0)
            with pytest.raises(InvalidRequest):
                await stream.start()
        chat, raw = server.peers[0].received[:2]
        messages = [{"role": "user", "content": "hi"}]
        assert chat == {
            "type": "INFER_REQ",
            "id": "r1",
            "messages": messages,
            "max_tokens": 5,
            "temperature": 0.0,
            "window": 256,
        }
        assert raw["prompt"] == "once upon"
        assert "messages" not in raw


@both_forms
async def test_many_streams_share_one_socket(binary: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        ids = [(await peer.expect("INFER_REQ"))["id"] for _ in range(3)]
        for id in ids:
            await peer.ack(id)
        for seq in range(4):
            for id in reversed(ids):
                await peer.chunk(id, seq, f"{id}.{seq} ")
        for id in ids:
            await peer.done(id, 4)
        await peer.receive()

    async with (
        fake_server(script) as server,
        SeedanceClient(server.url, binary=binary) as client,
    ):
        answers = await asyncio.gather(*(client.complete(f"q{i}") for i in range(3)))
    assert [answer.text for answer in answers] == [
        "".join(f"r{i}.{seq} " for seq in range(4)) for i in (1, 2, 3)
    ]
    assert len(server.peers) == 1


async def test_entering_a_stream_waits_until_it_is_accepted() -> None:
    async def reply(peer: Peer, id: str) -> None:
        await peer.done(id, 0)

    async with (
        fake_server(one_request(reply)) as server,
        SeedanceClient(server.url, window=None) as client,
    ):
        async with client.stream("hi") as stream:
            assert stream.ack == CacheOutcome(outcome="miss")
            assert await texts(stream) == []
        assert server.peers[0].received == [
            {"type": "INFER_REQ", "id": "r1", "messages": [{"role": "user", "content": "hi"}]}
        ]


async def test_breaking_out_of_the_loop_cancels_on_the_server() -> None:
    async with fake_server(answering) as server, SeedanceClient(server.url) as client:
        stream = client.stream("a long story")
        async for _ in stream:
            break
        gc.collect()
        await server.peers[0].until("CANCEL")
        assert server.peers[0].received[-1] == {"type": "CANCEL", "id": "r1"}
        # What was still on its way for the left stream disturbs nobody.
        assert (await client.complete("hi")).text == "".join(REPLY)


async def test_leaving_the_context_cancels_on_the_server() -> None:
    async with fake_server(answering) as server, SeedanceClient(server.url) as client:
        with pytest.raises(RuntimeError, match="changed my mind"):
            async with client.stream("a long story"):
                raise RuntimeError("changed my mind")
        await server.peers[0].until("CANCEL")


async def test_a_cancelled_task_cancels_on_the_server_even_before_the_answer_begins() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        while True:
            await peer.receive()

    async with fake_server(script) as server, SeedanceClient(server.url) as client:
        waiting = asyncio.create_task(client.complete("hi"))
        await server.peers[0].until("INFER_REQ")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await server.peers[0].until("CANCEL")


async def test_cancel_ends_the_iteration_and_a_late_one_is_harmless() -> None:
    async with fake_server(answering) as server, SeedanceClient(server.url) as client:
        stream = client.stream("a long story")
        async for _ in stream:
            await stream.cancel()
        assert stream.done is not None
        assert stream.done.finish_reason == "cancelled"
        num_frames = len(server.peers[0].received)
        await stream.cancel()
        await stream.aclose()
        await client.complete("hi")
        assert len(server.peers[0].received) == num_frames + 1


async def test_a_left_stream_does_not_pass_for_a_finished_one() -> None:
    async with fake_server(answering) as server, SeedanceClient(server.url) as client:
        async with client.stream("a long story") as stream:
            pass
        with pytest.raises(BadState, match="left before its end"):
            await texts(stream)


async def test_a_finished_stream_can_be_iterated_again_without_waiting() -> None:
    async with fake_server(answering) as server, SeedanceClient(server.url) as client:
        stream = client.stream("hi")
        assert await texts(stream) == list(REPLY)
        assert await texts(stream) == []


@both_forms
async def test_chunks_that_repeat_or_fall_back_are_dropped(binary: bool) -> None:
    async def reply(peer: Peer, id: str) -> None:
        for seq, text in [(0, "a"), (0, "a"), (3, "b"), (1, "x"), (3, "b"), (4, "c")]:
            await peer.chunk(id, seq, text)
        await peer.done(id, 5)

    async with (
        fake_server(one_request(reply)) as server,
        SeedanceClient(server.url, binary=binary) as client,
    ):
        assert await texts(client.stream("hi")) == ["a", "b", "c"]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), max_size=8))
async def test_any_replayed_stretch_leaves_the_text_as_it_was(
    replays: list[tuple[int, int]],
) -> None:
    stream = ClientStream(InferReq(id="r"), SeedanceClient())
    sent = [InferChunk(id="r", seq=seq, text=f"{seq};") for seq in range(8)]
    order = list(sent)
    for start, length in sorted(replays, reverse=True):
        order[start:start] = sent[max(0, start - length) : start]
    for chunk in order:
        stream.receive(chunk)
    stream.end(None)
    assert "".join(await texts(stream)) == "".join(chunk.text for chunk in sent)


@both_forms
async def test_pings_are_answered_while_nobody_reads_the_stream(binary: bool) -> None:
    async def reply(peer: Peer, id: str) -> None:
        await peer.chunk(id, 0, "a")
        await peer.send("PING", ts=7.25)
        assert await peer.expect("PONG") == {"type": "PONG", "ts": 7.25}
        ponged.set()
        await peer.done(id, 1)

    ponged = asyncio.Event()
    async with (
        fake_server(one_request(reply)) as server,
        SeedanceClient(server.url, binary=binary) as client,
        client.stream("hi") as stream,
    ):
        await ponged.wait()
        assert await texts(stream) == ["a"]


async def test_times_come_from_the_clock_and_begin_with_sending() -> None:
    async def reply(peer: Peer, id: str) -> None:
        clock.now_s += 0.25
        await peer.chunk(id, 0, "")
        await peer.send("PING", ts=1)
        await peer.expect("PONG")
        clock.now_s += 0.25
        await peer.chunk(id, 1, "a")
        await peer.send("PING", ts=2)
        await peer.expect("PONG")
        clock.now_s += 1.0
        await peer.done(id, 2)

    clock = Clock()
    async with (
        fake_server(one_request(reply)) as server,
        SeedanceClient(server.url, clock=clock) as client,
    ):
        stream = client.stream("hi")
        clock.now_s += 50.0
        await texts(stream)
    assert (stream.ttft_s, stream.total_s) == (0.5, 1.5)


async def test_a_lost_connection_ends_every_stream_after_what_had_arrived() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        ids = [(await peer.expect("INFER_REQ"))["id"] for _ in range(2)]
        for id in ids:
            await peer.ack(id)
            await peer.chunk(id, 0, "so far")
        await peer.send("PING", ts=1)
        await peer.expect("PONG")
        peer.abort()

    async with fake_server(script) as server, SeedanceClient(server.url, resume=False) as client:
        seen: list[str] = []
        streams = [client.stream("one"), client.stream("two")]
        ends = await asyncio.gather(
            *(read(stream, seen) for stream in streams), return_exceptions=True
        )
        assert seen == ["so far", "so far"]
        assert [type(end) for end in ends] == [ConnectionLost, ConnectionLost]
        assert [stream.done for stream in streams] == [None, None]
        with pytest.raises(ConnectionLost):
            await client.complete("three")
        await streams[0].cancel()


async def test_a_close_code_and_its_reason_reach_the_caller() -> None:
    async def reply(peer: Peer, id: str) -> None:
        await peer.connection.close(4408, "no frame for 30 s")

    async with (
        fake_server(one_request(reply)) as server,
        SeedanceClient(server.url, resume=False) as client,
    ):
        with pytest.raises(ConnectionLost, match="code 4408: no frame for 30 s") as caught:
            await client.complete("hi")
        assert caught.value.code == 4408


async def test_closing_the_client_ends_its_streams() -> None:
    async with fake_server(answering) as server:
        async with SeedanceClient(server.url) as client:
            stream = client.stream("a long story")
            await stream.start()
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await texts(stream)


@both_forms
async def test_an_error_frame_is_a_typed_error_and_the_socket_goes_on(binary: bool) -> None:
    async with (
        fake_server(answering) as server,
        SeedanceClient(server.url, binary=binary) as client,
    ):
        with pytest.raises(InvalidRequest, match="temperature is 3") as caught:
            await client.complete("hi", temperature=3.0)
        assert (caught.value.param, caught.value.limit) == ("temperature", 2.0)
        assert (await client.complete("hi", temperature=0.0)).finish_reason == "stop"


async def test_a_failure_after_the_first_text_is_raised_after_that_text() -> None:
    async def reply(peer: Peer, id: str) -> None:
        await peer.chunk(id, 0, "so far")
        error = {"code": "internal", "message": "incident 42", "retryable": True}
        await peer.done(id, 1, "error", error=error)

    async with fake_server(one_request(reply)) as server, SeedanceClient(server.url) as client:
        stream = client.stream("hi")
        seen: list[str] = []
        with pytest.raises(InternalError, match="incident 42"):
            await read(stream, seen)
        assert seen == ["so far"]
        assert stream.done is not None
        assert stream.done.finish_reason == "error"


async def test_an_error_that_names_no_request_ends_those_without_an_answer() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        await peer.ack((await peer.expect("INFER_REQ"))["id"])
        await peer.expect("INFER_REQ")
        await peer.send("ERROR", code="invalid_frame", message="frame is cut", retryable=False)
        await peer.chunk("r1", 0, "fine")
        await peer.done("r1", 1)
        await peer.receive()

    async with (
        fake_server(script) as server,
        SeedanceClient(server.url) as client,
        client.stream("one") as running,
    ):
        with pytest.raises(InvalidRequest, match="frame is cut"):
            await client.complete("two")
        assert await texts(running) == ["fine"]


async def test_frames_of_a_newer_server_are_skipped() -> None:
    async def reply(peer: Peer, id: str) -> None:
        await peer.send("ANCHOR", id=id, input_id=0, offset=0, ts=1)
        await peer.chunk(id, 0, "a", colour="green")
        await peer.done(id, 1)

    async with fake_server(one_request(reply)) as server, SeedanceClient(server.url) as client:
        assert (await client.complete("hi")).text == "a"


@pytest.mark.parametrize(
    "data", ['{"type": "INFER_CHUNK", "id": "r1"', b"\x01\x00\x00", b"\x02\x00\x00\x00\x00\x00{}"]
)
async def test_an_unreadable_frame_ends_the_connection_not_just_the_frame(
    data: str | bytes,
) -> None:
    async def reply(peer: Peer, id: str) -> None:
        await peer.connection.send(data)

    async with fake_server(one_request(reply)) as server, SeedanceClient(server.url) as client:
        with pytest.raises(ConnectionLost, match="unreadable frame"):
            await client.complete("hi")


async def test_the_key_travels_in_the_header_and_a_wrong_one_is_unauthorized() -> None:
    async with fake_server(answering, api_key="sk-right") as server:
        async with SeedanceClient(server.url, "sk-right") as client:
            assert (await client.complete("hi")).finish_reason == "stop"
        request = server.peers[0].connection.request
        assert request is not None
        assert "sk-right" not in request.path
        for key in ("sk-wrong", None):
            with pytest.raises(Unauthorized, match="send an API key"):
                async with SeedanceClient(server.url, key):
                    pass


async def test_a_full_server_says_when_to_come_back() -> None:
    async with fake_server(answering, refuse_with=503) as server:
        with pytest.raises(Overloaded, match="64 connections are open") as caught:
            async with SeedanceClient(server.url):
                pass
        assert caught.value.retry_after_s == 5.0


async def test_an_address_without_a_server_is_named() -> None:
    async with fake_server(answering) as server:
        gone = server.url
    with pytest.raises(ConnectionLost, match=f"cannot connect to {gone}"):
        async with SeedanceClient(gone):
            pass
    with pytest.raises(ConnectionLost, match="gopher"):
        async with SeedanceClient("gopher://127.0.0.1"):
            pass


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async def script(peer: Peer) -> None:
        await peer.receive()

    async with fake_server(script) as server:
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
            async with SeedanceClient(server.url, open_timeout_s=0.05):
                pass


async def test_a_client_that_is_not_entered_says_so() -> None:
    with pytest.raises(ConnectionLost, match="async with"):
        await SeedanceClient("http://127.0.0.1:1").complete("hi")


@pytest.mark.parametrize("params", [{"temperature": float("nan")}, {"top_p": float("inf")}])
async def test_numbers_that_json_cannot_carry_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SeedanceClient().stream("hi", **params)
    assert [caught.value.param] == list(params)


async def test_a_misspelt_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SeedanceClient().stream("hi", max_token=5)


async def test_text_that_is_not_unicode_is_refused_and_the_socket_goes_on() -> None:
    async with fake_server(answering) as server, SeedanceClient(server.url) as client:
        with pytest.raises(ServingError, match="cannot be written as JSON"):
            await client.complete("\ud800")
        assert (await client.complete("hi")).finish_reason == "stop"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", "ws://localhost:8000/v1/infer"),
        ("https://host/apps/x/", "wss://host/apps/x/v1/infer"),
        ("http://host/v1", "ws://host/v1/infer"),
        ("localhost:8000", "ws://localhost:8000/v1/infer"),
        ("wss://host/v1/infer", "wss://host/v1/infer"),
    ],
)
def test_the_socket_address_is_found_from_what_people_type(url: str, expected: str) -> None:
    assert infer_url(url) == expected
