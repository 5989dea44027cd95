"""Worker: OpenVINO GenAI's continuous batching with int8 weights.

pip install openvino-genai 'optimum-intel[openvino]' psutil
python -m bench.peers.conversion openvino --model FOLDER --out FOLDER
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.stdio import Replies, Request, WorkerOptions, read_options, serve, take_stdout

CACHE_GIB = 2


class PipelinePeer:
    """The pipeline on one thread, which adds who waits before each of its steps."""

    def __init__(self, options: WorkerOptions, replies: Replies) -> None:
        self._replies = replies
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = options.max_seqs
        scheduler.cache_size = CACHE_GIB
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}
        )
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._running: dict[int, tuple[Any, int]] = {}  # handle, tokens still to come
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._waiting.put(request)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            while not self._running or not self._waiting.empty():
                if (request := self._waiting.get()) is None:
                    return
                self._add(request)
            self._pipeline.step()
            for request_id, (handle, left) in list(self._running.items()):
                if handle.can_read():
                    self._take(request_id, handle, left)

    def _add(self, request: Request) -> None:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = request.max_tokens
        generation.ignore_eos = True
        if request.temperature > 0:
            generation.do_sample = True
            generation.temperature = request.temperature
            generation.top_p = request.top_p
            generation.rng_seed = request.seed
        ids = openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
        try:
            handle = self._pipeline.add_request(request.id, ids, generation)
        except Exception as exc:
            self._replies.error(request.id, f"{type(exc).__name__}: {exc}")
        else:
            self._running[request.id] = (handle, request.max_tokens)

    def _take(self, request_id: int, handle: Any, left: int) -> None:
        token_ids = [id for output in handle.read().values() for id in output.generated_ids]
        self._replies.tokens(request_id, token_ids)
        self._running[request_id] = (handle, left - len(token_ids))
        if len(token_ids) >= left:
            del self._running[request_id]
            self._replies.end(request_id)


def main() -> None:
    replies = Replies(take_stdout())
    options = read_options()
    peer = PipelinePeer(options, replies)
    serve(peer, replies, sys.stdin, openvino_genai=openvino_genai.__version__)


if __name__ == "__main__":
    main()
