"""Splits a prompt into terms: words, numbers, identifiers, quotations and marks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from cache import lexicon

Kind = Literal["word", "number", "identifier", "quote", "mark"]

SENTENCE_MARKS = ",;:.!?…。，、；：！？"
OPENING, CLOSING = "([{¿¡", ")]}"


class Term(NamedTuple):
    """`text` is what is compared; `shown` is as written, for capitals and reasons."""

    kind: Kind
    text: str
    shown: str


GLUE = Term("mark", "⁀", "")
"""Stands where a quotation and what follows are written without a space."""

_OPENER = re.compile(r"`+|[\"“«„「'‘]")
_CLOSER_OF = {"“": "”", "«": "»", "„": "“", "「": "」", "‘": "’"}
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*'?")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:[.,:/][0-9]+)*")
AMOUNTS = lexicon.UNITS_OF_NUMBERS.keys() | lexicon.TENS_OF_NUMBERS.keys()
"""Words for numbers."""
_PLAIN_MARKS = frozenset(SENTENCE_MARKS) - {"!"}


def split(prompt: str) -> list[Term]:
    """The terms of a prompt, in order; nothing is left out."""
    terms: list[Term] = []
    end = 0
    for start, stop in _quoted_spans(prompt):
        terms.extend(_split_chunks(prompt[end:start]))
        quoted = prompt[start:stop]
        text = quoted if quoted[0] == "`" else f'"{quoted[1:-1]}"'
        terms.append(Term("quote", text, quoted))
        end = stop
        if end < len(prompt) and not prompt[end].isspace() and prompt[end] not in SENTENCE_MARKS:
            terms.append(GLUE)
    terms.extend(_split_chunks(prompt[end:]))
    return terms


def _quoted_spans(prompt: str) -> Iterator[tuple[int, int]]:
    """Code spans and quotations as (start, stop), from left to right, in linear time."""
    unclosed: set[str] = set()
    place = 0
    while opener := _OPENER.search(prompt, place):
        mark = opener.group()
        closer = _CLOSER_OF.get(mark, mark)
        stop = -1
        # A closer that was not found once is not found further on either.
        if closer not in unclosed and (mark != "'" or _opens_quote(prompt, opener.start())):
            stop = prompt.find(closer, opener.end())
            if stop < 0:
                unclosed.add(closer)
        if stop < 0 or (mark == "'" and not _closes_quote(prompt, stop)):
            place = opener.end()
            continue
        place = stop + len(closer)
        yield opener.start(), place


def _opens_quote(prompt: str, place: int) -> bool:
    return place == 0 or prompt[place - 1].isspace()


def _closes_quote(prompt: str, place: int) -> bool:
    after = prompt[place + 1 : place + 2]
    return not after or after.isspace() or after in SENTENCE_MARKS


def _split_chunks(text: str) -> list[Term]:
    """Splits what stands between spaces, plain words with at most one mark the short way."""
    terms: list[Term] = []
    for chunk in text.split():
        last = chunk[-1]
        word = chunk[:-1] if last in _PLAIN_MARKS else chunk
        if word.isalpha() and (word.islower() or word.istitle() or word.isupper()):
            terms.append(Term("word", word, word))
            if word is not chunk:
                terms.append(Term("mark", last, last))
        else:
            terms.extend(_split_chunk(chunk))
    return terms


def _split_chunk(chunk: str) -> Iterator[Term]:
    """Splits what stood between spaces into opening brackets, a core and closing marks."""
    if chunk.isalpha():
        yield _core(chunk)
        return
    if all(character in SENTENCE_MARKS for character in chunk):
        # A mark on its own may be what the prompt is about ("??"), unless it only asks.
        kind: Kind = "mark" if chunk in ("?", "?!") else "identifier"
        yield Term(kind, chunk, chunk)
        return
    start, end = 0, len(chunk)
    while start < end and chunk[start] in OPENING:
        yield Term("mark", chunk[start], chunk[start])
        start += 1
    after: list[Term] = []
    while end > start and _is_closing(chunk, start, end):
        end -= 1
        after.append(Term("mark", chunk[end], chunk[end]))
    if start < end:
        yield _core(chunk[start:end])
    yield from reversed(after)


def _is_closing(chunk: str, start: int, end: int) -> bool:
    mark = chunk[end - 1]
    if mark in CLOSING:
        return OPENING[CLOSING.index(mark)] not in chunk[start:end]
    is_factorial = mark == "!" and _is_amount(chunk[start:end].rstrip("!"))
    return mark in SENTENCE_MARKS and not is_factorial


def _is_amount(text: str) -> bool:
    """Whether a "!" after it makes a factorial: "5!", "n!", "(n+1)!", "five!"."""
    return len(text) == 1 or text[-1:].isdigit() or text[-1:] in CLOSING or text in AMOUNTS


def _core(chunk: str) -> Term:
    text = chunk.replace("’", "'")
    if _WORD.fullmatch(text) and not _is_camel(text):
        return Term("word", text, text)
    if _NUMBER.fullmatch(text):
        return Term("number", text, chunk)
    return Term("identifier", chunk, chunk)


def _is_camel(word: str) -> bool:
    if word.islower() or word.isupper() or word.istitle():
        return False
    return "-" not in word and "'" not in word and not word[1:].islower()
