"""LiteLLM, by its `openai/` provider and its `hosted_vllm/` one."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import (
    EMBEDDER,
    FRESH,
    KEY,
    MODEL,
    PATIENCE_S,
    PERSON,
    URL,
    WEATHER,
    expect,
    refusal,
    run,
)

AT: Any = {"api_base": URL, "api_key": KEY, "timeout": PATIENCE_S, "num_retries": 0}
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
CHAT: Any = {"model": f"openai/{MODEL}", "messages": ASK, "max_tokens": 24, "temperature": 0, **AT}


def completion() -> None:
    answer = litellm.completion(**CHAT)
    expect(answer.choices[0].message.content, "a text", answer)
    expect(answer.choices[0].finish_reason in ("stop", "length"), "a finish reason", answer)
    expect(answer.usage.completion_tokens > 0, "usage", answer.usage)
    other = litellm.completion(**(CHAT | {"model": f"hosted_vllm/{MODEL}"}))
    expect(other.choices[0].message.content, "a text by hosted_vllm", other)


def stream() -> None:
    whole = litellm.completion(**CHAT, extra_body=FRESH).choices[0].message.content
    options = {"include_usage": True}
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options=options, extra_body=FRESH))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text == whole, f"the text of the whole answer {whole!r}", text)
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    expect(built.usage.completion_tokens > 0, "usage", built)


async def use_async() -> None:
    answer = await litellm.acompletion(**CHAT)
    expect(answer.choices[0].message.content, "a text", answer)
    chunks = [chunk async for chunk in await litellm.acompletion(**CHAT, stream=True)]
    expect(len(chunks) > 2, "chunks", chunks)


def logprobs() -> None:
    answer = litellm.completion(**CHAT, logprobs=True, top_logprobs=2, n=2, seed=1, stop=["#"])
    expect(len(answer.choices) == 2, "two choices", answer)
    expect(answer.choices[0].logprobs["content"], "logprobs", answer.choices[0])


def structured_output() -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    fields = CHAT | {"max_tokens": 100}
    answer = litellm.completion(
        **fields, response_format={"type": "json_schema", "json_schema": schema}
    )
    told = json.loads(answer.choices[0].message.content)
    expect(set(told) == {"name", "age"}, "both properties", told)


def tools() -> None:
    fields = CHAT | {"max_tokens": 60}
    answer = litellm.completion(**fields, tools=TOOLS, tool_choice=NAMED)
    call = answer.choices[0].message.tool_calls[0]
    expect(call.function.name == "weather", "a call", call)
    expect(set(json.loads(call.function.arguments)) == {"city", "days"}, "arguments", call)
    chunks = list(litellm.completion(**fields, tools=TOOLS, tool_choice=NAMED, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    arguments = built.choices[0].message.tool_calls[0].function.arguments
    expect(set(json.loads(arguments)) == {"city", "days"}, "the same from a stream", arguments)


def responses() -> None:
    fields: Any = {"model": f"openai/{MODEL}", "input": "Say hi.", "max_output_tokens": 16, **AT}
    answer = litellm.responses(**fields)
    expect(answer.output[0].content[0].text, "a text", answer)
    kinds = [str(event.type) for event in litellm.responses(**fields, stream=True)]
    expect(any("delta" in kind.lower() for kind in kinds), "deltas", kinds)


def text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="One two three", max_tokens=8, **AT
    )
    expect(answer.choices[0].text, "a text", answer)


def embedding() -> None:
    answer = litellm.embedding(model=f"openai/{EMBEDDER}", input=["a cat", "a dog"], **AT)
    expect(len(answer.data) == 2, "two vectors", answer)
    expect(len(answer.data[0]["embedding"]) > 100, "numbers", answer.data[0])


def errors() -> None:
    refusal(litellm.AuthenticationError, lambda: litellm.completion(**(CHAT | {"api_key": "sk-x"})))
    refusal(litellm.NotFoundError, lambda: litellm.completion(**(CHAT | {"model": "openai/none"})))
    refusal(litellm.BadRequestError, lambda: litellm.completion(**(CHAT | {"temperature": 9})))
    long: Any = [{"role": "user", "content": "a " * 9000}]
    refusal(
        litellm.ContextWindowExceededError,
        lambda: litellm.completion(**(CHAT | {"messages": long})),
    )


run(
    ["litellm", "openai"],
    [
        ("completion", completion),
        ("streaming", stream),
        ("async", use_async),
        ("n, stop, seed, logprobs", logprobs),
        ("structured output", structured_output),
        ("tools", tools),
        ("responses", responses),
        ("text completion", text_completion),
        ("embedding", embedding),
        ("errors", errors),
    ],
)
