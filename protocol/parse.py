"""From a client's JSON to an `InferenceRequest`, for WebSocket frames and HTTP bodies alike.

Two passes. The first is msgspec's: strict JSON straight into a typed struct,
which is all a good request costs. Only when it refuses does a second, slower
and lenient pass read the JSON again to say which field is at fault: NaN and
infinities, lone surrogates, bytes that are not UTF-8, wrong types, values out
of range.

Every refusal is an `InvalidRequest` whose `param` names the field as the client
wrote it (`temperature`, `messages[0].role`, `stop[1]`), and whose message holds
nothing that strict JSON cannot carry. JSON that cannot be read at all, and JSON
that is not an object, is a `MalformedJson`. `null` means the default.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec

from protocol.errors import InvalidRequest
from protocol.request import (
    MAX_LOGPROBS,
    CachePolicy,
    InferenceRequest,
    Message,
    Role,
    SamplingParams,
)
from protocol.strict_json import check_text, check_values, decode_body, join_path, show

MAX_TOKEN_ID = 2**31 - 1
"""No vocabulary is larger; whether the model has the token is for its replica to say."""

T = TypeVar("T", bound=msgspec.Struct)


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of a message's content; only `type: "text"` is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message as the OpenAI API has it, before its parts are joined."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


def decode_struct(raw: bytes | str, struct_type: type[T]) -> T:
    """Decodes a JSON object into `struct_type`; unknown fields are ignored.

    Raises:
        MalformedJson: not JSON, or not an object.
        InvalidRequest: a field is at fault; `param` names it.
    """
    try:
        check_text(raw)
        decoder: msgspec.json.Decoder[T] = _decoder(struct_type)
        return decoder.decode(raw)
    except (ValueError, RecursionError):
        return convert_fields(decode_body(raw), struct_type)


def convert_fields(data: Mapping[str, Any], struct_type: type[T], at: str = "") -> T:
    """Turns decoded JSON into `struct_type`; unknown fields are ignored, null means the default.

    Args:
        at: path of `data` in the body, put before the names of its fields in errors.

    Raises:
        InvalidRequest: a field is at fault; `param` names it.
    """
    optional = _optional_fields(struct_type)
    given = {
        name: value for name, value in data.items() if value is not None or name not in optional
    }
    try:
        return msgspec.convert(given, struct_type, str_keys=True)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc), given, at) from None


def sampling_params(fields: Mapping[str, Any] | msgspec.Struct) -> SamplingParams:
    """Reads the sampling parameters from a body's flat fields, in OpenAI's spelling.

    `max_completion_tokens` is an alias of `max_tokens`; `stop` is a string or a list;
    `logprobs` is a number, or a boolean with `top_logprobs` beside it.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range; `param` names it.
    """
    given: dict[str, Any] = {}
    for name in SamplingParams.__struct_fields__:
        value = _field(fields, name)
        if value is not None:
            given[name] = value
    alias = _field(fields, "max_completion_tokens")
    if alias is not None:
        if given.get("max_tokens", alias) != alias:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens are the same parameter and differ",
                param="max_completion_tokens",
            )
        given["max_tokens"] = alias
    if "stop" in given:
        given["stop"] = _stop_strings(given["stop"])
    given["logprobs"] = _num_logprobs(given.get("logprobs"), _field(fields, "top_logprobs"))
    try:
        params = convert_fields(given, SamplingParams)
    except InvalidRequest as exc:
        if alias is not None and exc.param == "max_tokens":
            exc.param = "max_completion_tokens"
            exc.message = exc.message.replace("max_tokens", "max_completion_tokens", 1)
        raise
    _check_token_ids(params.logit_bias or (), "logit_bias")
    _check_token_ids(params.stop_token_ids, "stop_token_ids")
    return params


def normalise_messages(
    messages: Sequence[ChatMessage | Mapping[str, Any]],
) -> tuple[Message, ...]:
    """Joins the text parts of each message with newlines.

    Raises:
        InvalidRequest: no message, an unknown role, a part that is not text, or no content;
            `param` names the place (`messages[0].content[1]`).
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages", limit=1)
    return tuple(
        _normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    )


