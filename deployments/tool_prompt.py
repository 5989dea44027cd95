"""Tells a model of its tools in words, where its chat template knows none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from protocol.request import InferenceRequest, Message

_INTRODUCTION = (
    "You may call functions. Each is described by one JSON line:\n{tools}\n"
    'To call one, write <tool_call>{{"name": "NAME", "arguments": {{...}}}}</tool_call> '
    "and nothing after it."
)


def tell_tools(request: InferenceRequest, template: str) -> InferenceRequest:
    """The request as the template takes it.

    Tools go into the first system message, earlier calls into their turns' text, and their
    results become user turns. A request that must not call anything loses its tools.
    """
    if request.tool_choice == "none":
        request = msgspec.structs.replace(request, tools=None)
    if request.messages is None or "tools" in template:
        return request
    messages = [_in_words(message) for message in request.messages]
    if request.tools:
        messages = _introduced(messages, request.tools)
    return msgspec.structs.replace(request, messages=tuple(messages), tools=None)


def _introduced(messages: list[Message], tools: Iterable[dict[str, Any]]) -> list[Message]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    first = messages[0]
    if first.role in ("system", "developer"):
        content = f"{first.content}\n\n{introduction}"
        return [msgspec.structs.replace(first, content=content), *messages[1:]]
    return [Message(role="system", content=introduction), *messages]


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        return Message(role="user", content=f"<tool_response>{message.content}</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join(f"<tool_call>{_call(call)}</tool_call>" for call in message.tool_calls)
    content = f"{message.content}\n{calls}" if message.content else calls
    return Message(role=message.role, content=content, name=message.name)


def _call(call: dict[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
