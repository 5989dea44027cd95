"""Pairs the words of two readings off: what both name, what differs by a slip, what one has alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from cache.concepts import concept_of
from cache.languages import BY_LANGUAGE
from cache.reading import Reading, Token
from cache.spelling import english_words, is_slip


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the tokens of two readings meet.

    `shared` holds pairs of equal concepts, in the order of the first reading; `slips` pairs that
    differ by a slip of the pen; the rest found no counterpart, light words apart.
    """

    shared: tuple[tuple[Token, Token], ...]
    num_slips: int
    num_respelled: int
    only: tuple[tuple[Token, ...], tuple[Token, ...]]
    light: tuple[tuple[Token, ...], tuple[Token, ...]]


def align(first: Reading, second: Reading) -> Alignment:
    """Pairs the tokens of two readings off."""
    places: dict[str, list[Token]] = {}
    for token in second.tokens:
        places.setdefault(token.concept, []).append(token)
    shared: list[tuple[Token, Token]] = []
    rest: list[Token] = []
    for token in first.tokens:
        twins = places.get(token.concept)
        if twins:
            shared.append((token, twins.pop(0)))
        else:
            rest.append(token)
    taken = {id(twin) for _, twin in shared}
    others = [token for token in second.tokens if id(token) not in taken]
    joined = _joined(rest, others)
    slips = _slips(rest, others) if first.language == second.language == "en" else []
    shared = sorted([*shared, *joined, *slips], key=lambda pair: pair[0].place)
    light = [[token for token in side if token.is_light] for side in (rest, others)]
    if not _are_interchangeable(light[0], light[1], first.language or ""):
        light = [[], []]
    only = [
        tuple([token for token in side if token not in spared] if spared else side)
        for side, spared in zip((rest, others), light, strict=True)
    ]
    return Alignment(
        tuple(shared),
        len(slips),
        len(joined),
        (only[0], only[1]),
        (tuple(light[0]), tuple(light[1])),
    )


def _are_interchangeable(one: list[Token], other: list[Token], language: str) -> bool:
    """Whether light words on both sides may stand for each other; alone they add nothing."""
    if not one or not other:
        return True
    concepts = {token.concept for token in (*one, *other)}
    return any(concepts <= group for group in _interchangeable(language))


@cache
def _interchangeable(language: str) -> tuple[frozenset[str], ...]:
    known = BY_LANGUAGE.get(language)
    groups = known.interchangeable if known else ()
    return tuple(frozenset(concept_of(word, language) for word in group) for group in groups)


def _joined(rest: list[Token], others: list[Token]) -> list[tuple[Token, Token]]:
    """Takes out words that one side writes apart: "smart phone" and "smartphone"."""
    ours, theirs = [_letters(token) for token in rest], [_letters(token) for token in others]
    if _runs(theirs).isdisjoint(ours) and _runs(ours).isdisjoint(theirs):
        return []
    found: list[tuple[Token, Token]] = []
    for one, other, is_turned in ((rest, others, False), (others, rest, True)):
        for token in list(one):
            letters = _letters(token)
            for size in (1, 2, 3):
                run = next(
                    (
                        other[i : i + size]
                        for i in range(len(other) - size + 1)
                        if "".join(map(_letters, other[i : i + size])) == letters
                    ),
                    None,
                )
                if run and token.kind == "word" and all(t.kind == "word" for t in run):
                    one.remove(token)
                    for member in run:
                        other.remove(member)
                    found.append((run[0], token) if is_turned else (token, run[0]))
                    break
    return found


def _runs(letters: list[str]) -> set[str]:
    """What up to three neighbours spell together."""
    pairs = {one + two for one, two in pairwise(letters)}
    threes = {
        one + two + three
        for one, two, three in zip(letters, letters[1:], letters[2:], strict=False)
    }
    return pairs.union(threes, letters)


def _letters(token: Token) -> str:
    return token.shown.lower().replace("-", "").replace("'", "")


def _slips(rest: list[Token], others: list[Token]) -> list[tuple[Token, Token]]:
    words = english_words()
    ours, theirs = _by_first_letter(rest), _by_first_letter(others)
    if not any(
        is_slip(one, other, words)
        for first in ours.keys() & theirs.keys()
        for one in ours[first]
        for other in theirs[first]
    ):
        return []
    found: list[tuple[Token, Token]] = []
    for token in list(rest):
        for other in others:
            if token.kind != "word" or other.kind != "word" or token.is_name or other.is_name:
                continue
            if is_slip(token.shown.lower(), other.shown.lower(), words):
                rest.remove(token)
                others.remove(other)
                found.append((token, other))
                break
    return found


def _by_first_letter(tokens: list[Token]) -> dict[str, list[str]]:
    """The words among the tokens that may be slips, or what was meant."""
    result: dict[str, list[str]] = {}
    for token in tokens:
        if token.kind == "word" and not token.is_name:
            word = token.shown.lower()
            result.setdefault(word[:1], []).append(word)
    return result
