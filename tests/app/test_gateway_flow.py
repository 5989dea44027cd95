"""Flow at the gateway: prompts that come in pieces, credit, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect

from app import connection, outbox
from app.accounts import hash_key
from protocol.token_log import TokenDelta
from tests.app.fake_model import (
    FakeIngress,
    FakeModel,
    Frame,
    MemoryPeer,
    chunks,
    deltas,
    gateway_on_air,
    gateway_over,
)
from tests.app.stack import (
    PATIENCE_S,
    eventually,
    on_air,
    running_stack,
)
from tests.app.talker import talking

CAPACITY = 1000


class Room:
    """One ingress, one client, and what the model was asked to prefill."""

    def __init__(self, **options: Any) -> None:
        self.model = FakeModel(is_paced=True)
        self.ingress = FakeIngress(self.model)
        self.gateway = gateway_over(self.ingress, **{"input_buffer_bytes": CAPACITY, **options})
        self.peer = MemoryPeer(self.gateway)

    def begin(self, **fields: Any) -> None:
        own = {"id": "r", "input": "chunked", "prompt": "", **fields}
        self.peer.say("INFER_REQ", **own)

    def piece(self, input_id: int, text: str, **fields: Any) -> None:
        self.peer.say("INPUT_CHUNK", id="r", input_id=input_id, text=text, **fields)

    async def synced(self) -> None:
        """Returns when everything that was said is heard and worked on."""
        self.peer.say("PING")
        await self.peer.until("PONG")
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def warmed(self) -> list[Any]:
        return [request.prompt or request.messages for request in self.ingress.warmed]


@asynccontextmanager
async def room(**options: Any) -> AsyncIterator[Room]:
    """Nothing is left of it when it closes."""
    opened = Room(**options)
    yield opened
    opened.peer.leave()
    await opened.peer.gone()
    opened.gateway.close()
    assert opened.gateway.live_requests == opened.gateway.open_connections == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"


# ------------------------------------------------------------------ prompts that come in pieces


async def test_the_model_prefills_what_came_one_call_at_a_time() -> None:
    async with room() as opened:
        gate = opened.ingress.warm_gate = asyncio.Event()
        opened.begin(anchor="sha256")
        for input_id, text in enumerate(["one ", "two ", "three "]):
            opened.piece(input_id, text)
            await opened.synced()
        assert opened.warmed == ["one "]
        gate.set()
        assert (await opened.peer.until("ANCHOR"))["input_id"] == 0
        assert (await opened.peer.until("ANCHOR"))["input_id"] == 2
        assert opened.warmed == ["one ", "one two three "]
        assert opened.model.num_running == 0
        opened.piece(3, "four", is_last=True)
        await opened.peer.until("INFER_ACK")
        anchor = await opened.peer.until("ANCHOR")
        assert (anchor["input_id"], anchor["offset"]) == (3, 0)
        (run,) = opened.model.runs.values()
        assert run.request.prompt == "one two three four"
        opened.model.step(100)
        assert (await opened.peer.until("INFER_DONE"))["finish_reason"] == "stop"


async def test_a_complete_request_does_not_wait_for_the_prefill_of_a_part() -> None:
    async with room() as opened:
        opened.ingress.warm_gate = asyncio.Event()
        opened.begin()
        opened.piece(0, "a part ")
        await opened.synced()
        opened.piece(1, "and the rest", is_last=True)
        await opened.peer.until("INFER_ACK")
        opened.ingress.warm_gate.set()
        opened.model.step(100)
        await opened.peer.until("INFER_DONE")
        anchors = [frame for frame in opened.peer.frames if frame["type"] == "ANCHOR"]
        assert [anchor["input_id"] for anchor in anchors] == [1]


async def test_what_a_chat_begins_with_is_prefilled_before_any_piece() -> None:
    async with room() as opened:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}]
        opened.begin(prompt=None, messages=turns)
        await opened.synced()
        assert [message.content for message in opened.warmed[0]] == ["Be brief.", ""]
        assert not any(frame["type"] == "ANCHOR" for frame in opened.peer.frames)
        opened.piece(0, "Hi", is_last=True)
        await opened.peer.until("INFER_ACK")
        (run,) = opened.model.runs.values()
        assert [message.content for message in run.request.messages or ()] == ["Be brief.", "Hi"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 99}, "temperature"),
        ({"messages": [{"role": "user", "content": ""}]}, "prompt"),
        ({"stop": [""]}, "stop[0]"),
    ],
)
async def test_a_request_that_can_be_none_is_refused_before_its_input(
    fields: dict[str, Any], param: str
) -> None:
    async with room() as opened:
        opened.begin(**fields)
        error = await opened.peer.until("ERROR")
        assert (error["id"], error["code"], error["param"]) == ("r", "invalid_request", param)
        opened.begin()
        opened.piece(0, "go", is_last=True)
        await opened.peer.until("INFER_ACK")


async def test_an_input_without_text_is_refused_as_a_prompt_without_text_is() -> None:
    async with room() as opened:
        opened.begin()
        opened.piece(0, "")
        opened.piece(1, "", is_last=True)
        error = await opened.peer.until("ERROR")
        assert (error["id"], error["param"]) == ("r", "prompt")


async def test_a_request_is_cancelled_while_it_is_received_and_so_is_its_prefill() -> None:
    async with room() as opened:
        opened.ingress.warm_gate = asyncio.Event()
        opened.begin()
        opened.piece(0, "x")
        await opened.synced()
        opened.peer.say("CANCEL", id="r")
        done = await opened.peer.until("INFER_DONE")
        assert (done["finish_reason"], done["seq"]) == ("cancelled", 0)
        opened.peer.say("CANCEL", id="r")
        await opened.synced()
        assert not opened.model.runs
        assert opened.gateway.live_requests == 0
        assert opened.peer.frames[-1]["type"] == "PONG"


@pytest.mark.parametrize("how", ["lose", "abort"])
async def test_nothing_is_left_of_a_request_whose_client_left_before_its_end(how: str) -> None:
    async with room() as opened:
        opened.ingress.warm_gate = asyncio.Event()
        opened.begin()
        opened.piece(0, "x")
        await opened.synced()
        if how == "lose":
            opened.peer.lose()
        else:
            opened.peer.task.cancel()
        await opened.peer.gone()
        assert not opened.model.runs


async def test_an_input_that_is_too_long_ends_its_request_alone() -> None:
    async with room(max_input_bytes=CAPACITY) as opened:
        opened.ingress.warm_gate = asyncio.Event()
        opened.peer.ask("other")
        await opened.peer.until("INFER_ACK", id="other")
        opened.begin()
        opened.piece(0, "x" * 900)
        assert (await opened.peer.until("INPUT_STATE"))["level"] == "high"
        opened.piece(1, "x" * 200)
        error = await opened.peer.until("ERROR")
        assert (error["id"], error["code"], error["limit"]) == ("r", "input_too_large", CAPACITY)
        await opened.synced()
        assert opened.gateway.live_requests == 1
        opened.model.step(100)
        await opened.peer.until("INFER_DONE", id="other")


async def test_a_full_buffer_holds_the_client_up_and_then_lets_it_go_on() -> None:
    async with room() as opened:
        gate = opened.ingress.warm_gate = asyncio.Event()
        opened.begin()
        opened.piece(0, "a" * 500)
        await opened.synced()
        opened.piece(1, "b" * 400)
        state = await opened.peer.until("INPUT_STATE")
        assert (state["level"], state["buffered"], state["capacity"]) == ("high", 900, CAPACITY)
        opened.piece(2, "c" * 200)
        error = await opened.peer.until("ERROR")
        assert (error["code"], error["param"], "id" in error) == ("input_too_large", "text", False)
        gate.set()
        assert (await opened.peer.until("INPUT_STATE"))["level"] == "ok"
        opened.piece(2, "c" * 200, is_last=True)
        await opened.peer.until("INFER_ACK")
        (run,) = opened.model.runs.values()
        assert run.request.prompt == "a" * 500 + "b" * 400 + "c" * 200


async def test_a_high_buffer_narrows_the_credit_of_the_other_streams_until_it_is_given_up() -> None:
    async with room() as opened:
        opened.model.answer = deltas(["x"] * 300)
        opened.ingress.warm_gate = asyncio.Event()
        fields = {"cache": "bypass", "window": 256, "boundary": "utf8", "anchor": "none"}
        opened.begin()
        opened.piece(0, "a" * 900)
        await opened.peer.until("INPUT_STATE")
        opened.peer.say("INFER_REQ", id="s", prompt="hi", **fields)
        await opened.peer.until("INFER_ACK", id="s")
        opened.model.step(300)
        await opened.synced()
        assert len(chunks(opened.peer.of("s"))) == 64
        opened.peer.say("CANCEL", id="r")
        await opened.peer.until("INFER_DONE", id="r")
        await opened.synced()
        assert len(chunks(opened.peer.of("s"))) == 256


async def test_a_draining_server_waits_for_the_rest_of_a_request_and_no_longer_than_it_said() -> (
    None
):
    async with room() as opened:
        opened.begin()
        opened.piece(0, "x")
        await opened.synced()
        draining = asyncio.create_task(opened.gateway.drain(0.05))
        await opened.peer.until("DRAIN")
        await opened.peer.until("CLOSE")
        assert opened.peer.close_code == 1001
        await draining


CUTS = st.lists(st.integers(0, 40), max_size=5)


@given(CUTS, st.booleans())
@settings(deadline=None, max_examples=20)
async def test_however_the_prompt_is_cut_the_answer_is_that_of_the_whole(
    cuts: list[int], binary: bool
) -> None:
    text = "春夏秋冬🙂 and a word, é\u0301 🇩🇪"
    edges = sorted({0, *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in zip(edges, [*edges[1:], len(text)], strict=True)]
    async with running_stack(with_cache=False) as stack, on_air(stack.graph) as site:
        async with talking(site.infer_url) as talker:
            assert await talker.answer("whole", text) == text
            whole = await talker.last_of("whole")
            await talker.ask("r", "", input="chunked")
            for input_id, piece in enumerate(pieces):
                fields = {"id": "r", "input_id": input_id, "text": piece}
                is_last = input_id == len(pieces) - 1
                await talker.send("INPUT_CHUNK", **fields, is_last=is_last, binary=binary)
            done = await talker.last_of("r")
            assert talker.text("r") == text
            for name in ("prompt_tokens", "completion_tokens"):
                assert done["usage"][name] == whole["usage"][name]
        await stack.until_idle()


async def test_a_prompt_in_pieces_hits_the_cache_entry_of_the_whole() -> None:
    async with (
        running_stack() as stack,
        on_air(stack.graph) as site,
        talking(site.infer_url) as talker,
    ):
        await talker.answer("whole", "What is the answer?", cache="auto")
        await talker.ask("r", "What is ", input="chunked", cache="auto")
        await talker.send("INPUT_CHUNK", id="r", input_id=0, text="the ")
        await talker.send("INPUT_CHUNK", id="r", input_id=1, text="answer?", is_last=True)
        assert (await talker.last_of("r"))["cache"]["outcome"] == "exact"
        assert talker.text("r") == "What is the answer?"


# ------------------------------------------------------------------ credit


async def test_a_stream_keeps_within_its_window_and_goes_on_with_each_ack() -> None:
    async with room() as opened:
        opened.model.answer = deltas(["x"] * 50)
        fields = {"cache": "bypass", "window": 8, "boundary": "utf8"}
        opened.peer.say("INFER_REQ", id="r", prompt="hi", **fields)
        await opened.peer.until("INFER_ACK")
        opened.model.step(100)
        acked = -1
        while acked < 49:
            await opened.synced()
            last = chunks(opened.peer.of("r"))[-1][0]
            assert last == min(acked + 8, 49)
            acked = min(acked + 5, 49)
            opened.peer.say("ACK", id="r", seq=acked)
        await opened.synced()
        assert opened.peer.of("r")[-1]["type"] == "INFER_DONE"
        assert [seq for seq, _ in chunks(opened.peer.of("r"))] == [*range(50)]


async def test_a_cancelled_stream_ends_without_credit_and_the_others_go_on() -> None:
    async with room() as opened:
        opened.model.answer = deltas(["x"] * 50)
        fields = {"prompt": "hi", "cache": "bypass", "boundary": "utf8"}
        opened.peer.say("INFER_REQ", id="r", window=3, **fields)
        opened.peer.say("INFER_REQ", id="s", **fields)
        await opened.peer.until("INFER_ACK", id="s")
        opened.model.step(40)
        await opened.synced()
        opened.peer.say("CANCEL", id="r")
        done = await opened.peer.until("INFER_DONE")
        assert (done["id"], done["finish_reason"], done["seq"]) == ("r", "cancelled", 3)
        opened.peer.say("ACK", id="r", seq=2)
        opened.model.step(20)
        assert (await opened.peer.until("INFER_DONE"))["id"] == "s"
        assert len(chunks(opened.peer.of("s"))) == 50
        assert not any(frame["type"] == "ERROR" for frame in opened.peer.frames)


async def test_a_stream_that_waits_for_credit_can_be_resumed_with_more() -> None:
    async with room() as opened:
        opened.model.answer = deltas(["x"] * 50)
        fields = {"cache": "bypass", "boundary": "utf8"}
        opened.peer.say("INFER_REQ", id="r", prompt="hi", window=4, **fields)
        token = (await opened.peer.until("INFER_ACK"))["stream"]
        opened.model.step(100)
        await opened.synced()
        assert len(chunks(opened.peer.of("r"))) == 4
        again = MemoryPeer(opened.gateway)
        again.say("RESUME", id="q", stream=token, last_seq=1, window=10, boundary="utf8")
        await again.until("INFER_ACK")
        again.say("PING")
        await again.until("PONG")
        assert [seq for seq, _ in chunks(again.of("q"))] == [*range(2, 12)]
        assert (await opened.peer.until("INFER_DONE"))["error"]["code"] == "replaced"
        again.say("ACK", id="q", seq=11)
        again.say("PING")
        await again.until("PONG")
        assert len(chunks(again.of("q"))) == 20
        again.leave()
        await again.gone()


EMOJI = ["Hi ", "\U0001f44b", "\U0001f3fd", "!", "🇩", "🇪", "🇫", "🇷", "e", "\u0301", "."]


@given(st.lists(st.integers(0, 12), max_size=5), st.sampled_from([None, 2, 5]))
@settings(deadline=None, max_examples=40)
async def test_wherever_it_breaks_whole_characters_come_once(
    breaks: list[int], window: int | None
) -> None:
    async with room() as opened:
        opened.model.answer = deltas(EMOJI)
        heard: list[Frame] = []
        token, last_seq, done = None, -1, None
        for num_frames in [*breaks, 1000]:
            peer = MemoryPeer(opened.gateway)
            if token is None:
                peer.say("INFER_REQ", id="r", prompt="hi", cache="bypass", window=window)
            else:
                peer.say("RESUME", id="r", stream=token, last_seq=last_seq, window=window)
            await peer.until("HELLO")
            for _ in range(num_frames):
                opened.model.step(3)
                frame = await peer.hear()
                if frame["type"] == "INFER_CHUNK":
                    last_seq = frame["seq"]
                    peer.say("ACK", id="r", seq=last_seq)
                token = frame.get("stream", token)
                heard.append(frame)
                if frame["type"] == "INFER_DONE":
                    done = frame
                    break
            peer.lose()
            await peer.gone()
            if done is not None:
                break
        assert done is not None
        assert done["finish_reason"] == "stop"
        seqs = [seq for seq, _ in chunks(heard)]
        assert seqs == sorted(set(seqs))
        assert "".join(text for _, text in chunks(heard)) == "".join(EMOJI)


# ------------------------------------------------------------------ clients that do not read


FAT = [TokenDelta(seq, "x" * 10_000, (seq,)) for seq in range(200)]
FAT_TEXT = "x" * 2_000_000
NUM_ASKED = 8
"""So many of them fill every buffer that the kernel may have for a socket."""


@asynccontextmanager
async def deaf(url: str) -> AsyncIterator[ClientConnection]:
    """A client that asks for much, and reads the greeting only, through a small window."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    host, _, port = url.removeprefix("ws://").partition("/")[0].partition(":")
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    options = {"ping_interval": None, "close_timeout": 0.1, "max_queue": 1, "compression": None}
    async with connect(url, sock=raw, **options) as client:  # type: ignore[arg-type]
        await client.recv()
        client.transport.pause_reading()
        for number in range(NUM_ASKED):
            request = {"type": "INFER_REQ", "id": f"d{number}", "prompt": "hi", "cache": "bypass"}
            await client.send(json.dumps(request))
        yield client
        client.transport.abort()