def inference_request(
    fields: Mapping[str, Any] | msgspec.Struct, *, request_id: str, tenant: str, model: str
) -> InferenceRequest:
    """Builds the request that the graph takes, from the fields of a frame or of an HTTP body.

    Reads `messages`, `prompt`, the sampling parameters, `tools`, `tool_choice`,
    `response_format`, `cache`, `priority` and `timeout_s`; a field that `fields` does
    not have counts as not given.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    given: dict[str, Any] = {"request_id": request_id, "tenant": tenant, "model": model}
    given |= _conversation(_field(fields, "messages"), _field(fields, "prompt"))
    for name in ("tools", "tool_choice", "response_format", "cache", "priority", "timeout_s"):
        value = _field(fields, name)
        if isinstance(value, list | dict):
            check_values(value, name)
        given[name] = value
    given["sampling"] = sampling_params(fields)
    return convert_fields(given, InferenceRequest)


def _conversation(messages: Any, prompt: Any) -> dict[str, Any]:
    if messages is not None and prompt is not None:
        raise InvalidRequest("messages and prompt exclude each other: give one", param="prompt")
    if messages is not None:
        if not isinstance(messages, list | tuple):
            raise InvalidRequest(f"messages must be a list, got {show(messages)}", param="messages")
        return {"messages": normalise_messages(messages)}
    if prompt is None:
        raise InvalidRequest("messages or prompt is required", param="messages")
    if not isinstance(prompt, str | list | tuple):
        raise InvalidRequest(f"prompt must be a string, got {show(prompt)}", param="prompt")
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt", limit=1)
    if isinstance(prompt, str):
        return {"prompt": prompt}
    _check_token_ids(prompt, "prompt")
    return {"prompt": tuple(prompt)}


def _check_token_ids(token_ids: Iterable[Any], param: str) -> None:
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequest(
                f"{param} must hold token ids from 0 to {MAX_TOKEN_ID}, got {show(token_id)}",
                param=param,
                limit=MAX_TOKEN_ID,
            )


def _normalise_message(message: ChatMessage | Mapping[str, Any], at: str) -> Message:
    if not isinstance(message, ChatMessage):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{at} must be an object, got {show(message)}", param=at)
        message = convert_fields(message, ChatMessage, at)
    content = message.content
    if isinstance(content, list):
        content = _join_parts(content, f"{at}.content")
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise InvalidRequest(
            f"{at}.content is required: only an assistant message with tool_calls may leave it out",
            param=f"{at}.content",
        )
    if message.tool_calls:
        check_values(message.tool_calls, f"{at}.tool_calls")
    return Message(
        role=message.role,
        content=content,
        name=message.name,
        tool_calls=message.tool_calls or None,
        tool_call_id=message.tool_call_id,
    )


def _join_parts(parts: list[ContentPart], at: str) -> str:
    if not parts:
        raise InvalidRequest(f"{at} must hold at least one part", param=at, limit=1)
    texts = []
    for index, part in enumerate(parts):
        if part.type != "text":
            raise InvalidRequest(
                f"{at}[{index}] has the unsupported type {show(part.type)}: "
                "this model takes only text",
                param=f"{at}[{index}]",
            )
        if part.text is None:
            raise InvalidRequest(f"{at}[{index}].text is required", param=f"{at}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _stop_strings(stop: Any) -> tuple[Any, ...]:
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, list | tuple):
        raise InvalidRequest(
            f"stop must be a string or a list of strings, got {show(stop)}", param="stop"
        )
    if "" in stop:
        at = f"stop[{stop.index('')}]"
        raise InvalidRequest(f"{at} must not be an empty string", param=at)
    return tuple(stop)


def _num_logprobs(logprobs: Any, top_logprobs: Any) -> Any:
    """The count that `SamplingParams.logprobs` takes, from OpenAI's two ways of asking."""
    if top_logprobs is None:
        return (0 if logprobs else None) if isinstance(logprobs, bool) else logprobs
    if logprobs is None or logprobs is False:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if type(top_logprobs) is not int or not 0 <= top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {show(top_logprobs)}",
            param="top_logprobs",
            limit=MAX_LOGPROBS,
        )
    return top_logprobs


