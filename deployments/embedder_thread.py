"""The one thread that embeds, shared by many coroutines."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor, ThreadPoolExecutor

from deployments.embedder import Embedder, Vector

MAX_BATCH_TEXTS = 32
MAX_BATCH_CHARS = 2048
"""About 512 tokens, a tenth of a second: whoever comes next waits no longer than that."""


class EmbedderThread:
    """Texts that come while a batch is embedded make up the next one; nobody waits for company.

    Belongs to one event loop, which never computes. Unbounded: `Embeddings` in front of
    it counts those that wait.

    Args:
        threads: runs one call at a time; one thread of its own by default.
    """

    def __init__(self, embedder: Embedder, *, threads: Executor | None = None) -> None:
        self._embedder = embedder
        self._threads = threads or ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._waiting: deque[tuple[str, asyncio.Future[Vector | None]]] = deque()
        self._working: asyncio.Task[None] | None = None

    async def embed(self, text: str) -> Vector | None:
        """The vector of a text; None for one longer than the window.

        Raises:
            Exception: whatever the embedder raised for this text.
        """
        future: asyncio.Future[Vector | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._embed_batch(self._next_batch())
        finally:
            self._working = None
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()

    def _next_batch(self) -> list[tuple[str, asyncio.Future[Vector | None]]]:
        batch = [self._waiting.popleft()]
        num_chars = len(batch[0][0])
        while self._waiting and len(batch) < MAX_BATCH_TEXTS:
            num_chars += len(self._waiting[0][0])
            if num_chars > MAX_BATCH_CHARS:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _embed_batch(self, batch: list[tuple[str, asyncio.Future[Vector | None]]]) -> None:
        # Whoever gave up need not be served.
        batch = [(text, future) for text, future in batch if not future.done()]
        if not batch:
            return
        try:
            vectors = await self._call([text for text, _ in batch])
        except Exception as exc:
            if len(batch) == 1:
                _fail(batch[0][1], exc)
                return
            # One text must not fail its neighbours.
            for item in batch:
                await self._embed_batch([item])
            return
        for (_, future), vector in zip(batch, vectors, strict=True):
            if not future.done():
                future.set_result(vector)

    async def _call(self, texts: list[str]) -> list[Vector | None]:
        loop = asyncio.get_running_loop()
        vectors = await loop.run_in_executor(self._threads, self._embedder.embed, texts)
        if len(vectors) != len(texts):
            raise ValueError(f"embedder gave {len(vectors)} vectors for {len(texts)} texts")
        return vectors


def _fail(future: asyncio.Future[Vector | None], exc: Exception) -> None:
    if not future.done():
        future.set_exception(exc)
