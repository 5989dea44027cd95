"""Prompts as read, each part once: of the asked one in its look-up, of stored ones in a memo."""

from __future__ import annotations

from cachetools import LRUCache

from cache.key import PromptKey
from cache.reading import Reading, understand
from cache.wording import Wording, read

MAX_MEMO_BYTES = 32 * 2**20
PROMPT_BYTES = 1024
BYTES_PER_CHAR = 64
BYTES_PER_FOREIGN_CHAR = 200
"""What a prompt that is read in full takes; outside of ASCII each character may be a word.
Measured: at most 0.95 of the sum, and 0.7 for questions of an everyday length."""


class Prompt:
    """A text with its wording and its reading, which are made when first asked for."""

    __slots__ = ("_reading", "_row", "_wording", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._wording: Wording | None = None
        self._reading: Reading | None = None
        self._row: tuple[str, ...] | None = None

    @property
    def wording(self) -> Wording:
        if self._wording is None:
            self._wording = read(self.text)
        return self._wording

    @property
    def row(self) -> tuple[str, ...]:
        """What of the wording is compared."""
        if self._row is None:
            self._row = tuple([term.text for term in self.wording.terms])
        return self._row

    @property
    def reading(self) -> Reading:
        if self._reading is None:
            self._reading = understand(self.text, self.wording)
        return self._reading


class PromptMemo:
    """Stored prompts that look-ups met lately, bounded by bytes; the least lately met leaves.

    By partition too: else the time of a look-up would tell what other tenants ask.
    """

    def __init__(self, max_bytes: int = MAX_MEMO_BYTES) -> None:
        self._prompts: LRUCache[tuple[str, str], Prompt] = LRUCache(max_bytes, _size)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def bytes(self) -> int:
        return int(self._prompts.currsize)

    def of(self, key: PromptKey) -> Prompt:
        """The prompt of a stored question."""
        own = (key.partition, key.text)
        try:
            return self._prompts[own]
        except KeyError:
            prompt = Prompt(key.text)
        if self._prompts.getsizeof(prompt) <= self._prompts.maxsize:
            self._prompts[own] = prompt
        return prompt


def _size(prompt: Prompt) -> int:
    char_bytes = BYTES_PER_CHAR if prompt.text.isascii() else BYTES_PER_FOREIGN_CHAR
    return PROMPT_BYTES + char_bytes * len(prompt.text)
