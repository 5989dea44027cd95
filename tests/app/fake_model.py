"""Streams that outlive an ingress, without an engine: a model that talks, and ingresses over it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Send
from starlette.websockets import WebSocket

from app.accounts import Accounts
from app.gateway import Gateway
from app.resume import ResumeTokens
from app.serving import ModelInfo, Stream
from app.settings import parse_settings
from protocol.errors import Replaced, ResumeExpired
from protocol.request import InferenceRequest
from protocol.session import SessionLimits
from protocol.token_log import Terminal, TokenDelta, TokenLog, Usage
from tests.app.stack import PATIENCE_S, served

Frame = dict[str, Any]
INFO = ModelInfo(id="maker/fake", revision="1", context_length=100, created=0, backend="mock")
PIECES = ("Once ", "upon ", "a ", "time ", "there ", "was ", "a ", "fox", ".")
TEXT = "".join(PIECES)
KEY = b"the key of the tests"


def deltas(pieces: Sequence[str], widths: Sequence[int] = ()) -> list[TokenDelta]:
    """A delta a piece, which completes as many tokens as its width says, or one."""
    made = []
    seq = -1
    for i, piece in enumerate(pieces):
        width = widths[i] if i < len(widths) else 1
        made.append(TokenDelta(seq + width, piece, tuple(range(seq + 1, seq + width + 1))))
        seq += width
    return made


@dataclass
class Run:
    """One answer: `log` is the model's, `held` the copy of the ingress that follows it."""

    request: InferenceRequest
    log: TokenLog = field(default_factory=TokenLog)
    held: TokenLog = field(default_factory=TokenLog)

    def append(self, delta: TokenDelta) -> None:
        self.log.append(delta)
        if self.held.terminal is None:
            self.held.append(delta)

    def end(self, terminal: Terminal) -> None:
        self.log.finish(terminal)
        self.held.finish(terminal)

    def move(self) -> TokenLog:
        """The log for another ingress; the former one learns that it lost the stream."""
        error = Replaced("the stream was resumed elsewhere").info
        self.held.finish(Terminal(finish_reason="error", error=error))
        self.held = TokenLog()
        self.held.append(*self.log.deltas)
        if self.log.terminal is not None:
            self.held.finish(self.log.terminal)
        return self.held

    def cancel(self, log: TokenLog) -> None:
        if log is self.held:
            self.end(Terminal(finish_reason="cancelled"))


class FakeModel:
    """Gives every request the same answer: a piece each turn of the loop, or at each `step`."""

    def __init__(self, answer: Sequence[TokenDelta] = (), *, is_paced: bool = False) -> None:
        self.answer = list(answer or deltas(PIECES))
        self.is_paced = is_paced
        self.runs: dict[str, Run] = {}

    @property
    def num_running(self) -> int:
        return sum(run.log.terminal is None for run in self.runs.values())

    def start(self, request: InferenceRequest) -> Run:
        run = self.runs[request.request_id] = Run(request)
        if not self.is_paced:
            asyncio.get_running_loop().call_soon(self._talk, run)
        return run

    def step(self, count: int = 1) -> None:
        """Goes on with every answer."""
        for run in self.runs.values():
            for _ in range(count):
                self._go_on(run)

    def _talk(self, run: Run) -> None:
        self._go_on(run)
        if run.log.terminal is None:
            asyncio.get_running_loop().call_soon(self._talk, run)

    def _go_on(self, run: Run) -> None:
        said = len(run.log.deltas)
        if run.log.terminal is not None:
            return
        if said < len(self.answer):
            run.append(self.answer[said])
        else:
            usage = Usage(prompt_tokens=1, completion_tokens=run.log.next_seq)
            run.end(Terminal(finish_reason="stop", usage=usage))


