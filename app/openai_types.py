"""The bodies of the OpenAI-compatible API, as types: what comes in and what goes out.

Requests are decoded strictly (a string is no number), unknown fields are
ignored, and null means the default. Ranges that all transports share are
checked in `protocol`, and only shown here, in the schemas for `/openapi.json`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from protocol.parse import ChatMessage
from protocol.request import CachePolicy, SamplingParams

FinishReason = Literal["stop", "length", "tool_calls"]

MAX_N = 16
DEFAULT_COMPLETION_TOKENS = 16
"""As the OpenAI API has it for /v1/completions; a chat may go on as far as the context holds."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the bodies of both generating routes have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache: CachePolicy | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`, as far as it is checked."""

    type: Literal["function"]
    function: FunctionDefinition


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    schema: dict[str, Any]


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`, as far as it is checked."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ReplyMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A field that is not set is left out: strict clients take no null for a role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `usage` is left out, or, when asked for, null in all chunks but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of /v1/completions, and each of its events."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "seedance"
    context_length: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


_SHARED = frozenset(SamplingParams.__struct_fields__) - {"stop", "logit_bias", "logprobs"}


def inline_schema(body: type[GenerationBody]) -> dict[str, Any]:
    """JSON Schema of a body without references, to stand anywhere in an OpenAPI document.

    Sampling parameters show the ranges and defaults of `SamplingParams`, which checks them.
    """
    schema = _schema_of(body)
    properties = schema["properties"]
    for name, shared in _schema_of(SamplingParams)["properties"].items():
        if name in _SHARED:
            default = shared.pop("default")
            kinds = shared.get("anyOf", [shared, {"type": "null"}])
            properties[name] = {"anyOf": kinds, "default": default}
    if "max_completion_tokens" in properties:
        properties["max_completion_tokens"] = properties["max_tokens"]
    else:
        properties["max_tokens"]["default"] = DEFAULT_COMPLETION_TOKENS
    return schema


def _schema_of(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    (root,), components = msgspec.json.schema_components([struct_type], ref_template="{name}")
    schema: dict[str, Any] = _inline(root, components)
    return schema


def _inline(node: Any, components: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, components) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(components[node["$ref"]], components)
    return {key: _inline(value, components) for key, value in node.items()}
