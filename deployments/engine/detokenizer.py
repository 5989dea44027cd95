"""Turns token ids into text as they arrive, one detokenizer per request.

The contract of every `Detokenizer`: the joined pieces equal decoding all ids at once, special
tokens skipped and no clean-up of spaces, code point by code point. Text once returned is never
taken back, half a character is never returned, and U+FFFD appears only where the final text has
it. Never fed with the prompt: a prompt that ends in the middle of a character would leak into the
answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

MAX_HELD_BYTE_TOKENS = 32


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that can no longer change."""
        ...

    def flush(self) -> str:
        """The rest of the text; an unfinished character becomes U+FFFD. Ends the sequence."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies, in which every token is a string of bytes.

    `pieces[id]` are the bytes of a token, empty for special tokens. Invalid UTF-8 is replaced as
    `String::from_utf8_lossy` does in tokenizers: one U+FFFD for each maximal invalid part. Holds
    back at most the three bytes of an unfinished character.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id >= len(self._pieces):  # the logits may be wider than the vocabulary
            return ""
        return self._decoder.decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other decoders: decodes a short window twice and returns the difference.

    The window starts at the tokens of the piece returned last, because most decoders treat the
    first token of a text differently (they strip its space), and what a token looks like depends on
    its left neighbour only.

    Args:
        decode: ids to text, special tokens already left out.
        shown_ids: tokens with text; all others (special tokens, ids the vocabulary lacks) are skipped.
        byte_ids: tokens such as `<0xE2>` that stand for one byte (byte fallback), with the byte. A
            run of them is decoded as a whole: one invalid byte turns every byte of the run into
            U+FFFD. So a run is held until it ends, or until it has `MAX_HELD_BYTE_TOKENS` tokens;
            from there on whole characters are returned as they complete, and an invalid byte costs
            only itself.
        holds_replacement: hold text that ends in U+FFFD, for decoders that show an unfinished
            character so.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        shown_ids: Container[int],
        byte_ids: dict[int, int] | None = None,
        holds_replacement: bool = False,
    ) -> None:
        self._decode = decode
        self._shown_ids = shown_ids
        self._byte_ids = byte_ids or {}
        self._holds_replacement = holds_replacement
        self._context: list[int] = []
        self._pending: list[int] = []
        self._long_run: codecs.IncrementalDecoder | None = None

    def push(self, token_id: int) -> str:
        if token_id not in self._shown_ids:
            return ""
        byte = self._byte_ids.get(token_id)
        if self._long_run is not None:
            if byte is not None:
                return self._long_run.decode(bytes([byte]))
            return self._end_long_run() + self.push(token_id)
        self._pending.append(token_id)
        if byte is None:
            return self._take(is_end=False)
        if self._num_trailing_bytes() < MAX_HELD_BYTE_TOKENS:
            return ""
        return self._begin_long_run()

    def flush(self) -> str:
        if self._long_run is not None:
            return self._end_long_run()
        return self._take(is_end=True)

    def _take(self, *, is_end: bool) -> str:
        """Decodes what is pending; keeps it pending when its text may still change."""
        if not self._pending:
            return ""
        known = self._decode(self._context)
        text = self._decode(self._context + self._pending)[len(known) :]
        if not text or (self._holds_replacement and not is_end and text.endswith("\ufffd")):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def _num_trailing_bytes(self) -> int:
        count = 0
        for token_id in reversed(self._pending):
            if token_id not in self._byte_ids:
                break
            count += 1
        return count

    def _begin_long_run(self) -> str:
        """Stops waiting for the end of the run at hand: returns its whole characters."""
        run = self._pending[-self._num_trailing_bytes() :]
        del self._pending[-len(run) :]
        text = self._take(is_end=True)
        # A byte token as context stands in for the run: the next token is not the first of the text.
        self._context, self._pending = run[-1:], []
        self._long_run = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return text + self._long_run.decode(bytes(self._byte_ids[i] for i in run))

    def _end_long_run(self) -> str:
        assert self._long_run is not None
        rest = self._long_run.decode(b"", final=True)
        self._long_run = None
        return rest
