"""Tools: what may be called, how calls are found in an answer, and how the model hears of them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai_tools import CallPart, Parsing, ToolCallReader, plan_tools
from deployments.engine.sequence import Sequence
from deployments.tool_prompt import tell_tools
from protocol.request import InferenceRequest, Message
from tests.app.openai_fakes import FakeGraph, chat_body, client_of, events_of, says
from tests.app.stack import MODEL, on_air, running_stack

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["bark", "bite"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a\\"}{"}}\n</tool_call>'
ARGUMENTS = '{"word": "a\\"}{"}'
NAMED = {"type": "function", "function": {"name": "look_up"}}


def read(parsing: Parsing, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces."""
    reader = ToolCallReader(parsing, "look_up")
    parts = [*map(reader.feed, pieces), reader.end()]
    text = "".join(part.text for part in parts)
    calls: list[CallPart] = []
    for part in [call for each in parts for call in each.calls]:
        if part.name is not None:
            assert part.index == len(calls)
            calls.append(part)
        else:
            last = calls[part.index]
            calls[part.index] = CallPart(last.index, last.arguments + part.arguments, last.name)
    return text, [(call.name or "", call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("parsing", "answer", "text", "calls"),
    [
        ("none", CALL, CALL, []),
        ("marked", "plain", "plain", []),
        ("marked", CALL, "", [("look_up", ARGUMENTS)]),
        ("marked", f"I look.\n{CALL}\n{CALL}\n", "I look.", [("look_up", ARGUMENTS)] * 2),
        ("marked", f"{CALL} and more", "and more", [("look_up", ARGUMENTS)]),
        ("marked", CALL.removesuffix("</tool_call>"), "", [("look_up", ARGUMENTS)]),
        ("marked", "a < b <tool", "a < b <tool", []),
        ("marked", "<tool_call>no call</tool_call>!", "<tool_call>no call</tool_call>!", []),
        ("marked", "<tool_call>" + "x" * 5000, "<tool_call>" + "x" * 5000, []),
        (
            "marked",
            '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        ("marked", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("marked", '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        ("json", '{"name": "f", "arguments": {"a": [1]}}', "", [("f", '{"a": [1]}')]),
        ("json", '{"name":"f","parameters":{}}', "", [("f", "{}")]),
        ("json", "no call", "no call", []),
        ("arguments", '{"word": 1}', "", [("look_up", '{"word": 1}')]),
        ("arguments", "", "", []),
    ],
)
def test_calls_are_found_however_the_answer_is_cut(
    parsing: Parsing, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    assert read(parsing, answer) == (text, calls)
    assert read(parsing, *answer) == (text, calls)


PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<tool", '{"name": "f", "arguments": {', "}", "x", " ", '"']
    )
)


@given(pieces=PIECES)
def test_no_answer_breaks_the_reader_and_the_cut_does_not_matter(pieces: list[str]) -> None:
    whole = "".join(pieces)
    assert read("marked", *pieces) == read("marked", whole) == read("marked", *whole)


@given(text=st.text(alphabet="<tolcal_> \n", max_size=30))
def test_an_answer_without_a_call_stays_as_it_is(text: str) -> None:
    if "<tool_call>" not in text:
        assert read("marked", *text) == (text, [])


