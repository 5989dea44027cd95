"""Holds text back until what the reader sees as one character is whole.

A piece of an answer may leave once its end is a grapheme cluster boundary whatever
comes next: UAX #29, extended clusters, by the `\\X` of the `regex` library. Almost any
cluster can be gone on with (a combining mark may follow a letter), so its end is known
when the first code point behind it is: a piece waits for the next one. Pieces are
never cut, only joined. Knows nothing of time: who holds text for too long flushes.
"""

from __future__ import annotations

import regex

from protocol.token_log import TokenDelta

MAX_OPEN_CODE_POINTS = 64
"""A cluster that is longer is let go unfinished: text may stack marks without end."""
_SCAN_CODE_POINTS = 128
"""`\\X` looks back over a whole run of flags at each of them, so long text is scanned in parts."""

_CLUSTER = regex.compile(r"\X")


class GraphemeGate:
    """Lets the deltas of one answer through at cluster boundaries, in order.

    Its state is the open cluster and the deltas that end in it: at most one cluster is
    held back, with whatever stands before it in the same delta. A delta without text
    only completes tokens; it joins the next one that has text, or the flush.
    """

    def __init__(self) -> None:
        self._tail = ""
        """The last cluster, from its start, held or gone: it decides how the text goes on."""
        self._held: list[TokenDelta] = []
        self._textless: list[TokenDelta] = []

    @property
    def is_holding(self) -> bool:
        """Whether a flush would let something out."""
        return bool(self._held or self._textless)

    def push(self, delta: TokenDelta) -> list[TokenDelta]:
        """Takes the next delta; returns what may go out now, at most two deltas.

        One that several deltas were joined to has the `seq` of the last of them.
        """
        text, tail = delta.text, self._tail
        if not text:
            self._textless.append(delta)
            return []
        out: list[TokenDelta] = []
        if _is_boundary(tail, text[0]):
            tail = ""
            if self._held:
                out.append(_join(self._held))
                self._held = []
        self._tail = tail = _last_cluster(tail, text)
        if self._textless:
            self._held += self._textless
            self._textless = []
        self._held.append(delta)
        # Nothing joins an ASCII control but a line feed a carriage return: it ends at once.
        if len(tail) > MAX_OPEN_CODE_POINTS or (tail < " " and tail != "\r"):
            out.append(_join(self._held))
            self._held = []
        return out

    def flush(self) -> list[TokenDelta]:
        """Lets out what is held, at the end of the answer or because it was held for too long.

        The answer may go on behind it, then perhaps inside the cluster.
        """
        held = self._held + self._textless
        self._held, self._textless = [], []
        return [_join(held)] if held else []


def _is_boundary(tail: str, following: str) -> bool:
    """Whether the cluster `tail` ends before the code point `following`."""
    if tail.isascii() and following.isascii():
        return tail != "\r" or following != "\n"
    cluster = _CLUSTER.match(tail + following)
    return cluster is not None and cluster.end() == len(tail)


def _last_cluster(tail: str, text: str) -> str:
    """The last cluster of `tail + text`, `tail` being one; of a very long one only its end."""
    if text[-1].isascii():
        # Whether something joins an ASCII character does not depend on what stands before it.
        return text[-1]
    for start in range(0, len(text), _SCAN_CODE_POINTS):
        part = tail + text[start : start + _SCAN_CODE_POINTS]
        tail = _CLUSTER.findall(part)[-1][-MAX_OPEN_CODE_POINTS - 1 :]
    return tail


def _join(deltas: list[TokenDelta]) -> TokenDelta:
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [each.logprobs for each in deltas if each.logprobs is not None]
    return TokenDelta(
        deltas[-1].seq,
        "".join(each.text for each in deltas),
        tuple(token_id for each in deltas for token_id in each.token_ids),
        tuple(entry for entries in logprobs for entry in entries) if logprobs else None,
    )
