"""Tools: which calls a chat may make, and how they are found in what the model writes.

Three ways, by `tool_choice`:

| choice | the model | a call is |
|---|---|---|
| `auto` | writes freely | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, among text |
| `required` | is held to a JSON schema | the whole answer: `{"name": …, "arguments": {…}}` |
| a named function | is held to its parameters | the whole answer: the arguments |

The tags are those of Hermes and Qwen templates; a model whose template knows no tools is
told of them in the same words (`deployments/tool_prompt.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.openai_tool_schemas import arguments_schema
from app.openai_types import NamedToolChoice, Tool
from protocol.errors import InvalidRequest
from protocol.parse import convert_fields

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_HEAD_CHARS = 4096
"""What is no call after so many characters is text."""

Parsing = Literal["none", "marked", "json", "arguments"]


@dataclass(frozen=True)
class ToolPlan:
    """What a chat's tools come to.

    Args:
        tools: for the template; None without any.
        tool_choice: None is `auto`.
        response_format: that holds the model to a call; None leaves it free.
        parsing: how calls are found in the answer.
        name: of the function, where there is but one choice.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    parsing: Parsing = "none"
    name: str = ""

    def reader(self) -> ToolCallReader:
        """A new reader for one answer."""
        return ToolCallReader(self.parsing, self.name)


def plan_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
) -> ToolPlan:
    """Checks `tools` and `tool_choice`.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    checked = [
        convert_fields(tool, Tool, f"tools[{at}]").function for at, tool in enumerate(tools or ())
    ]
    given = [dict(tool) for tool in tools or ()] or None
    if isinstance(choice, Mapping):
        name = convert_fields(choice, NamedToolChoice, "tool_choice").function.name
        function = next((one for one in checked if one.name == name), None)
        if function is None:
            raise InvalidRequest(
                f"tool_choice names {name[:60]!a}, which is not among tools", param="tool_choice"
            )
        return ToolPlan(
            given,
            dict(choice),
            _json_schema(arguments_schema(function.parameters)),
            "arguments",
            name,
        )
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest(
            "tool_choice must be none, auto, required or a named function, "
            f"got {str(choice)[:60]!a}",
            param="tool_choice",
        )
    if choice == "required":
        if not checked:
            raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
        calls = [_call(one.name, arguments_schema(one.parameters)) for one in checked]
        return ToolPlan(given, "required", _json_schema({"anyOf": calls}), "json")
    if given is None:
        return ToolPlan()
    return ToolPlan(given, "none") if choice == "none" else ToolPlan(given, parsing="marked")


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # Name first: the model writes properties in this order, and clients learn the name at once.
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "tool_call", "schema": schema}}


@dataclass(frozen=True)
class CallPart:
    """The next piece of call number `index`; the first one has the `name`."""

    index: int
    arguments: str
    name: str | None = None


@dataclass
class Parts:
    """What a piece of an answer adds to its text and to its calls, in this order."""

    text: str = ""
    calls: list[CallPart] = field(default_factory=list)


_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class ToolCallReader:
    """Takes an answer apart while it comes. What turns out to be no call is text, as it was."""

    def __init__(self, parsing: Parsing = "none", name: str = "") -> None:
        self._parsing = parsing
        self._name = name
        self._state: Literal["text", "head", "arguments", "tail"] = (
            "head" if parsing == "json" else "text"
        )
        self._held = ""
        self._depth = 0
        self._is_behind_call = False
        self._in_string = self._is_escaped = False
        self.num_calls = 0

    def feed(self, text: str) -> Parts:
        """What the next piece of the answer adds; what may become a call is held back."""
        if self._parsing == "none":
            return Parts(text)
        if self._parsing == "arguments":
            return self._feed_arguments(text)
        self._held += text
        parts = Parts()
        while self._step(parts, is_end=False):
            pass
        return parts

    def end(self) -> Parts:
        """What was held back until the end."""
        parts = Parts()
        while self._held and self._step(parts, is_end=True):
            pass
        return parts

    def _feed_arguments(self, text: str) -> Parts:
        if not text:
            return Parts()
        name = None if self.num_calls else self._name
        self.num_calls = 1
        return Parts(calls=[CallPart(0, text, name)])

    def _step(self, parts: Parts, *, is_end: bool) -> bool:
        """Moves on by one state; False when more of the answer is needed."""
        if self._state == "text":
            return self._step_text(parts, is_end)
        if self._state == "head":
            return self._step_head(parts, is_end)
        if self._state == "arguments":
            return self._step_arguments(parts)
        return self._step_tail(is_end)

    def _step_text(self, parts: Parts, is_end: bool) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        before, mark, after = self._held.partition(OPEN)
        if mark:
            parts.text += before.rstrip()
            self._held, self._state = after, "head"
            return True
        keep = "" if is_end else _may_open(self._held)
        text = self._held[: len(self._held) - len(keep)]
        parts.text += text
        self._held = keep
        return False

    def _step_head(self, parts: Parts, is_end: bool) -> bool:
        if (match := _HEAD.match(self._held)) is not None:
            self._begin_call(parts, json.loads(match[1], strict=False))
            self._held, self._state = self._held[match.end() :], "arguments"
            return True
        block, mark, after = self._held.partition(CLOSE)
        if not mark and not is_end and len(self._held) <= MAX_HEAD_CHARS:
            return False
        if (call := _read_call(block)) is not None:
            self._begin_call(parts, *call)
        else:
            parts.text += (OPEN if self._parsing == "marked" else "") + block + mark
        self._held, self._state = after, "text"
        return True

    def _begin_call(self, parts: Parts, name: str, arguments: str = "") -> None:
        parts.calls.append(CallPart(self.num_calls, arguments, name))
        self.num_calls += 1

    def _step_arguments(self, parts: Parts) -> bool:
        for at, char in enumerate(self._held):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._add_arguments(parts, self._held[: at + 1])
                    self._held, self._state = self._held[at + 1 :], "tail"
                    return True
        self._add_arguments(parts, self._held)
        self._held = ""
        return False

    def _add_arguments(self, parts: Parts, text: str) -> None:
        if text:
            parts.calls.append(CallPart(self.num_calls - 1, text))

    def _step_tail(self, is_end: bool) -> bool:
        _, mark, after = self._held.partition(CLOSE)
        if not mark:
            self._held = "" if is_end else self._held[-len(CLOSE) :]
            return False
        self._held, self._state, self._is_behind_call = after, "text", True
        return True


def _may_open(text: str) -> str:
    """The end of a text that may be the beginning of a call, with the blanks before it."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            break
    else:
        size = 0
    return text[len(text[: len(text) - size].rstrip()) :]


def _read_call(block: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is written in another order."""
    try:
        call = json.loads(block, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