async def test_calls_come_parsed_and_their_arguments_in_pieces() -> None:
    graph = FakeGraph(says("I look.\n", *(CALL[at : at + 7] for at in range(0, len(CALL), 7))))
    async with client_of(graph) as client:
        plain = (await client.post("/v1/chat/completions", json=chat_body(tools=[TOOL]))).json()
        streamed = await client.post(
            "/v1/chat/completions", json=chat_body(tools=[TOOL], stream=True)
        )
    (choice,) = plain["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "look_up", "arguments": ARGUMENTS}
    assert call["id"].startswith("call_")
    *chunks, _ = events_of(streamed.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert {piece["index"] for piece in pieces} == {0}
    assert [piece["function"].get("name") for piece in pieces if "id" in piece] == ["look_up"]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS
    assert len(pieces) > 2
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_cut_call_ends_with_length() -> None:
    graph = FakeGraph(says(CALL[:40], reason="length"))
    async with client_of(graph) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body(tools=[TOOL]))
    assert reply.json()["choices"][0]["finish_reason"] == "length"


async def test_without_tools_the_tags_are_text() -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        async with client_of(FakeGraph(says(CALL))) as client:
            reply = await client.post("/v1/chat/completions", json=chat_body(**fields))
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == CALL
        assert "tool_calls" not in message


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_holds_any_model_to_the_parameters(choice: Any) -> None:
    def babbles(seq: Sequence) -> list[int]:
        return [ord("x")] * 200

    async with running_stack(babbles) as stack, on_air(stack.graph) as site:
        url = f"{site.http.base_url}/v1"
        async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as client:
            reply = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Look."}],
                tools=[TOOL],  # type: ignore[list-item]
                tool_choice=choice,
                temperature=0,
            )
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["word"] in ("bark", "bite")
    assert reply.choices[0].finish_reason == "tool_calls"


def held_to(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema that a named function's arguments are held to."""
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    plan = plan_tools([tool], NAMED)
    assert plan.response_format is not None
    schema: dict[str, Any] = plan.response_format["json_schema"]["schema"]
    return schema


def test_a_forced_call_has_no_parameters_that_the_tool_does_not_declare() -> None:
    place = {"type": "object", "properties": {"city": {"type": "string"}}}
    schema = held_to(
        {
            "type": "object",
            "properties": {
                "at": {"$ref": "#/$defs/place"},
                "all": {"type": "array", "items": place},
                "one": {"anyOf": [place, {"type": "null"}]},
                "additionalProperties": {"type": "string"},
                "free": {"type": "object"},
                "open": {"properties": {}, "additionalProperties": True},
            },
            "$defs": {"place": place},
        }
    )
    closed = {**place, "additionalProperties": False}
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["place"] == closed
    properties = schema["properties"]
    assert properties["all"]["items"] == closed
    assert properties["one"]["anyOf"] == [closed, {"type": "null"}]
    assert properties["free"] == {"type": "object"}
    assert properties["open"]["additionalProperties"] is True
    assert "additionalProperties" not in place


def test_parameters_that_are_put_together_from_parts_stay_as_they_are() -> None:
    parts = [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]
    for parameters in ({"allOf": parts}, {"properties": {"x": {}}, "anyOf": parts}):
        assert held_to(parameters) == {"type": "object", **parameters}


def test_parameters_too_deep_to_look_into_are_left_to_the_engine() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert held_to(deep)["items"] is deep["items"]


def request(*messages: Message, **fields: Any) -> InferenceRequest:
    return InferenceRequest(
        request_id="r", tenant="t", model="m", messages=messages, tools=[TOOL], **fields
    )


USER = Message(role="user", content="Look.")
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_a_template_that_knows_tools_gets_them_itself() -> None:
    asked = request(USER)
    assert tell_tools(asked, "{% if tools %}") == asked


def test_another_template_is_told_of_them_in_the_system_message() -> None:
    told = tell_tools(request(USER), "no word of them")
    assert told.tools is None
    assert told.messages is not None
    assert told.messages[0].role == "system"
    assert '"look_up"' in (told.messages[0].content or "")
    assert told.messages[1:] == (USER,)
    told = tell_tools(request(Message(role="system", content="Be brief."), USER), "")
    assert told.messages is not None
    assert (told.messages[0].content or "").startswith("Be brief.\n\n")


def test_earlier_calls_and_their_results_become_text() -> None:
    told = tell_tools(
        request(
            USER,
            Message(role="assistant", tool_calls=[CALLED]),
            Message(role="tool", content="42", tool_call_id="c"),
        ),
        "",
    )
    assert told.messages is not None
    assert told.messages[2].content == '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert told.messages[3] == Message(role="user", content="<tool_response>42</tool_response>")


@pytest.mark.parametrize("template", ["", "{% if tools %}"])
def test_who_must_not_call_is_told_of_no_tools(template: str) -> None:
    told = tell_tools(request(USER, tool_choice="none"), template)
    assert (told.tools, told.messages) == (None, (USER,))
