"""What a body means, and which bodies are refused with the name of the field at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from app.openai_errors import install_error_handlers
from app.openai_routes import build_router
from protocol.errors import Unauthorized
from tests.app.openai_fakes import FakeGraph, chat_body, client_of, strict_json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "look_up"}}
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


async def refuse(path: str, content: str | bytes, status: int = 400, **headers: str) -> Any:
    graph = FakeGraph()
    async with client_of(graph) as client:
        reply = await client.post(
            path, content=content, headers={"content-type": "application/json", **headers}
        )
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
    assert reply.status_code == status, reply.text
    assert len(graph.requests) == 1, "nothing but the good request reached the graph"
    error = strict_json(reply.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert reply.headers["content-type"] == "application/json"
    return error


async def accept(path: str = CHAT, headers: dict[str, str] | None = None, **body: Any) -> Any:
    graph = FakeGraph()
    async with client_of(graph) as client:
        reply = await client.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return graph.requests[0]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", '"0.5"'),
        ("temperature", "-1"),
        ("temperature", "99"),
        ("temperature", "true"),
        ("temperature", "1e999"),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("top_p", "NaN"),
        ("top_k", "-2"),
        ("min_p", "-Infinity"),
        ("max_tokens", "1.5"),
        ("max_tokens", '"7"'),
        ("max_tokens", "true"),
        ("max_tokens", "1e12"),
        ("max_tokens", "0"),
        ("max_tokens", "-1"),
        ("max_completion_tokens", "0"),
        ("min_tokens", "-1"),
        ("stop", "42"),
        ("stop", json.dumps([str(number) for number in range(20)])),
        ("stop_token_ids", '["a"]'),
        ("stop_token_ids", "[-1]"),
        ("logit_bias", '{"nine": 5}'),
        ("logit_bias", '{"9": 500}'),
        ("logit_bias", "[]"),
        ("seed", str(2**70)),
        ("seed", "1.5"),
        ("n", "0"),
        ("n", "17"),
        ("n", '"2"'),
        ("presence_penalty", "3"),
        ("frequency_penalty", "-3"),
        ("repetition_penalty", "0"),
        ("ignore_eos", "1"),
        ("stream_options", "[]"),
        ("cache", '"always"'),
        ("priority", "1000"),
        ("timeout_s", "0"),
        ("timeout_s", "NaN"),
        ("model", "5"),
        ("logprobs", "21"),
        ("top_logprobs", "2"),
    ],
)
async def test_a_bad_value_is_refused_by_name(field: str, value: str, is_stream: bool) -> None:
    raw = f'{{"messages":[{{"role":"user","content":"x"}}],"stream":{str(is_stream).lower()},'
    error = await refuse(CHAT, f'{raw}"{field}":{value}}}')
    assert error["param"].partition("[")[0].partition(".")[0] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, chat_body(stop=["a", ""]), "stop[1]"),
        (CHAT, chat_body(stream="yes"), "stream"),
        (CHAT, chat_body(stream_options={"include_usage": True}), "stream_options"),
        (CHAT, chat_body(stream_options={}, stream=False), "stream_options"),
        (CHAT, chat_body(top_logprobs=2), "top_logprobs"),
        (CHAT, chat_body(logprobs=True, top_logprobs=21), "top_logprobs"),
        (CHAT, chat_body(logprobs=True, top_logprobs=-1), "top_logprobs"),
        (CHAT, chat_body(max_tokens=5, max_completion_tokens=6), "max_completion_tokens"),
        (CHAT, chat_body(min_tokens=6, max_tokens=5), "min_tokens"),
        (CHAT, chat_body(n=2, cache="only"), "n"),
        (CHAT, chat_body(functions=[]), "functions"),
        (CHAT, chat_body(function_call="auto"), "function_call"),
        (CHAT, chat_body(audio={}), "audio"),
        (CHAT, chat_body(modalities=["text", "audio"]), "modalities"),
        (CHAT, chat_body(tool_choice="required"), "tool_choice"),
        (
            CHAT,
            chat_body(
                tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}
            ),
            "tool_choice",
        ),
        (CHAT, chat_body(tools=[TOOL], tool_choice="maybe"), "tool_choice"),
        (
            CHAT,
            chat_body(
                tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look_down"}}
            ),
            "tool_choice",
        ),
        (CHAT, chat_body(web_search_options={}), "web_search_options"),
        (CHAT, chat_body(tools=["look_up"]), "tools[0]"),
        (CHAT, chat_body(tools=[TOOL, {"type": "function"}]), "tools[1].function"),
        (CHAT, chat_body(tools=[{**TOOL, "type": "retrieval"}]), "tools[0].type"),
        (CHAT, chat_body(response_format="json"), "response_format"),
        (CHAT, chat_body(response_format={"type": "xml"}), "response_format.type"),
        (
            CHAT,
            chat_body(response_format={"type": "json_schema"}),
            "response_format.json_schema",
        ),
        (CHAT, chat_body(structured_outputs={}), "structured_outputs"),
        (
            CHAT,
            chat_body(structured_outputs={"regex": "a", "choice": ["a"]}),
            "structured_outputs",
        ),
        (
            CHAT,
            chat_body(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
            "structured_outputs",
        ),
        (CHAT, chat_body(structured_outputs={"choice": "a"}), "structured_outputs.choice"),
        (TEXT, {"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {"prompt": ["a", 5]}, "prompt[1]"),
        (TEXT, {"prompt": ["a", ""]}, "prompt[1]"),
        (TEXT, {"prompt": [True]}, "prompt[0]"),
        (TEXT, {"prompt": [3, -4]}, "prompt"),
        (TEXT, {"prompt": [[3], [4, -5]]}, "prompt[1]"),
        (TEXT, {"prompt": [[]]}, "prompt[0]"),
        (TEXT, {"prompt": ["a"] * 65}, "prompt"),
        (TEXT, {"prompt": ["a"] * 5, "n": 16}, "n"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    error = await refuse(path, json.dumps(body))
    assert error["param"] == param


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{'messages': []}",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"\\ud800","messages":[{"role":"user","content":"x"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":[{"role":"user","content":"x"}],"\\ud800":NaN}',
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(content: bytes) -> None:
    await refuse(CHAT, content)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "x"])
async def test_another_content_type_is_refused(content_type: str) -> None:
    body = json.dumps(chat_body())
    error = await refuse(CHAT, body, **{"content-type": content_type})
    assert error["param"] == "content-type"


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
async def test_json_by_any_of_its_names_is_taken(content_type: str) -> None:
    await accept(headers={"content-type": content_type}, **chat_body())


async def test_a_compressed_body_is_refused_by_the_header_that_says_so() -> None:
    error = await refuse(CHAT, json.dumps(chat_body()), **{"content-encoding": "gzip"})
    assert error["param"] == "content-encoding"


async def test_a_body_over_the_limit_is_a_413_with_the_limit() -> None:
    graph = FakeGraph()
    body = chat_body(padding="x" * 2000)
    async with client_of(graph, max_body_bytes=1000) as client:
        reply = await client.post(CHAT, json=body)
        far_over = await client.post(CHAT, json=chat_body(padding="x" * 100_000))
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
    assert reply.status_code == far_over.status_code == 413
    assert reply.json()["error"]["code"] == "input_too_large"
    assert "the limit is 1000" in reply.json()["error"]["message"]


async def test_two_mebibytes_are_over_the_default_limit() -> None:
    error = await refuse(CHAT, json.dumps(chat_body(padding="x" * 2**21)), status=413)
    assert error["code"] == "input_too_large"


@pytest.mark.parametrize("colour", ["red", "blue"])
async def test_an_image_is_refused_and_never_dropped(colour: str) -> None:
    content = [{"type": "text", "text": f"What is in this {colour} picture?"}, PNG]
    body = {"messages": [{"role": "user", "content": content}]}
    error = await refuse(CHAT, json.dumps(body))
    assert error["param"] == "messages[0].content[1]"


async def test_an_unknown_model_is_a_404_that_names_the_field() -> None:
    for path, body in ((CHAT, chat_body()), (TEXT, {"prompt": "a"})):
        error = await refuse(path, json.dumps(body | {"model": "gpt-9", "stream": True}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_null_and_unknown_fields_mean_nothing() -> None:
    names = (
        "model temperature top_p top_k min_p max_tokens max_completion_tokens n stop seed "
        "logprobs top_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias "
        "min_tokens ignore_eos stop_token_ids stream stream_options response_format tools "
        "tool_choice parallel_tool_calls cache priority timeout_s functions audio modalities"
    )
    plain = await accept(**chat_body())
    nulls = await accept(
        **chat_body(**dict.fromkeys(names.split()), user="me", metadata={"a": 1}, shoe_size=44)
    )
    for name in plain.__struct_fields__:
        if name != "request_id":
            assert getattr(nulls, name) == getattr(plain, name), name
    assert plain.sampling.temperature == 1.0, "the documented default samples"


async def test_every_parameter_that_changes_the_answer_reaches_the_graph() -> None:
    plain = await accept(**chat_body())
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    changes: list[dict[str, Any]] = [
        {"max_tokens": 8},
        {"max_completion_tokens": 8},
        {"stop": ["."]},
        {"stop": "."},
        {"temperature": 0},
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.1},
        {"seed": 3},
        {"logprobs": True},
        {"presence_penalty": 1},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"9": -100}},
        {"min_tokens": 4},
        {"ignore_eos": True},
        {"stop_token_ids": [5]},
        {"response_format": {"type": "json_object"}},
        {"response_format": schema},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": NAMED},
        {"tools": [TOOL], "parallel_tool_calls": False},
    ]

    def key(request: Any) -> str:
        return repr((request.sampling, request.tools, request.tool_choice, request.response_format))

    for change in changes:
        assert key(await accept(**chat_body(**change))) != key(plain), change
    assert key(await accept(**chat_body(max_tokens=8))) == key(
        await accept(**chat_body(max_completion_tokens=8))
    )
    assert key(await accept(**chat_body(tools=[TOOL]))) != key(
        await accept(**chat_body(tools=[TOOL], tool_choice="none"))
    )


async def test_a_default_written_out_is_the_default() -> None:
    request = await accept(
        **chat_body(response_format={"type": "text"}, tools=[], tool_choice="auto", n=1)
    )
    assert (request.response_format, request.tools, request.tool_choice) == (None, None, None)


async def test_text_parts_are_joined_before_the_graph_sees_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = await accept(messages=[{"role": "user", "content": parts}])
    assert request.messages[0].content == "one\ntwo"


@pytest.mark.parametrize("policy", ["auto", "bypass", "only", "refresh", "sampled"])
async def test_the_cache_policy_comes_by_body_or_header_and_the_body_wins(policy: str) -> None:
    header = {"x-seedance-cache-control": policy}
    assert (await accept(**chat_body(cache=policy))).cache == policy
    assert (await accept(headers=header, **chat_body())).cache == policy
    assert (await accept(headers=header, **chat_body(cache="bypass"))).cache == "bypass"


async def test_a_bad_cache_header_is_refused_by_name() -> None:
    error = await refuse(CHAT, json.dumps(chat_body()), **{"x-seedance-cache-control": "no-cache"})
    assert error["param"] == "x-seedance-cache-control"


async def test_the_tenant_comes_from_the_credential_alone() -> None:
    request = await accept(**chat_body(tenant="tenant-b", user="tenant-b"))
    assert request.tenant == "tenant-a"


async def test_without_a_credential_nothing_is_told_or_read() -> None:
    def nobody(request: Request) -> str:
        raise Unauthorized("send an API key", param="Authorization")

    graph = FakeGraph()
    app = FastAPI()
    app.include_router(build_router(graph, nobody))
    install_error_handlers(app)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://seedance.test") as client:
        replies = [
            await client.post(CHAT, content=b"{"),
            await client.post(TEXT, json={"prompt": "a"}),
            await client.get("/v1/models"),
            await client.get("/v1/models/any"),
        ]
    assert [reply.status_code for reply in replies] == [401] * 4
    assert replies[0].json()["error"]["type"] == "authentication_error"
    assert replies[0].headers["www-authenticate"] == "Bearer"
    assert not graph.requests


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "messages",
        "model",
        "n",
        "max_tokens",
        "temperature",
        "stop",
        "logit_bias",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "response_format",
        "seed",
        "logprobs",
        "top_logprobs",
        "cache",
        "prompt",
        "echo",
        "suffix",
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from([CHAT, TEXT]), fields=st.dictionaries(FIELDS, JSON, max_size=4))
async def test_no_body_is_answered_with_a_5xx(path: str, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
    async with client_of(FakeGraph()) as client:
        reply = await client.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert set(strict_json(reply.text)["error"]) == {"message", "type", "param", "code"}
