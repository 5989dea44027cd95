"""`echo`: the prompt comes back before its answers, with the probabilities of its own tokens if asked."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.app.openai_fakes import events_of, strict_json
from tests.app.stack import MODEL, Site, echo, on_air, running_stack, talks_on

TEXT = "/v1/completions"
SKY = "The sky is blue."
GREEDY = {"temperature": 0}
EOS = 256


async def asked(site: Site, **fields: Any) -> Any:
    reply = await site.http.post(TEXT, json={"prompt": SKY, **GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    return strict_json(reply.text)


async def streamed(site: Site, **fields: Any) -> list[Any]:
    body = {"prompt": SKY, **GREEDY, "stream": True, **fields}
    reply = await site.http.post(TEXT, json=body)
    assert reply.status_code == 200, reply.text
    *events, last = events_of(reply.text)
    assert last == "[DONE]"
    return events


def as_one(events: list[Any], index: int = 0) -> dict[str, Any]:
    """What the chunks of a choice add up to."""
    chunks = [c for event in events for c in event["choices"] if c["index"] == index]
    logprobs: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    reasons = [c["finish_reason"] for c in chunks if c["finish_reason"] is not None]
    assert len(reasons) == 1
    return {
        "index": index,
        "text": "".join(chunk["text"] for chunk in chunks),
        "logprobs": logprobs or None,
        "finish_reason": reasons[0],
    }


@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_a_prompt_comes_back_before_its_answer(max_tokens: int, logprobs: int | None) -> None:
    fields = {"echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        whole = await asked(site, **fields)
        events = await streamed(site, **fields, stream_options={"include_usage": True})
    (choice,) = whole["choices"]
    assert as_one(events[:-1]) == choice
    assert events[-1]["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {
        "prompt_tokens_details": 0
    }
    text = SKY + SKY[:max_tokens]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert whole["usage"]["prompt_tokens"] == len(SKY)
    assert whole["usage"]["completion_tokens"] == max_tokens
    told = choice["logprobs"]
    if logprobs is None:
        assert told is None
        return
    assert told["tokens"] == list(text)
    assert told["text_offset"] == list(range(len(text)))
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx([0.0] * (len(text) - 1), abs=1e-3)
    first, *rest = told["top_logprobs"]
    assert first is None
    for token, best in zip(told["tokens"][1:], rest, strict=True):
        # The byte vocabulary has several tokens that read alike.
        assert 1 <= len(best) <= max(1, logprobs)
        assert best[token] == max(best.values())


async def test_a_stream_begins_with_the_prompt() -> None:
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        for logprobs in (None, 1):
            events = await streamed(site, echo=True, max_tokens=3, logprobs=logprobs)
            assert events[0]["choices"][0]["text"] == SKY
            counted = await streamed(
                site,
                echo=True,
                max_tokens=2,
                logprobs=logprobs,
                stream_options={"continuous_usage_stats": True},
            )
            completions = [event["usage"]["completion_tokens"] for event in counted]
            assert completions == [0, 1, 2, 2]


async def test_each_choice_of_each_prompt_has_its_own() -> None:
    prompts = ["one", "another"]
    fields = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 2, "logprobs": 1}
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        whole = await asked(site, **fields)
        events = await streamed(site, **fields)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["oneon", "oneon", "anotheran", "anotheran"]
    assert [as_one(events, index) for index in range(4)] == whole["choices"]
    assert whole["usage"]["prompt_tokens"] == 10


async def test_tokens_come_back_as_their_text() -> None:
    ids = [*"aé🙂".encode(), EOS]
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        for logprobs in (None, 1):
            fields = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": logprobs}
            whole = await asked(site, **fields)
            (choice,) = whole["choices"]
            assert choice["text"] == "aé🙂", "special tokens have no text"
            assert whole["usage"]["prompt_tokens"] == len(ids)
            assert as_one(await streamed(site, **fields)) == choice
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(ids)
        assert told["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
        back = await site.http.post("/detokenize", json={"tokens": ids})
        assert back.json() == {"prompt": "aé🙂"}


async def test_nothing_is_answered_where_no_token_is_asked_for() -> None:
    async with running_stack(talks_on) as stack, on_air(stack.graph) as site:
        await asked(site, echo=True, max_tokens=0)
        stats = stack.replicas[0].service.stats()
        assert stats["generated_tokens_total"] == 0
        assert stats["prompt_tokens_total"] == len(SKY)


async def test_an_echoed_answer_may_come_from_the_cache_and_scores_never_do() -> None:
    async with running_stack(echo) as stack, on_air(stack.graph) as site:

        async def mark(**fields: Any) -> str:
            body = {"prompt": SKY, **GREEDY, "max_tokens": 3, "stop": "k", **fields}
            reply = await site.http.post(TEXT, json=body)
            assert reply.status_code == 200, reply.text
            return reply.headers["x-seedance-cache"].partition(";")[0]

        assert await mark() == "miss"
        assert await mark(echo=True) == "exact"
        assert await mark(echo=True, logprobs=1) == "miss"
        assert await mark(echo=True, max_tokens=0) == "miss"


async def test_a_resumed_stream_repeats_no_prompt() -> None:
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        for logprobs in (None, 1):
            body = {"prompt": SKY, **GREEDY, "stream": True, "echo": True, "logprobs": logprobs}
            headers = {"x-seedance-resumable": "true"}
            whole = (await site.http.post(TEXT, json=body, headers=headers)).text
            places = [line[4:] for line in whole.splitlines() if line.startswith("id: ")]
            rest = await site.http.post(TEXT, json=body, headers={"last-event-id": places[3]})
            assert rest.text
            assert whole.endswith(rest.text)
            assert SKY not in rest.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
        ({"echo": True, "logprobs": 1, "cache": "only"}, "echo"),
        ({"echo": True, "max_tokens": 0, "cache": "only"}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": -1}, "logprobs"),
        ({"echo": True, "prompt": [5, 10**6]}, "prompt"),
        ({"echo": True, "prompt": "x" * 5000, "logprobs": 1}, "prompt"),
    ],
)
async def test_what_cannot_be_echoed_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        reply = await site.http.post(TEXT, json={"prompt": SKY, **fields})
        assert reply.status_code == 400
        assert strict_json(reply.text)["error"]["param"] == param
        assert (await asked(site, max_tokens=1))["choices"][0]["text"] == "T"


@pytest.mark.parametrize("max_tokens", [0, -1])
async def test_a_chat_answers_with_a_token_at_least(max_tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": max_tokens}
    async with running_stack(echo) as stack, on_air(stack.graph) as site:
        reply = await site.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert strict_json(reply.text)["error"]["param"] == "max_tokens"


async def test_a_prompt_whose_probabilities_are_nan_is_an_error_of_its_own() -> None:
    async with (
        running_stack(echo, fault=lambda seq: "nan" if seq.is_scored else None) as stack,
        on_air(stack.graph) as site,
    ):
        body = {"prompt": SKY, "echo": True, "logprobs": 1, "max_tokens": 0}
        reply = await site.http.post(TEXT, json=body)
        assert reply.status_code == 500
        assert (await asked(site, max_tokens=1))["choices"][0]["text"] == "T"


async def test_the_official_client_reads_an_echo() -> None:
    async with (
        running_stack(echo) as stack,
        on_air(stack.graph) as site,
        openai.AsyncOpenAI(
            base_url=f"{site.http.base_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        reply = await client.completions.create(
            model=MODEL, prompt=SKY, echo=True, max_tokens=0, logprobs=1
        )
    assert reply.choices[0].text == SKY
    assert len(reply.choices[0].logprobs.token_logprobs) == reply.usage.prompt_tokens
