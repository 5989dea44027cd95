"""How an exchange ends: errors before and after the first event, clients that leave, silence."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from protocol.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    ServingError,
)
from protocol.request import InferenceRequest
from protocol.token_log import TokenLog
from tests.app.openai_fakes import (
    FakeGraph,
    HangUpCall,
    app_over,
    chat_body,
    client_of,
    ending,
    events_of,
    says,
    stalls,
    streams,
    strict_json,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CUT = DeadlineExceeded("the answer took longer than timeout_s 1", param="timeout_s")


async def post(graph: FakeGraph, path: str = CHAT, **fields: Any) -> httpx.Response:
    async with client_of(graph) as client:
        body = {"prompt": "x", **fields} if path == TEXT else chat_body(**fields)
        return await client.post(path, json=body)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (
            ContextLengthExceeded("prompt has 9000 tokens, the model takes 8192", limit=8192),
            400,
            None,
        ),
        (InvalidRequest("logit_bias names token 999999", param="logit_bias"), 400, None),
        (RateLimited("30 requests a minute", retry_after_s=0.2), 429, "1"),
        (Overloaded("256 requests wait, the limit", retry_after_s=2.5), 503, "3"),
        (CUT, 504, None),
        (InternalError("the server failed; incident 17"), 500, None),
    ],
)
async def test_a_refusal_has_its_own_status_even_when_streaming(
    refusal: ServingError, status: int, retry_after: str | None, is_stream: bool
) -> None:
    reply = await post(FakeGraph(refusal=refusal), stream=is_stream)
    assert reply.status_code == status
    assert reply.headers.get("retry-after") == retry_after
    assert strict_json(reply.text) == {
        "error": {
            "message": refusal.message,
            "type": refusal.openai_type,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_unforeseen_exception_is_a_500_without_detail(is_stream: bool) -> None:
    reply = await post(FakeGraph(refusal=RuntimeError("secret detail")), stream=is_stream)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal"
    assert "incident" in reply.json()["error"]["message"]
    assert "secret" not in reply.text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(is_stream: bool) -> None:
    for script in (says(reason="error", error=CUT.info), streams(reason="error", error=CUT.info)):
        reply = await post(FakeGraph(script), stream=is_stream)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "timeout"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_failure_in_mid_stream_is_one_error_event_and_the_end(path: str) -> None:
    graph = FakeGraph(streams("some", " text", reason="error", error=CUT.info))
    reply = await post(graph, path, stream=True, stream_options={"include_usage": True})
    assert reply.status_code == 200
    *chunks, last = events_of(reply.text)
    assert last == {
        "error": {
            "message": CUT.message,
            "type": "server_error",
            "param": "timeout_s",
            "code": "timeout",
        }
    }
    assert "some" in reply.text
    assert all(choice["finish_reason"] is None for c in chunks for choice in c["choices"])
    assert "[DONE]" not in reply.text


async def test_a_plain_answer_that_fails_on_the_way_has_the_errors_status() -> None:
    reply = await post(FakeGraph(streams("some", " text", reason="error", error=CUT.info)))
    assert reply.status_code == 504
    assert "choices" not in reply.json()


async def test_text_that_came_with_the_failure_is_sent_before_it() -> None:
    def write(request: InferenceRequest, log: TokenLog) -> None:
        streams("first")(request, log)
        loop = asyncio.get_running_loop()

        def fail() -> None:
            if log.next_seq == 0:
                loop.call_soon(fail)
            else:
                log.finish(ending("error", 1, CUT.info))

        loop.call_soon(fail)

    reply = await post(FakeGraph(write), stream=True)
    assert reply.text.index("first") < reply.text.index('"error"')


async def test_a_cancel_that_was_not_the_clients_is_told_as_an_error() -> None:
    graph = FakeGraph(streams("some", reason="cancelled"))
    plain = await post(graph)
    assert (plain.status_code, plain.headers["retry-after"]) == (503, "1")
    streamed = await post(graph, stream=True)
    assert events_of(streamed.text)[-1]["error"]["code"] == "overloaded"


async def test_a_stream_that_breaks_without_a_reason_is_an_internal_error() -> None:
    reply = await post(FakeGraph(streams("some", reason="error")))
    assert reply.json()["error"]["code"] == "internal"


async def test_one_failing_choice_ends_the_exchange_and_frees_the_others() -> None:
    def script(request: InferenceRequest, log: TokenLog) -> None:
        if request.request_id.endswith("-1"):
            streams("a", reason="error", error=CUT.info)(request, log)
        else:
            stalls("b")(request, log)

    for is_stream in (False, True):
        graph = FakeGraph(script)
        reply = await post(graph, n=3, stream=is_stream)
        assert '"code":"timeout"' in reply.text
        assert graph.num_running == 0
        assert len(graph.cancelled) == 3


async def test_one_refused_choice_frees_those_that_were_opened() -> None:
    graph = FakeGraph(stalls())
    real_open = graph.open_stream

    async def open_stream(request: InferenceRequest) -> Any:
        if request.request_id.endswith("-2"):
            raise Overloaded("full", retry_after_s=1)
        return await real_open(request)

    graph.open_stream = open_stream  # type: ignore[method-assign]
    reply = await post(graph, n=4)
    assert reply.status_code == 503
    assert graph.num_running == 0


async def test_an_open_that_is_dropped_by_the_graph_is_an_overload() -> None:
    reply = await post(FakeGraph(refusal=asyncio.CancelledError()))  # type: ignore[arg-type]
    assert reply.status_code == 503


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_frees_its_streams_at_once(is_stream: bool, n: int) -> None:
    graph = FakeGraph(stalls("some", " text"))
    call = HangUpCall(app_over(graph), CHAT, chat_body(stream=is_stream, n=n))
    running = asyncio.create_task(call.run())
    if is_stream:
        await call.until(" text")
    else:
        await graph.opened.wait()
    assert not graph.cancelled
    call.is_gone.set()
    await running
    assert graph.num_running == 0
    assert len(graph.cancelled) == n
    assert is_stream or not call.sent, "nobody is there to be answered"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_while_its_request_waits_is_not_served(is_stream: bool) -> None:
    graph = FakeGraph(gate=asyncio.Event())
    call = HangUpCall(app_over(graph), CHAT, chat_body(stream=is_stream))
    running = asyncio.create_task(call.run())
    await graph.opened.wait()
    call.is_gone.set()
    await running
    assert graph.num_abandoned == 1
    assert not graph.streams


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_cancelled_server_task_frees_its_streams(is_stream: bool) -> None:
    graph = FakeGraph(stalls("some"))
    call = HangUpCall(app_over(graph), CHAT, chat_body(stream=is_stream, n=2))
    running = asyncio.create_task(call.run())
    await (call.until('"index":1') if is_stream else graph.until_open(2))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert graph.num_running == 0


async def test_a_broken_connection_counts_as_a_client_that_left() -> None:
    graph = FakeGraph(stalls("some"))
    call = HangUpCall(app_over(graph), CHAT, chat_body(stream=True))
    call.send_error = BrokenPipeError()
    await call.run()
    assert graph.num_running == 0


async def test_a_stream_that_cannot_be_cancelled_does_not_keep_the_others() -> None:
    graph = FakeGraph(stalls("some"))
    call = HangUpCall(app_over(graph), CHAT, chat_body(stream=True, n=2))
    running = asyncio.create_task(call.run())
    await call.until('"index":1')

    def fail() -> None:
        raise RuntimeError("the hop is gone")

    graph.streams[0].cancel = fail
    call.is_gone.set()
    await running
    assert graph.cancelled == [graph.streams[1].request.request_id]


async def test_every_stream_is_released_after_a_good_end_too() -> None:
    graph = FakeGraph(streams("a", "b"))
    await post(graph, n=2, stream=True)
    await post(graph)
    assert len(graph.cancelled) == 3


async def test_silence_is_broken_by_comments() -> None:
    graph = FakeGraph(stalls())
    app = app_over(graph, heartbeat_s=0.01)
    call = HangUpCall(app, CHAT, chat_body(stream=True))
    running = asyncio.create_task(call.run())
    await call.until(": ping\n\n: ping\n\n")
    log = graph.streams[0].log
    says("late")(graph.requests[0], log)
    await running
    *chunks, done = events_of(call.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "late" in call.text


async def test_a_client_that_takes_nothing_is_given_up_and_its_request_cancelled() -> None:
    graph = FakeGraph(stalls("some text"))
    call = HangUpCall(app_over(graph, unread_timeout_s=0.02), CHAT, chat_body(stream=True))
    call.reads = False
    await asyncio.wait_for(call.run(), 20)
    assert graph.cancelled == [graph.streams[0].request.request_id]


async def test_the_status_waits_for_the_first_token() -> None:
    graph = FakeGraph(stalls())
    call = HangUpCall(app_over(graph), CHAT, chat_body(stream=True))
    running = asyncio.create_task(call.run())
    await graph.opened.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.sent
    graph.streams[0].log.finish(ending("error", 0, Overloaded("no room", retry_after_s=1).info))
    await running
    assert call.sent[0]["status"] == 503


async def test_equal_request_ids_are_names_and_nothing_more() -> None:
    graph = FakeGraph(streams("a", "b", "c"))
    async with client_of(graph) as client:
        replies = await asyncio.gather(
            *(
                client.post(CHAT, json=chat_body(), headers={"X-Request-Id": "same"})
                for _ in range(8)
            )
        )
    assert [reply.headers["x-request-id"] for reply in replies] == ["same"] * 8
    assert len({reply.json()["id"] for reply in replies}) == 8
    assert len({request.request_id for request in graph.requests}) == 8
    assert {r.json()["choices"][0]["message"]["content"] for r in replies} == {"abc"}


@pytest.mark.parametrize("offered", ["", "a b", "x" * 129, "é", "a\tb"])
async def test_a_strange_request_id_is_replaced(offered: str) -> None:
    async with client_of(FakeGraph()) as client:
        headers = [(b"x-request-id", offered.encode())]
        first = await client.post(CHAT, json=chat_body(stream=True), headers=headers)
        second = await client.post(CHAT, json={}, headers=headers)
    assert first.headers["x-request-id"].startswith("req_")
    assert second.headers["x-request-id"].startswith("req_")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_errors_of_the_framework_are_openai_errors_too() -> None:
    async with client_of(FakeGraph()) as client:
        missing = await client.post("/v1/images", json={})
        wrong_method = await client.get(CHAT)
        broken = await client.get("/broken", headers={"x-request-id": "mine"})
    assert (missing.status_code, wrong_method.status_code, broken.status_code) == (404, 405, 500)
    assert missing.json()["error"] == {
        "message": "not found: POST /v1/images",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
    }
    assert wrong_method.json()["error"]["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "POST"
    assert broken.json()["error"]["type"] == "server_error"
    assert "secret" not in broken.text
    assert broken.headers["x-request-id"] == "mine"
