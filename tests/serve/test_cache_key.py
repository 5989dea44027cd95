"""What of a request is compared exactly, and what may be compared by meaning."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cache.key import PromptKey
from deployments.cache_key import cache_key, is_cacheable
from protocol.request import InferenceRequest, Message, SamplingParams

TURN = Message(role="user", content="How large is it?")
BEFORE = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Name a city."),
    Message(role="assistant", content="Paris."),
)
REQUEST = InferenceRequest(
    request_id="r-1",
    tenant="red",
    model="m",
    messages=(*BEFORE, TURN),
    sampling=SamplingParams(temperature=0.0, max_tokens=8),
)
TOOL = {"type": "function", "function": {"name": "find"}}


def key_of(request: InferenceRequest, **versions: Any) -> PromptKey:
    given = {"model_revision": "rev-1", "embedder_revision": "e-1", "epoch": 0, **versions}
    return cache_key(request, **given)


def changed(**fields: Any) -> InferenceRequest:
    return msgspec.structs.replace(REQUEST, **fields)


def sampled(**fields: Any) -> InferenceRequest:
    return changed(sampling=msgspec.structs.replace(REQUEST.sampling, **fields))


@pytest.mark.parametrize(
    "other",
    [
        changed(request_id="r-2"),
        changed(priority=5, timeout_s=3.0),
        changed(cache="only"),
        sampled(max_tokens=64),
        sampled(max_tokens=None),
        changed(messages=(*BEFORE, Message(role="user", content=" How large is it? "))),
    ],
    ids=["id", "urgency", "policy", "a longer limit", "no limit", "outer space"],
)
def test_what_cannot_change_an_answer_is_not_in_the_key(other: InferenceRequest) -> None:
    assert key_of(other).exact == key_of(REQUEST).exact
    assert key_of(other).partition == key_of(REQUEST).partition


def test_the_limit_is_kept_beside_the_key() -> None:
    assert key_of(REQUEST).max_tokens == 8
    assert key_of(sampled(max_tokens=None)).max_tokens is None


OTHERS = {
    "tenant": changed(tenant="blue"),
    "model": changed(model="n"),
    "system prompt": changed(
        messages=(Message(role="system", content="Be long."), *BEFORE[1:], TURN)
    ),
    "earlier turn": changed(
        messages=(*BEFORE[:2], Message(role="assistant", content="Rome."), TURN)
    ),
    "fewer turns": changed(messages=(TURN,)),
    "name of an earlier turn": changed(
        messages=(
            *BEFORE[:1],
            Message(role="user", content="Name a city.", name="x"),
            BEFORE[2],
            TURN,
        )
    ),
    "tools": changed(tools=[TOOL]),
    "tool choice": changed(tool_choice="none"),
    "response format": changed(response_format={"type": "json_object"}),
    "temperature": sampled(temperature=0.5),
    "seed": sampled(seed=4),
    "stop": sampled(stop=(".",)),
    "logit bias": sampled(logit_bias={5: 1.0}),
    "logprobs": sampled(logprobs=0),
    "min tokens": sampled(min_tokens=2),
    "ignored end": sampled(ignore_eos=True),
}


def test_everything_else_is_a_partition_of_its_own() -> None:
    partitions = {name: key_of(request).partition for name, request in OTHERS.items()}
    partitions["itself"] = key_of(REQUEST).partition
    for version in ({"model_revision": "rev-2"}, {"embedder_revision": "e-2"}, {"epoch": 1}):
        partitions[str(version)] = key_of(REQUEST, **version).partition
    assert len(set(partitions.values())) == len(partitions)


def test_keys_in_another_order_ask_for_another_answer() -> None:
    def asking(order: str) -> list[InferenceRequest]:
        properties: dict[str, Any] = {name: {"type": "string"} for name in order}
        schema = {"type": "object", "properties": properties}
        call = {"type": "function", "function": {"name": "find", "arguments": properties}}
        return [
            changed(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]),
            changed(response_format={"type": "json_schema", "json_schema": {"schema": schema}}),
            changed(messages=(Message(role="assistant", tool_calls=[call]), TURN)),
        ]

    for one, other in zip(asking("ab"), asking("ba"), strict=True):
        assert key_of(one).partition != key_of(other).partition


def test_the_last_user_turn_alone_is_compared_by_meaning() -> None:
    key = key_of(REQUEST)
    assert key.allow_semantic
    assert key.text == "How large is it?"
    other = key_of(changed(messages=(*BEFORE, Message(role="user", content="How big is it?"))))
    assert other.partition == key.partition
    assert other.exact != key.exact


@pytest.mark.parametrize(
    "request_",
    [
        changed(messages=None, prompt="Once upon a time"),
        changed(messages=None, prompt=(1, 2, 3)),
        changed(messages=(TURN, Message(role="assistant", content="It is"))),
        changed(messages=(TURN, Message(role="tool", content="5", tool_call_id="c"))),
        changed(messages=(Message(role="user", content="Hi", name="ann"),)),
    ],
    ids=["text", "tokens", "begun answer", "tool result", "named"],
)
def test_other_endings_are_compared_exactly_only(request_: InferenceRequest) -> None:
    key = key_of(request_)
    assert not key.allow_semantic
    assert key.text == ""


def test_prompts_differ_by_their_last_character_and_by_their_kind() -> None:
    prompts: list[Any] = ["ab", "ab ", " ab", "Ab", (97, 98)]
    exact = {key_of(changed(messages=None, prompt=prompt)).exact for prompt in prompts}
    exact.add(key_of(changed(messages=(Message(role="user", content="ab"),))).exact)
    assert len(exact) == 6


@pytest.mark.parametrize(
    ("policy", "temperature", "expected"),
    [
        ("auto", 0.0, True),
        ("auto", 0.1, False),
        ("refresh", 0.0, True),
        ("refresh", 0.1, False),
        ("bypass", 0.0, False),
        ("sampled", 0.1, True),
        ("only", 0.1, True),
    ],
)
def test_sampled_answers_are_cached_only_when_asked(
    policy: Any, temperature: float, expected: bool
) -> None:
    sampling = SamplingParams(temperature=temperature)
    assert is_cacheable(changed(cache=policy, sampling=sampling)) is expected
