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
    openings: Mapping[str, int]
    """The words that phrases of several words begin with, and how long the longest of these is."""
    function: frozenset[str]
    filler: frozenset[str]
    light: frozenset[str]
    plain_function: frozenset[str]
    """Function and filler words that are nothing else, nor begin a phrase."""
    special: frozenset[str]
    """All that a reading treats in another way than as the name of something."""
    stems: Mapping[str, str]
    """Of the words on the lists, which are most of what prompts hold. What was asked before is not
    remembered: the time would tell others of it."""


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
    openings: dict[str, int] = {}
    for phrase in (*concepts, *markers):
        if len(phrase) > 1:
            openings[phrase[0]] = max(len(phrase), openings.get(phrase[0], 0))
    turning = known.negation | known.persons.keys() | known.relations | {"or", "'s", "how"}
    turning |= {phrase[0] for phrase in markers} | openings.keys()
    function = known.function | known.filler
    return Lists(
        known,
        concepts,
        markers,
        negations,
        openings,
        known.function,
        known.filler,
        frozenset(stem(word, language) for word in known.light),
        frozenset(function - turning),
        frozenset(function | turning),
        {word: stem(word, language) for word in _words_of(known)},
    )


def _words_of(known: Senses) -> set[str]:
    """All words that the lists of a language hold."""
    phrases = [member for group in (*known.same, *known.markers, *known.opposite, *known.kinds)
               for member in group]  # fmt: skip
    words = {word for phrase in phrases for word in phrase.split()}
    return words | known.function | known.filler | known.light | known.persons.keys()


def concept_of(word: str, language: str) -> str:
    """The concept that a word of a list stands for."""
    stems = tuple(stem(part, language) for part in word.split())
    return lists_of(language).concepts.get(stems, " ".join(stems))
