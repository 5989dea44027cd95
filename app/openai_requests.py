"""From the bodies of the OpenAI-compatible API to the requests that the graph takes.

A parameter that changes the answer is honoured or refused by name, never
dropped: what we cannot do is a 400, so that nobody takes another answer for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import msgspec

from app.openai_tools import CLOSE, ToolPlan, plan_tools
from app.openai_types import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponseFormat,
)
from protocol.errors import InvalidRequest
from protocol.parse import convert_fields, inference_request
from protocol.request import SEED_MAX, SEED_MIN, CachePolicy, InferenceRequest

CACHE_CONTROL_HEADER = "x-seedance-cache-control"
NO_TOOLS = ToolPlan()
MAX_CHOICES = 64
"""Answers of one request, over all its prompts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one HTTP request asks for; `requests` holds the `n` of one prompt next to each other.

    Args:
        counts_usage: every chunk tells the usage so far.
        echo: the texts of the prompts, where they are to come back before the answers.
    """

    requests: tuple[InferenceRequest, ...]
    n: int
    is_stream: bool
    include_usage: bool = False
    counts_usage: bool = False
    tools: ToolPlan = NO_TOOLS
    echo: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Caller:
    """What is known of a request beside its body.

    Args:
        reply_id: unique; the requests behind a reply are named after it.
        cache: the header's policy, which a `cache` field in the body outranks.
    """

    reply_id: str
    tenant: str
    model: str
    cache: CachePolicy | None = None


def cache_policy(headers: Mapping[str, str]) -> CachePolicy | None:
    """The policy that the header asks for, if it is there.

    Raises:
        InvalidRequest: it names no policy.
    """
    value = headers.get(CACHE_CONTROL_HEADER)
    if value is None:
        return None
    policy = value.strip().lower()
    if policy not in get_args(CachePolicy):
        raise InvalidRequest(
            f"{CACHE_CONTROL_HEADER} must be one of {', '.join(get_args(CachePolicy))}, "
            f"got {value[:60]!a}",
            param=CACHE_CONTROL_HEADER,
        )
    return cast(CachePolicy, policy)


def plan_chat(body: ChatBody, caller: Caller) -> Plan:
    """Turns a chat into one request a choice.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    _refuse_unsupported_chat(body)
    tools = plan_tools(body.tools, body.tool_choice)
    fields = _fields(body) | tool_fields(
        tools,
        response_format=_response_format(body),
        stop=body.stop,
        is_parallel=body.parallel_tool_calls is not False,
    )
    return _plan(body, caller, [inference_request(fields, **_identity(caller))], tools)


def tool_fields(
    tools: ToolPlan,
    *,
    response_format: dict[str, Any] | None,
    stop: str | list[str] | None,
    is_parallel: bool,
) -> dict[str, Any]:
    """The fields of a request that its tools have a say in.

    Raises:
        InvalidRequest: a call and another format are asked for at the same time.
    """
    if tools.response_format is not None and response_format is not None:
        raise InvalidRequest(
            "tool_choice forces a call, which response_format excludes", param="tool_choice"
        )
    if tools.parsing == "marked" and not is_parallel:
        # The answer ends where another call could begin.
        stop = [*([stop] if isinstance(stop, str) else stop or ()), CLOSE]
    return {
        "tools": tools.tools,
        "tool_choice": tools.tool_choice,
        "response_format": response_format or tools.response_format,
        "stop": stop,
    }


