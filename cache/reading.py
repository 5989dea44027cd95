"""Reads a prompt for what it asks: the things it names, in order, and the words that turn it.

Where `cache.wording` keeps every word, a reading evens out what the word lists of
`cache.senses` say is one and the same (inflections, synonyms, passives, possessives) and drops
function words, so that paraphrases may meet; `cache.guards` tells which differences forbid it.
A prompt of no known language, or one whose letters matter, has a reading without a language.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cache.asks import COUNTS, ask_of, foreign_ask_of
from cache.concepts import Lists, lists_of
from cache.english_grammar import (
    AUXILIARIES,
    WH,
    in_active_voice,
    with_opinion_last,
    with_particles,
)
from cache.languages import BY_LANGUAGE, OTHER_TELLTALE
from cache.splitting import Term
from cache.stems import IRREGULAR, stem
from cache.terms import prepared, segmented, with_small_beginnings
from cache.wording import Wording, read

Kind = Literal["word", "number", "identifier", "quote"]

MAX_PHRASE = 6


class Token(NamedTuple):
    """Something that is named.

    `concept` is what is compared, `shown` is as written, `role` is the preposition before it, and
    `place` is where it stood among the terms of the prompt.
    """

    concept: str
    shown: str
    kind: Kind
    role: str
    place: int
    is_name: bool
    is_light: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt as understood.

    `markers` are the words that turn an answer, sorted; `persons` tell who does what to whom, in
    order; `ask` is the kind of question. `numbers` and `literals` are the concepts of the tokens of
    these kinds, identifiers and quotations, in order.
    """

    wording: Wording
    language: str | None
    tokens: tuple[Token, ...]
    negations: int
    markers: tuple[str, ...]
    persons: tuple[str, ...]
    ask: str
    letters: str
    numbers: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()


def understand(prompt: str, plain: Wording | None = None) -> Reading:
    """The reading of a prompt; `plain` is its wording, where that is known."""
    plain = plain or read(prompt)
    language = None if plain.is_literal else _language(prompt, plain)
    if language == "en" and not plain.is_english:
        plain = read(prompt, is_english=True)
    letters = " ".join(prompt.lower().split())
    if language is None or plain.is_literal:
        return Reading(plain, None, (), 0, (), (), "", letters)
    known = lists_of(language)
    terms = prepared(plain.terms, language)
    if language == "zh":
        terms = list(segmented(terms, known))
    if language == "es":
        terms = list(with_small_beginnings(terms))
    ask = ask_of(terms, plain.is_question) if language == "en" else foreign_ask_of(terms, language)
    if language == "en":
        terms = in_active_voice(with_opinion_last(with_particles(terms)))
    return _Reader(known, language, plain.has_case).read(plain, terms, ask, letters)


def _language(prompt: str, wording: Wording) -> str | None:
    if not prompt.isascii() and _HAN.search(prompt):
        return None if _KANA_OR_HANGUL.search(prompt) else "zh"
    words = {term.text.lower() for term in wording.terms if term.kind == "word"}
    if "¿" in prompt or "¡" in prompt:
        words |= {"¿"}
    counts = {language: len(words & telltale) for language, telltale in _TELLTALES.items()}
    counts["es"] += "¿" in words
    other = len(words & OTHER_TELLTALE)
    best = max(counts, key=lambda language: counts[language])
    rest = max(count for language, count in counts.items() if language != best)
    if wording.is_english:
        return "en" if counts["en"] >= max(other, *counts.values()) else None
    return best if counts[best] > max(rest, other) else None


_HAN = re.compile("[\u4e00-\u9fff]")
_KANA_OR_HANGUL = re.compile("[\u3040-\u30ff\uac00-\ud7a3]")
_TELLTALES = {
    language: known.telltale for language, known in BY_LANGUAGE.items() if language != "zh"
}


