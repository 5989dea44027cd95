from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.frames import InferReq
from protocol.parse import (
    MAX_TOKEN_ID,
    ChatMessage,
    decode_struct,
    inference_request,
    normalise_messages,
    sampling_params,
)
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.strict_json import MAX_NESTING, MalformedJson, decode_body

HI = '"messages": [{"role": "user", "content": "hi"}]'


class Body(msgspec.Struct, kw_only=True):
    """A body as an HTTP route has it: some fields, one of them with a default that is not null."""

    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    cache: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    stream: bool = False


def build(raw: str | bytes) -> InferenceRequest:
    body = decode_struct(raw, Body)
    return inference_request(body, request_id="r", tenant="t", model="m")


def refusal(raw: str | bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        build(raw)
    # Whatever was wrong, the error itself must be strict JSON.
    msgspec.json.encode(caught.value.info)
    json.dumps(msgspec.to_builtins(caught.value.info), allow_nan=False).encode()
    return caught.value


BAD_FIELDS = [
    ('"temperature": NaN', "temperature"),
    ('"temperature": Infinity', "temperature"),
    ('"temperature": -Infinity', "temperature"),
    ('"temperature": 1e999', "temperature"),
    ('"temperature": "0.5"', "temperature"),
    ('"temperature": true', "temperature"),
    ('"temperature": -1', "temperature"),
    ('"temperature": 99', "temperature"),
    ('"top_p": 0', "top_p"),
    ('"top_p": 1.5', "top_p"),
    ('"top_p": NaN', "top_p"),
    ('"max_tokens": 0', "max_tokens"),
    ('"max_tokens": -1', "max_tokens"),
    ('"max_tokens": 1.5', "max_tokens"),
    ('"max_tokens": "7"', "max_tokens"),
    ('"max_tokens": true', "max_tokens"),
    ('"max_tokens": 1e12', "max_tokens"),
    ('"max_tokens": 1000000000000', "max_tokens"),
    ('"max_completion_tokens": 0', "max_completion_tokens"),
    ('"max_tokens": 5, "max_completion_tokens": 6', "max_completion_tokens"),
    ('"max_tokens": 5, "min_tokens": 6', "min_tokens"),
    ('"stop": 42', "stop"),
    ('"stop": ""', "stop"),
    ('"stop": [""]', "stop[0]"),
    ('"stop": ["a", ""]', "stop[1]"),
    ('"stop": ["a", 5]', "stop[1]"),
    ('"stop": {"a": 1}', "stop"),
    (f'"stop": {json.dumps(list("abcdefghijklmnopqrst"))}', "stop"),
    ('"stop": "\\ud800"', "stop"),
    ('"stop_token_ids": [-1]', "stop_token_ids[0]"),
    ('"stop_token_ids": [5, 99999999999]', "stop_token_ids"),
    (f'"stop_token_ids": {list(range(1025))}', "stop_token_ids"),
    ('"seed": 1180591620717411303424', "seed"),
    ('"seed": -1180591620717411303424', "seed"),
    (f'"seed": {"9" * 5000}', "seed"),
    ('"seed": 1.5', "seed"),
    ('"logit_bias": {"cat": 1}', "logit_bias"),
    ('"logit_bias": {"5": "x"}', "logit_bias"),
    ('"logit_bias": {"5": 101}', "logit_bias"),
    ('"logit_bias": {"-5": 1}', "logit_bias"),
    (f'"logit_bias": {{"{2**70}": 1}}', "logit_bias"),
    ('"logit_bias": [5]', "logit_bias"),
    ('"logprobs": 21', "logprobs"),
    ('"logprobs": "x"', "logprobs"),
    ('"logprobs": true, "top_logprobs": 21', "top_logprobs"),
    ('"logprobs": true, "top_logprobs": -1', "top_logprobs"),
    ('"top_logprobs": 2', "top_logprobs"),
    ('"tools": 5', "tools"),
    ('"tools": [5]', "tools[0]"),
    ('"tools": [{"a": [NaN]}]', "tools[0].a[0]"),
    ('"tools": [{"a": "\\udfff"}]', "tools[0].a"),
    (f'"tools": [{{"a": {2**70}}}]', "tools[0].a"),
    ('"cache": "often"', "cache"),
    ('"priority": 101', "priority"),
    ('"timeout_s": 0', "timeout_s"),
    ('"timeout_s": NaN', "timeout_s"),
    ('"stream": "yes"', "stream"),
    ('"prompt": "hi"', "prompt"),
]


@pytest.mark.parametrize(("field", "param"), BAD_FIELDS, ids=[f[:40] for f, _ in BAD_FIELDS])
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, param: str) -> None:
    raw = f"{{{HI}, {field}}}"
    for form in (raw, raw.encode()):
        error = refusal(form)
        assert error.param == param
        assert param.partition("[")[0] in error.message
        assert "NaN" not in error.message
        assert len(error.message) < 250


