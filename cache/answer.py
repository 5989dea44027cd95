"""A stored answer: bytes that only the caller understands, and what the cache must know of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One finished answer, ready to be replayed.

    `payload` is opaque and transport-neutral. `completion_tokens` is its length: a
    request with a lower limit must not get it. `is_truncated` says that the token
    limit cut it: only an equal request with the same limit may get it, since it
    would be cut there too.

    Raises:
        ValueError: `completion_tokens` is negative.
    """

    payload: bytes
    completion_tokens: int
    model_revision: str
    is_truncated: bool = False
    _checksum: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_checksum", zlib.crc32(self.payload))
        if self.completion_tokens < 0:
            raise ValueError(f"completion_tokens is {self.completion_tokens}, the least is 0")

    @property
    def is_intact(self) -> bool:
        """Whether the payload is still what was stored."""
        return zlib.crc32(self.payload) == self._checksum

    @property
    def size_bytes(self) -> int:
        return len(self.payload) + len(self.model_revision)
