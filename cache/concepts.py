"""What the words of a language stand for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from cache.languages import BY_LANGUAGE
from cache.senses import Senses
from cache.stems import stem


class Lists(NamedTuple):
    """The word lists of one language, by the stems that they match."""

    senses: Senses
    concepts: Mapping[tuple[str, ...], str]
    markers: Mapping[tuple[str, ...], str]
    negations: frozenset[tuple[str, ...]]
    openings: frozenset[str]
    function: frozenset[str]
    filler: frozenset[str]
    light: frozenset[str]


@cache
def lists_of(language: str) -> Lists:
    known = BY_LANGUAGE[language]

    def key(phrase: str) -> tuple[str, ...]:
        words = phrase.split()
        return tuple(stem(word, language) for word in words)

    concepts: dict[tuple[str, ...], str] = {}
    for group in known.same:
        # A word on two lines keeps its first sense; lines that share a word do not become one.
        name = concepts.get(key(group[0]), group[0])
        for member in group:
            concepts.setdefault(key(member), name)
    markers: dict[tuple[str, ...], str] = {}
    for group in known.markers:
        for member in group:
            markers.setdefault(tuple(member.split()), group[0])
    negations = frozenset((word,) for word in known.negation)
    phrases = [*concepts, *markers]
    return Lists(
        known,
        concepts,
        markers,
        negations,
        frozenset(phrase[0] for phrase in phrases),
        known.function,
        known.filler,
        frozenset(stem(word, language) for word in known.light),
    )


def concept_of(word: str, language: str) -> str:
    """The concept that a word of a list stands for."""
    stems = tuple(stem(part, language) for part in word.split())
    return lists_of(language).concepts.get(stems, " ".join(stems))
