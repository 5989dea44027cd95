"""RESUME and DRAIN at the gateway: nothing is lost or doubled wherever a connection breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app import connection as connection_module
from app.accounts import hash_key
from app.gateway import Gateway
from app.resume import ResumeTokens, resume_expired
from app.stream_keeper import check_last_seq
from protocol.errors import InvalidRequest, Overloaded
from protocol.token_log import TokenLog
from tests.app.fake_model import (
    KEY,
    PIECES,
    TEXT,
    FakeIngress,
    FakeModel,
    Frame,
    MemoryPeer,
    chunks,
    deltas,
    gateway_on_air,
    gateway_over,
)
from tests.app.stack import PATIENCE_S, eventually
from tests.app.talker import Talker, talking
from tests.protocol.fakes import FakeClock

LAST = len(PIECES) - 1
EXPIRED = {"id": "r", "type": "ERROR", "retryable": False} | {
    name: getattr(resume_expired(), name) for name in ("code", "message", "param")
}
KEYS = {name: f"key-{name}" for name in ("red", "blue")}
AUTH = {"keys": [{"tenant": name, "sha256": hash_key(key)} for name, key in KEYS.items()]}


class House:
    """Two ingresses over one model; `peer` connects to one of them."""

    def __init__(self, model: FakeModel | None = None, **options: Any) -> None:
        self.model = model or FakeModel()
        self.ingresses = [FakeIngress(self.model), FakeIngress(self.model)]
        self.gateways = [gateway_over(ingress, **options) for ingress in self.ingresses]
        self.peers: list[MemoryPeer] = []

    def peer(self, at: int = 0, *, key: str | None = None) -> MemoryPeer:
        self.peers.append(MemoryPeer(self.gateways[at], key=key))
        return self.peers[-1]

    async def begin(self, hear: int = 0, *, at: int = 0, key: str | None = None) -> MemoryPeer:
        """A peer that has asked, and heard the acceptance and so many chunks."""
        peer = self.peer(at, key=key)
        peer.ask()
        await peer.until("INFER_ACK")
        for _ in range(hear):
            await peer.until("INFER_CHUNK")
        return peer


@asynccontextmanager
async def house(model: FakeModel | None = None, **options: Any) -> AsyncIterator[House]:
    """A house whose peers have all left when it closes, and in which nothing runs on."""
    open_house = House(model, **options)
    yield open_house
    for peer in open_house.peers:
        peer.leave()
        await peer.gone()
    for gateway in open_house.gateways:
        gateway.close()
        assert gateway.live_requests == gateway.open_connections == gateway.resumable_streams == 0
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, "tasks are left"


def token_of(peer: MemoryPeer) -> str:
    return str(next(frame["stream"] for frame in peer.frames if frame["type"] == "INFER_ACK"))


async def rest_of(peer: MemoryPeer, token: str, last_seq: int, id: str = "r") -> list[Frame]:
    """What a RESUME brings, to the frame that ends it."""
    peer.say("RESUME", id=id, stream=token, last_seq=last_seq)
    await peer.until("INFER_DONE", "ERROR", id=id)
    return peer.of(id)


# ------------------------------------------------------------------ where it breaks


@pytest.mark.parametrize("to", [0, 1], ids=["the same ingress", "another ingress"])
@pytest.mark.parametrize("is_over", [False, True], ids=["while it runs", "after its end"])
@pytest.mark.parametrize("heard", [0, 1, 7, LAST, LAST + 1])
async def test_a_lost_stream_goes_on_behind_what_was_heard(
    heard: int, is_over: bool, to: int
) -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        model = open_house.model
        peer = await open_house.begin()
        model.step(heard)
        for _ in range(heard):
            await peer.until("INFER_CHUNK")
        model.step(100 if is_over else 1)
        peer.lose()
        await peer.gone()
        again = open_house.peer(to)
        again.say("RESUME", id="r", stream=token_of(peer), last_seq=heard - 1)
        await again.until("INFER_ACK")
        model.step(100)
        done = await again.until("INFER_DONE")
        assert (done["finish_reason"], done["seq"]) == ("stop", len(PIECES))
        assert chunks(again.of("r")) == [*enumerate(PIECES)][heard:]
        assert [frame["type"] for frame in again.of("r")].count("INFER_ACK") == 1
        assert token_of(again) == token_of(peer)
        assert "queue_position" not in again.of("r")[0]


CUTS = st.lists(
    st.tuples(
        st.integers(0, len(PIECES) + 3),
        st.integers(0, 1),
        st.sampled_from(["lose", "abort", "late"]),
    ),
    max_size=6,
)
WIDTHS = st.lists(st.integers(1, 4), min_size=len(PIECES), max_size=len(PIECES))


@settings(max_examples=60)
@given(CUTS, WIDTHS, st.booleans())
async def test_any_number_of_breaks_anywhere_leaves_every_token_once(
    cuts: list[tuple[int, int, str]], widths: list[int], is_slow: bool
) -> None:
    """Breaks are a lost connection, a handler that Serve cancels, and one not noticed yet."""
    answer = deltas(PIECES, widths)
    async with house(FakeModel(answer, is_paced=is_slow)) as open_house:
        heard: list[Frame] = []
        token, last_seq, done = None, -1, None
        for num_frames, at, how in [*cuts, (1000, 0, "lose")]:
            peer = open_house.peer(at)
            if token is None:
                peer.ask()
            else:
                peer.say("RESUME", id="r", stream=token, last_seq=last_seq)
            await peer.until("HELLO")
            for _ in range(num_frames):
                open_house.model.step()
                frame = await peer.hear()
                token = frame.get("stream", token)
                last_seq = frame["seq"] if frame["type"] == "INFER_CHUNK" else last_seq
                heard.append(frame)
                done = frame if frame["type"] == "INFER_DONE" else None
                if done is not None:
                    break
            if done is not None:
                break
            if how == "lose":
                peer.lose()
                await peer.gone()
            elif how == "abort":
                peer.task.cancel()
                await peer.gone()
        assert done is not None
        assert done["finish_reason"] == "stop"
        assert chunks(heard) == [(delta.seq, delta.text) for delta in answer]


async def test_a_resumed_stream_brings_token_ids_to_who_asks_for_them() -> None:
    async with house() as open_house:
        peer = await open_house.begin(1)
        peer.lose()
        await peer.gone()
        again = open_house.peer()
        fields = {"id": "r", "stream": token_of(peer), "last_seq": 0}
        again.say("RESUME", **fields, return_token_ids=True)
        await again.until("INFER_DONE")
        ids = [frame["token_ids"] for frame in again.of("r") if frame["type"] == "INFER_CHUNK"]
        assert ids == [[seq] for seq in range(1, len(PIECES))]


# ------------------------------------------------------------------ refusals


async def test_a_stream_that_waited_too_long_is_gone_and_its_id_is_free() -> None:
    clock = FakeClock()
    async with house(FakeModel(is_paced=True), clock=clock) as open_house:
        model = open_house.model
        peer = await open_house.begin()
        peer.lose()
        await peer.gone()
        gateway = open_house.gateways[0]
        assert gateway.resumable_streams == model.num_running == 1
        clock.now += 30
        gateway._keeper._tick()
        assert gateway.resumable_streams == model.num_running == 0
        model.runs.clear()
        again = open_house.peer()
        assert await rest_of(again, token_of(peer), -1) == [EXPIRED]
        again.ask()
        await again.until("INFER_ACK")
        model.step(100)
        await again.until("INFER_DONE")
        assert chunks(again.of("r")) == [*enumerate(PIECES)]


async def test_the_window_ends_by_itself() -> None:
    async with house(FakeModel(is_paced=True), resume_window_s=0.05) as open_house:
        peer = await open_house.begin()
        peer.lose()
        await peer.gone()
        await eventually(lambda: open_house.model.num_running == 0)
        assert open_house.gateways[0].resumable_streams == 0


@pytest.mark.parametrize("at", [0, 1])
async def test_nobody_learns_of_anothers_stream(at: int) -> None:
    async with house(FakeModel(is_paced=True), auth=AUTH) as open_house:
        peer = await open_house.begin(key=KEYS["red"])
        peer.lose()
        await peer.gone()
        thief = open_house.peer(at, key=KEYS["blue"])
        token = token_of(peer)
        forged = ResumeTokens(b"guess").sign("x", "replica-1", "blue")
        unknown = ResumeTokens(KEY).sign("x", "replica-1", "blue")
        for guess in (token, token[:-1], forged, unknown, "", "x" * 500, "☃"):
            thief.frames.clear()
            assert await rest_of(thief, guess, -1) == [EXPIRED]
        owner = open_house.peer(at, key=KEYS["red"])
        owner.say("RESUME", id="mine", stream=token, last_seq=-1)
        await owner.until("INFER_ACK")


@pytest.mark.parametrize("at", [0, 1])
async def test_a_last_seq_that_nobody_heard_is_refused_and_the_stream_stays(at: int) -> None:
    answer = deltas(PIECES, [1, 3])
    async with house(FakeModel(answer, is_paced=True)) as open_house:
        peer = await open_house.begin()
        open_house.model.step(2)
        peer.lose()
        await peer.gone()
        again = open_house.peer(at)
        for last_seq, limit in ((4, 3), (2**32 - 1, 3), (2, None)):
            again.frames.clear()
            (error,) = await rest_of(again, token_of(peer), last_seq)
            assert (error["code"], error["param"]) == ("invalid_request", "last_seq")
            assert error.get("limit") == limit
            assert str(last_seq) in error["message"]
        again.say("RESUME", id="r", stream=token_of(peer), last_seq=0)
        assert (await again.until("INFER_CHUNK"))["seq"] == 3


def test_a_stream_without_a_token_has_nothing_behind_it() -> None:
    check_last_seq(TokenLog(), -1)
    with pytest.raises(InvalidRequest, match="last_seq is 0, the last token of this stream is -1"):
        check_last_seq(TokenLog(), 0)


async def test_an_ingress_that_cannot_ask_says_so_and_the_stream_can_be_had_later() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.lose()
        await peer.gone()
        other = open_house.ingresses[1]
        other.refusal = Overloaded("no replica answers", retry_after_s=1)
        again = open_house.peer(1)
        (error,) = await rest_of(again, token_of(peer), -1)
        assert (error["code"], error["retryable"], error["id"]) == ("overloaded", True, "r")
        other.refusal = None
        again.say("RESUME", id="r", stream=token_of(peer), last_seq=-1)
        await again.until("INFER_ACK")


async def test_without_a_window_nothing_can_be_resumed_and_a_lost_stream_stops() -> None:
    async with house(FakeModel(is_paced=True), resume_window_s=0.0) as open_house:
        peer = await open_house.begin()
        assert peer.frames[0]["resume_window_s"] == 0
        peer.lose()
        await peer.gone()
        assert open_house.model.num_running == 0
        again = open_house.peer()
        assert await rest_of(again, token_of(peer), -1) == [EXPIRED]


# ------------------------------------------------------------------ leaving


@pytest.mark.parametrize("code", [1000, 1001, 1005])
async def test_a_client_that_leaves_on_purpose_stops_its_streams_at_once(code: int) -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.leave(code)
        await peer.gone()
        assert open_house.model.num_running == open_house.gateways[0].resumable_streams == 0


@pytest.mark.parametrize("code", [1002, 1006, 1011, 1012, 4000])
async def test_every_other_end_is_a_loss(code: int) -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.leave(code)
        await peer.gone()
        assert open_house.model.num_running == open_house.gateways[0].resumable_streams == 1


@pytest.mark.parametrize("is_goodbye", [True, False])
async def test_a_handler_that_is_cancelled_still_finds_out_why(is_goodbye: bool) -> None:
    """Serve cancels it when the client is gone; what the client said last may be unread."""
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.say("PONG")
        if is_goodbye:
            peer.leave(1001)
        else:
            peer.lose()
        peer.task.cancel()
        await peer.gone()
        assert open_house.model.num_running == (0 if is_goodbye else 1)


async def test_a_silent_peer_is_closed_and_can_come_back() -> None:
    async with house(FakeModel(is_paced=True), heartbeat_s=0.05) as open_house:
        peer = await open_house.begin()
        await peer.until("CLOSE")
        assert peer.close_code == 4408
        await peer.gone()
        assert open_house.model.num_running == 1
        again = open_house.peer()
        again.say("RESUME", id="r", stream=token_of(peer), last_seq=-1)
        open_house.model.step(100)
        await again.until("INFER_DONE")
        assert chunks(again.of("r")) == [*enumerate(PIECES)]


async def test_a_request_that_was_not_accepted_yet_is_not_kept() -> None:
    async with house() as open_house:
        open_house.ingresses[0].gate = asyncio.Event()
        peer = open_house.peer()
        peer.ask()
        await peer.until("HELLO")
        await eventually(lambda: open_house.gateways[0].live_requests == 1)
        peer.lose()
        await peer.gone()
        assert open_house.gateways[0].live_requests == 0
        assert open_house.model.runs == {}


# ------------------------------------------------------------------ one owner


@pytest.mark.parametrize("at", [0, 1], ids=["the same ingress", "another ingress"])
async def test_the_last_resume_has_the_stream(at: int) -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        model = open_house.model
        first = await open_house.begin()
        model.step(3)
        for _ in range(3):
            await first.until("INFER_CHUNK")
        second = open_house.peer(at)
        second.say("RESUME", id="s", stream=token_of(first), last_seq=0)
        await second.until("INFER_ACK")
        replaced = await first.until("INFER_DONE")
        assert (replaced["finish_reason"], replaced["seq"]) == ("error", 3)
        assert replaced["error"]["code"] == "replaced"
        model.step(100)
        await second.until("INFER_DONE")
        assert chunks(second.of("s")) == [*enumerate(PIECES)][1:]
        assert chunks(first.of("r")) == [*enumerate(PIECES)][:3]
        # The one that lost it goes on with other things.
        first.say("PING", ts=1)
        await first.until("PONG")
        first.ask("again")
        await first.until("INFER_ACK", id="again")


async def test_one_socket_may_take_its_own_stream_under_another_name() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.say("RESUME", id="s", stream=token_of(peer), last_seq=-1)
        assert (await peer.until("INFER_DONE", id="r"))["error"]["code"] == "replaced"
        open_house.model.step(100)
        await peer.until("INFER_DONE", id="s")
        assert chunks(peer.of("s")) == [*enumerate(PIECES)]


async def test_two_that_ask_at_a_time_fetch_once_and_the_later_has_it() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.lose()
        await peer.gone()
        other = open_house.ingresses[1]
        other.gate = asyncio.Event()
        pair = [open_house.peer(1), open_house.peer(1)]
        for one in pair:
            one.say("RESUME", id="r", stream=token_of(peer), last_seq=-1)
            await one.until("HELLO")
        gateway = open_house.gateways[1]
        await eventually(lambda: gateway.live_requests == 2)
        other.gate.set()
        for one in pair:
            await one.until("INFER_ACK")
        assert (await pair[0].until("INFER_DONE"))["error"]["code"] == "replaced"
        open_house.model.step(100)
        assert (await pair[1].until("INFER_DONE"))["finish_reason"] == "stop"
        assert other.num_fetched == 1


async def test_a_stream_moves_away_and_back_again() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        token = token_of(peer)
        for at in (1, 0, 1, 0):
            peer.lose()
            await peer.gone()
            open_house.model.step()
            peer = open_house.peer(at)
            peer.say("RESUME", id="r", stream=token, last_seq=-1)
            await peer.until("INFER_ACK")
        open_house.model.step(100)
        await peer.until("INFER_DONE")
        assert chunks(peer.of("r")) == [*enumerate(PIECES)]


async def test_a_client_that_is_gone_before_its_stream_was_fetched_may_ask_again() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.lose()
        await peer.gone()
        other = open_house.ingresses[1]
        other.gate = asyncio.Event()
        hasty = open_house.peer(1)
        hasty.say("RESUME", id="r", stream=token_of(peer), last_seq=-1)
        await eventually(lambda: open_house.gateways[1].live_requests == 1)
        hasty.lose()
        await hasty.gone()
        other.gate.set()
        await eventually(lambda: open_house.gateways[1].resumable_streams == 1)
        again = open_house.peer(1)
        again.say("RESUME", id="r", stream=token_of(peer), last_seq=-1)
        await again.until("INFER_ACK")
        assert other.num_fetched == 1


async def test_a_cancel_reaches_a_stream_that_is_just_being_fetched() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        peer = await open_house.begin()
        peer.lose()
        await peer.gone()
        open_house.ingresses[1].gate = gate = asyncio.Event()
        again = open_house.peer(1)
        again.say("RESUME", id="r", stream=token_of(peer), last_seq=-1)
        again.say("CANCEL", id="r")
        again.say("PING", ts=1)
        await again.until("PONG")
        gate.set()
        assert (await again.until("INFER_DONE"))["finish_reason"] == "cancelled"
        assert open_house.model.num_running == 0


# ------------------------------------------------------------------ draining


async def until_draining(peer: MemoryPeer, gateway: Gateway, s: float) -> asyncio.Task[None]:
    draining = asyncio.create_task(gateway.drain(s))
    assert (await peer.until("DRAIN"))["deadline_s"] == s
    return draining


async def test_a_draining_server_ends_what_it_has_and_takes_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "LEAVE_TIMEOUT_S", 0.02)
    async with house(FakeModel(is_paced=True)) as open_house:
        gateway = open_house.gateways[0]
        peer, idle = await open_house.begin(), open_house.peer()
        await idle.until("HELLO")
        draining = await until_draining(peer, gateway, 60.0)
        assert gateway.is_draining
        assert (await idle.until("DRAIN"))["deadline_s"] == 60.0
        peer.ask("new")
        refusal = await peer.until("ERROR")
        assert (refusal["code"], refusal["retryable"], refusal["id"]) == ("overloaded", True, "new")
        assert refusal["retry_after_s"] == 0
        peer.say("RESUME", id="old", stream=token_of(peer), last_seq=-1)
        assert (await peer.until("ERROR"))["code"] == "overloaded"
        late = open_house.peer()
        await late.until("REFUSED")
        assert late.status == 503
        await idle.until("CLOSE")
        assert idle.close_code == 1001
        assert (peer.close_code, gateway.live_requests, draining.done()) == (None, 1, False)
        open_house.model.step(100)
        await peer.until("INFER_DONE")
        assert chunks(peer.of("r")) == [*enumerate(PIECES)]
        await peer.until("CLOSE")
        assert peer.close_code == 1001
        await draining


async def test_a_client_that_goes_by_itself_ends_the_drain() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        gateway = open_house.gateways[0]
        peer = await open_house.begin()
        draining = await until_draining(peer, gateway, 60.0)
        peer.leave()
        async with asyncio.timeout(PATIENCE_S):
            await draining
            await gateway.drain(60.0)
        assert open_house.model.num_running == 0


async def test_at_the_deadline_the_rest_is_closed_and_goes_on_elsewhere() -> None:
    async with house(FakeModel(is_paced=True)) as open_house:
        model = open_house.model
        peer = await open_house.begin()
        model.step(2)
        draining = await until_draining(peer, open_house.gateways[0], 0.05)
        await peer.until("CLOSE")
        assert peer.close_code == 1001
        await draining
        assert model.num_running == 1
        heard = chunks(peer.of("r"))
        again = open_house.peer(1)
        again.say("RESUME", id="r", stream=token_of(peer), last_seq=len(heard) - 1)
        await again.until("INFER_ACK")
        model.step(100)
        await again.until("INFER_DONE")
        assert heard + chunks(again.of("r")) == [*enumerate(PIECES)]


async def test_a_server_without_connections_has_drained_at_once() -> None:
    async with house() as open_house:
        await open_house.gateways[0].drain(60.0)


async def test_a_handshake_that_the_drain_overtakes_is_closed() -> None:
    async with house() as open_house:
        gateway, ingress = open_house.gateways[0], open_house.ingresses[0]
        info, gate = ingress.model_info, asyncio.Event()

        async def late_info() -> Any:
            await gate.wait()
            return await info()

        ingress.model_info = late_info  # type: ignore[method-assign]
        peer = open_house.peer()
        await eventually(lambda: gateway.open_connections == 1)
        await gateway.drain(60.0)
        gate.set()
        await peer.until("CLOSE")
        assert peer.close_code == 1001


# ------------------------------------------------------------------ over real sockets


@pytest.mark.parametrize("cut", ["reset", "finish"])
async def test_a_socket_cut_at_any_frame_loses_nothing(cut: str) -> None:
    model = FakeModel(is_paced=True)
    gateway = gateway_over(FakeIngress(model))
    async with gateway_on_air(gateway) as url:
        heard: list[Frame] = []
        token, last_seq = "", -1
        for num_frames in (1, 2, 3, 100):
            async with talking(url) as talker:
                if token:
                    await talker.send("RESUME", id="r", stream=token, last_seq=last_seq)
                else:
                    await talker.ask("r")
                token = (await talker.until("INFER_ACK"))["stream"]
                for _ in range(num_frames):
                    model.step()
                    if (await talker.hear())["type"] == "INFER_DONE":
                        break
                heard += chunks_of(talker)
                last_seq = heard[-1]["seq"]
                getattr(talker, cut)()
            await eventually(lambda: gateway.live_requests == 0)
        assert chunks(heard) == [*enumerate(PIECES)]
    assert model.num_running == 0


def chunks_of(talker: Talker) -> list[Frame]:
    return [frame for frame in talker.of("r") if frame["type"] == "INFER_CHUNK"]


@pytest.mark.parametrize("code", [1000, 1001, None])
async def test_a_socket_that_is_closed_properly_stops_its_stream(code: int | None) -> None:
    model = FakeModel(is_paced=True)
    async with gateway_on_air(gateway_over(FakeIngress(model))) as url, talking(url) as talker:
        await talker.ask("r")
        await talker.until("INFER_ACK")
        if code is None:
            # As browsers do, whose close() without arguments sends no code.
            talker.connection.protocol.send_close()
            talker.connection.send_data()
        else:
            await talker.connection.close(code)
        await eventually(lambda: model.num_running == 0)


async def test_a_drained_server_closes_real_sockets_properly() -> None:
    model = FakeModel(is_paced=True)
    gateway = gateway_over(FakeIngress(model))
    async with gateway_on_air(gateway) as url, talking(url) as talker, talking(url) as idle:
        await talker.ask("r")
        await talker.until("INFER_ACK")
        draining = asyncio.create_task(gateway.drain(0.2))
        await talker.until("DRAIN")
        with pytest.raises(InvalidStatus) as caught:
            await connect(url)
        assert caught.value.response.status_code == 503
        assert json.loads(caught.value.response.body)["error"]["code"] == "overloaded"
        assert await talker.closed_with() == 1001
        assert await idle.closed_with() == 1001
        await draining


async def test_text_is_whole_over_both_forms() -> None:
    gateway = gateway_over(FakeIngress(FakeModel(is_paced=True)))
    model = gateway._opener.model  # type: ignore[attr-defined]
    async with gateway_on_air(gateway) as url:
        async with talking(url) as talker:
            await talker.ask("r")
            token = (await talker.until("INFER_ACK"))["stream"]
            model.step(4)
            for _ in range(4):
                await talker.until("INFER_CHUNK")
            first = talker.text("r")
            talker.reset()
        async with talking(url, subprotocols=("seedance.v1.bin",)) as talker:
            await talker.send("RESUME", binary=True, id="r", stream=token, last_seq=3)
            model.step(100)
            await talker.last_of("r")
            assert {frame["form"] for frame in talker.of("r")} == {"binary"}
            assert first + talker.text("r") == TEXT
