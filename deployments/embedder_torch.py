"""Any sentence-transformers model, on torch: slower to load and to compute than OpenVINO's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from deployments.embedder import Vector, is_hopelessly_long


class TorchEmbedder:
    """Embeds batches of texts; blocks, so call it from a worker thread.

    One thread computes, because two under load were measured 25 times slower
    than one (OpenMP threads spin while a neighbour holds their core).
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
        """A unit-norm float32 vector of shape (D,) per text; None for one longer than the window."""
        fitting = [i for i, text in enumerate(texts) if self._fits(text)]
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

    def _fits(self, text: str) -> bool:
        if is_hopelessly_long(text, self._max_tokens):
            return False
        return len(self._model.tokenizer.encode(text)) <= self._max_tokens
