"""LangChain's ChatOpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import EMBEDDER, FRESH, KEY, MODEL, PATIENCE_S, URL, expect, run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


def chat_model(**fields: Any) -> ChatOpenAI:
    settings: Any = {
        "model": MODEL,
        "base_url": URL,
        "api_key": KEY,
        "timeout": PATIENCE_S,
        "max_retries": 0,
        "max_tokens": 24,
        "temperature": 0,
        "stream_usage": True,
    }
    return ChatOpenAI(**(settings | fields))


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"clear in {city}"


def invoke() -> None:
    answer = chat_model().invoke([SystemMessage("Be brief."), HumanMessage("Say hi.")])
    expect(isinstance(answer, AIMessage) and answer.content, "a text", answer)
    expect(answer.usage_metadata["total_tokens"] > 0, "usage", answer.usage_metadata)
    expect(answer.response_metadata["finish_reason"], "a finish reason", answer.response_metadata)


def chain() -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    text = (prompt | chat_model() | StrOutputParser()).invoke({"question": "Why is the sky blue?"})
    expect(text, "a text", text)


def stream() -> None:
    model = chat_model(extra_body=FRESH)
    chunks = list(model.stream("What is the capital of France?"))
    whole = model.invoke("What is the capital of France?")
    text = "".join(chunk.text for chunk in chunks)
    expect(text == whole.content, f"the text of the whole answer {whole.content!r}", text)
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    expect(total.usage_metadata, "usage", total)
    expect(
        total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], "it", total
    )


async def use_async() -> None:
    model = chat_model()
    answers = await asyncio.gather(*(model.ainvoke(f"Count from {n}.") for n in range(4)))
    expect(all(answer.content for answer in answers), "four texts", answers)
    text = "".join([chunk.text async for chunk in model.astream("Say hi.")])
    expect(text, "a text", text)
    batch = await model.abatch(["Say hi.", "Say bye."])
    expect(len(batch) == 2, "two answers", batch)


def logprobs() -> None:
    answer = chat_model(logprobs=True, top_logprobs=2).invoke("Say hi.")
    content = answer.response_metadata["logprobs"]["content"]
    expect("".join(entry["token"] for entry in content) == answer.content, "its tokens", content)


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        model = chat_model(max_tokens=100).with_structured_output(Person, method=method)
        person = model.invoke("Ann is 30.")
        expect(isinstance(person, Person), f"a Person by {method}", person)
    last = list(chat_model(max_tokens=100).with_structured_output(Person).stream("Ann is 30."))[-1]
    expect(isinstance(last, Person), "a Person from a stream", last)


def tools() -> None:
    model = chat_model(max_tokens=60).bind_tools([weather], tool_choice="weather")
    asked = HumanMessage("What is the weather in Rome?")
    answer = model.invoke([asked])
    expect(len(answer.tool_calls) == 1, "a call", answer)
    call = answer.tool_calls[0]
    expect(call["name"] == "weather" and call["args"]["city"], "a city", call)
    told = weather.invoke(call)
    expect(isinstance(told, ToolMessage), "the tool's message", told)
    after = chat_model().bind_tools([weather], tool_choice="none").invoke([asked, answer, told])
    expect(after.content, "a text behind the tool's result", after)
    total: Any = None
    for chunk in model.stream([asked]):
        total = chunk if total is None else total + chunk
    expect(total.tool_calls[0]["args"]["city"], "the same from a stream", total)
    free = chat_model().bind_tools([weather]).invoke([asked])
    expect(free.content or free.tool_calls, "an answer for auto", free)


def responses_api() -> None:
    model = chat_model(use_responses_api=True)
    answer = model.invoke("Say hi.")
    expect(answer.text, "a text", answer)
    text = "".join(chunk.text for chunk in model.stream("Say hi."))
    expect(text, "a text from a stream", text)
    turns = [HumanMessage("Say hi."), answer, HumanMessage("And bye?")]
    expect(model.invoke(turns).text, "a text in a second turn", turns)
    calling = chat_model(use_responses_api=True, max_tokens=60)
    called = calling.bind_tools([weather], tool_choice="weather").invoke("Rome?")
    expect(called.tool_calls, "a call", called)
    told = weather.invoke(called.tool_calls[0])
    after = model.bind_tools([weather], tool_choice="none")
    expect(after.invoke([HumanMessage("Rome?"), called, told]).text, "a text behind it", told)


def completions() -> None:
    model = OpenAI(
        model=MODEL, base_url=URL, api_key=KEY, max_tokens=12, timeout=PATIENCE_S, max_retries=0
    )
    expect(model.invoke("One two three"), "a text")
    expect("".join(model.stream("One two three")), "a streamed text")


def embeddings() -> None:
    # Its token ids are those of another model's tokenizer.
    embedder = OpenAIEmbeddings(
        model=EMBEDDER, base_url=URL, api_key=KEY, check_embedding_ctx_length=False
    )
    vectors = embedder.embed_documents(["The cat sleeps.", "Interest rates rose."])
    expect(len(vectors) == 2 and len(vectors[0]) == len(vectors[1]), "two vectors", len(vectors))
    asked = embedder.embed_query("A cat is asleep.")
    near, far = (sum(a * b for a, b in zip(asked, v, strict=True)) for v in vectors)
    expect(near > far, "meaning", (near, far))
    expect(len(asyncio.run(embedder.aembed_query("a"))) == len(asked), "the same, async")


run(
    ["langchain-openai", "langchain-core", "openai"],
    [
        ("invoke", invoke),
        ("prompt chain", chain),
        ("stream with usage", stream),
        ("async, batch", use_async),
        ("logprobs", logprobs),
        ("with_structured_output", structured_output),
        ("bind_tools", tools),
        ("use_responses_api", responses_api),
        ("OpenAI (completions)", completions),
        ("OpenAIEmbeddings", embeddings),
    ],
)
