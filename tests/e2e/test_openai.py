"""The OpenAI API on the real cluster and model, by openai-python where it can: what a fake cannot show."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.asking import GREEDY, Asker, nonce

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BLOCK = 32
"""Tokens whose keys and values are shared together, see docs/engine.md."""
FRESH = {"cache": "bypass"}
RULES = "You answer questions about rivers, mountains and towns in one short sentence. "


@pytest.fixture(scope="module")
def client(asker: Asker) -> Iterator[openai.OpenAI]:
    base_url = f"{asker.server.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key=asker.key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def eventually(read: Callable[[], float], expected: float, timeout_s: float = 5.0) -> None:
    """Waits for a figure of /metrics, which follows within a second."""
    deadline_s = time.monotonic() + timeout_s
    while (found := read()) != expected:
        assert time.monotonic() < deadline_s, f"{found}, not {expected}"
        time.sleep(0.05)


def running(asker: Asker) -> float:
    return asker.metrics()["seedance_requests_running"]


def cached(usage: openai.types.CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_each_turn_of_a_conversation_computes_little_more_than_what_is_new(
    client: openai.OpenAI, model: str
) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": f"{nonce()}. {RULES * 4}"}
    ]
    reused, before = [], 0
    for question in ("Where is the Rhine?", "How long is it?", "And the Elbe?", "Which is longer?"):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(
            model=model, messages=messages, max_tokens=24, temperature=0, extra_body=FRESH
        )
        reused.append(cached(reply.usage))
        # All of the turns before but for a block that was not full.
        assert before - BLOCK < reused[-1] < reply.usage.prompt_tokens
        before = reply.usage.prompt_tokens
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    assert reused[0] == 0
    assert reused == sorted(set(reused)), "each turn finds more than the one before"


def test_three_choices_compute_their_prompt_once(
    client: openai.OpenAI, model: str, asker: Asker
) -> None:
    def computed() -> float:
        return asker.metrics()["seedance_prompt_tokens_total"]

    def ask() -> openai.types.Completion:
        return client.completions.create(
            model=model, prompt=prompt, n=3, seed=5, temperature=0.9, max_tokens=12
        )

    prompt = f"{nonce()}. {RULES * 8}"
    asker.wait_until_idle()
    start = computed()
    reply = ask()
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    texts = [choice.text for choice in reply.choices]
    assert len(set(texts)) == 3, "each has a seed of its own"
    assert reply.usage.completion_tokens <= 36
    num_prompt = reply.usage.prompt_tokens
    tail = (num_prompt - 1) % BLOCK + 1
    eventually(lambda: computed() - start, num_prompt + 2 * tail)
    again = ask()
    assert [choice.text for choice in again.choices] == texts
    assert cached(again.usage) == num_prompt - tail
    eventually(lambda: computed() - start, num_prompt + 5 * tail)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_client_that_leaves_in_mid_stream_frees_its_place_at_once(
    asker: Asker, path: str
) -> None:
    asker.wait_until_idle()
    asked: dict[str, Any] = {"prompt": "Once"}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": "Write a very long story."}]}
    body = {**asked, **GREEDY, **FRESH, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with asker.http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        for _ in range(5):
            next(lines)
        eventually(lambda: running(asker), 1)
    eventually(lambda: running(asker), 0, timeout_s=2)


def test_responses_stream_their_events_in_order(client: openai.OpenAI, model: str) -> None:
    kinds, text = [], ""
    with client.responses.create(
        model=model,
        input=f"{nonce()}: say hi.",
        max_output_tokens=12,
        temperature=0,
        stream=True,
    ) as events:
        for number, event in enumerate(events):
            assert event.sequence_number == number
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert kinds.count("response.output_text.done") == 1
    assert event.response.output_text == text != ""
    assert event.response.usage.output_tokens <= 12


def test_a_stream_that_broke_goes_on_behind_its_last_event(asker: Asker) -> None:
    def events(reply: httpx.Response) -> Iterator[tuple[str, str]]:
        """Ids and data."""
        name = ""
        for line in reply.iter_lines():
            if line.startswith("id: "):
                name = line[4:]
            elif line.startswith("data: "):
                yield name, line[6:]

    body = {"prompt": f"{nonce()}: once", "max_tokens": 60, "ignore_eos": True, "stream": True}
    body |= {**GREEDY, **FRESH}
    seen: list[str] = []
    headers = {"x-seedance-resumable": "true"}
    with asker.http.stream("POST", TEXT, json=body, headers=headers) as reply:
        for name, data in events(reply):
            last = name
            seen.append(data)
            if len(seen) == 10:
                break
    assert re.fullmatch(r"\S+:\d+", last)
    with asker.http.stream("POST", TEXT, json=body, headers={"last-event-id": last}) as reply:
        assert reply.status_code == 200
        seen += [data for _, data in events(reply)]
    assert seen.pop() == "[DONE]"
    chunks = [json.loads(data) for data in seen]
    assert len({chunk["id"] for chunk in chunks}) == 1
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == asker.completion(**body | {"stream": False}).text


def test_a_prompt_is_scored_without_an_answer_and_echoed_before_one(
    client: openai.OpenAI, model: str
) -> None:
    def echo(**fields: Any) -> openai.types.Completion:
        asked = {"max_tokens": 0, "temperature": 0, **fields}
        return client.completions.create(model=model, prompt=text, echo=True, **asked)

    text = "The sky is blue."
    scored, bare = echo(logprobs=1), echo()
    for reply in (scored, bare):
        assert reply.choices[0].text == text
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == 0
    logprobs = scored.choices[0].logprobs
    assert "".join(logprobs.tokens) == text
    assert len(logprobs.token_logprobs) == scored.usage.prompt_tokens
    first, *rest = logprobs.token_logprobs
    assert first is None
    assert all(-30 < logprob < 0 for logprob in rest)
    with client.completions.create(
        model=model, prompt=text, echo=True, max_tokens=3, temperature=0, stream=True
    ) as chunks:
        pieces = [chunk.choices[0].text for chunk in chunks]
    answer = client.completions.create(model=model, prompt=text, max_tokens=3, temperature=0)
    assert pieces[0] == text
    assert "".join(pieces[1:]) == answer.choices[0].text
