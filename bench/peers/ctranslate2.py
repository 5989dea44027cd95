"""Worker: CTranslate2 with int8 weights.

    pip install ctranslate2 transformers torch psutil
    python -m bench.peers.conversion ctranslate2 --model FOLDER --out FOLDER

It has no continuous batching: the worker batches who waits, and each row ends on its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ctranslate2

from bench.peers.batches import BatchPeer
from bench.peers.stdio import Replies, Request, WorkerOptions, read_options, serve, take_stdout


class Batches:
    """A generator, and how it answers one batch."""

    def __init__(self, options: WorkerOptions, replies: Replies) -> None:
        self._replies = replies
        self._vocabulary = json.loads((Path(options.model) / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            options.model, compute_type="default", intra_threads=options.threads
        )

    def run(self, batch: list[Request]) -> None:
        counts = [0] * len(batch)

        def take(step: ctranslate2.GenerationStepResult) -> bool:
            request = batch[step.batch_id]
            counts[step.batch_id] += 1
            self._replies.tokens(request.id, [step.token_id])
            is_done = counts[step.batch_id] == request.max_tokens
            if is_done:
                self._replies.end(request.id)
            return is_done

        longest = max(request.max_tokens for request in batch)
        sampling = {}
        if batch[0].temperature > 0:
            ctranslate2.set_random_seed(batch[0].seed)
            sampling = {
                "sampling_topk": 0,
                "sampling_topp": batch[0].top_p,
                "sampling_temperature": batch[0].temperature,
            }
        self._generator.generate_batch(
            [[self._vocabulary[id] for id in request.prompt_token_ids] for request in batch],
            include_prompt_in_result=False,
            max_length=longest,
            # Nothing ends before its time.
            min_length=longest,
            callback=take,
            **sampling,
        )


def main() -> None:
    replies = Replies(take_stdout())
    options = read_options()
    peer = BatchPeer(Batches(options, replies).run, replies, options.max_seqs)
    serve(peer, replies, sys.stdin, ctranslate2=ctranslate2.__version__)


if __name__ == "__main__":
    main()
