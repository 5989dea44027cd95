"""/v1/responses by HTTP and WebSocket, with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import openai
import pydantic
import pytest

from protocol.errors import DeadlineExceeded, Overloaded
from tests.app.openai_fakes import MODEL as FAKE_MODEL
from tests.app.openai_fakes import FakeGraph, client_of, says, strict_json
from tests.app.stack import MODEL, Site, Stack, on_air, running_stack, talks_on, until_metrics
from tests.app.test_openai_tools import ARGUMENTS, CALL, TOOL

FLAT_TOOL: Any = {"type": "function", **TOOL["function"]}
PATH = "/v1/responses"


async def post(graph: FakeGraph | None = None, **body: Any) -> Any:
    async with client_of(graph or FakeGraph()) as client:
        return await client.post(PATH, json={"input": "Say hi.", **body})


def events_of(body: str) -> list[Any]:
    """The events of a body, whose names stand in both places and whose numbers have no gap."""
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@asynccontextmanager
async def on_line(stack: Stack, **settings: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Site]]:
    async with (
        on_air(stack.graph, **settings) as site,
        openai.AsyncOpenAI(
            api_key="none", base_url=f"{site.http.base_url}/v1", max_retries=0
        ) as client,
    ):
        yield client, site


async def test_a_response_is_one_message_and_its_usage() -> None:
    reply = strict_json((await post(instructions="Be brief.", metadata={"a": "b"})).text)
    assert reply["object"] == "response"
    assert (reply["status"], reply["store"], reply["error"]) == ("completed", False, None)
    (item,) = reply["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}
    ]
    assert reply["instructions"] == "Be brief."
    assert reply["metadata"] == {"a": "b"}
    usage = reply["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 2, 9)
    assert usage["input_tokens_details"]["cached_tokens"] == 2


async def test_a_stream_builds_the_same_response_up() -> None:
    reply = await post(stream=True)
    events = events_of(reply.text)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert "".join(e["delta"] for e in events if "delta" in e) == "Hello world"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert len({e["item_id"] for e in events if "item_id" in e}) == 1


async def test_a_cut_response_is_incomplete() -> None:
    graph = FakeGraph(says("a", reason="length"))
    reply = (await post(graph, max_output_tokens=1)).json()
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert graph.requests[0].sampling.max_tokens == 1
    events = events_of((await post(graph, stream=True)).text)
    assert events[-1]["type"] == "response.incomplete"


async def test_logprobs_come_where_they_are_included() -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    part = (await post(**asked)).json()["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["Hello", " world"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 1


async def test_a_call_is_an_item_of_its_own_and_its_arguments_stream() -> None:
    graph = FakeGraph(says("I look.\n", *(CALL[at : at + 9] for at in range(0, len(CALL), 9))))
    reply = (await post(graph, tools=[FLAT_TOOL])).json()
    message, call = reply["output"]
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"]) == ("function_call", "look_up")
    assert call["arguments"] == ARGUMENTS
    events = events_of((await post(graph, tools=[FLAT_TOOL], stream=True)).text)
    deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas) == ARGUMENTS
    assert {event["output_index"] for event in deltas} == {1}
    assert events[-1]["response"]["output"][1]["arguments"] == ARGUMENTS


async def test_items_become_the_turns_of_a_chat() -> None:
    graph = FakeGraph()
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "43"}],
        },
    ]
    assert (await post(graph, input=items, instructions="Be brief.")).status_code == 200
    turns = graph.requests[0].messages or ()
    assert [(turn.role, turn.content) for turn in turns] == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("tool", "42"),
        ("tool", "43"),
    ]
    assert [one["id"] for one in turns[2].tool_calls or ()] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"metadata": 5}, "metadata"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_cannot_be_honoured_is_refused_by_name(
    body: dict[str, Any], param: str, is_stream: bool
) -> None:
    reply = await post(**body, stream=is_stream)
    assert reply.status_code == 400, reply.text
    assert strict_json(reply.text)["error"]["param"] == param


async def test_a_reference_to_what_is_not_kept_tells_what_a_client_has_to_ask_for() -> None:
    # A client that takes answers to be stored refers to them, until `store` is false.
    reply = await post(input=[{"type": "item_reference", "id": "msg_1"}])
    assert "store: false" in reply.json()["error"]["message"]


async def test_store_false_is_what_there_is() -> None:
    assert (await post(store=False)).status_code == 200


async def test_a_failure_in_mid_stream_is_told_twice_and_raises_in_the_client() -> None:
    error = DeadlineExceeded("the answer took too long").info
    events = events_of(
        (await post(FakeGraph(says("a", reason="error", error=error)), stream=True)).text
    )
    assert events[-2]["type"] == "response.failed"
    assert events[-2]["response"]["error"]["message"] == "the answer took too long"
    assert events[-1]["error"]["code"] == "timeout"

    async with running_stack(talks_on) as stack, on_line(stack) as (client, _):
        stream = await client.responses.create(
            model=MODEL, input="go", stream=True, extra_body={"timeout_s": 0.2}
        )
        with pytest.raises(openai.APIError):
            async for _event in stream:
                pass


async def test_the_official_client_reads_whole_and_streamed_responses() -> None:
    async with running_stack() as stack, on_line(stack) as (client, _):
        whole = await client.responses.create(model=MODEL, input="one two", temperature=0)
        assert "one two" in whole.output_text
        async with client.responses.stream(model=MODEL, input="one two", temperature=0) as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == whole.output_text
        raw = await client.responses.with_raw_response.create(
            model=MODEL, input="one two", temperature=0
        )
        assert raw.headers["x-seedance-cache"].startswith("exact")


class Answer(pydantic.BaseModel):
    is_right: bool


def babbles(seq: Any) -> list[int]:
    return [ord("x")] * 200


async def test_structured_output_is_parsed_by_the_official_client() -> None:
    async with running_stack(babbles) as stack, on_line(stack) as (client, _):
        response = await client.responses.parse(
            model=MODEL, input="Well?", text_format=Answer, temperature=0
        )
        assert isinstance(response.output_parsed, Answer)
        completion = await client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Well?"}],
            response_format=Answer,
            temperature=0,
        )
        assert isinstance(completion.choices[0].message.parsed, Answer)


async def events_on(connection: Any, num_ends: int) -> list[Any]:
    """All events until so many responses have come to an end."""
    events = []
    async with asyncio.timeout(30):
        async for event in connection:
            events.append(event)
            num_ends -= event.type in ("response.completed", "response.incomplete", "error")
            if num_ends == 0:
                break
    return events


async def test_two_lanes_of_a_socket_stream_side_by_side() -> None:
    async with (
        running_stack(token_interval_s=0.005) as stack,
        on_line(stack) as (client, site),
        client.responses.connect() as connection,
    ):
        for lane in ("a", "b"):
            await connection.response.create(
                model=MODEL, input=f"in lane {lane}", stream_id=lane, temperature=0
            )
        events = await events_on(connection, 2)
        lanes = [event.stream_id for event in events]
        assert sum(one != other for one, other in pairwise(lanes)) > 5
        for lane in ("a", "b"):
            mine = [event for event in events if event.stream_id == lane]
            assert [event.sequence_number for event in mine] == list(range(len(mine)))
            assert mine[-1].type == "response.completed"
            assert f"in lane {lane}" in mine[-1].response.output_text
            deltas = [e.delta for e in mine if e.type == "response.output_text.delta"]
            assert "".join(deltas) == mine[-1].response.output_text
        await until_metrics(site, open_connections=1)


async def test_one_lane_answers_in_its_order_and_remembers() -> None:
    async with (
        running_stack() as stack,
        on_line(stack) as (client, _),
        client.responses.connect() as connection,
    ):
        for number in range(3):
            await connection.response.create(model=MODEL, input=f"number {number}")
        events = await events_on(connection, 3)
        ends = [event.response for event in events if event.type == "response.completed"]
        assert all(f"number {number}" in ends[number].output_text for number in range(3))
        created = [at for at, event in enumerate(events) if event.type == "response.created"]
        done = [at for at, event in enumerate(events) if event.type == "response.completed"]
        assert created[1] > done[0]
        assert not hasattr(events[0], "stream_id") or events[0].stream_id is None
        await connection.response.create(
            model=MODEL, input="and now?", previous_response_id=ends[1].id
        )
        (*_, last) = await events_on(connection, 1)
        assert "number 1" in last.response.output_text
        assert "number 2" not in last.response.output_text
        assert last.response.previous_response_id == ends[1].id


async def test_a_prompt_can_be_prepared_and_answered_later() -> None:
    async with (
        running_stack() as stack,
        on_line(stack) as (client, _),
        client.responses.connect() as connection,
    ):
        await connection.response.create(model=MODEL, input="first", generate=False)
        (*_, prepared) = await events_on(connection, 1)
        assert prepared.response.output == []
        assert stack.num_generated == 0
        await connection.response.create(
            model=MODEL, input="second", previous_response_id=prepared.response.id
        )
        (*_, last) = await events_on(connection, 1)
        assert "first" in last.response.output_text


async def test_a_bad_request_on_a_socket_leaves_the_others_alone() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.002) as stack,
        on_line(stack) as (client, _),
        client.responses.connect() as connection,
    ):
        await connection.response.create(
            model=MODEL, input="long", stream_id="good", max_output_tokens=400
        )
        for bad in (
            "{",
            "[]",
            '{"type": "response.cancel"}',
            '{"type": "response.create", "input": 5, "stream_id": "bad"}',
            '{"type": "response.create", "input": "a", "temperature": 9, "stream_id": "bad"}',
            '{"type": "response.create", "input": "a", "previous_response_id": "resp_x"}',
            '{"type": "response.create", "input": "a", "model": "other"}',
            '{"type": "response.create", "stream_id": "good", "input": "\\ud800"}',
        ):
            await connection.send_raw(bad)
        await connection.send_raw(
            json.dumps({"type": "response.steer", "previous_response_id": "x", "input": "y"})
        )
        events = await events_on(connection, 9)
        errors = [event for event in events if event.type == "error"]
        assert len(errors) == 8
        assert {event.status for event in errors} == {400, 404}
        assert [e.error.param for e in errors if e.stream_id == "bad"] == ["input", "temperature"]
        assert sum(event.type == "response.steer.failed" for event in events) == 1
        (good,) = [event for event in events if event.type == "response.incomplete"]
        assert good.response.usage.output_tokens == 400


async def test_closing_a_socket_stops_its_generations() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.002) as stack,
        on_line(stack) as (client, site),
    ):
        async with client.responses.connect() as connection:
            for lane in ("a", "b"):
                await connection.response.create(model=MODEL, input="on", stream_id=lane)
            async for event in connection:
                if event.type == "response.output_text.delta":
                    break
        await stack.until_idle()
        await until_metrics(site, open_connections=0)


async def test_requests_over_the_limit_of_a_socket_are_refused() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.002) as stack,
        on_line(stack, limits={"max_live_requests": 2}) as (client, _),
        client.responses.connect() as connection,
    ):
        for _ in range(3):
            await connection.response.create(model=MODEL, input="a", max_output_tokens=50)
        events = await events_on(connection, 3)
        (error,) = [event for event in events if event.type == "error"]
        assert (error.status, error.error.code) == (429, "rate_limited")


async def test_a_refusal_has_its_status_on_http() -> None:
    reply = await post(FakeGraph(refusal=Overloaded("full", retry_after_s=2)), stream=True)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
    assert (await post(model="other")).status_code == 404
    assert (await post(model=FAKE_MODEL)).status_code == 200
