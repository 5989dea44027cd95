"""A stored answer: bytes that only the caller understands, and what the cache must know of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One finished answer, ready to be replayed.

    `payload` is opaque and transport-neutral. Only answers that ended by
    themselves are stored, so `completion_tokens` is the length of the whole
    answer: a request with a lower limit must not get it.

    Raises:
        ValueError: `completion_tokens` is negative.
    """

    payload: bytes
    completion_tokens: int
    model_revision: str

    def __post_init__(self) -> None:
        if self.completion_tokens < 0:
            raise ValueError(f"completion_tokens is {self.completion_tokens}, the least is 0")

    @property
    def size_bytes(self) -> int:
        return len(self.payload) + len(self.model_revision)
