"""What is known of a language: closed word lists that `cache.reading` reads prompts with, lower case.

`same` merges wordings that ask for the same thing almost everywhere, so a line must be dull
rather than clever: it is compared with its inflections evened out, and what it merges is still
scored and checked. `opposite` and `kinds` keep apart what must never be merged; `function`,
`filler` and `light` words add nothing that an answer depends on (one may be
exchanged for another only within a group of `interchangeable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def groups(text: str) -> tuple[tuple[str, ...], ...]:
    """One group a line, its members apart by commas."""
    return tuple(
        tuple(member.strip() for member in line.split(","))
        for line in text.strip().splitlines()
        if line.strip()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Senses:
    """What is known of one language.

    `markers` are words that turn an answer: each group counts as one marker, and two prompts must
    hold the same ones. `persons` are pronouns by whom they stand for. `relations` are
    prepositions, which tell the part that the following words play. `movable` are concepts of verbs
    that stand second or last by rule, so that their place tells nothing.
    """

    telltale: frozenset[str]
    function: frozenset[str]
    filler: frozenset[str] = frozenset()
    light: frozenset[str] = frozenset()
    negation: frozenset[str] = frozenset()
    markers: tuple[tuple[str, ...], ...] = ()
    persons: Mapping[str, str] = field(default_factory=dict)
    relations: frozenset[str] = frozenset()
    same: tuple[tuple[str, ...], ...] = ()
    opposite: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[frozenset[str], ...] = ()
    negative_prefixes: tuple[str, ...] = ()
    interchangeable: tuple[frozenset[str], ...] = ()
    movable: frozenset[str] = frozenset()
