"""The official Python client, on every route it has here."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from typing import Any, Literal

import openai
from checks import EMBEDDER, FRESH, MODEL, PERSON, WEATHER, expect, refusal, run
from openai_clients import Person, client, make_async
from openai_responses import RESPONSES_PARTS
from pydantic import BaseModel, Field

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Forecast.", "parameters": WEATHER},
    }
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Verdict(BaseModel):
    mood: Literal["good", "bad"]
    score: int = Field(ge=1, le=5)


def chat() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, *ASK],
        max_completion_tokens=16,
        temperature=0,
        extra_body=FRESH,
    )
    expect(raw.headers.get("x-request-id"), "an x-request-id", dict(raw.headers))
    answer = raw.parse()
    expect(answer.object == "chat.completion", "a chat.completion", answer.object)
    expect(answer.choices[0].message.role == "assistant", "the role assistant", answer)
    expect(answer.choices[0].message.content, "a text", answer)
    expect(answer.choices[0].finish_reason in ("stop", "length"), "a finish reason", answer)
    usage = answer.usage
    expect(usage is not None, "usage", answer)
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "a sum", usage)
    expect(0 < usage.completion_tokens <= 16, "at most 16 tokens", usage)


def content_parts() -> None:
    parts: Any = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=8
    )
    expect(answer.choices[0].message.content, "a text for a list of text parts", answer)
    image: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    error = refusal(
        openai.BadRequestError,
        lambda: client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": image}]
        ),
    )
    expect("image_url" in str(error), "the part's type in the message", str(error))


def stream() -> None:
    ask = {"model": MODEL, "messages": ASK, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask, extra_body=FRESH)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(**ask, stream=True, stream_options=options, extra_body=FRESH)
    )
    expect(chunks[0].choices[0].delta.role == "assistant", "the role first", chunks[0])
    text = "".join(choice.delta.content or "" for one in chunks for choice in one.choices)
    wanted = whole.choices[0].message.content
    expect(text == wanted, f"the text of the whole answer {wanted!r}", text)
    reasons = [c.finish_reason for one in chunks for c in one.choices if c.finish_reason]
    expect(reasons == [whole.choices[0].finish_reason], "one finish reason", reasons)
    expect(chunks[-1].choices == [], "no choice in the last chunk", chunks[-1])
    usage = chunks[-1].usage
    expect(usage, "usage at the end", chunks[-1])
    wanted = whole.usage.completion_tokens
    expect(usage.completion_tokens == wanted, f"{wanted} tokens", usage)
    expect(len(chunks) > 8, "a chunk for a token or so", len(chunks))


def stream_helper() -> None:
    # A cut answer makes the helper raise.
    hi: Any = [{"role": "user", "content": "Say hi."}]
    with client.chat.completions.stream(
        model=MODEL, messages=hi, max_tokens=300, temperature=0
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    expect({"chunk", "content.delta", "content.done"} <= kinds, "its events", kinds)
    expect(final.choices[0].message.content, "an assembled text", final)


def leave_early() -> None:
    with client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        expect(len(list(itertools.islice(chunks, 4))) == 4, "four chunks")
    chat()


def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=FRESH,
    )
    choice = answer.choices[0]
    expect(choice.logprobs and choice.logprobs.content, "logprobs", choice)
    entries = choice.logprobs.content
    expect("".join(e.token for e in entries) == choice.message.content, "its tokens", entries)
    for entry in entries:
        expect(len(entry.top_logprobs) == 3, "3 alternatives", entry)
        expect(entry.top_logprobs[0].token == entry.token, "the best token first", entry)
        expect(entry.logprob <= 0, "a logarithm", entry)


def several_choices() -> None:
    ask: Any = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 1.5, "seed": 7}
    answer = client.chat.completions.create(**ask, n=3)
    expect([c.index for c in answer.choices] == [0, 1, 2], "three choices", answer)
    expect(len({c.message.content for c in answer.choices}) > 1, "different ones", answer)
    ends = [
        choice.index
        for chunk in client.chat.completions.create(**ask, n=3, stream=True)
        for choice in chunk.choices
        if choice.finish_reason
    ]
    expect(sorted(ends) == [0, 1, 2], "an end for each choice", ends)


def stop() -> None:
    ask: Any = {"model": MODEL, "max_tokens": 24, "temperature": 0, "extra_body": FRESH}
    prompt = "A B C D E F G H A B C D E F G H A B C D"
    free = client.completions.create(prompt=prompt, **ask).choices[0].text
    mark = free[6:9]
    cut = client.completions.create(prompt=prompt, stop=[mark], **ask).choices[0]
    expect(cut.text == free[: free.index(mark)], f"{free!r} cut before {mark!r}", cut.text)
    expect(cut.finish_reason == "stop", "the reason stop", cut.finish_reason)


def seed() -> None:
    def text(number: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=16, temperature=1.2, seed=number, extra_body=FRESH
        )
        return answer.choices[0].message.content

    first = text(11)
    expect(text(11) == first, "the same text for the same seed", first)
    expect({text(12), text(13), text(14)} != {first}, "other texts for others", first)


def penalties_and_bias() -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=8,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"11": -100},
        user="someone",
        metadata={"trace": "1"},
        extra_body={"min_tokens": 2, "top_k": 20, "unknown_field": 1},
    )


def structured_output() -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Ann is 30. Give her as JSON."}],
        response_format=Person,
        max_tokens=100,
    )
    person = parsed.choices[0].message.parsed
    expect(isinstance(person, Person), "a Person", parsed)
    schema: Any = {"name": "person", "schema": PERSON, "strict": True}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=100,
    )
    told = json.loads(answer.choices[0].message.content or "")
    expect(set(told) == {"name", "age"}, "both properties", told)
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Verdict, max_tokens=60
    ) as events:
        verdict = events.get_final_completion().choices[0].message.parsed
    expect(isinstance(verdict, Verdict), "a Verdict from a stream", verdict)
    plain = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Give me a very small JSON object."}],
        response_format={"type": "json_object"},
        max_tokens=200,
    )
    if plain.choices[0].finish_reason == "stop":
        json.loads(plain.choices[0].message.content or "")


def tools() -> None:
    ask: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 60}
    for choice in (NAMED, "required"):
        answer = client.chat.completions.create(**ask, tool_choice=choice).choices[0]
        expect(answer.message.tool_calls, f"a call for tool_choice {choice}", answer)
        call = answer.message.tool_calls[0]
        expect(call.function.name == "weather", "a call of weather", call)
        expect(set(json.loads(call.function.arguments)) == {"city", "days"}, "arguments", call)
        expect(answer.finish_reason == "tool_calls", "the reason tool_calls", answer)
    free = client.chat.completions.create(**ask, tool_choice="auto").choices[0]
    expect(free.message.content or free.message.tool_calls, "an answer for auto", free)
    history: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'},
    ]
    after = client.chat.completions.create(
        model=MODEL, messages=history, tools=TOOLS, tool_choice="none", max_tokens=16
    )
    expect(after.choices[0].message.content, "a text behind a tool's result", after)


def streamed_tool_arguments() -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=NAMED, max_tokens=60, stream=True
    )
    names, arguments, reasons = [], [], []
    for chunk in chunks:
        for choice in chunk.choices:
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments += [call.function.arguments] if call.function.arguments else []
    expect(names == ["weather"], "the name once", names)
    expect(len(arguments) > 2, "arguments in pieces", arguments)
    expect(set(json.loads("".join(arguments))) == {"city", "days"}, "arguments", arguments)
    expect(reasons == ["tool_calls"], "the reason tool_calls", reasons)
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=NAMED, max_tokens=60
    ) as events:
        kinds = [event.type for event in events]
    expect("tool_calls.function.arguments.done" in kinds, "the helper's event", set(kinds))


def conversation() -> None:
    turns: Any = [{"role": "user", "content": "Tell me about the sea, slowly. " * 12}]
    usages = []
    for _ in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=turns, max_tokens=24, temperature=0, extra_body=FRESH
        )
        usages.append(answer.usage)
        turns += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "Go on."},
        ]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    expect(cached[1] > 0, "cached tokens in the second turn", cached)
    expect(cached[2] > cached[1], "more of them in the third", cached)


def completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One two three", "A B C"], n=2, max_tokens=8, logprobs=2
    )
    expect([c.index for c in answer.choices] == [0, 1, 2, 3], "four choices", answer)
    expect(answer.choices[0].logprobs.tokens, "tokens", answer)
    chunks = list(
        client.completions.create(model=MODEL, prompt=[504, 9], max_tokens=8, stream=True)
    )
    expect(chunks[-1].choices[0].finish_reason, "a finish reason", chunks[-1])


def embeddings() -> None:
    texts = ["The cat sleeps.", "A cat is asleep.", "Interest rates rose."]
    answer = client.embeddings.create(model=EMBEDDER, input=texts)
    cat, sleeping, rates = (entry.embedding for entry in answer.data)

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    expect(cosine(cat, sleeping) > 0.7 > cosine(cat, rates), "meaning", cosine(cat, sleeping))
    floats = client.embeddings.create(model=EMBEDDER, input=texts[0], encoding_format="float")
    distance = math.dist(floats.data[0].embedding, cat)
    expect(distance < 1e-4, "the same vector in base64 and in numbers", distance)
    expect(answer.usage.prompt_tokens > 0, "usage", answer.usage)


def models() -> None:
    names = [model.id for model in client.models.list()]
    expect(MODEL in names, MODEL, names)
    for name in (MODEL, EMBEDDER):
        found = client.models.retrieve(name)
        expect((found.id, found.object) == (name, "model"), f"the model {name}", found)


def errors() -> None:
    def ask(**fields: Any) -> Any:
        return lambda: client.chat.completions.create(
            **({"model": MODEL, "messages": ASK, "max_tokens": 4} | fields)
        )

    for field, value in {"temperature": 9, "n": 0, "top_p": 0, "max_tokens": "many"}.items():
        error = refusal(openai.BadRequestError, ask(**{field: value}))
        expect(error.param == field, f"the param {field}", error.body)
    error = refusal(openai.NotFoundError, ask(model="no-such-model"))
    expect(error.code == "model_not_found", "the code model_not_found", error.body)
    error = refusal(
        openai.BadRequestError, ask(messages=[{"role": "user", "content": "a " * 9000}])
    )
    expect(error.code == "context_length_exceeded", "context_length_exceeded", error.body)
    stranger = client.with_options(api_key="sk-nobody")
    for call in (
        lambda: stranger.models.list(),
        lambda: stranger.chat.completions.create(model=MODEL, messages=ASK),
        lambda: stranger.responses.create(model=MODEL, input="Hi."),
        lambda: stranger.embeddings.create(model=EMBEDDER, input="Hi."),
    ):
        error = refusal(openai.AuthenticationError, call)
        expect(error.code == "unauthorized", "the code unauthorized", error.body)
    error = refusal(
        openai.BadRequestError,
        lambda: client.responses.create(model=MODEL, input="Hi.", previous_response_id="resp_1"),
    )
    expect(error.param == "previous_response_id", "its param", error.body)


async def many_at_once() -> None:
    async with make_async() as one:

        async def text(number: int) -> str:
            ask: Any = [{"role": "user", "content": f"Count up from {number}."}]
            chunks = await one.chat.completions.create(
                model=MODEL, messages=ask, max_tokens=12, stream=True, extra_body=FRESH
            )
            return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

        texts = await asyncio.gather(*(text(number) for number in range(8)))
        expect(all(texts), "eight texts", texts)
        answer = await one.responses.create(model=MODEL, input="Hi.", max_output_tokens=8)
        expect(answer.output_text, "a text", answer)
        vectors = await one.embeddings.create(model=EMBEDDER, input=["a", "b"])
        expect(len(vectors.data) == 2, "two vectors", len(vectors.data))
        expect([m.id async for m in one.models.list()] == [MODEL], "one model")


run(
    ["openai"],
    [
        ("chat", chat),
        ("content parts", content_parts),
        ("streaming", stream),
        ("stream helper", stream_helper),
        ("leaving in mid-stream", leave_early),
        ("logprobs", logprobs),
        ("n", several_choices),
        ("stop", stop),
        ("seed", seed),
        ("penalties, bias, unknown fields", penalties_and_bias),
        ("structured output", structured_output),
        ("tools", tools),
        ("streamed tool arguments", streamed_tool_arguments),
        ("cached tokens over turns", conversation),
        ("completions", completions),
        *RESPONSES_PARTS,
        ("embeddings", embeddings),
        ("models", models),
        ("errors", errors),
        ("async, 8 at once", many_at_once),
    ],
)