async def test_clients_that_never_read_are_let_go_and_disturb_nobody() -> None:
    model = FakeModel(FAT)
    gateway = gateway_over(FakeIngress(model), unread_timeout_s=0.5, resume_window_s=0)
    async with (
        gateway_on_air(gateway) as url,
        contextlib.AsyncExitStack() as stuck,
        talking(url) as talker,
    ):
        for _ in range(5):
            await stuck.enter_async_context(deaf(url))
        for number in range(3):
            assert await talker.answer(f"r{number}") == FAT_TEXT
        for stuck_one in gateway._connections:
            assert stuck_one._outbox._num_bytes <= outbox.MAX_BYTES + 10_500
        await eventually(lambda: gateway.open_connections == 1)
        assert gateway.live_requests == model.num_running == 0
        assert await talker.answer("last") == FAT_TEXT


async def test_a_client_that_begins_to_read_again_has_missed_nothing() -> None:
    model = FakeModel(FAT)
    gateway = gateway_over(FakeIngress(model))
    async with gateway_on_air(gateway) as url, deaf(url) as client:
        await eventually(lambda: len(model.runs) == NUM_ASKED and model.num_running == 0)
        assert gateway.live_requests > 0
        client.transport.resume_reading()
        frames: list[Frame] = []
        async with asyncio.timeout(PATIENCE_S):
            while [frame["type"] for frame in frames].count("INFER_DONE") < NUM_ASKED:
                frames.append(json.loads(await client.recv()))
        for number in range(NUM_ASKED):
            of = [frame for frame in frames if frame.get("id") == f"d{number}"]
            assert [seq for seq, _ in chunks(of)] == [*range(200)]
            assert of[-1]["finish_reason"] == "stop"