def _field(fields: Mapping[str, Any] | msgspec.Struct, name: str) -> Any:
    if isinstance(fields, Mapping):
        return fields.get(name)
    return getattr(fields, name, None)


@functools.cache
def _decoder(struct_type: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(struct_type)


@functools.cache
def _optional_fields(struct_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(f.encode_name for f in msgspec.structs.fields(struct_type) if not f.required)


_WHERE = re.compile(r"(?s)^(.*?)(?: - at (`key` in )?`\$\.?(.*)`)?$")
_WRONG_TYPE = re.compile(r"^Expected `([^`]*)`(?:, got `[^`]*`)?$")
_OUT_OF_RANGE = re.compile(r"^Expected `\w+` (of length )?(<=|<|>=|>) (\S+)$")
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_TYPE_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}
_BOUND_WORDS = {"<=": "at most", "<": "below", ">=": "at least", ">": "above"}
_CHOICES = {
    "role": get_args(Role),
    "cache": get_args(CachePolicy),
    "input": ("whole", "chunked"),
    "boundary": ("grapheme", "utf8"),
    "anchor": ("plain", "sha256", "none"),
}


def _explain(complaint: str, data: Any, at: str) -> InvalidRequest:
    """Words msgspec's complaint in the client's terms: field, bound, offending value."""
    match = _WHERE.match(complaint)
    assert match is not None
    reason, in_key, path = match[1], match[2], match[3] or ""
    value = _value_at(data, path)
    got = "" if value is _NOWHERE else f", got {show(value)}"
    param = join_path(at, path.replace("[...]", ""))
    if in_key:
        kind = _WRONG_TYPE.match(reason)
        what = _type_words(kind[1]) if kind else "valid"
        return InvalidRequest(f"a key of {param} must be {what}", param=param)
    if missing := _MISSING.match(reason):
        param = join_path(param, missing[1])
        return InvalidRequest(f"{param} is required", param=param)
    subject = f"a value of {param}" if "[...]" in path else param or "the value"
    if wrong := _WRONG_TYPE.match(reason):
        return InvalidRequest(
            f"{subject} must be {_type_words(wrong[1])}{got}", param=param or None
        )
    if bound := _OUT_OF_RANGE.match(reason):
        limit = _number(bound[3])
        if isinstance(value, float) and value.is_integer():
            got = f", got {int(value)}"  # 99 was read as 99.0
        verb = "have a length of" if bound[1] else "be"
        return InvalidRequest(
            f"{subject} must {verb} {_BOUND_WORDS[bound[2]]} {limit}{got}",
            param=param or None,
            limit=limit,
        )
    if reason.startswith("Invalid enum value"):
        choices = _CHOICES.get(param.rpartition(".")[2], ())
        what = f"one of {', '.join(map(show, choices))}" if choices else "an allowed value"
        return InvalidRequest(f"{subject} must be {what}{got}", param=param or None)
    return InvalidRequest(f"{subject}: {reason[:1].lower()}{reason[1:]}{got}", param=param or None)


def _type_words(names: str) -> str:
    kinds = [name for name in names.split(" | ") if name != "null"]
    return " or ".join(dict.fromkeys(_TYPE_WORDS.get(kind, kind) for kind in kinds))


def _number(digits: str) -> int | float:
    value = float(digits)
    return int(digits.partition(".")[0]) if value == int(value) else value


_NOWHERE = object()


def _value_at(data: Any, path: str) -> Any:
    """The value at a path such as `messages[0].role`, or `_NOWHERE`."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        try:
            data = data[name] if name else data[int(index)]
        except (LookupError, TypeError, ValueError):
            return _NOWHERE
    return data