class _Reader:
    """Walks over the terms once; holds what is known so far."""

    def __init__(self, known: Lists, language: str, has_case: bool) -> None:
        self._known = known
        self._language = language
        self._may_name = has_case and language not in ("de", "zh")
        self._tokens: list[Token] = []
        self._markers: list[str] = []
        self._persons: list[str] = []
        self._negations = 0
        self._role = ""

    def read(self, wording: Wording, terms: list[Term], ask: str, letters: str) -> Reading:
        known, language = self._known, self._language
        texts = [term.text for term in terms]
        stems = [
            known.stems.get(term.text) or stem(term.text, language)
            if term.kind == "word"
            else term.text
            for term in terms
        ]
        place = 0
        while place < len(terms):
            base = stems[place]
            is_plain = terms[place].kind == "word" and base not in known.openings
            if not is_plain or not self._take_plain(terms[place], base, place):
                place += self._take(terms, texts, stems, place)
            else:
                place += 1
        if self._language == "en":
            self._markers.extend(_tense(texts, ask))
            self._add_cost(texts)
        tokens = _with_pairs_in_order(self._tokens, texts)
        return Reading(
            wording,
            self._language,
            tuple(tokens),
            self._negations,
            tuple(sorted(self._markers)),
            tuple(self._persons),
            ask,
            letters,
            tuple(token.concept for token in tokens if token.kind == "number"),
            tuple(token.concept for token in tokens if token.kind in ("identifier", "quote")),
        )

    def _take_plain(self, term: Term, base: str, place: int) -> bool:
        """Reads a word that begins no phrase, if it is of no other kind: the short way of `_take`."""
        known, text = self._known, term.text
        if self._is_name(term):
            return False
        if text in known.plain_function:
            if self._language == "en" and text in _ASKING:
                self._role = ""
            return True
        if text in known.special:
            return False
        concept = known.concepts.get((base,), base)
        is_light = base in known.light
        self._tokens.append(Token(concept, term.shown, "word", self._role, place, False, is_light))
        return True

    def _take(self, terms: list[Term], texts: list[str], stems: list[str], place: int) -> int:
        """Reads what stands at `place`; returns how many terms that were."""
        known, term = self._known, terms[place]
        if term.kind == "mark":
            self._role = ""
            return 1
        if term.kind != "word":
            self._add(term.text, term, place, is_name=False)
            return 1
        text = texts[place]
        longest = max(known.openings.get(stems[place], 1), known.openings.get(text, 1))
        for size in range(min(MAX_PHRASE, longest, len(terms) - place), 0, -1):
            marker = known.markers.get(tuple(texts[place : place + size]))
            if marker and not self._is_name(term):
                self._mark(marker)
                return size
            concept = known.concepts.get(tuple(stems[place : place + size])) if size > 1 else None
            if concept and all(t.kind == "word" for t in terms[place : place + size]):
                shown = " ".join(t.shown for t in terms[place : place + size])
                self._add(concept, term._replace(shown=shown), place, is_name=False)
                return size
        if text == "how" and self._language == "en" and texts[place + 1 : place + 2]:
            # Told by the kind of question.
            return 2 if texts[place + 1] in COUNTS | {"come"} else 1
        self._take_word(terms, texts, stems[place], place)
        return 1

    def _take_word(self, terms: list[Term], texts: list[str], base: str, place: int) -> None:
        known, term, text = self._known, terms[place], texts[place]
        is_name = self._is_name(term)
        if (text,) in known.negations:
            self._negations += 1
        elif text == "or":
            self._mark("or")
        elif is_name and len(text) > 1 and term.shown.isupper():
            # "US" is not "us".
            self._add(text, term, place, is_name=True)
        elif text == "'s":
            if self._tokens and self._tokens[-1].place == place - 1:
                self._tokens[-1] = self._tokens[-1]._replace(role="of")
        elif person := known.senses.persons.get(text):
            if self._language == "de" and place and term.shown in ("Sie", "Ihr", "Ihre", "Ihnen"):
                person = "you"
            self._persons.append(person)
            if person.endswith("does") or person == "you":
                self._role = ""
        elif is_name:
            self._add(text, term, place, is_name=True)
        elif text in known.senses.relations and self._is_particle(terms, place):
            self._add(text, term, place, is_name=False)
        elif text in known.senses.relations and not self._is_infinitive(texts, place):
            self._role = text
        elif text in known.filler or text in known.function:
            if self._language == "en" and text in _ASKING:
                self._role = ""
        else:
            self._add(known.concepts.get((base,), base), term, place, is_name=False, base=base)

    def _add_cost(self, texts: list[str]) -> None:
        """ "How much is it?" asks what it costs."""
        place = next(
            (i for i in range(len(texts) - 2) if texts[i : i + 2] == ["how", "much"]), None
        )
        if place is None or texts[place + 2] not in AUXILIARIES | {"for"}:
            return
        if {token.concept for token in self._tokens}.isdisjoint(_MEASURES):
            end = Term("word", "cost", "cost")
            self._role = ""
            self._add("cost", end, len(texts), is_name=False)

    def _is_particle(self, terms: list[Term], place: int) -> bool:
        """Whether a preposition ends its clause: "is it on", "Ist die Tür zu?"."""
        return place + 1 == len(terms) or terms[place + 1].kind == "mark"

    def _is_infinitive(self, texts: list[str], place: int) -> bool:
        before = texts[place - 1] if place else ""
        return texts[place] == "to" and before in _BEFORE_INFINITIVE

    def _is_name(self, term: Term) -> bool:
        return self._may_name and term.shown[:1].isupper() and term.text != "i"

    def _mark(self, marker: str) -> None:
        self._markers.append(marker)
        if marker in _RELATING:
            self._role = marker

    def _add(self, concept: str, term: Term, place: int, *, is_name: bool, base: str = "") -> None:
        kind: Kind = "word" if term.kind == "mark" else term.kind
        # "Abbey Road" is not Abbey Street, but "ATM" is a cash machine.
        if is_name and not (term.shown.isalpha() and term.shown.istitle()):
            concept = self._known.concepts.get((stem(concept, self._language),), concept)
        is_light = bool(base) and base in self._known.light and not is_name
        self._tokens.append(Token(concept, term.shown, kind, self._role, place, is_name, is_light))


