"""Worker: Seedance's engine, in this process and without Ray."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from bench.peers.stdio import (
    Replies,
    Request,
    WorkerOptions,
    read_options,
    serve_async,
    take_stdout,
)
from deployments.engine.async_engine import AsyncEngine
from deployments.engine.build import EngineSpec, build_engine
from deployments.engine.config import EngineConfig
from protocol.request import InferenceRequest, SamplingParams

MOCK = "mock"
"""Given as the model: the scripted engine, for tests of the protocol."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "bfloat16"}


class SeedancePeer:
    """Answers on the event loop that started the engine."""

    def __init__(self, engine: AsyncEngine, replies: Replies) -> None:
        self._engine = engine
        self._replies = replies

    async def answer(self, request: Request) -> None:
        seq = await self._engine.prepare(
            InferenceRequest(
                request_id=str(request.id),
                tenant="",
                model="",
                prompt=tuple(request.prompt_token_ids),
                sampling=SamplingParams(
                    max_tokens=request.max_tokens,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    seed=request.seed,
                    ignore_eos=True,
                ),
            )
        )
        (refusal,) = self._engine.admit([seq])
        if refusal is not None:
            raise refusal
        log = self._engine.follow(seq)
        cursor = log.cursor()
        while deltas := await cursor.wait():
            token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            self._replies.tokens(request.id, token_ids)
        assert log.terminal is not None, "the log has ended"
        if log.terminal.error is not None:
            raise RuntimeError(log.terminal.error.message)
        self._replies.end(request.id)

    async def close(self) -> None:
        await self._engine.close()


def engine_spec(options: WorkerOptions) -> EngineSpec:
    """The engine with its own defaults, but for what the options give.

    Raises:
        ValueError: there is no such precision.
    """
    if options.precision not in DTYPES:
        raise ValueError(f"precision is {options.precision}, allowed are {', '.join(DTYPES)}")
    config = EngineConfig(
        max_num_seqs=options.max_seqs,
        max_model_len=options.max_len,
        num_threads=options.threads,
        dtype=DTYPES[options.precision],
        quantization="int8" if options.precision == "int8" else "none",
    )
    folder = None if options.model == MOCK else Path(options.model)
    return EngineSpec(config, folder, mock_token_interval_s=0.0)


async def main() -> None:
    replies = Replies(take_stdout())
    options = read_options()
    engine = build_engine(engine_spec(options))
    await engine.start()
    await serve_async(SeedancePeer(engine, replies), replies, sys.stdin)


if __name__ == "__main__":
    asyncio.run(main())
