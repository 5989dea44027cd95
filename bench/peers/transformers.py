"""Worker: transformers' own continuous batching."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.peers.stdio import Replies, Request, WorkerOptions, read_options, serve, take_stdout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAGE_TOKENS = 32
NO_TOKEN = -1


class ContinuousPeer:
    """One manager for greedy requests or one for sampled ones, whichever was asked for last."""

    def __init__(self, options: WorkerOptions, replies: Replies) -> None:
        torch.set_num_threads(options.threads)
        self._replies = replies
        self._options = options
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=DTYPES[options.precision], attn_implementation="sdpa"
        ).eval()
        self._is_sampling = False
        self._reader: threading.Thread | None = None
        self._sent: dict[str, int] = {}
        self._start(None)

    def submit(self, request: Request) -> None:
        if (request.temperature > 0) != self._is_sampling:
            self._stop()
            self._start(request if request.temperature > 0 else None)
        self._sent[str(request.id)] = 0
        self._manager.add_request(
            list(request.prompt_token_ids),
            request_id=str(request.id),
            max_new_tokens=request.max_tokens,
            streaming=True,
            eos_token_id=NO_TOKEN,
        )

    def close(self) -> None:
        self._stop()

    def _start(self, sampled: Request | None) -> None:
        self._is_sampling = sampled is not None
        sampling: dict[str, Any] = {"do_sample": False}
        if sampled is not None:
            sampling = {
                "do_sample": True,
                "temperature": sampled.temperature,
                "top_p": sampled.top_p,
                "top_k": 0,
            }
        rows, length = self._options.max_seqs, self._options.max_len
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                eos_token_id=NO_TOKEN, pad_token_id=0, max_new_tokens=length, **sampling
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=rows * length // PAGE_TOKENS // 4,
                max_batch_tokens=512,
                max_requests_per_batch=rows,
                use_cuda_graph=False,
            ),
        )
        self._manager.start()
        self._reader = threading.Thread(target=self._read, args=(self._manager,), daemon=True)
        self._reader.start()

    def _stop(self) -> None:
        self._manager.stop(block=True)
        if self._reader is not None:
            self._reader.join()

    def _read(self, manager: Any) -> None:
        while manager.is_running():
            output = manager.get_result(timeout=0.5)
            if output is None:
                continue
            request_id = int(output.request_id)
            if output.error is not None:
                self._replies.error(request_id, output.error)
                continue
            sent = self._sent[output.request_id]
            self._replies.tokens(request_id, output.generated_tokens[sent:])
            self._sent[output.request_id] = len(output.generated_tokens)
            if output.is_finished():
                self._replies.end(request_id)


def main() -> None:
    replies = Replies(take_stdout())
    options = read_options()
    peer = ContinuousPeer(options, replies)
    serve(peer, replies, sys.stdin, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
