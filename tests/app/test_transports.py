"""One text on every transport: plain, as events and over the WebSocket, through the whole process."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.engine.scripted import Script
from deployments.engine.sequence import Sequence
from protocol.request import MAX_TOKENS_LIMIT
from tests.app.openai_fakes import events_of
from tests.app.stack import Site, echo, on_air, running_stack, talks_on, until_metrics
from tests.app.talker import talking

TRANSPORTS = ("plain", "sse", "ws")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Reply:
    """What came over one transport; `pieces` are the parts in which it came."""

    pieces: tuple[str, ...]
    finish_reason: str
    usage: dict[str, Any]
    mark: str

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def counts(self) -> tuple[int, ...]:
        """What all transports tell of the usage, each in its own form."""
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return tuple(self.usage[name] for name in names)


async def ask(site: Site, transport: str, prompt: str, *, chat: bool, **fields: Any) -> Reply:
    question: dict[str, Any] = {"prompt": prompt}
    if chat:
        question = {"messages": [{"role": "user", "content": prompt}]}
    body = {"temperature": 0, "max_tokens": 1000, **question, **fields}
    if transport == "ws":
        return await over_websocket(site, body)
    path = CHAT if chat else COMPLETIONS
    if transport == "plain":
        response = await site.http.post(path, json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        text = choice["message"]["content"] if chat else choice["text"]
        usage = response.json()["usage"]
        mark = response.headers["x-seedance-cache"]
        return Reply((text,), choice["finish_reason"], usage, mark.partition(";")[0])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await site.http.post(path, json=body | options)
    return read_events(response.text, response.headers, chat=chat)


def read_events(text: str, headers: Any, *, chat: bool) -> Reply:
    assert headers["content-type"].startswith("text/event-stream")
    *events, last = events_of(text)
    assert last == "[DONE]"
    *chunks, final = events
    assert final["choices"] == []
    choices = [chunk["choices"][0] for chunk in chunks]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1
    assert len({event["id"] for event in events}) == 1
    pieces = [
        (choice["delta"].get("content") or "") if chat else choice["text"] for choice in choices
    ]
    if chat:
        assert choices[0]["delta"]["role"] == "assistant"
        assert not any(choice["delta"].get("role") for choice in choices[1:])
    mark = headers["x-seedance-cache"].partition(";")[0]
    return Reply(tuple(filter(None, pieces)), reasons[0], final["usage"], mark)


async def over_websocket(site: Site, body: dict[str, Any]) -> Reply:
    async with talking(site.infer_url) as talker:
        await talker.send("INFER_REQ", id="r", **body)
        done = await talker.last_of("r")
        assert done["type"] == "INFER_DONE", done
        ack, *chunks, last = talker.of("r")
        assert (ack["type"], last) == ("INFER_ACK", done)
        assert ack["cache"]["outcome"] == done["cache"]["outcome"]
        pieces = tuple(chunk["text"] for chunk in chunks if chunk["type"] == "INFER_CHUNK")
        return Reply(pieces, done["finish_reason"], done["usage"], done["cache"]["outcome"])


def says(text: str | bytes) -> Script:
    answer = list(text.encode() if isinstance(text, str) else text)
    return lambda seq: answer


async def on_all(script: Script, *, chat: bool = False, **fields: Any) -> list[Reply]:
    """The reply on each transport, each one generated."""
    async with running_stack(script, with_cache=False) as stack, on_air(stack.graph) as site:
        return [await ask(site, each, "Go on", chat=chat, **fields) for each in TRANSPORTS]


TEXTS: dict[str, bytes] = {
    "emoji and CJK": "春夏秋冬🙂春夏秋冬🙂".encode(),
    "a family of seven code points": "a👩‍👩‍👧‍👦b".encode(),
    "combining marks": "é vs e\u0301, n̈ and क्षि".encode(),
    "right to left": "שלום مرحبا".encode(),
    "bytes that are no character": b"ab\xff\xfecd\xe6\x98",
    "a replacement character that is meant": "a\ufffdb".encode(),
    "line ends and controls": b"a\r\nb\n\n\tc\0d\x7f\xe2\x80\xa8e",
    "what looks like protocol": b'data: [DONE]\n\n{"type": "INFER_DONE"}',
    "nothing at all": b"",
}


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("raw", tuple(TEXTS.values()), ids=tuple(TEXTS))
async def test_joined_pieces_equal_the_plain_text_and_cut_no_character(
    raw: bytes, chat: bool
) -> None:
    plain, sse, ws = await on_all(says(raw), chat=chat)
    assert plain.text == sse.text == ws.text == raw.decode("utf-8", "replace")
    assert plain.counts == sse.counts == ws.counts
    assert plain.usage["completion_tokens"] == len(raw) + 1
    assert {reply.finish_reason for reply in (plain, sse, ws)} == {"stop"}
    for reply in (sse, ws):
        replaced = sum(piece.count("\ufffd") for piece in reply.pieces)
        assert replaced == plain.text.count("\ufffd")


async def test_plain_ascii_comes_about_once_a_token() -> None:
    text = "https://example.org/a/b/c/" * 3
    _, sse, ws = await on_all(says(text))
    assert ws.pieces == tuple(text)
    assert len(sse.pieces) >= len(text) // 2


LETTERS = "A B C D E F G H A B C D E F G H A B C D"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["F G H A"], "A B C D E "),
        (["F G Z"], LETTERS),
        (["E F", "E F G"], "A B C D "),
        (["E F G", "E F"], "A B C D "),
        ("D", "A B C "),
        (["A"], ""),
        (["D\n"], LETTERS),
    ],
)
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_a_stop_string_cuts_alike_everywhere(stop: Any, expected: str, chat: bool) -> None:
    for reply in await on_all(says(LETTERS), chat=chat, stop=stop):
        assert reply.text == expected
        assert reply.finish_reason == "stop"


async def test_a_stop_string_may_cross_characters_of_several_tokens() -> None:
    for reply in await on_all(says("前🙂中文🙂后"), stop=["文🙂"]):
        assert reply.text == "前🙂中"


@pytest.mark.parametrize("limit", [1, 5, 20])
async def test_a_cut_answer_says_length_and_counts_every_token(limit: int) -> None:
    for reply in await on_all(says(LETTERS), chat=True, max_tokens=limit):
        assert reply.text == LETTERS[:limit]
        assert reply.finish_reason == "length"
        assert reply.usage["completion_tokens"] == limit


async def test_a_cut_within_a_character_says_so_alike() -> None:
    replies = await on_all(says("ab🙂"), max_tokens=4)
    assert len({reply.text for reply in replies}) == 1
    assert {reply.finish_reason for reply in replies} == {"length"}


async def test_room_for_more_than_the_context_holds_is_lowered() -> None:
    for reply in await on_all(says("short"), max_tokens=MAX_TOKENS_LIMIT):
        assert (reply.text, reply.finish_reason) == ("short", "stop")


@pytest.mark.parametrize("order", tuple(itertools.permutations(TRANSPORTS)), ids="-".join)
async def test_what_one_transport_stored_the_others_replay(order: tuple[str, ...]) -> None:
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        replies = [await ask(site, each, "Name a 🙂 colour.", chat=True) for each in order]
        assert [reply.mark for reply in replies] == ["miss", "exact", "exact"]
        assert len({reply.text for reply in replies}) == 1
        assert "🙂" in replies[0].text
        assert len({reply.counts for reply in replies}) == 1


async def test_calls_that_carry_the_same_request_id_are_independent() -> None:
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        prompts = [f"call number {i}" for i in range(8)]
        replies = await asyncio.gather(
            *(
                site.http.post(
                    COMPLETIONS, json={"prompt": prompt}, headers={"x-request-id": "same"}
                )
                for prompt in prompts
            )
        )
        assert [reply.json()["choices"][0]["text"] for reply in replies] == prompts
        assert len({reply.json()["id"] for reply in replies}) == len(prompts)


async def test_a_prompt_over_the_context_is_refused_with_both_numbers_before_any_event() -> None:
    async with running_stack(echo, max_model_len=64) as stack, on_air(stack.graph) as site:
        turns = [
            {"role": "system", "content": "Always end with the word ZEBRA."},
            {"role": "user", "content": "word " * 40},
        ]
        for is_stream in (False, True):
            response = await site.http.post(CHAT, json={"messages": turns, "stream": is_stream})
            assert response.status_code == 400
            assert_names_both_numbers(response.json()["error"])
        async with talking(site.infer_url) as talker:
            await talker.send("INFER_REQ", id="r", messages=turns)
            assert_names_both_numbers(await talker.last_of("r"))
        assert stack.num_generated == 0


def assert_names_both_numbers(error: dict[str, Any]) -> None:
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    limit, asked = [int(number) for number in re.findall(r"\d+", error["message"])]
    assert asked > limit == 64


# ------------------------------------------------------------------ failures, on the way out


def breaks_at(position: int) -> Callable[[Sequence], Any]:
    return lambda seq: "raise" if len(seq.output_token_ids) == position else None


async def test_a_failure_before_the_first_token_keeps_its_status() -> None:
    async with (
        running_stack(says(LETTERS), fault=breaks_at(0)) as stack,
        on_air(stack.graph) as site,
    ):
        for is_stream in (False, True):
            body = {"prompt": "Go on", "stream": is_stream}
            response = await site.http.post(COMPLETIONS, json=body)
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal"


async def test_a_failure_in_mid_stream_is_an_event_after_the_text() -> None:
    async with (
        running_stack(says(LETTERS), fault=breaks_at(10)) as stack,
        on_air(stack.graph) as site,
    ):
        response = await site.http.post(COMPLETIONS, json={"prompt": "Go on", "stream": True})
        *chunks, last = events_of(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == LETTERS[:10]
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "internal")
        assert "fault" not in response.text


async def test_a_deadline_in_mid_stream_is_an_event_after_the_text() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.002) as stack,
        on_air(stack.graph) as site,
    ):
        body = {"prompt": "Go on", "stream": True, "timeout_s": 0.3, "max_tokens": 4000}
        *chunks, last = events_of((await site.http.post(COMPLETIONS, json=body)).text)
        assert chunks
        assert last["error"]["code"] == "timeout"
        whole = await site.http.post(COMPLETIONS, json=body | {"stream": False})
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        await stack.until_idle()


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "sse"])
async def test_a_client_that_leaves_stops_its_generation(is_stream: bool) -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.002) as stack,
        on_air(stack.graph) as site,
    ):
        body = json.dumps({"prompt": "Go on", "stream": is_stream, "max_tokens": 4000}).encode()
        reader, writer = await asyncio.open_connection(*site.address)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if is_stream:
            await reader.readuntil(b"data: ")
        else:
            await until_metrics(site, requests_running=1)
        writer.transport.abort()
        samples = await until_metrics(site, requests_running=0, requests_waiting=0)
        assert samples["requests_total[disconnected][miss]"] == 1
        await stack.until_idle()
