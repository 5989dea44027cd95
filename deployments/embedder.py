"""Texts to vectors: what an embedder is, which one is taken, and what is remembered of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]
EmbedText = Callable[[str], Coroutine[Any, Any, Vector | None]]

MAX_TOKEN_CHARS = 32
"""A text with more characters a token than this counts as too long, without being tokenised."""
VECTOR_OVERHEAD_BYTES = 512
"""Of a remembered vector: its array, key and place in the order of use."""


class Embedder(Protocol):
    """Embeds batches of texts. Blocks: call it from one worker thread."""

    def embed(self, texts: list[str]) -> list[Vector | None]:
        """A unit-norm float32 vector of shape (D,) per text; None for one longer than the window.

        Past the window texts with opposite ends would get the same vector.
        """
        ...


def load_embedder(folder: Path) -> Embedder:
    """The embedder of a prepared model: on OpenVINO where it can be, on torch otherwise."""
    try:
        from deployments.embedder_openvino import OpenVINOEmbedder, UnsupportedModel
    except ImportError as exc:
        logger.warning("openvino is not there (%s): the embedder runs on torch, slower", exc)
    else:
        try:
            return OpenVINOEmbedder(folder)
        except UnsupportedModel as exc:
            logger.info("the embedder runs on torch: %s", exc)
        except Exception:
            logger.exception("openvino does not take the embedder: it runs on torch, slower")
    from deployments.embedder_torch import TorchEmbedder

    return TorchEmbedder(folder)


def is_hopelessly_long(text: str, max_tokens: int) -> bool:
    """Whether a text is too long for the window whatever its tokens are.

    Tokenising a megabyte would hold up everyone else's look-up.
    """
    return len(text) > MAX_TOKEN_CHARS * max_tokens


class EmbedderBusy(Exception):
    """The embedder has too much to do, or does not move."""


@dataclass(frozen=True)
class _Running:
    task: asyncio.Task[Vector | None]
    started_s: float


class Embeddings:
    """Vectors on demand: remembered, computed once for all who ask, and bounded in number.

    An embedding goes on when nobody waits for it any more: it cannot be stopped, and its
    vector is of use to whoever asks next. So those that wait for a stuck embedder are
    counted here, and more are refused at once. From then on one text at a time is let
    through, until one has come back quickly.

    Args:
        embed: may raise or be slow.
        max_running: texts that may wait for the embedder.
        max_bytes: of the vectors that are remembered.
        stuck_s: an embedding that takes longer shows that the embedder is stuck.
    """

    def __init__(
        self,
        embed: EmbedText,
        *,
        max_running: int = 256,
        max_bytes: int = 4 << 20,
        stuck_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._embed = embed
        self._max_running = max_running
        self._stuck_s = stuck_s
        self._clock = clock
        self._is_slow = False
        # By digest of partition and text, because a prompt may be a megabyte long, and
        # because how quickly a vector comes must not tell what another tenant asked.
        # In the order of their starts.
        self._running: dict[str, _Running] = {}
        self._known: LRUCache[str, Vector] = LRUCache(max_bytes, getsizeof=_size_bytes)

    def known(self, digest: str) -> Vector | None:
        """The vector of a text that was embedded lately."""
        return self._known.get(digest)

    def begin(self, digest: str, text: str) -> asyncio.Task[Vector | None]:
        """The running computation of a vector; wait for it without cancelling it.

        Raises:
            EmbedderBusy: it is not begun.
        """
        running = self._running.get(digest)
        if running is not None:
            return running.task
        self._is_slow = self._is_slow or self.stuck_for_s > self._stuck_s
        if len(self._running) >= (1 if self._is_slow else self._max_running):
            raise EmbedderBusy(f"{len(self._running)} texts wait for the embedder")
        task = asyncio.create_task(self._compute(digest, text))
        self._running[digest] = _Running(task, self._clock())
        task.add_done_callback(_look_at)
        return task

    @property
    def stuck_for_s(self) -> float:
        """Age of the oldest computation; 0 without any."""
        oldest = next(iter(self._running.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest.started_s

    async def _compute(self, digest: str, text: str) -> Vector | None:
        try:
            vector = await self._embed(text)
        finally:
            running = self._running.pop(digest)
            self._is_slow = self._clock() - running.started_s > self._stuck_s
        if vector is not None and _size_bytes(vector) <= self._known.maxsize:
            self._known[digest] = vector
        return vector


def _size_bytes(vector: Vector) -> int:
    return vector.nbytes + VECTOR_OVERHEAD_BYTES


def _look_at(task: asyncio.Task[Vector | None]) -> None:
    """Takes note of a failure that nobody may have waited for."""
    if not task.cancelled():
        task.exception()
