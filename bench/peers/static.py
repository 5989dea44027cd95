"""Worker: static batching over transformers' `generate()`.

Prompts are padded on the left into one tensor. A row that ended has its answer at once, and the
batch stops as soon as every row is done; who comes meanwhile waits for the next one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from bench.peers.batches import BatchPeer
from bench.peers.stdio import Replies, Request, WorkerOptions, read_options, serve, take_stdout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RowLimits(StoppingCriteria):
    """Ends each row at its own `max_tokens`."""

    def __init__(self, limits: list[int], prompt_length: int) -> None:
        self._ends = torch.tensor(limits) + prompt_length  # (B,)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


class RowStreamer(BaseStreamer):
    """Hands each row's token on, until the row has all it asked for."""

    def __init__(self, batch: list[Request], replies: Replies) -> None:
        self._batch = batch
        self._replies = replies
        self._num_steps = -1  # The first call carries the prompts.

    def put(self, value: torch.Tensor) -> None:
        self._num_steps += 1
        if self._num_steps == 0:
            return
        for request, token_id in zip(self._batch, value.tolist(), strict=True):
            if self._num_steps <= request.max_tokens:
                self._replies.tokens(request.id, [token_id])
            if self._num_steps == request.max_tokens:
                self._replies.end(request.id)

    def end(self) -> None:
        """Every row has had its own."""


class StaticBatches:
    """A model, and how it answers one batch."""

    def __init__(self, options: WorkerOptions, replies: Replies) -> None:
        torch.set_num_threads(options.threads)
        dtype = DTYPES[options.precision]
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        # Otherwise `generate` ends rows with the model's own.
        self._pad_token_id = self._model.generation_config.pad_token_id or 0
        self._model.generation_config.eos_token_id = None
        self._replies = replies
        self._num_threads = options.threads

    def run(self, batch: list[Request]) -> None:
        # The number of threads belongs to the thread that asks.
        torch.set_num_threads(self._num_threads)
        length = max(len(request.prompt_token_ids) for request in batch)
        input_ids = torch.full((len(batch), length), self._pad_token_id)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(batch):
            ids = torch.tensor(request.prompt_token_ids)
            input_ids[row, length - len(ids) :] = ids
            mask[row, length - len(ids) :] = 1
        limits = [request.max_tokens for request in batch]
        sampling: dict[str, Any] = {"do_sample": False}
        if batch[0].temperature > 0:
            torch.manual_seed(batch[0].seed)
            sampling = {
                "do_sample": True,
                "temperature": batch[0].temperature,
                "top_p": batch[0].top_p,
                "top_k": 0,
            }
        with torch.inference_mode():
            self._model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                max_new_tokens=max(limits),
                pad_token_id=self._pad_token_id,
                stopping_criteria=StoppingCriteriaList([RowLimits(limits, length)]),
                streamer=RowStreamer(batch, self._replies),
                **sampling,
            )


def main() -> None:
    replies = Replies(take_stdout())
    options = read_options()
    peer = BatchPeer(StaticBatches(options, replies).run, replies, options.max_seqs)
    serve(peer, replies, sys.stdin, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
