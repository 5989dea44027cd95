"""From the bodies of /v1/responses to the requests that the graph takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.openai_requests import Caller, Plan, tool_fields
from app.openai_response_types import (
    LOGPROBS,
    FlatTool,
    FlatToolChoice,
    InputItem,
    InputPart,
    ResponseBody,
    TextFormat,
)
from app.openai_tools import ToolPlan, plan_tools
from protocol.errors import InvalidRequest
from protocol.parse import convert_fields, inference_request

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "priority",
    "timeout_s",
)
_SEND_WHOLE = "send the item whole, as clients do that are told store: false"
_OUR_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}

Turn = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResponsePlan:
    """What one body asks for.

    Args:
        turns: the conversation without `instructions`, which hold for one response.
        shown: fields that the response repeats.
    """

    plan: Plan
    turns: list[Turn]
    shown: dict[str, Any]


def plan_response(
    body: ResponseBody, caller: Caller, *, earlier: Sequence[Turn] | None = None
) -> ResponsePlan:
    """Turns a body into its one request.

    Args:
        earlier: the turns behind `previous_response_id`, where it is known.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    _refuse_unsupported(body, knows_earlier=earlier is not None)
    tools = _tools(body)
    turns = [*(earlier or ()), *read_input(body.input)]
    before = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if not turns:
        raise InvalidRequest("input must not be empty", param="input", limit=1)
    shows_logprobs = LOGPROBS in (body.include or ())
    fields = {name: getattr(body, name) for name in _SAMPLING}
    fields |= tool_fields(
        tools,
        response_format=_response_format(body),
        stop=body.stop,
        is_parallel=body.parallel_tool_calls is not False,
    )
    fields |= {
        "messages": before + turns,
        "max_tokens": body.max_output_tokens,
        "logprobs": (body.top_logprobs or 0) if shows_logprobs else None,
        "cache": body.cache or caller.cache or "auto",
    }
    try:
        request = inference_request(
            fields, request_id=caller.reply_id, tenant=caller.tenant, model=caller.model
        )
    except InvalidRequest as exc:
        _rename(exc)
        raise
    plan = Plan(requests=(request,), n=1, is_stream=bool(body.stream), tools=tools)
    return ResponsePlan(plan=plan, turns=turns, shown=_shown(body))


def read_input(items: str | Sequence[dict[str, Any]]) -> list[Turn]:
    """The chat that the items of `input` or `output` make.

    Raises:
        InvalidRequest: an item is of a kind that is not known here.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    turns: list[Turn] = []
    for place, raw in enumerate(items):
        at = f"input[{place}]"
        item = convert_fields(raw, InputItem, at)
        if item.type == "message":
            turns.append(_message(item, at))
        elif item.type == "function_call":
            _add_call(turns, item, at)
        elif item.type == "function_call_output":
            output = _text(item.output or "", f"{at}.output")
            _require(item.call_id, f"{at}.call_id")
            turns.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        elif item.type != "reasoning":
            is_reference = item.type == "item_reference"
            hint = f": nothing is kept, {_SEND_WHOLE}" if is_reference else ""
            raise InvalidRequest(
                f"{at}.type {item.type[:60]!a} is not supported{hint}", param=f"{at}.type"
            )
    return turns


def _message(item: InputItem, at: str) -> Turn:
    _require(item.role, f"{at}.role")
    if item.role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(
            f"{at}.role must be one of user, assistant, system, developer, "
            f"got {str(item.role)[:60]!a}",
            param=f"{at}.role",
        )
    if item.content is None:
        raise InvalidRequest(f"{at}.content is required", param=f"{at}.content")
    return {"role": item.role, "content": _text(item.content, f"{at}.content")}


def _text(content: str | list[InputPart], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{at}[{place}] has the unsupported type {part.type[:60]!a}: "
                "this model takes only text",
                param=f"{at}[{place}]",
            )
        _require(part.text, f"{at}[{place}].text")
        texts.append(part.text or "")
    return "\n".join(texts)


def _add_call(turns: list[Turn], item: InputItem, at: str) -> None:
    """Calls that were made together stand in one turn, with the text before them."""
    _require(item.name, f"{at}.name")
    _require(item.call_id, f"{at}.call_id")
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": None})
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    call = {"id": item.call_id, "type": "function", "function": function}
    turns[-1].setdefault("tool_calls", []).append(call)


def _require(value: Any, at: str) -> None:
    if value is None:
        raise InvalidRequest(f"{at} is required", param=at)


def _tools(body: ResponseBody) -> ToolPlan:
    tools = []
    for place, raw in enumerate(body.tools or ()):
        tool = convert_fields(raw, FlatTool, f"tools[{place}]")
        function = {
            name: value
            for name in ("name", "description", "parameters")
            if (value := getattr(tool, name)) is not None
        }
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice
    if isinstance(choice, dict):
        name = convert_fields(choice, FlatToolChoice, "tool_choice").name
        choice = {"type": "function", "function": {"name": name}}
    return plan_tools(tools, choice)


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    if body.text is None or body.text.format is None:
        return None
    asked = convert_fields(body.text.format, TextFormat, "text.format")
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    _require(asked.schema, "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema}}


def _refuse_unsupported(body: ResponseBody, *, knows_earlier: bool) -> None:
    refusals = {
        "store": (body.store, "true is not supported: responses are not kept, send false"),
        "background": (body.background, "true is not supported"),
        "conversation": (body.conversation is not None, "is not supported: send its items"),
        "prompt": (body.prompt is not None, "is not supported: there are no stored prompts"),
        "truncation": (body.truncation not in (None, "disabled"), "must be disabled"),
        "previous_response_id": (
            body.previous_response_id is not None and not knows_earlier,
            "names no response that is kept here: send the whole conversation as input",
        ),
    }
    for param, (is_refused, why) in refusals.items():
        if is_refused:
            raise InvalidRequest(f"{param} {why}", param=param)


def _rename(exc: InvalidRequest) -> None:
    """Puts the names of this body in the place of a chat's."""
    param = exc.param or ""
    new = _OUR_NAMES.get(param, "input" if param.startswith("messages") else param)
    if new != param:
        exc.message = exc.message.replace(param, new, 1)
        exc.param = new


def _shown(body: ResponseBody) -> dict[str, Any]:
    text_format = None if body.text is None else body.text.format
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }
