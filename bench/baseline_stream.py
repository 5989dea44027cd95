"""The baseline of `bench.graph`: Ray Serve's documented way to stream from one deployment to a client.

An ingress with FastAPI calls a method of the model's deployment through a handle with
`stream=True` and returns the response generator in a `StreamingResponse`: one call a request,
one item a token, as in Ray's guides "Streaming responses" and "Model composition". Nothing of
Serve's environment is changed: default transport, Python proxy, user code in its own thread.

The model is the scripted engine of `bench.mock`, exactly as Seedance's replica runs it.
"""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from bench.scripted_engine import build_mock
from deployments.engine.async_engine import AsyncEngine
from deployments.engine.build import EngineSpec
from deployments.engine.config import EngineConfig
from protocol.request import InferenceRequest, SamplingParams
from protocol.token_log import TokenDelta


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /generate`."""

    prompt: str
    max_tokens: int


async def start_engine(rows: int, interval_s: float) -> AsyncEngine:
    """The scripted engine, running."""
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=rows + 256)
    engine = build_mock(EngineSpec(config=config, folder=None, mock_token_interval_s=interval_s))
    await engine.start()
    return engine


async def deltas_of(
    engine: AsyncEngine, request: InferenceRequest
) -> AsyncIterator[list[TokenDelta]]:
    """What is new each time; the sequence is dropped when the caller leaves."""
    sequence = await engine.prepare(request)
    try:
        cursor = engine.follow(sequence).cursor()
        (refusal,) = engine.admit([sequence])
        if refusal is not None:
            raise refusal
        while deltas := await cursor.wait():
            yield deltas
    finally:
        engine.abort(sequence)


@serve.deployment(name="Model", max_ongoing_requests=4096)
class StreamingModel:
    """Yields text, a token at a time."""

    async def __init__(self, rows: int, interval_s: float) -> None:  # type: ignore[misc]
        self._engine = await start_engine(rows, interval_s)

    async def generate(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        request = InferenceRequest(
            request_id=uuid.uuid4().hex,
            tenant="default",
            model="mock",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0),
        )
        async for deltas in deltas_of(self._engine, request):
            for delta in deltas:
                yield delta.text


api = FastAPI()


@serve.deployment(name="Ingress", max_ongoing_requests=4096)
@serve.ingress(api)
class StreamingIngress:
    """One streaming call to the model a request."""

    def __init__(self, model: DeploymentHandle) -> None:
        self._model = model.options(stream=True)

    @api.get("/readyz")
    async def readyz(self) -> str:
        return "ready"

    @api.post("/generate")
    async def generate(self, request: Request) -> StreamingResponse:
        question = msgspec.json.decode(await request.body(), type=Question)
        pieces = self._model.generate.remote(question.prompt, question.max_tokens)
        return StreamingResponse(pieces, media_type="text/plain")


def app(args: dict[str, Any]) -> Application:
    """What `serve run` builds; `args` are the model replica's."""
    return StreamingIngress.bind(StreamingModel.bind(**args))  # type: ignore[attr-defined]