async def test_a_lost_slow_client_finds_its_streams_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that takes nothing is closed, which is a loss like any other."""
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_S", 0.01)
    async with room(unread_timeout_s=0.05) as opened:
        opened.model.answer = [TokenDelta(seq, "x" * 1000, (seq,)) for seq in range(2000)]
        peer = opened.peer
        peer.ask("r")
        token = (await peer.until("INFER_ACK"))["stream"]

        async def never(message: Any) -> None:
            await asyncio.Event().wait()

        peer.stall(never)
        opened.model.step(2000)
        await peer.gone()
        assert opened.gateway.open_connections == 0
        assert opened.gateway.resumable_streams == 1
        heard = chunks(peer.of("r"))
        again = MemoryPeer(opened.gateway)
        again.say("RESUME", id="r", stream=token, last_seq=len(heard) - 1, boundary="utf8")
        opened.model.step(1)
        await again.until("INFER_DONE")
        assert [seq for seq, _ in heard + chunks(again.of("r"))] == [*range(2000)]
        again.leave()
        await again.gone()
        opened.peer = MemoryPeer(opened.gateway)


@pytest.mark.parametrize(("key", "shares"), [(None, 2), ("secret", 1)])
async def test_where_nobody_has_a_key_each_socket_has_a_share_of_its_own(
    key: str | None, shares: int
) -> None:
    keys = [] if key is None else [{"tenant": "red", "sha256": hash_key(key)}]
    async with (
        running_stack(with_cache=False) as stack,
        on_air(stack.graph, auth={"keys": keys}) as site,
    ):
        for _ in range(2):
            async with talking(site.infer_url, key=key) as talker:
                for id in ("a", "b"):
                    await talker.send("INFER_REQ", id=id, prompt="Go on", max_tokens=2)
                    await talker.last_of(id)
        asked = [submit.request for replica in stack.replicas for submit in replica.submits]
    assert len(asked) == 4
    assert len({request.share for request in asked}) == shares
