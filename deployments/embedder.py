"""Texts to vectors, with sentence-transformers, on one pinned thread."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]


class Embedder:
    """Embeds batches of texts.

    Blocks: call it from a worker thread. One thread computes, because two
    under load were measured 25 times slower than one (OpenMP threads spin while
    a neighbour holds their core).
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        self._model = SentenceTransformer(
            str(folder), device=device, local_files_only=True, trust_remote_code=False
        )
        self._max_tokens = int(self._model.max_seq_length or 256)

    def embed(self, texts: list[str]) -> list[Vector | None]:
        """A unit-norm float32 vector of shape (D,) per text; None for one longer than the window.

        Past the window texts with opposite ends would get the same vector.
        """
        lengths = [len(self._model.tokenizer.encode(text)) for text in texts]
        fitting = [i for i, length in enumerate(lengths) if length <= self._max_tokens]
        vectors: list[Vector | None] = [None] * len(texts)
        if not fitting:
            return vectors
        rows = self._model.encode(
            [texts[i] for i in fitting],
            convert_to_numpy=True,
            normalize_embeddings=True,
            show_progress_bar=False,
            batch_size=32,
        )
        for i, row in zip(fitting, rows, strict=True):
            vectors[i] = np.ascontiguousarray(row, dtype=np.float32)
        return vectors
