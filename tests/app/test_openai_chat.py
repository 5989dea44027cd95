"""Chat and text completions in the public format: plain, as events, with several choices."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from protocol.token_log import CacheOutcome
from tests.app.openai_fakes import (
    MODEL,
    REVISION,
    FakeGraph,
    Script,
    chat_body,
    client_of,
    events_of,
    says,
    streams,
    strict_json,
)


def exactly(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
BYTES = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": 255}}
TOP = exactly({"token": TEXT, "logprob": {"type": "number"}, "bytes": BYTES})
CHAT_LOGPROBS = exactly(
    {
        "content": {
            "type": "array",
            "items": exactly(
                {
                    "token": TEXT,
                    "logprob": {"type": "number"},
                    "bytes": BYTES,
                    "top_logprobs": {"type": "array", "items": TOP},
                }
            ),
        },
        "refusal": {"type": "null"},
    }
)
USAGE = exactly(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": exactly({"cached_tokens": COUNT}),
    }
)
CALL_PIECE = exactly(
    {
        "index": COUNT,
        "id": TEXT,
        "type": {"const": "function"},
        "function": exactly({"name": TEXT, "arguments": TEXT}, ("name",)),
    },
    ("id", "type"),
)
FINISH_REASON = {"enum": ["stop", "length", "tool_calls", None]}
CHUNK = exactly(
    {
        "id": {"type": "string", "pattern": "^chatcmpl-"},
        "object": {"const": "chat.completion.chunk"},
        "created": COUNT,
        "model": {"const": MODEL},
        "system_fingerprint": TEXT,
        "choices": {
            "type": "array",
            "items": exactly(
                {
                    "index": COUNT,
                    "delta": exactly(
                        {
                            "role": {"const": "assistant"},
                            "content": TEXT,
                            "tool_calls": {"type": "array", "minItems": 1, "items": CALL_PIECE},
                        },
                        ("role", "content", "tool_calls"),
                    ),
                    "logprobs": {"anyOf": [CHAT_LOGPROBS, {"type": "null"}]},
                    "finish_reason": FINISH_REASON,
                }
            ),
        },
        "usage": {"anyOf": [USAGE, {"type": "null"}]},
    },
    optional=("usage",),
)


async def stream_chat(graph: FakeGraph, **fields: Any) -> list[Any]:
    async with client_of(graph) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body(stream=True, **fields))
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply.text)
    assert events[-1] == "[DONE]"
    return events[:-1]


async def post(graph: FakeGraph, path: str = "/v1/chat/completions", **body: Any) -> Any:
    async with client_of(graph) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return strict_json(reply.text)


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


async def test_a_plain_chat_is_one_completion_object() -> None:
    reply = await post(FakeGraph(), **chat_body())
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply == {
        "object": "chat.completion",
        "created": 1_750_000_000,
        "model": MODEL,
        "system_fingerprint": REVISION,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


@pytest.mark.parametrize("script", [says("Hé", "llo", " 🙂"), streams("Hé", "llo", " 🙂")])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 1},
        {"n": 3},
        {"stream_options": {"include_usage": True}},
    ],
)
async def test_every_chunk_of_a_chat_has_the_public_format(
    script: Script, fields: dict[str, Any]
) -> None:
    chunks = await stream_chat(FakeGraph(script), **fields)
    for chunk in chunks:
        jsonschema.validate(chunk, CHUNK)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    for index in range(fields.get("n", 1)):
        mine = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
        assert text_of(chunks, index) == "Héllo 🙂"


async def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    chunks = await stream_chat(FakeGraph(), stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 9


async def test_usage_can_come_with_every_chunk() -> None:
    graph = FakeGraph(streams("a", "b"))
    for path, body in (
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"prompt": "x"}),
    ):
        asked = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        async with client_of(graph) as client:
            reply = await client.post(path, json=body | asked)
        *chunks, _ = events_of(reply.text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 2
        assert all(chunk["choices"] for chunk in chunks), "the last one was not asked for"


async def test_chunks_with_calls_have_the_public_format() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for pieces in ((call,), tuple(call)):
        chunks = await stream_chat(FakeGraph(streams("Hm. ", *pieces)), tools=[tool])
        for chunk in chunks:
            jsonschema.validate(chunk, CHUNK)
        assert text_of(chunks) == "Hm."
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_usage_is_left_out_of_a_stream_that_did_not_ask() -> None:
    for options in (None, {}, {"include_usage": False}):
        chunks = await stream_chat(FakeGraph(), stream_options=options)
        assert all("usage" not in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


async def test_each_piece_of_text_is_its_own_chunk() -> None:
    pieces = [f"w{number} " for number in range(400)]
    for script in (says(*pieces), streams(*pieces)):
        chunks = await stream_chat(FakeGraph(script))
        contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert contents == ["", *pieces, None]


async def test_a_piece_without_text_makes_no_chunk() -> None:
    chunks = await stream_chat(FakeGraph(says("a", "", "b")))
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "a", "b", None]


async def test_a_long_run_of_pieces_without_text_does_not_hold_the_rest_back() -> None:
    chunks = await stream_chat(FakeGraph(says(*[""] * 1000, "end")))
    assert text_of(chunks) == "end"


async def test_plain_and_streamed_answers_are_the_same_text() -> None:
    graph = FakeGraph(streams("春", "夏", " <|im_end|>", "\n", "\u2028"))
    plain = await post(graph, **chat_body())
    chunks = await stream_chat(graph)
    assert text_of(chunks) == plain["choices"][0]["message"]["content"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_the_finish_reason_tells_a_cut_answer_from_a_whole_one(
    reason: Any, is_stream: bool
) -> None:
    graph = FakeGraph(streams("a", "b", reason=reason))
    if is_stream:
        chunks = await stream_chat(graph, stream_options={"include_usage": True})
        reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
        assert [found for found in reasons if found] == [reason]
        assert chunks[-1]["usage"]["completion_tokens"] == 2
    else:
        reply = await post(graph, **chat_body())
        assert reply["choices"][0]["finish_reason"] == reason
        assert reply["usage"]["completion_tokens"] == 2


async def test_chat_logprobs_carry_tokens_bytes_and_alternatives() -> None:
    graph = FakeGraph(says("é", "\ufffd"))
    reply = await post(graph, **chat_body(logprobs=True, top_logprobs=2))
    first, second = reply["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é0", "logprob": -0.5, "bytes": [195, 169, 48]},
            {"token": "é1", "logprob": -1.5, "bytes": [195, 169, 49]},
        ],
    }
    assert second["bytes"] is None, "half a character has no UTF-8 of its own"
    chunks = await stream_chat(graph, logprobs=True, top_logprobs=2)
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry["content"][0] for entry in streamed] == [first, second]


async def test_logprobs_alone_ask_for_no_alternatives() -> None:
    graph = FakeGraph()
    reply = await post(graph, **chat_body(logprobs=True))
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert graph.requests[0].sampling.logprobs == 0
    reply = await post(graph, **chat_body(logprobs=False))
    assert reply["choices"][0]["logprobs"] is None


async def test_completion_logprobs_are_parallel_lists() -> None:
    graph = FakeGraph(says("ab", "🙂", "c"))
    body = {"prompt": "x", "logprobs": 1}
    reply = await post(graph, "/v1/completions", **body)
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["ab", "🙂", "c"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"ab0": -0.5, "ab": -0.5}
    assert logprobs["text_offset"] == [0, 2, 3]
    async with client_of(graph) as client:
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
    offsets = [
        offset
        for event in events_of(streamed.text)[:-1]
        if event["choices"][0]["logprobs"]
        for offset in event["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 2, 3]


async def test_several_choices_are_independent_streams() -> None:
    graph = FakeGraph(streams("a", "b"))
    reply = await post(graph, **chat_body(n=3, seed=2**63 - 1))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in graph.requests] == [
        2**63 - 1,
        -(2**63),
        -(2**63) + 1,
    ]
    assert len({request.request_id for request in graph.requests}) == 3
    assert reply["usage"]["prompt_tokens"] == 7, "one prompt, however many answers"
    assert reply["usage"]["completion_tokens"] == 6


async def test_several_choices_never_share_a_cached_answer() -> None:
    graph = FakeGraph()
    await post(graph, **chat_body(n=2))
    await post(graph, **chat_body(n=2, cache="sampled"))
    assert {request.cache for request in graph.requests} == {"bypass"}


async def test_a_text_completion_streams_its_own_format() -> None:
    graph = FakeGraph(streams("one", " two", reason="length"))
    async with client_of(graph) as client:
        reply = await client.post("/v1/completions", json={"prompt": "zero", "stream": True})
    *events, done = events_of(reply.text)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    assert [event["choices"][0]["text"] for event in events] == ["one", " two", ""]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
    assert all(event["id"].startswith("cmpl-") for event in events)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("Once", ["Once"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
async def test_prompts_come_as_text_or_tokens_one_or_many(prompt: Any, asked: Any) -> None:
    graph = FakeGraph()
    reply = await post(graph, "/v1/completions", prompt=prompt, n=2)
    assert [request.prompt for request in graph.requests] == [p for p in asked for _ in range(2)]
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(asked)))
    assert reply["usage"]["prompt_tokens"] == 7 * len(asked)


async def test_text_completions_stop_at_16_tokens_by_default_and_chats_at_the_context() -> None:
    graph = FakeGraph()
    await post(graph, "/v1/completions", prompt="Once")
    await post(graph, **chat_body())
    assert [request.sampling.max_tokens for request in graph.requests] == [16, None]


async def test_a_cached_answer_is_a_new_reply_with_the_stored_usage() -> None:
    outcome = CacheOutcome(outcome="semantic", tier="memory", similarity=0.97312, age_s=12.34)
    graph = FakeGraph(cache=outcome)
    async with client_of(graph) as client:
        plain = await client.post("/v1/chat/completions", json=chat_body())
        streamed = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    header = "semantic; tier=memory; similarity=0.9731; age=12.3"
    assert plain.headers["x-seedance-cache"] == header
    assert streamed.headers["x-seedance-cache"] == header
    assert plain.json()["id"] != events_of(streamed.text)[0]["id"]
    assert plain.json()["usage"]["total_tokens"] == 9


async def test_a_miss_says_so_and_why() -> None:
    graph = FakeGraph(cache=CacheOutcome(similarity=0.91, reason="cache timed out"))
    async with client_of(graph) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body())
    assert reply.headers["x-seedance-cache"] == "miss; similarity=0.9100; reason=cache_timed_out"


async def test_event_streams_are_neither_stored_nor_buffered_on_the_way() -> None:
    async with client_of(FakeGraph()) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"


async def test_the_model_is_listed_and_found_by_its_id_with_slashes() -> None:
    async with client_of(FakeGraph()) as client:
        listed = (await client.get("/v1/models")).json()
        found = (await client.get(f"/v1/models/{MODEL}")).json()
        quoted = (await client.get("/v1/models/maker%2Ftiny-model")).json()
        missing = await client.get("/v1/models/other/model")
    assert listed == {"object": "list", "data": [found]}
    assert found == quoted
    assert found["id"] == MODEL
    assert found["object"] == "model"
    # What vLLM's clients read.
    assert (found["root"], found["max_model_len"]) == (MODEL, found["context_length"])
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
