"""The official `openai` client against the API, over ASGI and over a real socket."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn

from protocol.errors import ContextLengthExceeded, DeadlineExceeded, RateLimited
from protocol.token_log import CacheOutcome
from tests.app.openai_fakes import (
    EMBEDDER,
    MODEL,
    FakeGraph,
    app_over,
    chat_body,
    says,
    stalls,
    streams,
)

# The client is built on httpx or on its successor, as its release has it.
client_http: Any = importlib.import_module(
    openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
)
MESSAGES: Any = [{"role": "user", "content": "Say hi."}]


def async_client(graph: FakeGraph) -> openai.AsyncOpenAI:
    transport = client_http.ASGITransport(app_over(graph))
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://seedance.test/v1",
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        max_retries=0,
    )


async def test_a_chat_comes_back_typed() -> None:
    graph = FakeGraph(cache=CacheOutcome(outcome="exact", tier="memory"))
    async with async_client(graph) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=MESSAGES,
            logprobs=True,
            top_logprobs=1,
            extra_body={"cache": "auto"},
        )
    completion = raw.parse()
    assert raw.headers["x-seedance-cache"].startswith("exact")
    assert completion.choices[0].message.content == "Hello world"
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].logprobs is not None
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 2
    assert completion.model_dump(exclude_unset=True)["object"] == "chat.completion"


async def test_a_stream_comes_in_typed_chunks() -> None:
    async with async_client(FakeGraph(streams("Hello", " world"))) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello world"
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_the_stream_helper_assembles_the_answer() -> None:
    async with (
        async_client(FakeGraph(streams("Hello", " world"))) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"


async def test_text_completions_and_models_come_back_typed() -> None:
    async with async_client(FakeGraph()) as client:
        completion = await client.completions.create(
            model=MODEL, prompt=["a", "b"], logprobs=1, n=2
        )
        models = [model.id async for model in client.models.list()]
        assert (await client.models.retrieve(MODEL)).id == MODEL
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert models == [MODEL]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_refusals_raise_the_clients_own_errors(is_stream: bool) -> None:
    refusal = ContextLengthExceeded("prompt has 9000 tokens, the model takes 8192")
    async with async_client(FakeGraph(refusal=refusal)) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=is_stream)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=0)
        assert caught.value.param == "n"
    async with async_client(FakeGraph(refusal=RateLimited("slow down"))) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)


async def test_a_failure_in_mid_stream_raises_in_the_client() -> None:
    error = DeadlineExceeded("the answer took longer than timeout_s 1").info
    seen: list[str | None] = []

    async def read(stream: Any) -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content)

    async with async_client(FakeGraph(streams("Hi", reason="error", error=error))) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="took longer"):
            await read(stream)
    assert seen == ["", "Hi"]


class ServerThread:
    """The app on a real socket of this machine, in a loop of its own."""

    def __init__(self, graph: FakeGraph) -> None:
        config = uvicorn.Config(
            app_over(graph, embedder=EMBEDDER), port=0, log_level="error", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture
def stalling() -> Iterator[tuple[FakeGraph, ServerThread]]:
    graph = FakeGraph(stalls("some"))
    server = ServerThread(graph)
    yield graph, server
    server.stop()


@pytest.fixture
def server() -> Iterator[ServerThread]:
    server = ServerThread(FakeGraph(says("Hello", " world")))
    yield server
    server.stop()


def test_the_synchronous_client_works_over_a_socket(server: ServerThread) -> None:
    with openai.OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.port}/v1") as client:
        plain = client.chat.completions.create(model=MODEL, messages=MESSAGES)
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert client.responses.create(model=MODEL, input="Say hi.").output_text == text
        assert client.embeddings.create(model=EMBEDDER, input="ab").data[0].embedding == [2, 1]
    assert plain.choices[0].message.content == text == "Hello world"


def test_a_body_over_the_limit_is_answered_and_not_reset(server: ServerThread) -> None:
    with openai.OpenAI(
        api_key="none", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0
    ) as client:
        for size in (2**21, 2**23):
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(model=MODEL, prompt="x" * size)
            assert caught.value.status_code == 413


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_closing_the_connection_stops_the_generation(
    stalling: tuple[FakeGraph, ServerThread], is_stream: bool, is_reset: bool
) -> None:
    graph, server = stalling
    stopped = threading.Event()
    body = json.dumps(chat_body(stream=is_stream, max_tokens=1000)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + body)
    if is_stream:
        assert b"200 OK" in connection.recv(100)
    while not graph.streams:
        stopped.wait(0.005)
    graph.streams[0].log.subscribe(stopped.set)
    if is_reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert stopped.wait(30)
    assert graph.num_running == 0
