"""Requests that are left, cancelled, doubled, malformed or unlucky, on the real cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import time
from typing import Any

import httpx
import openai
import pytest
from websockets.asyncio.client import ClientConnection, connect

from app.client import SeedanceClient
from tests.e2e.asking import GREEDY, Asker, nonce
from tests.e2e.cluster import Server

LONG = "Write a very long story."


@contextlib.asynccontextmanager
async def raw_socket(asker: Asker):
    headers = {"authorization": f"Bearer {asker.key}"} if asker.key else {}
    async with connect(asker.server.ws_url, additional_headers=headers, compression=None) as ws:
        assert json.loads(await ws.recv())["type"] == "HELLO"
        yield ws


async def frame(ws: ClientConnection, timeout_s: float = 60) -> dict[str, Any]:
    async with asyncio.timeout(timeout_s):
        while True:
            received = json.loads(await ws.recv())
            if received["type"] != "PING":
                return received
            await ws.send(json.dumps({"type": "PONG", "ts": received["ts"]}))


async def until_done(ws: ClientConnection, *ids: str) -> dict[str, list[dict[str, Any]]]:
    """All frames by id, until each id has had its last."""
    frames: dict[str, list[dict[str, Any]]] = {id: [] for id in ids}
    while any(not f or f[-1]["type"] not in ("INFER_DONE", "ERROR") for f in frames.values()):
        received = await frame(ws)
        frames.setdefault(received.get("id", ""), []).append(received)
    return frames


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(f["text"] for f in frames if f["type"] == "INFER_CHUNK")


def http_request(asker: Asker, path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {asker.key}\r\nContent-Length: {len(payload)}\r\n\r\n"
    ).encode() + payload


def leave(sock: socket.socket, *, reset: bool) -> None:
    """Closes a connection with FIN, or with RST."""
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "sse"])
def test_work_for_an_http_client_that_left_is_stopped(
    asker: Asker, server: Server, stream: bool, reset: bool
) -> None:
    asker.wait_until_idle()
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    turns = [{"role": "user", "content": LONG}]
    body = {"messages": turns, "max_tokens": 1000, "stream": stream, "ignore_eos": True, **GREEDY}
    sock.sendall(http_request(asker, "/v1/chat/completions", body))
    wait_until_running(asker)
    leave(sock, reset=reset)
    assert_stopped(asker)


def test_work_for_a_client_that_left_a_reused_connection_is_stopped(
    asker: Asker, server: Server
) -> None:
    asker.wait_until_idle()
    path, turns = "/v1/chat/completions", [{"role": "user", "content": LONG}]
    # httpx sends headers and body apart, which HAProxy once made a difference of.
    with httpx.Client(base_url=server.url) as http:
        assert http.post(path, json={}).status_code == 400
        with contextlib.suppress(httpx.ReadTimeout):
            http.post(path, json={"messages": turns, "ignore_eos": True, **GREEDY}, timeout=2)
    assert_stopped(asker)


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_work_for_a_socket_that_left_is_stopped(asker: Asker, reset: bool) -> None:
    asker.wait_until_idle()
    async with raw_socket(asker) as ws:
        await ws.send(request("r1", max_tokens=1000))
        await ws.send(request("r2", max_tokens=1000))
        while (await frame(ws))["type"] != "INFER_CHUNK":
            pass
        transport = ws.transport
        if reset:
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        transport.abort()
    assert_stopped(asker)


async def test_a_cancel_is_prompt_final_and_harmless_when_repeated(asker: Asker) -> None:
    truth = (await asker.ws("Say hi.", cache="bypass", max_tokens=30)).text
    async with raw_socket(asker) as ws:
        await ws.send(request("r1", max_tokens=1000))
        seen: list[dict[str, Any]] = []
        while sum(f["type"] == "INFER_CHUNK" for f in seen) < 5:
            seen.append(await frame(ws))
        await ws.send(json.dumps({"type": "CANCEL", "id": "r1"}))
        await ws.send(request("r2", prompt="Say hi.", max_tokens=30))
        await ws.send(json.dumps({"type": "CANCEL", "id": "r1"}))
        await ws.send(json.dumps({"type": "CANCEL", "id": "nobody"}))
        frames = await until_done(ws, "r1", "r2", "nobody")
        assert [f["type"] for f in frames["r1"]].count("INFER_DONE") == 1
        assert frames["r1"][-1]["finish_reason"] == "cancelled", "nothing may follow it"
        assert [f["code"] for f in frames["nobody"]] == ["unknown_id"]
        assert text_of(frames["r2"]) == truth
    assert_stopped(asker)


async def test_twenty_busy_sockets_stay_open_and_answer_pings(asker: Asker) -> None:
    round_trips: list[float] = []

    async def one() -> None:
        async with raw_socket(asker) as ws:
            await ws.send(request("r", max_tokens=60))
            done = False
            next_ping_s, sent_s = time.monotonic(), {}
            while not done:
                if time.monotonic() >= next_ping_s:
                    stamp = time.monotonic_ns()
                    sent_s[stamp] = time.monotonic()
                    await ws.send(json.dumps({"type": "PING", "ts": stamp}))
                    next_ping_s = time.monotonic() + 2
                received = await frame(ws)
                if received["type"] == "PONG":
                    round_trips.append(time.monotonic() - sent_s[received["ts"]])
                done = received["type"] == "INFER_DONE"
            assert received["finish_reason"] == "length"

    long_prompt = asyncio.create_task(
        asyncio.to_thread(asker.plain, "word " * 3000, max_tokens=1, cache="bypass")
    )
    await asyncio.gather(*(one() for _ in range(20)))
    await long_prompt
    assert len(round_trips) >= 20
    assert sorted(round_trips)[int(len(round_trips) * 0.99)] < 10


async def test_ids_are_names_on_one_connection_only(asker: Asker, other_tenant: Asker) -> None:
    fields = {"prompt": "What is the capital of France?", "max_tokens": 24}
    truth = (await asker.ws("What is the capital of France?", cache="bypass", max_tokens=24)).text
    async with (
        raw_socket(asker) as one,
        raw_socket(asker) as two,
        raw_socket(other_tenant) as three,
    ):
        for ws in (one, two, three):
            await ws.send(request("x", **fields))
        await one.send(request("x", **fields))
        first = await until_done(one, "x")
        refused = [f for f in first["x"] if f["type"] == "ERROR"]
        frames = first["x"]
        while frames[-1]["type"] != "INFER_DONE":
            frames += (await until_done(one, "x"))["x"]
        refused = [f for f in frames if f["type"] == "ERROR"]
        assert [f["code"] for f in refused] == ["duplicate_id"]
        assert text_of(frames) == truth
        assert text_of((await until_done(two, "x"))["x"]) == truth
        assert text_of((await until_done(three, "x"))["x"]) == truth
        await one.send(request("x", **fields))
        assert text_of((await until_done(one, "x"))["x"]) == truth
        for bad in ("", "i" * 10_000, 5, None):
            await one.send(json.dumps(json.loads(request("y", **fields)) | {"id": bad}))
            error = await frame(one)
            assert (error["type"], error["param"]) == ("ERROR", "id")


def test_equal_request_ids_of_parallel_http_calls_are_independent(asker: Asker) -> None:
    async def run() -> list[httpx.Response]:
        headers = {"authorization": f"Bearer {asker.key}", "x-request-id": "same"}
        async with httpx.AsyncClient(base_url=asker.server.url, headers=headers, timeout=120) as c:
            bodies = [
                {"prompt": f"Count from {n}:", "max_tokens": 8, "cache": "bypass", **GREEDY}
                for n in range(8)
            ]
            return await asyncio.gather(*(c.post("/v1/completions", json=b) for b in bodies))

    replies = asyncio.run(run())
    assert [reply.status_code for reply in replies] == [200] * 8
    assert len({reply.json()["id"] for reply in replies}) == 8


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"temperature": "0.5"', "temperature"),
        ('"temperature": -1', "temperature"),
        ('"temperature": 99', "temperature"),
        ('"top_p": 0', "top_p"),
        ('"top_p": 1.5', "top_p"),
        ('"top_p": NaN', "top_p"),
        ('"max_tokens": 0', "max_tokens"),
        ('"max_tokens": 1.5', "max_tokens"),
        ('"max_tokens": "7"', "max_tokens"),
        ('"max_tokens": true', "max_tokens"),
        ('"max_tokens": 1e12', "max_tokens"),
        ('"stop": 42', "stop"),
        ('"stop": [""]', "stop"),
        ('"stop": ' + json.dumps([str(n) for n in range(20)]), "stop"),
        ('"logit_bias": {"999999": 5}', "logit_bias"),
        (f'"seed": {2**70}', "seed"),
        ('"repetition_penalty": 0', "repetition_penalty"),
    ],
)
async def test_a_bad_value_is_refused_by_name_before_any_work(
    asker: Asker, body: str, param: str
) -> None:
    turns = '"messages": [{"role": "user", "content": "Hi"}]'
    for stream in ("false", "true"):
        reply = asker.http.post(
            "/v1/chat/completions",
            content=f'{{{turns}, "stream": {stream}, {body}}}',
            headers={"content-type": "application/json"},
        )
        assert reply.status_code == 400
        error = json.loads(reply.text, parse_constant=pytest.fail)["error"]
        assert error["param"].startswith(param)
        assert error["type"] == "invalid_request_error"
    async with raw_socket(asker) as ws:
        await ws.send(f'{{"type": "INFER_REQ", "id": "bad", {turns}, {body}}}')
        refused = await frame(ws)
        assert (refused["type"], refused["id"]) == ("ERROR", "bad")
        assert refused["param"].startswith(param)
        await ws.send(request("good", max_tokens=1))
        assert (await until_done(ws, "good"))["good"][-1]["finish_reason"] == "length"


async def test_bad_members_of_a_batch_fail_alone(asker: Asker) -> None:
    question = "What is the capital of France?"
    truth = asker.truth(question, max_tokens=20)
    bad: list[str | bytes] = [
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
        json.dumps({"messages": [{"role": "user", "content": "a" * 2**21}]}),
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
        json.dumps({"messages": [{"role": "user", "content": "x"}], "stop": [""]}),
        json.dumps({"messages": [{"role": "robot", "content": "x"}]}),
        json.dumps({"messages": []}),
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        "[" * 100_000,
    ]
    headers = {"authorization": f"Bearer {asker.key}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=asker.server.url, headers=headers, timeout=120) as client:
        good = {"messages": [{"role": "user", "content": question}], "max_tokens": 20, **GREEDY}
        good |= {"cache": "bypass"}
        tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=good)) for _ in "123"]
        for content in bad:
            reply = await client.post("/v1/chat/completions", content=content)
            assert 400 <= reply.status_code < 500, (content[:60], reply.text)
            assert reply.json()["error"]["message"]
        for reply in await asyncio.gather(*tasks):
            assert reply.json()["choices"][0]["message"]["content"] == truth


async def test_a_prompt_alone_and_in_company_has_the_same_reply(asker: Asker) -> None:
    question = "how are you?"
    alone = asker.plain(question, max_tokens=24, cache="bypass").text
    async with SeedanceClient(asker.server.url, asker.key) as client:
        for turn in range(3):
            company = [f"Story {turn}: " + "word " * (5 * 3**n) for n in range(5)]
            replies = await asyncio.gather(
                *(client.complete(q, max_tokens=24, cache="bypass", **GREEDY) for q in company[:3]),
                client.complete(question, max_tokens=24, cache="bypass", **GREEDY),
                *(client.complete(q, max_tokens=24, cache="bypass", **GREEDY) for q in company[3:]),
            )
            assert replies[3].text == alone


async def test_a_deadline_ends_a_stream_with_an_error(asker: Asker) -> None:
    turns = [{"role": "user", "content": LONG}]
    fields = {"max_tokens": 2000, "ignore_eos": True, "timeout_s": 1.0, "cache": "bypass"}
    extra = {key: fields[key] for key in ("ignore_eos", "timeout_s", "cache")}
    client = openai.OpenAI(
        base_url=f"{asker.server.url}/v1", api_key=asker.key, max_retries=0, timeout=60
    )
    with client, pytest.raises(openai.APIError):
        list(
            client.chat.completions.create(
                model="HuggingFaceTB/SmolLM2-135M-Instruct",
                messages=turns,  # type: ignore[arg-type]
                stream=True,
                temperature=0,
                max_tokens=2000,
                extra_body=extra,
            )
        )
    async with raw_socket(asker) as ws:
        await ws.send(request("late", **fields))
        last = (await until_done(ws, "late"))["late"][-1]
        assert (last["finish_reason"], last["error"]["code"]) == ("error", "timeout")
    assert_stopped(asker)


def test_the_official_client_streams_and_completes(asker: Asker) -> None:
    with openai.OpenAI(base_url=f"{asker.server.url}/v1", api_key=asker.key or "") as client:
        model = client.models.list().data[0].id
        turns: Any = [{"role": "user", "content": f"Say hi to {nonce()}."}]
        whole = client.chat.completions.create(
            model=model, messages=turns, temperature=0, max_tokens=30
        )
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=turns,
                temperature=0,
                max_tokens=30,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        whole.choices[0].message.content
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].id != whole.id
    assert [c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 1
    assert chunks[-1].usage == whole.usage


def test_a_request_without_a_known_key_is_refused(server: Server) -> None:
    with contextlib.closing(Asker(server, "sk-wrong")) as stranger:
        reply = stranger.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "unauthorized"


async def test_the_only_replica_dies_and_no_stream_ends_in_silence(
    asker: Asker, server: Server
) -> None:
    question = f"Write three sentences about {nonce()}."
    fields = {"max_tokens": 60, "ignore_eos": True}
    async with raw_socket(asker) as ws:
        await ws.send(request("r", prompt=question, **fields))
        while (await frame(ws))["type"] != "INFER_CHUNK":
            pass
        for pid in server.replica_pids("Model"):
            os.kill(pid, signal.SIGKILL)
        last = (await until_done(ws, "r"))["r"][-1]
        assert last["type"] == "INFER_DONE"
        # Where a new one is not there in time, the client is told to try again.
        assert last["finish_reason"] == "length" or last["error"]["retryable"] is True
    deadline_s = time.monotonic() + 120
    while True:
        reply = asker.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": question}],
            max_tokens=30,
            **GREEDY,
        )
        if reply.status_code == 200:
            break
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        assert time.monotonic() < deadline_s
        await asyncio.sleep(1)
    assert reply.headers["x-seedance-cache"].startswith("miss")
    text = reply.json()["choices"][0]["message"]["content"]
    assert text == asker.truth(question, max_tokens=30)


def request(id: str, prompt: str = LONG, **fields: Any) -> str:
    """An INFER_REQ that the cache has no part in."""
    turns = [{"role": "user", "content": prompt}]
    body = {"type": "INFER_REQ", "id": id, "messages": turns, "cache": "bypass", **GREEDY}
    return json.dumps(body | fields)


def wait_until_running(asker: Asker, timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while asker.metrics()["seedance_requests_running"] == 0:
        assert time.monotonic() < deadline_s, "the request never ran"
        time.sleep(0.05)


def assert_stopped(asker: Asker) -> None:
    """Nothing runs any more, and no token is sampled for anyone."""
    asker.wait_until_idle(timeout_s=10)
    before = asker.metrics()["seedance_generated_tokens_total"]
    time.sleep(0.5)
    assert asker.metrics()["seedance_generated_tokens_total"] == before
