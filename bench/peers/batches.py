"""Requests in batches: for engines that answer one batch after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from bench.peers.stdio import Replies, Request

GATHER_S = 0.005
"""How long a batch waits for those who asked together with its first."""


class BatchPeer:
    """Runs one batch at a time on a thread: all who wait when the last one ended, up to a limit."""

    def __init__(
        self, run: Callable[[list[Request]], None], replies: Replies, max_batch_size: int
    ) -> None:
        self._run = run
        self._replies = replies
        self._max_batch_size = max_batch_size
        self._waiting: SimpleQueue[Request | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_batches, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._waiting.put(request)

    def close(self) -> None:
        self._waiting.put(None)

    def join(self) -> None:
        """Waits until all batches before `close` are answered."""
        self._thread.join()

    def _run_batches(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = self._gather(first)
            try:
                self._run(batch)
            except Exception as exc:
                for request in batch:
                    self._replies.error(request.id, f"{type(exc).__name__}: {exc}")

    def _gather(self, first: Request) -> list[Request]:
        time.sleep(GATHER_S)
        batch = [first]
        while len(batch) < self._max_batch_size and not self._waiting.empty():
            # Only this thread takes, and nothing follows the end.
            request = self._waiting.get()
            if request is None:
                self._waiting.put(None)
                break
            batch.append(request)
        return batch