_ASKING = AUXILIARIES | WH
_MEASURES = frozenset({"cost", "weigh", "weight", "pay", "owe", "spend", "earn", "need", "charg"})
_PAST = frozenset({"was", "were", "did", "had"})


def _tense(texts: list[str], ask: str) -> Iterator[str]:
    """Markers of the time and mood that auxiliaries give a question."""
    if not _PAST.isdisjoint(texts) or (AUXILIARIES.isdisjoint(texts) and _is_past(texts, ask)):
        yield "past"
    if "will" in texts and ask != "when":
        yield "future"
    if texts[:1] == ["would"]:
        yield "would"
    if ask in ("whether", "why") and not {"should", "ought"}.isdisjoint(texts):
        yield "should"


def _is_past(texts: list[str], ask: str) -> bool:
    return ask in ("who", "what") and any(
        text in IRREGULAR or text.endswith("ed")
        for text in texts[1:3]
        if text not in ("need", "speed")
    )


_BEFORE_INFINITIVE = frozenset({"how", "need", "needs", "want", "like", "able", "way", "possible",
                                "going", "trying", "allowed", "steps", "process"})  # fmt: skip
_RELATING = frozenset({"before", "after", "since", "until", "during", "over", "under", "between",
                       "against", "within", "out of", "near", "only"})  # fmt: skip


def _with_pairs_in_order(tokens: list[Token], texts: list[str]) -> list[Token]:
    """ "an educator and an executive" as "an executive and an educator" would be read.

    Only where both sides are one plain word, and nothing follows that could belong to one.
    """
    if "and" not in texts and "or" not in texts:
        return tokens
    places = {token.place for token in tokens}
    result = list(tokens)
    for place, text in enumerate(texts):
        if text not in ("and", "or"):
            continue
        left = next((i for i, t in enumerate(result) if t.place == place - 1), None)
        if left is None or left + 1 >= len(result):
            continue
        one, other = result[left], result[left + 1]
        gap = set(range(place + 1, other.place))
        stands_alone = {one.place - 1, other.place + 1}.isdisjoint(places)
        is_plain = one.kind == other.kind == "word" and all(
            texts[i] in ("a", "an", "the") for i in gap
        )
        if stands_alone and is_plain and other.concept < one.concept:
            result[left] = other._replace(role=one.role, place=one.place)
            result[left + 1] = one._replace(role=other.role, place=other.place)
    return result