def plan_completion(body: CompletionBody, caller: Caller) -> Plan:
    """Turns one or many prompts into one request a choice.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    _refuse_unsupported_completion(body)
    fields = _fields(body)
    fields["response_format"] = _structured_outputs(body)
    is_prompt_only = bool(body.echo) and body.max_tokens == 0
    if is_prompt_only:
        # In the place of 0, which no other request may have.
        fields["max_tokens"] = 1
        if body.min_tokens:
            raise InvalidRequest(
                f"min_tokens is {body.min_tokens}, above max_tokens 0", param="min_tokens", limit=0
            )
    elif body.max_tokens is None:
        fields["max_tokens"] = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    requests = []
    for at, prompt in _prompts(body.prompt):
        try:
            requests.append(inference_request(fields | {"prompt": prompt}, **_identity(caller)))
        except InvalidRequest as exc:
            if exc.param is not None and exc.param.startswith("prompt"):
                exc.param = at + exc.param.removeprefix("prompt")
                exc.message = exc.message.replace("prompt", at, 1)
            raise
    plan = _plan(body, caller, requests)
    if not body.echo or not (is_prompt_only or body.logprobs is not None):
        return plan
    return _computing_prompts(plan, is_prompt_only=is_prompt_only)


def _computing_prompts(plan: Plan, *, is_prompt_only: bool) -> Plan:
    """The plan for an echo that the model has to compute.

    Raises:
        InvalidRequest: only the cache is asked, which knows no prompt's probabilities.
    """
    requests = []
    for request in plan.requests:
        if request.cache == "only":
            raise InvalidRequest(
                "echo with logprobs, or without a token, has to be computed: cache 'only' excludes it",
                param="echo",
            )
        requests.append(
            msgspec.structs.replace(
                request,
                is_prompt_only=is_prompt_only,
                prompt_logprobs=request.sampling.logprobs,
                cache="bypass",
            )
        )
    return replace(plan, requests=tuple(requests))


def _plan(
    body: GenerationBody,
    caller: Caller,
    prompts: Sequence[InferenceRequest],
    tools: ToolPlan | None = None,
) -> Plan:
    n = body.n or 1
    is_stream = bool(body.stream)
    options = body.stream_options
    if options is not None and not is_stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n {n} make {n * len(prompts)} answers, "
            f"the limit is {MAX_CHOICES}",
            param="prompt" if n == 1 else "n",
            limit=MAX_CHOICES,
        )
    cache = _cache_of(body.cache or caller.cache or "auto", n)
    requests = [_choice(prompt, choice, cache) for prompt in prompts for choice in range(n)]
    if len(requests) > 1:
        requests = [
            msgspec.structs.replace(request, request_id=f"{caller.reply_id}-{index}")
            for index, request in enumerate(requests)
        ]
    return Plan(
        requests=tuple(requests),
        n=n,
        is_stream=is_stream,
        include_usage=bool(options and options.include_usage),
        counts_usage=bool(options and options.continuous_usage_stats),
        tools=tools or NO_TOOLS,
    )


def _choice(prompt: InferenceRequest, choice: int, cache: CachePolicy) -> InferenceRequest:
    """The request for one of the answers to a prompt; a seed is counted on, so that they differ."""
    sampling = prompt.sampling
    if sampling.seed is not None and choice:
        seed = (sampling.seed + choice - SEED_MIN) % (SEED_MAX - SEED_MIN + 1) + SEED_MIN
        sampling = msgspec.structs.replace(sampling, seed=seed)
    return msgspec.structs.replace(prompt, sampling=sampling, cache=cache)


def _cache_of(policy: CachePolicy, n: int) -> CachePolicy:
    """One stored answer cannot stand for several that are meant to differ."""
    if n == 1:
        return policy
    if policy == "only":
        raise InvalidRequest(
            f"cache 'only' has one answer to give, but n is {n}", param="n", limit=1
        )
    return "bypass"


def _fields(body: GenerationBody) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.__struct_fields__}


def _identity(caller: Caller) -> dict[str, str]:
    return {"request_id": caller.reply_id, "tenant": caller.tenant, "model": caller.model}


def _prompts(prompt: str | list[str | int | list[int]]) -> list[tuple[str, Any]]:
    """Each prompt with its place in the body.

    Raises:
        InvalidRequest: no prompt, or prompts of several kinds.
    """
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt", limit=1)
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise InvalidRequest(
                f"prompt[{index}] is of another kind than prompt[0]: "
                "give texts, or token ids, or lists of token ids",
                param=f"prompt[{index}]",
            )
    if kind is int:
        return [("prompt", prompt)]
    return [(f"prompt[{index}]", item) for index, item in enumerate(prompt)]


def _structured_outputs(body: GenerationBody) -> dict[str, Any] | None:
    """vLLM's `structured_outputs` as a `response_format`."""
    given = body.structured_outputs
    if given is None:
        return None
    forms: list[dict[str, Any]] = []
    if given.json is not None:
        forms.append({"type": "json_schema", "json_schema": {"schema": given.json}})
    if given.regex is not None:
        forms.append({"type": "regex", "regex": given.regex})
    if given.choice is not None:
        forms.append({"type": "choice", "choice": given.choice})
    if len(forms) != 1:
        raise InvalidRequest(
            f"structured_outputs has {len(forms)} of json, regex and choice, it takes one",
            param="structured_outputs",
        )
    return forms[0]


def _response_format(body: ChatBody) -> dict[str, Any] | None:
    structured = _structured_outputs(body)
    if body.response_format is None:
        return structured
    if structured is not None:
        raise InvalidRequest(
            "structured_outputs and response_format exclude each other", param="structured_outputs"
        )
    checked = convert_fields(body.response_format, ResponseFormat, "response_format")
    if checked.type == "json_schema" and checked.json_schema is None:
        at = "response_format.json_schema"
        raise InvalidRequest(f"{at} is required", param=at)
    return None if checked.type == "text" else body.response_format


def _refuse_unsupported_chat(body: ChatBody) -> None:
    if body.functions is not None:
        raise InvalidRequest("functions is not supported: use tools", param="functions")
    if body.function_call is not None:
        raise InvalidRequest(
            "function_call is not supported: use tool_choice", param="function_call"
        )
    if body.web_search_options is not None:
        raise InvalidRequest(
            "web_search_options is not supported: nothing is searched", param="web_search_options"
        )
    if body.audio is not None:
        raise InvalidRequest("audio is not supported: this model writes text", param="audio")
    if any(modality != "text" for modality in body.modalities or ()):
        raise InvalidRequest("modalities must be ['text']", param="modalities")


def _refuse_unsupported_completion(body: CompletionBody) -> None:
    if body.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of not in (None, 1):
        raise InvalidRequest(
            f"best_of must be 1, got {body.best_of}: ask for several answers with n",
            param="best_of",
            limit=1,
        )
