"""A graph of scripted streams, an app over it, and an ASGI client that can hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from starlette.types import Message

from app.openai_document import describe_errors
from app.openai_errors import install_error_handlers
from app.openai_routes import build_router
from app.serving import ModelInfo, Stream
from deployments.wire import EmbedReply, TokenizeCall, TokenizeReply
from protocol.errors import ErrorInfo, ResumeExpired
from protocol.request import InferenceRequest
from protocol.token_log import (
    CacheOutcome,
    FinishReason,
    Terminal,
    TokenDelta,
    TokenLog,
    TokenLogprob,
    Usage,
)

MODEL = "maker/tiny-model"
REVISION = "rev-1"
EMBEDDER = "maker/tiny-embedder"

Script = Callable[[InferenceRequest, TokenLog], None]


def deltas_of(pieces: Sequence[str], *, logprobs: int | None = None) -> list[TokenDelta]:
    """One delta and token a piece; with `logprobs`, that many alternatives of each."""
    return [
        TokenDelta(
            seq=seq,
            text=piece,
            token_ids=(seq,),
            logprobs=None
            if logprobs is None
            else (
                TokenLogprob(
                    token_id=seq,
                    token=piece,
                    logprob=-0.5,
                    top=tuple((seq + k, f"{piece}{k}", -0.5 - k) for k in range(logprobs)),
                ),
            ),
        )
        for seq, piece in enumerate(pieces)
    ]


def ending(
    reason: FinishReason = "stop", tokens: int = 0, error: ErrorInfo | None = None
) -> Terminal:
    return Terminal(
        finish_reason=reason,
        usage=Usage(prompt_tokens=7, completion_tokens=tokens, cached_tokens=2),
        error=error,
    )


def says(*pieces: str, reason: FinishReason = "stop", error: ErrorInfo | None = None) -> Script:
    """A script that writes a whole answer at once, as a cache hit does."""

    def write(request: InferenceRequest, log: TokenLog) -> None:
        log.append(*deltas_of(pieces, logprobs=request.sampling.logprobs))
        log.finish(ending(reason, len(pieces), error))

    return write


def streams(*pieces: str, reason: FinishReason = "stop", error: ErrorInfo | None = None) -> Script:
    """A script that writes one piece each turn of the event loop, then ends."""

    def write(request: InferenceRequest, log: TokenLog) -> None:
        loop = asyncio.get_running_loop()
        todo = deltas_of(pieces, logprobs=request.sampling.logprobs)

        def step() -> None:
            if log.terminal is not None:
                return
            if todo:
                log.append(todo.pop(0))
                loop.call_soon(step)
            else:
                log.finish(ending(reason, len(pieces), error))

        loop.call_soon(step)

    return write


def stalls(*pieces: str) -> Script:
    """A script that writes some pieces and then nothing, until it is cancelled."""

    def write(request: InferenceRequest, log: TokenLog) -> None:
        log.append(*deltas_of(pieces))

    return write


@dataclass
class FakeGraph:
    """Opens streams that follow `script`; notes what it was asked and what was cancelled."""

    script: Script = field(default_factory=lambda: says("Hello", " world"))
    cache: CacheOutcome = field(default_factory=CacheOutcome)
    token: str = ""
    refusal: Exception | None = None
    gate: asyncio.Event | None = None
    requests: list[InferenceRequest] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    num_abandoned: int = 0
    warmed: list[InferenceRequest] = field(default_factory=list)

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            id=MODEL, revision=REVISION, context_length=2048, created=1_700_000_000, backend="mock"
        )

    async def open_stream(self, request: InferenceRequest) -> Stream:
        self.requests.append(request)
        self.opened.set()
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_abandoned += 1
                raise
        if self.refusal is not None:
            raise self.refusal
        log = TokenLog()

        def cancel() -> None:
            self.cancelled.append(request.request_id)
            log.finish(ending("cancelled", log.next_seq))

        stream = Stream(request=request, log=log, cache=self.cache, cancel=cancel, token=self.token)
        self.streams.append(stream)
        self.opened.set()
        self.script(request, log)
        return stream

    async def warm(self, request: InferenceRequest) -> None:
        self.warmed.append(request)

    async def resume_stream(self, token: str, tenant: str) -> Stream:
        raise ResumeExpired("there is no such stream, or none any more: ask again")

    async def tokenize(self, call: TokenizeCall) -> TokenizeReply:
        """One token a character."""
        request = call.request
        if request is None:
            return TokenizeReply(text="".join(map(chr, call.token_ids)))
        text = request.prompt if request.messages is None else request.messages[-1].content
        assert isinstance(text, str)
        return TokenizeReply(token_ids=tuple(map(ord, text)), token_texts=tuple(text), text=text)

    async def embed(self, texts: tuple[str, ...]) -> EmbedReply:
        vectors = tuple(np.array([len(text), 1], dtype="<f4").tobytes() for text in texts)
        return EmbedReply(vectors=vectors, num_tokens=sum(map(len, texts)))

    async def until_open(self, count: int) -> None:
        """Waits until `count` streams were opened."""
        while len(self.streams) < count:
            self.opened.clear()
            await self.opened.wait()

    @property
    def num_running(self) -> int:
        return sum(stream.log.terminal is None for stream in self.streams)


def app_over(graph: FakeGraph, **options: Any) -> FastAPI:
    options.setdefault("clock", lambda: 1_750_000_000.0)
    app = FastAPI()
    app.include_router(build_router(lambda: graph, lambda _: "tenant-a", **options))

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("secret detail")

    install_error_handlers(app)
    describe_errors(app)
    return app


def client_of(graph: FakeGraph, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_over(graph, **options))
    return httpx.AsyncClient(transport=transport, base_url="http://seedance.test")


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Say hi."}], **fields}


def events_of(body: str) -> list[Any]:
    """The data of each event of an SSE body, checked line by line; `[DONE]` stays text."""
    assert body.endswith("\n\n")
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data, parse_constant=_refuse))
    return events


def strict_json(body: str | bytes) -> Any:
    return json.loads(body, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@dataclass
class HangUpCall:
    """One ASGI call whose client can leave at any moment."""

    app: FastAPI
    path: str
    body: dict[str, Any]
    sent: list[Message] = field(default_factory=list)
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)
    has_sent: asyncio.Event = field(default_factory=asyncio.Event)
    send_error: OSError | None = None
    reads: bool = True
    _is_read: bool = False

    async def receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": json.dumps(self.body).encode()}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.send_error is not None:
            raise self.send_error
        if not self.reads:
            await asyncio.Event().wait()
        self.sent.append(message)
        self.has_sent.set()

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("seedance.test", 80),
        }
        await self.app(scope, self.receive, self.send)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def until(self, text: str) -> None:
        """Waits until `text` was sent."""
        while text not in self.text:
            self.has_sent.clear()
            await self.has_sent.wait()