BAD_MESSAGES = [
    ("[]", "messages"),
    ("{}", "messages"),
    ("5", "messages"),
    ('["hi"]', "messages[0]"),
    ('[{"content": "hi"}]', "messages[0].role"),
    ('[{"role": null, "content": "hi"}]', "messages[0].role"),
    ('[{"role": "robot", "content": "hi"}]', "messages[0].role"),
    ('[{"role": "user"}]', "messages[0].content"),
    ('[{"role": "user", "content": null}]', "messages[0].content"),
    ('[{"role": "assistant", "content": null}]', "messages[0].content"),
    ('[{"role": "assistant", "content": null, "tool_calls": []}]', "messages[0].content"),
    ('[{"role": "user", "content": 5}]', "messages[0].content"),
    ('[{"role": "user", "content": []}]', "messages[0].content"),
    ('[{"role": "user", "content": ["x"]}]', "messages[0].content[0]"),
    ('[{"role": "user", "content": [{"text": "x"}]}]', "messages[0].content[0].type"),
    ('[{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content[0].text"),
    ('[{"role": "user", "content": [{"type": "text", "text": 5}]}]', "messages[0].content[0].text"),
    (
        '[{"role": "user", "content": [{"type": "text", "text": "\\ud83d"}]}]',
        "messages[0].content[0].text",
    ),
    ('[{"role": "user", "content": "\\udc00"}]', "messages[0].content"),
    ('[{"role": "user", "content": "hi"}, {"role": "tool", "content": {}}]', "messages[1].content"),
    ('[{"role": "user", "content": "hi", "name": 5}]', "messages[0].name"),
    (
        f'[{{"role": "assistant", "tool_calls": [{{"a": {2**70}}}]}}]',
        "messages[0].tool_calls[0].a",
    ),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_a_bad_message_is_refused_by_its_place(messages: str, param: str) -> None:
    assert refusal(f'{{"messages": {messages}}}').param == param


def test_an_image_is_refused_by_its_place_and_type() -> None:
    error = refusal(
        '{"messages": [{"role": "user", "content": ['
        '{"type": "text", "text": "What is this?"}, '
        '{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]}'
    )
    assert error.param == "messages[0].content[1]"
    assert "image_url" in error.message


def test_an_unknown_role_is_answered_with_the_known_ones() -> None:
    error = refusal('{"messages": [{"role": "robot", "content": "hi"}]}')
    assert all(role in error.message for role in ("system", "user", "assistant", "tool", "robot"))


def test_a_bound_is_told_with_the_offending_value() -> None:
    error = refusal(f'{{{HI}, "temperature": 99}}')
    assert error.message == "temperature must be at most 2, got 99"
    assert error.limit == 2


def test_prompt_and_messages_exclude_each_other_and_one_is_needed() -> None:
    assert "messages" in refusal(f'{{{HI}, "prompt": "hi"}}').message
    error = refusal("{}")
    assert (error.param, "prompt" in error.message) == ("messages", True)
    assert refusal('{"prompt": ""}').param == "prompt"
    assert refusal('{"prompt": []}').param == "prompt"
    assert refusal('{"prompt": [1, -1]}').param == "prompt"
    assert refusal(f'{{"prompt": [{MAX_TOKEN_ID + 1}]}}').param == "prompt"


def test_null_means_the_default_everywhere() -> None:
    names = [field.encode_name for field in msgspec.structs.fields(Body) if field.name != "prompt"]
    nulls = ", ".join(f'"{name}": null' for name in names)
    body = decode_struct(f'{{{nulls}, "prompt": "hi"}}', Body)
    assert body == Body(prompt="hi")
    request = inference_request(body, request_id="r", tenant="t", model="m")
    assert request == InferenceRequest(request_id="r", tenant="t", model="m", prompt="hi")


def test_a_null_does_not_let_another_bad_value_through() -> None:
    assert refusal(f'{{{HI}, "stream": null, "temperature": NaN}}').param == "temperature"
    assert refusal(f'{{{HI}, "stream": null, "top_p": 2}}').param == "top_p"


def test_unknown_fields_are_ignored() -> None:
    assert build(f'{{{HI}, "frobnicate": {{"a": [1, 2.5, null]}}}}') == build(f"{{{HI}}}")


NO_OBJECTS = """
{|[1]|5|"x"|null|{'a': 1}|{"a": 1}x|{"a": 01}|\ufeff{}|x|{"a": "\x01"}|{"a" 1}|{"a": tru}|{}{}
"""


@pytest.mark.parametrize(
    "raw", ["", " ", "\x01\x00\x00", '{"prompt": "hi"', *NO_OBJECTS.strip().split("|")]
)
def test_what_is_not_a_json_object_is_refused(raw: str) -> None:
    for form in (raw, raw.encode()):
        with pytest.raises(MalformedJson) as caught:
            decode_struct(form, Body)
        assert caught.value.code == "invalid_request"
        with pytest.raises(MalformedJson):
            decode_body(form)


def test_bytes_that_are_not_utf8_are_refused_by_their_field() -> None:
    assert refusal(b'{"prompt": "caf\xe9"}').param == "prompt"
    assert refusal(b'{"prompt": "hi", "unknown": "caf\xe9"}').param == "unknown"
    assert isinstance(refusal(b"\xff\xfe"), MalformedJson)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("levels", [MAX_NESTING, 1000, 200_000])
@pytest.mark.parametrize("field", ["tools", "unknown"])
def test_deep_nesting_is_refused_by_its_field(opening: str, levels: int, field: str) -> None:
    for closing in ("", "]}" * levels):
        error = refusal(f'{{{HI}, "{field}": {opening * levels}{closing}')
        assert (error.param, error.limit) == (field, MAX_NESTING)


def test_brackets_in_text_are_not_nesting() -> None:
    text = '[{"' * 1000
    assert build(json.dumps({"prompt": text})).prompt == text


def test_a_fault_under_a_long_name_costs_no_copy_of_the_name() -> None:
    name = "n" * 200_000
    raw = json.dumps({name: [0] * 10_000 + [math.nan]})
    error = refusal(raw)
    assert error.param is not None
    assert len(error.param) < 100


@pytest.mark.parametrize("piece", ['\\"', '"', "\\", '["', "{", '"\\'])
def test_a_megabyte_of_punctuation_is_refused_in_one_pass(piece: str) -> None:
    refusal(f'{{{HI}, "x": {piece * (1_000_000 // len(piece))}')


def test_a_fault_behind_very_many_values_is_refused_without_a_name() -> None:
    error = refusal(f'{{{HI}, "x": [{"0, " * 50_000} NaN]}}')
    assert (error.code, error.param) == ("invalid_request", None)


def test_text_parts_are_joined_with_newlines() -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert normalise_messages([message]) == (Message(role="user", content="a\nb"),)


def test_an_assistant_turn_may_be_only_tool_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message == Message(role="assistant", tool_calls=[call])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": 0}, 0),
        ({"logprobs": 3}, 3),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": True, "top_logprobs": 0}, 0),
    ],
)
def test_both_ways_of_asking_for_logprobs_are_understood(
    fields: dict[str, Any], expected: int | None
) -> None:
    assert sampling_params(fields).logprobs == expected


