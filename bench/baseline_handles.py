"""The other baseline of `bench.graph`: Seedance's own web room over per-request handle streams.

The gateway, the session and the frames are the app's. Between ingress and model stands what a
Serve application usually has: one streaming call a request over Serve's gRPC transport, its
deltas as packed records. What this costs above Seedance itself is what the token bus saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from app.serving import ModelInfo, Stream
from app.settings import Settings, parse_settings
from app.web import build_web
from bench.baseline_stream import deltas_of, start_engine
from deployments.metrics import GraphStats
from protocol.errors import ResumeExpired
from protocol.request import InferenceRequest
from protocol.token_log import Terminal, TokenDelta, TokenLog, Usage

INFO = ModelInfo(
    id="seedance-mock", revision="mock", context_length=8192, created=0, backend="mock"
)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The deltas of one request that are new."""

    deltas: tuple[TokenDelta, ...]


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(InferenceRequest).decode
decode_record = msgspec.msgpack.Decoder(Record).decode


class RecordModel:
    """Yields packed records, as many as the engine's steps, for each request apart."""

    async def __init__(self, rows: int, interval_s: float) -> None:  # type: ignore[misc]
        self._engine = await start_engine(rows, interval_s)

    async def generate(self, payload: bytes) -> AsyncIterator[bytes]:
        async for deltas in deltas_of(self._engine, decode_request(payload)):
            yield encode(Record(tuple(deltas)))


class HandleGraph:
    """What `build_web` needs of a graph, on one streaming call a request."""

    def __init__(self, model: DeploymentHandle) -> None:
        self._streams = model.options(stream=True, _by_reference=False)
        self._pumps: set[asyncio.Task[None]] = set()

    async def model_info(self) -> ModelInfo:
        return INFO

    async def check_ready(self) -> None:
        return None

    async def stats(self) -> GraphStats:
        return GraphStats()

    async def open_stream(self, request: InferenceRequest) -> Stream:
        records = self._streams.generate.remote(encode(request))
        log = TokenLog()
        pump = asyncio.create_task(self._pump(records, log))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

        def cancel() -> None:
            if log.terminal is None:
                records.cancel()
                pump.cancel()

        return Stream(request=request, log=log, cancel=cancel)

    async def resume_stream(self, token: str, tenant: str) -> Stream:
        raise ResumeExpired("this baseline does not resume streams")

    async def _pump(self, records: AsyncIterator[bytes], log: TokenLog) -> None:
        async for record in records:
            log.append(*decode_record(record).deltas)
        usage = Usage(prompt_tokens=0, completion_tokens=log.next_seq)
        log.finish(Terminal(finish_reason="length", usage=usage))


class HandleIngress:
    """One ingress process."""

    def __init__(self, settings: Settings, model: DeploymentHandle) -> None:
        self._settings = settings
        self._graph: Any = HandleGraph(model)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_web(self._graph, self._settings)


ModelDeployment = serve.deployment(name="Model", max_ongoing_requests=4096)(RecordModel)
IngressDeployment = serve.deployment(name="Ingress", max_ongoing_requests=4096)(
    serve.ingress()(HandleIngress)
)


def app(args: dict[str, Any]) -> Application:
    """What `serve run` builds; `args` are the model replica's."""
    return IngressDeployment.bind(parse_settings({}), ModelDeployment.bind(**args))
