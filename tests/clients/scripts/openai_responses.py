"""The official Python client on /v1/responses, over HTTP and on a WebSocket."""

from __future__ import annotations

import itertools
import json
from typing import Any

from checks import FRESH, MODEL, PATIENCE_S, WEATHER, expect
from openai.lib.responses_websocket import ResponsesWebSocketLimits, ResponsesWebSocketSession
from openai_clients import Person, client, make_async

FLAT_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]


def responses() -> None:
    answer = client.responses.create(
        model=MODEL,
        input="What is the capital of France?",
        instructions="Be brief.",
        max_output_tokens=24,
        temperature=0,
        store=False,
        metadata={"trace": "1"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body=FRESH,
    )
    expect(answer.object == "response", "a response", answer.object)
    expect(answer.output_text, "a text", answer)
    expect(answer.status in ("completed", "incomplete"), "a status", answer.status)
    expect(answer.output[0].content[0].logprobs, "logprobs", answer.output)
    expect(answer.metadata == {"trace": "1"}, "the metadata back", answer.metadata)
    expect(answer.usage.output_tokens > 0, "usage", answer.usage)
    turns: Any = [
        {"role": "user", "content": "Say hi."},
        *(item.model_dump() for item in answer.output),
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    later = client.responses.create(model=MODEL, input=turns, max_output_tokens=16)
    expect(later.output_text, "a text behind its own output", later)


def responses_structured() -> None:
    parsed = client.responses.parse(
        model=MODEL, input="Ann is 30.", text_format=Person, max_output_tokens=100
    )
    expect(isinstance(parsed.output_parsed, Person), "a Person", parsed)


def responses_tools() -> None:
    named: Any = {"type": "function", "name": "weather"}
    answer = client.responses.create(
        model=MODEL, input="Rome?", tools=FLAT_TOOLS, tool_choice=named, max_output_tokens=60
    )
    call = answer.output[0]
    expect(call.type == "function_call" and call.name == "weather", "a call", call)
    expect(set(json.loads(call.arguments)) == {"city", "days"}, "arguments", call)
    turns: Any = [
        {"role": "user", "content": "Rome?"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    later = client.responses.create(
        model=MODEL, input=turns, tools=FLAT_TOOLS, tool_choice="none", max_output_tokens=16
    )
    expect(later.output_text, "a text behind a tool's result", later)
    events = client.responses.create(
        model=MODEL,
        input="Rome?",
        tools=FLAT_TOOLS,
        tool_choice=named,
        max_output_tokens=60,
        stream=True,
    )
    kinds = [event.type for event in events]
    expect("response.function_call_arguments.delta" in kinds, "streamed arguments", kinds)
    expect("response.function_call_arguments.done" in kinds, "their end", kinds)


def responses_stream() -> None:
    events = list(
        client.responses.create(model=MODEL, input="Say hi.", max_output_tokens=24, stream=True)
    )
    numbers = [event.sequence_number for event in events]
    expect(numbers == list(range(len(events))), "numbers without a gap", numbers)
    kinds = [event.type for event in events]
    expect(kinds[:2] == ["response.created", "response.in_progress"], "its opening", kinds[:2])
    expect(kinds[-1] in ("response.completed", "response.incomplete"), "its end", kinds[-1])
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    expect("".join(deltas) == final.output_text, "the text of the deltas", final.output_text)
    # Of a cut answer the helper says that it did not end.
    with client.responses.stream(
        model=MODEL, input="Say hi.", max_output_tokens=300, temperature=0
    ) as helper:
        assembled = helper.get_final_response() if list(helper) else None
    expect(assembled and assembled.output_text, "a text from the helper", assembled)


def websocket_lanes() -> None:
    lanes: dict[str, list[Any]] = {"left": [], "right": []}
    order, ended = [], set()
    with client.responses.connect() as connection:
        for lane in lanes:
            connection.response.create(
                model=MODEL,
                input=f"Write a story about a {lane} hand.",
                max_output_tokens=40,
                stream_id=lane,
            )
        for event in connection:
            lane = event.stream_id
            lanes[lane].append(event)
            order.append(lane)
            if event.type in ("response.completed", "response.incomplete"):
                ended.add(lane)
            if ended == set(lanes):
                break
    for lane, events in lanes.items():
        numbers = [event.sequence_number for event in events]
        expect(numbers == list(range(len(events))), f"{lane}'s numbers without a gap", numbers)
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        expect(text and text == events[-1].response.output_text, f"{lane}'s text", text)
    switches = sum(a != b for a, b in itertools.pairwise(order))
    expect(switches > 10, "two interleaved lanes", order)


def websocket_session() -> None:
    limits = ResponsesWebSocketLimits(
        max_lanes=4,
        max_events_per_lane=512,
        max_events=2048,
        max_bytes_per_lane=2**24,
        max_bytes=2**25,
        max_response_bytes=None,
    )
    ask = {"type": "response.create", "model": MODEL, "max_output_tokens": 24}
    with (
        client.responses.connect(websocket_connection_options={"max_size": None}) as connection,
        ResponsesWebSocketSession(connection, limits=limits) as session,
    ):
        lanes: Any = [session.lane("one"), session.lane("two")]
        for lane in lanes:
            lane.send({**ask, "input": "Say hi."})
        firsts = [lane.get_final_response(timeout=PATIENCE_S) for lane in lanes]
        expect(all(one.output_text for one in firsts), "a text in each lane", firsts)
        lanes[0].send({**ask, "input": "Go on.", "previous_response_id": firsts[0].id})
        later = lanes[0].get_final_response(timeout=PATIENCE_S)
    expect(later.previous_response_id == firsts[0].id, "the earlier response", later)
    expect(later.usage.input_tokens > firsts[0].usage.input_tokens, "its turns", later.usage)


async def websocket_async() -> None:
    async with make_async() as one, one.responses.connect() as connection:
        await connection.response.create(model=MODEL, input="Say hi.", max_output_tokens=12)
        async for event in connection:
            if event.type in ("response.completed", "response.incomplete"):
                expect(event.response.output_text, "a text", event)
                break


RESPONSES_PARTS = [
    ("responses", responses),
    ("responses: structured output", responses_structured),
    ("responses: tools", responses_tools),
    ("responses: streaming", responses_stream),
    ("responses: WebSocket, two lanes", websocket_lanes),
    ("responses: WebSocket session", websocket_session),
    ("responses: WebSocket, async", websocket_async),
]
