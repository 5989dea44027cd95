"""The WebSocket gateway on a real server: many requests a socket, cancels, bad frames, lost peers."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app import connection, outbox
from app.accounts import Accounts, hash_key
from app.client import SeedanceClient
from app.gateway import Gateway
from app.settings import AuthSettings
from deployments.engine.scripted import Fault
from deployments.engine.sequence import Sequence
from protocol.session import Session, SessionLimits
from tests.app.openai_fakes import FakeGraph, stalls
from tests.app.stack import (
    MODEL,
    PATIENCE_S,
    TOKENIZER,
    Site,
    Stack,
    eventually,
    graph_over,
    on_air,
    running_stack,
    talks_on,
    until_metrics,
)
from tests.app.talker import Talker, talking
from tests.protocol.fakes import framed, infer_req

TALK = "Speak for long."
KEY_A, KEY_B = "key-a", "key-b"
TWO_TENANTS = {
    "keys": [
        {"tenant": "a", "sha256": hash_key(KEY_A)},
        {"tenant": "b", "sha256": hash_key(KEY_B)},
    ]
}
STEP_S = 0.002


def speaks(seq: Sequence) -> list[int]:
    """Echoes, or talks on where it was told to."""
    prompt = bytes(token_id for token_id in seq.prompt_token_ids if token_id < 256).decode()
    return talks_on(seq) if TALK in prompt else TOKENIZER.encode_prompt(prompt)


@asynccontextmanager
async def speaking(
    settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Stack, Site]]:
    """A server that answers `TALK` without an end, a token each few milliseconds.

    It keeps nothing for who comes back, unless the settings say so.
    """
    given = settings or {}
    limits = {"resume_window_s": 0, **given.get("limits", {})}
    async with (
        running_stack(speaks, **{"token_interval_s": STEP_S, **options}) as stack,
        on_air(stack.graph, **{**given, "limits": limits}) as site,
    ):
        yield stack, site


# ------------------------------------------------------------------ one socket, many requests


async def test_the_server_greets_with_its_limits() -> None:
    limits = {"max_body_bytes": 4096, "max_live_requests": 3, "heartbeat_s": 7.5}
    async with speaking({"limits": limits}) as (_, site), talking(site.infer_url) as talker:
        hello = talker.hello
        assert hello["model"] == MODEL
        assert hello["heartbeat_s"] == 7.5
        assert hello["limits"]["max_message_bytes"] == 4096
        assert hello["limits"]["max_live_requests"] == 3


async def test_several_requests_share_a_socket_and_none_carries_anothers_text() -> None:
    async with speaking() as (_, site), talking(site.infer_url) as talker:
        prompts = {f"r{i}": f"question number {i} " * (i + 1) for i in range(6)}
        for id, prompt in prompts.items():
            await talker.ask(id, prompt)
        for id, prompt in prompts.items():
            done = await talker.last_of(id)
            assert talker.text(id) == prompt
            assert done["finish_reason"] == "stop"
            assert done["usage"]["prompt_tokens"] == len(prompt)
            frames = [frame for frame in talker.of(id) if frame["type"] != "ANCHOR"]
            types = [frame["type"] for frame in frames]
            assert types == ["INFER_ACK", *["INFER_CHUNK"] * (len(types) - 2), "INFER_DONE"]
            seqs = [frame["seq"] for frame in frames[1:]]
            assert seqs == sorted(set(seqs))
        order = [frame["id"] for frame in talker.frames]
        assert order != sorted(order), "streams that run at a time take turns"


async def test_more_live_requests_than_the_limit_are_refused_and_the_others_go_on() -> None:
    settings = {"limits": {"max_live_requests": 2}}
    async with speaking(settings) as (_, site), talking(site.infer_url) as talker:
        for id in ("r1", "r2", "r3"):
            await talker.ask(id, TALK)
        refusal = await talker.last_of("r3")
        assert (refusal["code"], refusal["limit"]) == ("rate_limited", 2)
        await talker.send("CANCEL", id="r1")
        await talker.last_of("r1")
        assert await talker.answer("r3", "now") == "now"


async def test_a_request_that_finds_no_room_is_told_to_come_back() -> None:
    options = {"max_num_seqs": 1, "max_waiting": 1}
    async with speaking(**options) as (stack, site), talking(site.infer_url) as talker:
        for id in ("r1", "r2"):
            await talker.ask(id, TALK)
            await talker.until("INFER_ACK", id=id)
        await talker.ask("r3", TALK)
        refusal = await talker.last_of("r3")
        assert (refusal["code"], refusal["retryable"]) == ("overloaded", True)
        assert refusal["retry_after_s"] > 0
        await talker.send("CANCEL", id="r2")
        assert (await talker.last_of("r2"))["seq"] == 0
        assert await mark_of(talker, "r1") == "streaming"
        assert stack.num_live <= 2


async def mark_of(talker: Talker, id: str) -> str:
    await talker.sync()
    ended = [frame for frame in talker.of(id) if frame["type"] in ("INFER_DONE", "ERROR")]
    return "ended" if ended else "streaming"


# ------------------------------------------------------------------ cancelling


async def test_a_cancel_ends_one_request_once_and_the_socket_goes_on() -> None:
    async with speaking() as (stack, site), talking(site.infer_url) as talker:
        await talker.ask("r1", TALK)
        for _ in range(5):
            await talker.until("INFER_CHUNK", id="r1")
        await talker.send("CANCEL", id="r1")
        await talker.ask("r2", "and now")
        await talker.send("CANCEL", id="r1")
        await talker.send("CANCEL", id="never-heard-of")
        done = await talker.last_of("r1")
        assert done["finish_reason"] == "cancelled"
        assert done["seq"] == done["usage"]["completion_tokens"]
        assert (await talker.last_of("r2"))["finish_reason"] == "stop"
        assert talker.text("r2") == "and now"
        await talker.sync()
        assert [f["type"] for f in talker.of("r1")].count("INFER_DONE") == 1
        assert talker.of("r1")[-1]["type"] == "INFER_DONE"
        (unknown,) = talker.of("never-heard-of")
        assert unknown["code"] == "unknown_id"
        await stack.until_idle()


async def test_a_cancel_reaches_a_request_that_is_not_accepted_yet() -> None:
    async with speaking() as (stack, site), talking(site.infer_url) as talker:
        gate = asyncio.Event()
        info = stack.model.info

        async def late_info() -> bytes:
            await gate.wait()
            return await info()

        stack.graph._model_desk._info = None
        stack.model.info = late_info  # type: ignore[method-assign]
        await talker.ask("r1", TALK)
        await talker.send("CANCEL", id="r1")
        done = await talker.last_of("r1")
        assert (done["finish_reason"], done["seq"]) == ("cancelled", 0)
        gate.set()
        assert await talker.answer("r1", "again") == "again"
        assert stack.num_live == 0


# ------------------------------------------------------------------ the two forms, and bad frames


async def test_each_request_is_answered_in_the_form_that_it_came_in() -> None:
    async with speaking() as (_, site), talking(site.infer_url) as talker:
        await talker.ask("t", "as text")
        await talker.ask("b", "as bytes", binary=True)
        for id, form, text in (("t", "text", "as text"), ("b", "binary", "as bytes")):
            done = await talker.last_of(id)
            assert talker.text(id) == text
            assert {frame["form"] for frame in talker.of(id)} == {form}
            assert done["seq"] == len(text)


@pytest.mark.parametrize(
    ("offered", "chosen", "form"),
    [
        ((), None, "text"),
        (("seedance.v1.json",), "seedance.v1.json", "text"),
        (("seedance.v1.bin",), "seedance.v1.bin", "binary"),
        (("other", "seedance.v1.bin"), "seedance.v1.bin", "binary"),
    ],
)
async def test_the_subprotocol_is_one_that_was_offered(
    offered: tuple[str, ...], chosen: str | None, form: str
) -> None:
    async with speaking() as (_, site), talking(site.infer_url, subprotocols=offered) as talker:
        assert talker.connection.subprotocol == chosen
        assert talker.hello["form"] == form


async def test_a_client_that_speaks_something_else_is_told_so() -> None:
    async with speaking() as (_, site):
        connection = await connect(
            site.infer_url,
            additional_headers=[
                ("Sec-WebSocket-Protocol", "graphql-ws"),
            ],
        )
        await connection.wait_closed()
        assert connection.close_code == 4406


GOOD = json.dumps({"type": "INFER_REQ", "id": "ok", "prompt": "fine", "cache": "bypass"})
BAD_FRAMES: dict[str, tuple[str | bytes, str]] = {
    "nothing": (b"", "invalid_frame"),
    "one byte": (b"\x01", "invalid_frame"),
    "five bytes": (b"\x01\0\0\0\0", "invalid_frame"),
    "a header alone": (framed(""), "invalid_frame"),
    "version 0": (framed(GOOD, version=0), "unsupported_version"),
    "version 255": (framed(GOOD, version=255), "unsupported_version"),
    "a reserved flag": (framed(GOOD, flags=8), "invalid_frame"),
    "not UTF-8": (framed(b'{"type": "PING", "x": "\xff"}'), "invalid_request"),
    "cut": (framed(GOOD[:-5]), "invalid_frame"),
    "JSON as binary": (GOOD.encode(), "unsupported_version"),
    "the binary form as text": (framed(GOOD).decode(), "invalid_frame"),
    "no JSON": ("hello", "invalid_frame"),
    "empty text": ("", "invalid_frame"),
    "no object": ("[1]", "invalid_frame"),
    "no type": ("{}", "invalid_frame"),
    "an unknown type": ('{"type": "DANCE"}', "invalid_frame"),
    "a server's frame": ('{"type": "INFER_DONE", "id": "r0"}', "invalid_frame"),
    "too deep": ('{"type": "PING", "x": ' + "[" * 5000 + "]" * 5000 + "}", "invalid_request"),
    "no id": ('{"type": "CANCEL"}', "invalid_request"),
}


async def test_bad_frames_get_one_error_each_and_harm_no_neighbour() -> None:
    async with speaking() as (_, site), talking(site.infer_url) as talker:
        await talker.ask("r0", "a request that runs all the while, " * 20)
        await talker.until("INFER_CHUNK", id="r0")
        for name, (data, code) in BAD_FRAMES.items():
            await talker.send_raw(data)
            error = await talker.until("ERROR")
            assert error["code"] == code, (name, error)
            assert error["form"] == ("text" if isinstance(data, str) else "binary"), name
        await talker.sync()
        assert [f["type"] for f in talker.frames].count("ERROR") == len(BAD_FRAMES)
        for seq in (0, 7, 7, 2**32 - 1):
            talker.forget("ok")
            await talker.send_raw(framed(GOOD, seq=seq))
            assert (await talker.last_of("ok"))["type"] == "INFER_DONE"
            assert talker.text("ok") == "fine"
        await talker.last_of("r0")
        assert talker.text("r0") == "a request that runs all the while, " * 20


async def test_a_text_frame_that_is_not_utf8_closes_its_socket_alone() -> None:
    async with (
        speaking() as (stack, site),
        talking(site.infer_url) as talker,
        talking(site.infer_url) as neighbour,
    ):
        await talker.ask("r1", TALK)
        await talker.until("INFER_CHUNK")
        talker.connection.protocol.send_text(b'{"type": "\xff\xfe"}')
        talker.connection.send_data()
        assert await talker.closed_with() == 1007
        assert await neighbour.answer("r1", "still here") == "still here"
        await stack.until_idle()


async def test_a_message_over_the_limit_is_named_and_closes_the_socket() -> None:
    settings = {"limits": {"max_body_bytes": 1024}}
    async with speaking(settings) as (_, site), talking(site.infer_url) as talker:
        assert await talker.answer("r1", "x" * 100, stop=["y" * 800]) == "x" * 100
        await talker.ask("r2", "x" * 1024)
        assert await talker.closed_with() == 1009
        error = talker.frames[-1]
        assert (error["code"], error["limit"]) == ("input_too_large", 1024)


BAD_VALUES: list[tuple[str, str]] = [
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", '"0.5"'),
    ("temperature", "-1"),
    ("temperature", "99"),
    ("top_p", "0"),
    ("top_p", "1.5"),
    ("top_p", "NaN"),
    ("max_tokens", "1.5"),
    ("max_tokens", '"7"'),
    ("max_tokens", "true"),
    ("max_tokens", "1e12"),
    ("max_tokens", "0"),
    ("stop", "42"),
    ("stop", '[""]'),
    ("stop", json.dumps(["s"] * 20)),
    ("logit_bias", '{"999999": 5}'),
    ("logit_bias", '{"65": NaN}'),
    ("seed", str(2**70)),
    ("repetition_penalty", "0"),
    ("timeout_s", "-1"),
    ("priority", "1e9"),
    ("cache", '"maybe"'),
    ("messages", '[{"role": "wizard", "content": "x"}]'),
    ("messages", '[{"role": "user", "content": [{"type": "text", "text": 5}]}]'),
    ("messages", '[{"role": "user", "content": "\\ud800"}]'),
    ("messages", "[]"),
    ("prompt", '""'),
    ("prompt", "[99999999]"),
    ("prompt", json.dumps("w" * 60_000)),
    ("model", '"maker/other"'),
]


async def test_a_bad_value_is_refused_by_name_before_any_work() -> None:
    async with speaking() as (stack, site), talking(site.infer_url) as talker:
        good = [f"g{i}" for i in range(4)]
        for id in good:
            await talker.ask(id, f"good question {id} " * 10)
            await talker.until("INFER_CHUNK", id=id)
        for i, (name, value) in enumerate(BAD_VALUES):
            body = {"prompt": '"hi"', name: value}
            if name == "messages":
                del body["prompt"]
            fields = "".join(f', "{field}": {raw}' for field, raw in body.items())
            await talker.send_raw(f'{{"type": "INFER_REQ", "id": "b{i}"{fields}}}')
            error = await talker.last_of(f"b{i}")
            assert error["type"] == "ERROR", (name, value, error)
            assert re.split(r"[.\[]", error["param"])[0] == name, (name, value, error)
            assert error["code"] in (
                "invalid_request",
                "context_length_exceeded",
                "model_not_found",
            ), error
        for id in good:
            await talker.last_of(id)
            assert talker.text(id) == f"good question {id} " * 10
        assert await talker.answer("after", "fine", temperature=None, stop=None) == "fine"
        assert stack.engine.stats().finished_total["stop"] == len(good) + 1


# ------------------------------------------------------------------ ids


async def test_an_id_is_a_name_on_one_socket_only() -> None:
    settings = {"auth": TWO_TENANTS}
    async with (
        speaking(settings) as (_, site),
        talking(site.infer_url, key=KEY_A) as first,
        talking(site.infer_url, key=KEY_A) as second,
        talking(site.infer_url, key=KEY_B) as other,
    ):
        for talker, prompt in ((first, "one " * 30), (second, "two " * 30), (other, TALK)):
            await talker.ask("x", prompt)
            await talker.until("INFER_CHUNK")
        await other.send("CANCEL", id="x")
        assert (await other.last_of("x"))["finish_reason"] == "cancelled"
        for talker, prompt in ((first, "one " * 30), (second, "two " * 30)):
            assert (await talker.last_of("x"))["finish_reason"] == "stop"
            assert talker.text("x") == prompt


async def test_a_live_id_is_refused_and_an_ended_one_may_be_used_again() -> None:
    async with speaking() as (_, site), talking(site.infer_url) as talker:
        await talker.ask("x", "the first of them, " * 5)
        await talker.until("INFER_CHUNK")
        await talker.send("INFER_REQ", id="x", prompt="a second")
        assert (await talker.until("ERROR"))["code"] == "duplicate_id"
        await talker.until("INFER_DONE", id="x")
        assert talker.text("x") == "the first of them, " * 5
        talker.frames.clear()
        assert await talker.answer("x", "again") == "again"


@pytest.mark.parametrize("id", ["", "x" * 10_000, 5, None, ["x"]])
async def test_an_impossible_id_is_refused(id: Any) -> None:
    async with speaking() as (_, site), talking(site.infer_url) as talker:
        await talker.ask(id)
        error = await talker.until("ERROR")
        assert (error["code"], error["param"]) == ("invalid_request", "id")
        assert await talker.answer("fine", "on") == "on"


# ------------------------------------------------------------------ peers that are lost


@pytest.mark.parametrize("cut", ["reset", "finish", "close"])
async def test_a_lost_socket_stops_its_generations(cut: str) -> None:
    async with speaking() as (stack, site):
        async with talking(site.infer_url) as talker:
            for id in ("r1", "r2"):
                await talker.ask(id, TALK)
                await talker.until("INFER_CHUNK", id=id)
            if cut == "close":
                await talker.connection.close()
            else:
                getattr(talker, cut)()
            await stack.until_idle()
        generated = stack.num_generated
        async with talking(site.infer_url) as talker:
            assert await talker.answer("r", "next") == "next"
        assert stack.num_generated == generated + len("next") + 1
        assert stack.engine.stats().finished_total["cancelled"] == 2


async def test_a_socket_lost_while_queued_leaves_the_queue() -> None:
    options = {"max_num_seqs": 1, "max_waiting": 4}
    async with speaking(**options) as (stack, site), talking(site.infer_url) as talker:
        await talker.ask("r1", TALK)
        await talker.until("INFER_CHUNK")
        async with talking(site.infer_url) as queued:
            for id in ("q1", "q2"):
                await queued.ask(id, TALK)
                await queued.until("INFER_ACK", id=id)
            assert stack.engine.stats().waiting == 2
            queued.reset()
            await eventually(lambda: stack.engine.stats().waiting == 0)
        assert await mark_of(talker, "r1") == "streaming"


async def test_a_silent_peer_is_closed_and_its_work_stopped() -> None:
    settings = {"limits": {"heartbeat_s": 0.1}}
    async with speaking(settings) as (stack, site), talking(site.infer_url) as talker:
        await talker.ask("r1", TALK)
        assert await talker.closed_with() == 4408
        assert "PING" in {frame["type"] for frame in talker.frames}
        await stack.until_idle()


async def test_a_peer_that_answers_stays_however_long_nothing_is_said() -> None:
    gate = threading.Event()
    settings = {"limits": {"heartbeat_s": 0.2}}
    async with speaking(settings, sleep=lambda _: gate.wait()) as (_, site):
        try:
            async with talking(site.infer_url) as talker:
                await talker.ask("r1", "patience")
                for _ in range(6):
                    ping = await talker.until("PING")
                    await talker.send("PONG", ts=ping["ts"])
                gate.set()
                assert (await talker.last_of("r1"))["finish_reason"] == "stop"
                assert talker.text("r1") == "patience"
        finally:
            gate.set()


async def test_pings_and_refusals_are_answered_while_a_step_blocks() -> None:
    gate = threading.Event()
    async with speaking(sleep=lambda _: gate.wait()) as (stack, site):
        try:
            async with talking(site.infer_url) as talker:
                await talker.ask("r1", "blocked")
                await talker.until("INFER_ACK")
                await eventually(lambda: stack.num_live == 1)
                await talker.sync()
                await talker.ask("r2", temperature=99)
                assert (await talker.last_of("r2"))["param"] == "temperature"
                await talker.send("CANCEL", id="r1")
                assert (await talker.last_of("r1"))["finish_reason"] == "cancelled"
        finally:
            gate.set()


class DeafPeer:
    """An ASGI peer that takes the greeting and nothing after it, and sends what it is given."""

    def __init__(self, *messages: str) -> None:
        self._messages = ["connect", *messages]
        self.types: list[str] = []

    @property
    def num_left(self) -> int:
        return len(self._messages)

    @property
    def socket(self) -> WebSocket:
        scope = {"type": "websocket", "headers": [], "subprotocols": []}
        return WebSocket(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        message = self._messages.pop(0)
        if message == "connect":
            return {"type": "websocket.connect"}
        return {"type": "websocket.receive", "text": message}

    async def _send(self, message: Message) -> None:
        self.types.append(message["type"])
        if len(self.types) > 2:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("flood", "heartbeat_s"), [(2000, 3600.0), (0, 0.02)], ids=["floods", "is silent"]
)
async def test_a_peer_that_takes_nothing_is_dropped_with_its_requests(
    flood: int, heartbeat_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_S", 0.02)
    graph = FakeGraph(stalls("never", "ends"))
    serving = Gateway(
        graph,
        Accounts(AuthSettings()),
        limits=SessionLimits(heartbeat_s=heartbeat_s),
        max_connections=1,
        unread_timeout_s=0.05 if flood else 3600.0,
    )
    peer = DeafPeer(infer_req("r1"), *["no JSON"] * flood)
    async with asyncio.timeout(PATIENCE_S):
        await serving.serve(peer.socket)
    assert peer.types[:2] == ["websocket.accept", "websocket.send"]
    assert serving.open_connections == 0
    assert graph.num_running == 0


async def test_a_peer_that_floods_and_reads_is_answered_to_the_last() -> None:
    """What comes in one burst must not fill the outbox before the writer has its turn."""
    flood = 2 * (outbox.MAX_FRAMES + outbox.MAX_UNSENT_REPLIES)
    async with speaking() as (_, site), talking(site.infer_url) as talker:
        for _ in range(flood):
            await talker.send_raw("no JSON")
        for _ in range(flood):
            assert (await talker.until("ERROR"))["code"] == "invalid_frame"
        assert await talker.answer("r1", "still here") == "still here"


async def test_a_burst_of_one_peer_does_not_hold_up_the_others() -> None:
    graph = FakeGraph(stalls("never", "ends"))
    serving = Gateway(graph, Accounts(AuthSettings()), limits=SessionLimits(), max_connections=1)
    peer = DeafPeer(*["no JSON"] * 500)
    running = asyncio.create_task(serving.serve(peer.socket))
    async with asyncio.timeout(PATIENCE_S):
        turns = 0
        while peer.num_left:
            await asyncio.sleep(0)
            turns += 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert turns >= 500


async def test_a_fault_of_our_own_closes_the_socket_as_the_servers() -> None:
    async with speaking() as (_, site), talking(site.infer_url) as talker:
        with pytest.MonkeyPatch.context() as patch:

            def fail(*_: Any) -> None:
                raise ValueError("a secret")

            patch.setattr(Session, "receive", fail)
            await talker.ask("r1")
            assert await talker.closed_with() == 1011
        assert "incident" in str(talker.connection.close_reason)
        assert "secret" not in str(talker.connection.close_reason)


# ------------------------------------------------------------------ who may connect


async def refused(site: Site, **options: Any) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(site.infer_url, **options):
            pass
    return caught.value


async def test_a_socket_without_a_key_is_refused_with_a_reason() -> None:
    async with speaking({"auth": TWO_TENANTS}) as (_, site):
        for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": KEY_A}):
            response = (await refused(site, additional_headers=headers)).response
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert json.loads(response.body)["error"]["code"] == "unauthorized"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://[::1", "file://"])
async def test_a_page_from_elsewhere_is_refused(origin: str) -> None:
    async with speaking() as (_, site):
        response = (await refused(site, additional_headers={"Origin": origin})).response
        assert response.status_code == 403
        assert json.loads(response.body)["error"]["code"] == "origin_refused"


async def test_our_own_page_and_the_listed_ones_may_connect() -> None:
    settings = {"auth": {"allowed_origins": ["https://chat.example.org"]}}
    async with speaking(settings) as (_, site):
        own = f"http://{site.address[0]}:{site.address[1]}"
        for origin in (own, "https://chat.example.org"):
            async with connect(site.infer_url, additional_headers={"Origin": origin}):
                pass


async def test_a_full_house_says_when_to_come_back() -> None:
    settings = {"limits": {"max_connections": 1}}
    async with speaking(settings) as (_, site):
        async with talking(site.infer_url):
            response = (await refused(site)).response
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert json.loads(response.body)["error"]["code"] == "overloaded"
        await until_metrics(site, open_connections=0)
        async with talking(site.infer_url) as talker:
            assert await talker.answer("r", "room") == "room"


async def test_a_server_without_a_model_refuses_the_socket_and_says_when_to_retry() -> None:
    async with speaking(accept_timeout_s=0.05) as (stack, site):

        async def no_info() -> bytes:
            raise ConnectionError("no replica")

        stack.model.info = no_info  # type: ignore[method-assign]
        response = (await refused(site)).response
        assert response.status_code == 503
        assert response.headers["Retry-After"] == "1"


# ------------------------------------------------------------------ models that fail in mid-stream


@pytest.mark.parametrize("fault", ["raise", "nan"])
@pytest.mark.parametrize("at", [0, 9])
async def test_a_failing_step_ends_the_stream_with_an_error_and_nothing_else(
    fault: Fault, at: int
) -> None:
    def strike(seq: Sequence) -> Fault | None:
        is_marked = ord("!") in seq.prompt_token_ids
        return fault if is_marked and len(seq.output_token_ids) == at else None

    async with speaking(fault=strike) as (stack, site), talking(site.infer_url) as talker:
        assert await talker.answer("before", "all is well") == "all is well"
        num_threads = threading.active_count()
        await talker.ask("bad", "this will not end well!")
        done = await talker.last_of("bad")
        assert done["type"] == "INFER_DONE"
        assert (done["finish_reason"], done["error"]["code"]) == ("error", "internal")
        assert "scripted" not in json.dumps(done)
        assert talker.text("bad") == "this will not end well!"[:at]
        assert await talker.answer("after", "all is well") == "all is well"
        assert threading.active_count() == num_threads
        assert stack.engine.stats().finished_total == {"stop": 2, "internal": 1}


async def test_a_deadline_in_mid_stream_is_an_error_after_the_text() -> None:
    async with speaking() as (stack, site), talking(site.infer_url) as talker:
        await talker.ask("r1", TALK, timeout_s=0.3)
        done = await talker.last_of("r1")
        assert (done["finish_reason"], done["error"]["code"]) == ("error", "timeout")
        assert done["error"]["retryable"]
        assert talker.text("r1").startswith(TALK)
        assert done["usage"]["completion_tokens"] > len(TALK)
        await stack.until_idle()


# ------------------------------------------------------------------ streams that come back


async def test_a_stream_wanders_between_two_ingresses_and_loses_nothing() -> None:
    """The real graph on either side, one engine behind both, and a cut every few tokens."""
    question = "what shall I say but this, " * 10
    async with running_stack(speaks, token_interval_s=STEP_S, with_cache=False) as stack:
        board = stack.graph._board
        elsewhere = graph_over(stack.model, None, board, ingress="ingress-2")
        async with on_air(stack.graph) as first, on_air(elsewhere) as second:
            async with SeedanceClient(first.infer_url, rng=lambda: 0.0) as client:
                seqs: list[int] = []
                text = ""
                fields = {"temperature": 0, "return_token_ids": True}
                async for delta in client.stream(prompt=question, **fields):
                    seqs.append(delta.seq)
                    text += delta.text
                    if len(seqs) % 40 == 0:
                        client.url = second.infer_url if len(seqs) % 80 else first.infer_url
                        client._connections[-1]._socket.transport.abort()
            assert text == question
            assert seqs == sorted(set(seqs))
            assert stack.engine.stats().finished_total == {"stop": 1}
        await elsewhere.close()
        await stack.until_idle()


async def test_an_answer_that_nobody_comes_for_is_not_computed_on() -> None:
    settings = {"limits": {"resume_window_s": 1.5}}
    async with speaking(settings) as (stack, site), talking(site.infer_url) as talker:
        await talker.ask("r1", TALK)
        await talker.until("INFER_CHUNK")
        talker.reset()
        generated = stack.num_generated
        await eventually(lambda: stack.num_generated > generated + 10)
        await stack.until_idle()
        assert stack.engine.stats().finished_total["cancelled"] == 1
