"""The bodies of /v1/responses: what comes in, as types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from app.openai_types import IGNORED_EVERYWHERE, refused
from protocol.request import CachePolicy

LOGPROBS = "message.output_text.logprobs"

IGNORED_IN_RESPONSES = {
    **IGNORED_EVERYWHERE,
    "access_programs": "there are none",
    "background_options": "see `background`",
    "context_management": "nothing is compacted",
    "image": "this model takes text",
    "max_tool_calls": "of built-in tools, which there are none of",
    "moderation": "nothing is moderated",
    "prompt_cache_key": "prefixes are found by themselves",
    "prompt_cache_options": "prefixes are found by themselves",
    "prompt_cache_retention": "prefixes are found by themselves",
    "reasoning": "the model decides",
    "safety_identifier": "the tenant comes from the key",
    "service_tier": "there is one; see `priority`",
    "stream_options": "nothing is obfuscated",
}
"""Fields of the OpenAI API that change nothing here. Unknown ones are ignored as well."""


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`text`; a verbosity is ignored."""

    format: dict[str, Any] | None = None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses. Nothing is kept: a conversation is sent whole each time."""

    model: str | None = None
    input: Annotated[
        str | list[dict[str, Any]],
        Meta(description="Messages, function calls and their outputs; reasoning is left out."),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[
        int | None, Meta(description=f"Shown where `include` holds `{LOGPROBS}`.")
    ] = None
    include: list[str] | None = None
    text: TextSettings | None = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Of type `function` only.")] = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Comes back as it was.")] = None
    store: Annotated[bool | None, Meta(description="`false`, the default here, only.")] = None
    previous_response_id: Annotated[
        str | None, Meta(description="Refused over HTTP; on a WebSocket, its last responses.")
    ] = None
    background: Annotated[bool | None, Meta(description="`false` only.")] = None
    truncation: Annotated[str | None, Meta(description="`disabled` only.")] = None
    conversation: Annotated[Any, refused("nothing is kept; send the items")] = None
    prompt: Annotated[Any, refused("there are no stored prompts")] = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache: Annotated[
        CachePolicy | None, Meta(description="Ours; see docs/cache.md. Outranks the header.")
    ] = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None


class SocketBody(ResponseBody, frozen=True, kw_only=True):
    """`response.create` on a WebSocket.

    Requests of the same `stream_id`, a lane, come one after the other; without `generate`
    the prompt is only computed ahead.
    """

    type: Literal["response.create"]
    input: str | list[dict[str, Any]] = []
    stream_id: Annotated[str, Meta(max_length=256)] | None = None
    generate: bool | None = None


class OutputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of `output`, for the document: a message, or a function call."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["completed", "incomplete", "in_progress"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[dict[str, Any]] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """What /v1/responses answers with, for the document."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    usage: ResponseUsage


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of `input`, as far as it is read."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FlatTool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`, which has no `function` around its fields here."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FlatToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`text.format`, as far as it is checked."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema: dict[str, Any] | None = None