class FakeIngress:
    """A `StreamOpener` over a model that it shares with other ingresses."""

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.num_fetched = 0
        self.gate: asyncio.Event | None = None
        self.warmed: list[InferenceRequest] = []
        self.warm_gate: asyncio.Event | None = None
        self.refusal: Exception | None = None
        self._tokens = ResumeTokens(KEY)

    async def model_info(self) -> ModelInfo:
        return INFO

    async def open_stream(self, request: InferenceRequest) -> Stream:
        if self.gate is not None:
            await self.gate.wait()
        return self._stream(self.model.start(request))

    async def warm(self, request: InferenceRequest) -> None:
        self.warmed.append(request)
        if self.warm_gate is not None:
            await self.warm_gate.wait()

    async def resume_stream(self, token: str, tenant: str) -> Stream:
        name = self._tokens.open(token, tenant).stream
        if self.gate is not None:
            await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        run = self.model.runs.get(name)
        if run is None:
            raise ResumeExpired("other words")
        self.num_fetched += 1
        run.move()
        return self._stream(run)

    def _stream(self, run: Run) -> Stream:
        log, request = run.held, run.request
        token = self._tokens.sign(request.request_id, "replica-1", request.tenant)
        return Stream(
            request=request, log=log, token=token, queue_position=0, cancel=lambda: run.cancel(log)
        )


def gateway_over(ingress: FakeIngress, **options: Any) -> Gateway:
    names = {field.name for field in dataclasses.fields(SessionLimits)}
    limits = SessionLimits(**{name: options.pop(name) for name in names & options.keys()})
    settings = parse_settings({"auth": options.pop("auth", {})}).auth
    given = {"resume_window_s": 30.0, "max_connections": 100, **options}
    return Gateway(ingress, Accounts(settings), limits=limits, **given)


@asynccontextmanager
async def gateway_on_air(gateway: Gateway) -> AsyncIterator[str]:
    """Serves the gateway on a free port; gives its address."""
    web = FastAPI()
    web.add_api_websocket_route("/v1/infer", gateway.serve)
    async with served(web) as (host, port):
        yield f"ws://{host}:{port}/v1/infer"
    gateway.close()


class MemoryPeer:
    """A client without a network. What it did not hear before it goes is lost to it."""

    def __init__(self, gateway: Gateway, *, key: str | None = None) -> None:
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "websocket", "headers": headers, "subprotocols": []}
        scope["extensions"] = {"websocket.http.response": {}}
        self.frames: list[Frame] = []
        self.close_code: int | None = None
        self.status: int | None = None
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inbox.put_nowait({"type": "websocket.connect"})
        self._send: Send = self._outbox.put

        async def send(message: Message) -> None:
            await self._send(message)

        socket = WebSocket(scope, self._inbox.get, send)
        self.task = asyncio.create_task(gateway.serve(socket))

    def say(self, type: str, **fields: Any) -> None:
        text = json.dumps({"type": type, **fields})
        self._inbox.put_nowait({"type": "websocket.receive", "text": text})

    def ask(self, id: str = "r") -> None:
        self.say("INFER_REQ", id=id, prompt="hi", cache="bypass")

    async def hear(self) -> Frame:
        """The next frame; CLOSE when the server closed."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._outbox.get()
                if message["type"] == "websocket.close":
                    self.close_code = message["code"]
                    self.lose(1005)
                    return {"type": "CLOSE"}
                if message["type"] == "websocket.http.response.start":
                    self.status = message["status"]
                    return {"type": "REFUSED"}
                if message["type"] == "websocket.send":
                    frame: Frame = json.loads(message["text"])
                    self.frames.append(frame)
                    return frame

    async def until(self, *types: str, id: str | None = None) -> Frame:
        while True:
            frame = await self.hear()
            if frame["type"] in types and id in (None, frame.get("id")):
                return frame

    def of(self, id: str) -> list[Frame]:
        return [frame for frame in self.frames if frame.get("id") == id]

    def stall(self, send: Send) -> None:
        """From now on its socket takes what it is sent as `send` does."""
        self._send = send

    def lose(self, code: int = 1005) -> None:
        """The connection breaks."""
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": code})

    def leave(self, code: int = 1000) -> None:
        """Closes the connection, as clients do that are done."""
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})

    async def gone(self) -> None:
        """Returns when the server has nothing left of this connection."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(self.task, return_exceptions=True)


def chunks(frames: Sequence[Frame]) -> list[tuple[int, str]]:
    return [(frame["seq"], frame["text"]) for frame in frames if frame["type"] == "INFER_CHUNK"]
