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


def refused(instead: str) -> Meta:
    """Marks a field that is known and not taken, so that nobody takes another answer for it."""
    return Meta(description=f"Refused: {instead}.")


IGNORED_EVERYWHERE = {"user": "the tenant comes from the key"}
IGNORED = {
    "chat": {
        **IGNORED_EVERYWHERE,
        "metadata": "nothing is kept to attach it to",
        "moderation": "nothing is moderated",
        "prediction": "a hint for speed",
        "prompt_cache_key": "prefixes are found by themselves",
        "prompt_cache_options": "prefixes are found by themselves",
        "prompt_cache_retention": "prefixes are found by themselves",
        "reasoning_effort": "the model decides",
        "safety_identifier": "the tenant comes from the key",
        "service_tier": "there is one; see `priority`",
        "store": "nothing is stored",
        "verbosity": "ask in words",
    },
    "completions": {**IGNORED_EVERYWHERE},
}
"""Fields of the OpenAI API that change nothing here, by route. Unknown ones are ignored as well."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer is held to, as in vLLM's API: one of the three."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None


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
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="One of `json`, `regex` and `choice`, as in vLLM's API."),
    ] = None
    cache: Annotated[
        CachePolicy | None, Meta(description="Ours; see docs/cache.md. Outranks the header.")
    ] = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Annotated[
        dict[str, Any] | None,
        Meta(
            description="`text`, `json_object`, `json_schema`; ours: `{type: regex, regex: …}` "
            "and `{type: choice, choice: […]}`."
        ),
    ] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str] | None, Meta(description="`text` only.")] = None
    audio: Annotated[Any, refused("this model writes text")] = None
    functions: Annotated[Any, refused("use `tools`")] = None
    function_call: Annotated[Any, refused("use `tool_choice`")] = None
    web_search_options: Annotated[Any, refused("nothing is searched")] = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int | None, Meta(description="0 with `echo` only.")] = None
    logprobs: int | None = None
    echo: Annotated[bool | None, Meta(description="With `logprobs`, also those of the prompt.")] = (
        None
    )
    suffix: Annotated[str | None, Meta(description="Empty only.")] = None
    best_of: Annotated[int | None, Meta(description="1 only; see `n`.")] = None


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`, as far as it is checked."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` as an object, as far as it is checked."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    schema: dict[str, Any]


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`, as far as it is checked."""

    type: Literal["text", "json_object", "json_schema", "regex", "choice"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None
    choice: list[str] | None = None


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


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """In a stream, the name comes once and the arguments piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call, or in a stream its next piece, which alone has an `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class ReplyMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    """Null for the first token of a prompt, which has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
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
    """As in the OpenAI API; `root`, which is the id, and `max_model_len` are vLLM's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "seedance"
    root: str
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


ALIASES = {"max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens")}
_SHARED = frozenset(SamplingParams.__struct_fields__) - {"stop", "logit_bias", "logprobs"}


def inline_schema(body: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema of a body without references, to stand anywhere in an OpenAPI document.

    Sampling parameters show the ranges and defaults of `SamplingParams`, which checks them.
    """
    schema = schema_of(body)
    properties = schema["properties"]
    for name, shared in schema_of(SamplingParams)["properties"].items():
        default = shared.pop("default", None)
        kinds = shared.get("anyOf", [shared, {"type": "null"}])
        for shown in ALIASES.get(name, (name,)):
            if name in _SHARED and shown in properties:
                properties[shown] = {**properties[shown], "anyOf": kinds, "default": default}
                properties[shown].pop("type", None)
    if body is CompletionBody:
        kinds = [_from_zero(kind) for kind in properties["max_tokens"]["anyOf"]]
        properties["max_tokens"] |= {"anyOf": kinds, "default": DEFAULT_COMPLETION_TOKENS}
    return schema


def _from_zero(kind: dict[str, Any]) -> dict[str, Any]:
    return {**kind, "minimum": 0} if "minimum" in kind else kind


def schema_of(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema of a struct, without references."""
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
