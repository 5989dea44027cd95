"""Which English words exist, so that a slip of the pen can be told from another word.

A Bloom filter of a large word list (see `cache/data/README.md`): it knows every word of the
list, and takes one in a hundred others for a word too, in which case a slip stays a difference.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data" / "english_words.npy"
NUM_HASHES = 7
MIN_CHARS = 5
"""Shorter words have too many neighbours."""


class KnownWords:
    """A set of words that may claim too much.

    Args:
        bits: (N,) uint8; eight flags a byte.
    """

    def __init__(self, bits: NDArray[np.uint8]) -> None:
        self._bits = bits.tobytes()

    @classmethod
    def of(cls, words: list[str], *, bits_per_word: int = 10) -> KnownWords:
        """The set of these words."""
        num_bytes = max(1, len(words) * bits_per_word // 8)
        flags = bytearray(num_bytes)
        for word in words:
            for place in _places(word, num_bytes * 8):
                flags[place >> 3] |= 1 << (place & 7)
        return cls(np.frombuffer(bytes(flags), dtype=np.uint8))

    @property
    def bits(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._bits, dtype=np.uint8)

    def __contains__(self, word: str) -> bool:
        return all(
            self._bits[place >> 3] & (1 << (place & 7))
            for place in _places(word, len(self._bits) * 8)
        )


@cache
def english_words() -> KnownWords:
    """The shipped list."""
    return KnownWords(np.load(DATA, allow_pickle=False))


def is_slip(one: str, other: str, words: KnownWords) -> bool:
    """Whether one of two words is no word, and a single slip away from the other, which is.

    A slip leaves out, adds or replaces a letter, or swaps two neighbours; the first letter stays.
    """
    if min(len(one), len(other)) < MIN_CHARS - 1 or max(len(one), len(other)) < MIN_CHARS:
        return False
    if one[0] != other[0] or not (one.isalpha() and other.isalpha()):
        return False
    return _is_one_slip(one, other) and (one in words) != (other in words)


def _is_one_slip(one: str, other: str) -> bool:
    if abs(len(one) - len(other)) > 1:
        return False
    if len(one) > len(other):
        one, other = other, one
    start = next((i for i in range(len(one)) if one[i] != other[i]), len(one))
    if len(one) == len(other):
        swapped = one[:start] + one[start + 1 : start + 2] + one[start : start + 1]
        return one[start + 1 :] == other[start + 1 :] or swapped + one[start + 2 :] == other
    return len(other) == len(one) + 1 and one[start:] == other[start + 1 :]


def _places(word: str, num_bits: int) -> list[int]:
    digest = blake2b(word.encode(), digest_size=16).digest()
    first, second = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
    return [(first + i * second) % num_bits for i in range(NUM_HASHES)]
