"""Cuts the terms of a wording further, into what is compared one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cache.concepts import Lists
from cache.splitting import Term

_QUANTITY = re.compile(r"([£$€¥]?)([+-]?\d[\d.,:]*\d|\d)([a-zµ°%]{1,4}|%)?", re.IGNORECASE)
_COUNTED = re.compile(r"\d+(?:-[^\W\d_]+)+")
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)", re.IGNORECASE)
_CLOCK = ("am", "pm")


def prepared(terms: Sequence[Term], language: str) -> list[Term]:
    """Splits "23kg", "£50" and "6-year-old" into a number and words; lower-cases what is compared."""
    result: list[Term] = []
    for term in terms:
        if term.kind in ("number", "identifier"):
            result.extend(_quantity(term))
        elif term.kind == "word":
            if "'" in term.text:
                result.extend(_parts(term, language))
            elif term.text == (lowered := term.text.lower()):
                result.append(term)
            else:
                result.append(Term("word", lowered, term.shown))
        else:
            result.append(term)
    return result


def _quantity(term: Term) -> Iterator[Term]:
    text = term.text
    if _COUNTED.fullmatch(text):
        number, *words = text.split("-")
        yield Term("number", number, number)
        yield from (Term("word", word.lower(), word) for word in words)
        return
    if match := _QUANTITY.fullmatch(text):
        currency, number, unit = match.groups()
        plain = number.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", number) else number
        if unit and unit.lower() in _CLOCK:
            yield Term("number", plain + unit.lower(), term.shown)
            return
        yield Term("number", plain, number)
        for word in (currency, unit):
            if word:
                yield Term("word", word.lower() if word.islower() else word, word)
        return
    if ordinal := _ORDINAL.fullmatch(text):
        yield Term("number", ordinal[1] + "th", term.shown)
        return
    yield term


def _parts(term: Term, language: str) -> Iterator[Term]:
    text = term.text.lower()
    if language == "en" and text.endswith("'s") and len(text) > 2:
        yield Term("word", text[:-2], term.shown[:-2])
        yield Term("word", "'s", "'s")
    elif language == "en" and text.endswith("s'"):
        yield Term("word", text[:-1], term.shown[:-1])
        yield Term("word", "'s", "'s")
    else:
        yield Term("word", text, term.shown)


def segmented(terms: Sequence[Term], known: Lists) -> Iterator[Term]:
    """Cuts Chinese text at the longest known words, and into characters elsewhere."""
    words = {
        word for phrase in (*known.concepts, *known.markers, *known.negations) for word in phrase
    }
    words |= known.function | known.filler | known.senses.light | set(known.senses.persons)
    words |= {word for group in known.senses.opposite for word in group}
    for term in terms:
        if term.kind not in ("word", "identifier"):
            yield term
            continue
        for piece in re.findall(r"[\u4e00-\u9fff]+|[^\u4e00-\u9fff]+", term.text):
            if not "\u4e00" <= piece[0] <= "\u9fff":
                number = re.fullmatch(r"[+-]?\d[\d.,:]*", piece)
                yield Term("number" if number else term.kind, piece.lower(), piece)
                continue
            place = 0
            while place < len(piece):
                size = next(
                    (size for size in range(5, 1, -1) if piece[place : place + size] in words), 1
                )
                word = piece[place : place + size]
                yield Term("word", word, word)
                place += size


def with_small_beginnings(terms: Sequence[Term]) -> Iterator[Term]:
    """Takes away the capitals that only sentences begin with."""
    begins = True
    for term in terms:
        yield term._replace(shown=term.text) if begins and term.kind == "word" else term
        begins = term.kind == "mark" and term.text in ".!?¿¡"