def test_sampling_fields_arrive_as_they_were_sent() -> None:
    fields = {
        "max_completion_tokens": 7,
        "temperature": 0,
        "stop": "END",
        "logit_bias": {"50": -100},
        "seed": -(2**63),
        "unknown": 1,
    }
    assert sampling_params(fields) == SamplingParams(
        max_tokens=7, temperature=0.0, stop=("END",), logit_bias={50: -100.0}, seed=-(2**63)
    )


def test_a_frame_and_a_body_make_the_same_request() -> None:
    options = f'{HI}, "max_tokens": 5, "stop": ["a", "b"], "cache": "bypass", "priority": 3'
    frame = decode_struct(f'{{"type": "INFER_REQ", "id": "x", {options}}}', InferReq)
    from_frame = inference_request(frame, request_id="r", tenant="t", model="m")
    assert from_frame == build(f"{{{options}}}")
    assert from_frame.messages == (Message(role="user", content="hi"),)


@given(st.text(alphabet='{}[]":,\\u d8zaé0', max_size=60) | st.binary(max_size=60))
def test_no_input_escapes_as_anything_but_a_refusal(raw: str | bytes) -> None:
    for decode in (decode_body, lambda data: decode_struct(data, Body)):
        try:
            decode(raw)
        except InvalidRequest as error:
            msgspec.json.encode(error.info)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(Body.__struct_fields__), JSON, max_size=6))
def test_no_field_value_escapes_as_anything_but_a_refusal(fields: dict[str, Any]) -> None:
    try:
        request = build(json.dumps(fields))
    except InvalidRequest as error:
        is_named = error.param is not None or isinstance(error, MalformedJson)
        assert is_named, error  # noqa: PT017
    else:
        assert msgspec.json.decode(msgspec.json.encode(request), type=InferenceRequest) == request
