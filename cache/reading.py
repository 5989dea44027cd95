"""Reads a prompt for what it asks: the things it names, in order, and the words that turn it.

Where `cache.wording` keeps every word, a reading evens out what the word lists of
`cache.senses` say is one and the same (inflections, synonyms, passives, possessives) and drops
function words, so that paraphrases may meet; `cache.guards` tells which differences forbid it.
A prompt of no known language, or one whose letters matter, has a reading without a language.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from cache import lexicon, senses
from cache.wording import Term, Wording, read

Kind = Literal["word", "number", "identifier", "quote"]

MAX_PHRASE = 6
MAX_PARTICLE_GAP = 5
"""Words between a verb and its particle: "turn my water supply on"."""


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
    order; `ask` is the kind of question.
    """

    wording: Wording
    language: str | None
    tokens: tuple[Token, ...]
    negations: int
    markers: tuple[str, ...]
    persons: tuple[str, ...]
    ask: str
    letters: str


def understand(prompt: str) -> Reading:
    """The reading of a prompt."""
    plain = read(prompt)
    language = None if plain.is_literal else _language(prompt, plain)
    if language == "en" and not plain.is_english:
        plain = read(prompt, is_english=True)
    letters = " ".join(prompt.lower().split())
    if language is None or plain.is_literal:
        return Reading(plain, None, (), 0, (), (), "", letters)
    known = _lists(language)
    terms = _prepared(plain.terms, language)
    if language == "zh":
        terms = list(_segmented(terms, known))
    if language == "es":
        terms = list(_with_small_beginnings(terms))
    ask = _ask(terms, plain.is_question) if language == "en" else _foreign_ask(terms, language)
    if language == "en":
        terms = _in_active_voice(_with_opinion_last(_with_particles(terms)))
    return _Reader(known, language, plain.has_case).read(plain, terms, ask, letters)


def _language(prompt: str, wording: Wording) -> str | None:
    han = sum("\u4e00" <= character <= "\u9fff" for character in prompt)
    kana = any("\u3040" <= character <= "\u30ff" for character in prompt)
    hangul = any("\uac00" <= character <= "\ud7a3" for character in prompt)
    if han:
        return None if kana or hangul else "zh"
    words = {term.text.lower() for term in wording.terms if term.kind == "word"}
    if "¿" in prompt or "¡" in prompt:
        words |= {"¿"}
    counts = {
        language: len(words & known.telltale)
        for language, known in senses.BY_LANGUAGE.items()
        if language != "zh"
    }
    counts["es"] += "¿" in words
    other = len(words & senses.OTHER_TELLTALE)
    best = max(counts, key=lambda language: counts[language])
    rest = max(count for language, count in counts.items() if language != best)
    if wording.is_english:
        return "en" if counts["en"] >= max(other, *counts.values()) else None
    return best if counts[best] > max(rest, other) else None


class _Lists(NamedTuple):
    """The word lists of one language, by the stems that they match."""

    senses: senses.Senses
    concepts: Mapping[tuple[str, ...], str]
    markers: Mapping[tuple[str, ...], str]
    negations: frozenset[tuple[str, ...]]
    openings: frozenset[str]
    function: frozenset[str]
    filler: frozenset[str]
    light: frozenset[str]


@cache
def _lists(language: str) -> _Lists:
    known = senses.BY_LANGUAGE[language]

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
    return _Lists(
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
    return _lists(language).concepts.get(stems, " ".join(stems))


# Terms

_QUANTITY = re.compile(r"([£$€¥]?)([+-]?\d[\d.,:]*\d|\d)([a-zµ°%]{1,4}|%)?", re.IGNORECASE)
_COUNTED = re.compile(r"\d+(?:-[^\W\d_]+)+")
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)", re.IGNORECASE)
_CLOCK = ("am", "pm")


def _prepared(terms: Sequence[Term], language: str) -> list[Term]:
    """Splits "23kg", "£50" and "6-year-old" into a number and words; lower-cases what is compared."""
    result: list[Term] = []
    for term in terms:
        if term.kind in ("number", "identifier"):
            result.extend(_quantity(term))
        elif term.kind == "word":
            result.extend(_parts(term, language))
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


def _segmented(terms: Sequence[Term], known: _Lists) -> Iterator[Term]:
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


def _with_small_beginnings(terms: Sequence[Term]) -> Iterator[Term]:
    """Takes away the capitals that only sentences begin with."""
    begins = True
    for term in terms:
        yield term._replace(shown=term.text) if begins and term.kind == "word" else term
        begins = term.kind == "mark" and term.text in ".!?¿¡"


# English rewriting

_BE = frozenset({"is", "are", "was", "were", "am", "be", "been", "being"})
_PAST_BE = frozenset({"was", "were"})
_AUXILIARIES = _BE | {"do", "does", "did", "can", "could", "will", "would", "should", "must", "may",
                      "might", "shall", "have", "has", "had"}  # fmt: skip
_WH = frozenset({"what", "which", "who", "whom", "whose", "where", "when", "why", "how"})
_OPINION = frozenset({"think", "believe", "say", "consider"})
_PARTICLES = {"on", "off", "up", "down", "out", "in", "back"}
_PARTICLE_VERBS = frozenset({"turn", "turning", "switch", "switching", "set", "cut", "call"})
_NOT_AGENTS = frozenset(
    """post mail email phone card cash bus train car bike plane default law mistake accident hand
    date time now then using paying going doing which what how whom me you""".split()  # noqa: SIM905
)


def _with_particles(terms: list[Term]) -> list[Term]:
    """ "turn the water on" as "turn on the water"."""
    for start, term in enumerate(terms):
        if term.text not in _PARTICLE_VERBS:
            continue
        for place in range(start + 2, min(start + 2 + MAX_PARTICLE_GAP, len(terms))):
            text = terms[place].text
            after = terms[place + 1].text if place + 1 < len(terms) else ""
            if terms[place].kind == "mark" or text in _AUXILIARIES:
                break
            ends = (
                place + 1 == len(terms)
                or terms[place + 1].kind == "mark"
                or (after in ("at", "for", "when", "if", "with", "from", "after", "before"))
            )
            if text in _PARTICLES and ends:
                moved = terms[place]
                rest = terms[start + 1 : place] + terms[place + 1 :]
                return [*terms[: start + 1], moved, *rest]
    return terms


def _with_opinion_last(terms: list[Term]) -> list[Term]:
    """ "Who do doctors think is the best" as "Who is the best according to doctors"."""
    texts = [term.text for term in terms]
    if len(texts) < 5 or texts[0] not in _WH or texts[1] not in ("do", "does"):
        return terms
    verb = next((i for i in range(3, min(7, len(texts))) if texts[i] in _OPINION), None)
    if verb is None or verb + 1 >= len(texts) or texts[verb + 1] not in _BE:
        return terms
    according = [Term("word", word, word) for word in ("according", "to")]
    return [terms[0], *terms[verb + 1 :], *according, *terms[2:verb]]


def _in_active_voice(terms: list[Term]) -> list[Term]:
    """ "Was the book read by Ann?" as "did Ann read the book", so that roles can be compared."""
    texts = [term.text for term in terms]
    if texts.count("by") != 1:
        return terms
    by = texts.index("by")
    be = next((i for i in range(by - 2, -1, -1) if texts[i] in _BE), None)
    if be is None or not _is_participle(texts[by - 1]):
        return terms
    end = next(
        (i for i in range(by + 1, len(terms)) if terms[i].kind == "mark" or texts[i] in _STOPS),
        len(terms),
    )
    agent = terms[by + 1 : end]
    if not agent or any(t.kind != "word" or t.text in _NOT_AGENTS for t in agent):
        return terms
    if any(t.text in lexicon.DATES or t.text.endswith("ing") for t in agent):
        return terms
    helper = "did" if texts[be] in _PAST_BE else "do"
    patient, before = terms[be + 1 : by - 1], terms[:be]
    if not patient:
        first = next((i for i in range(be - 1, -1, -1) if texts[i] in _AUXILIARIES), -1)
        before, patient = terms[: first + 1], terms[first + 1 : be]
    return [*before, Term("word", helper, helper), *agent, terms[by - 1], *patient, *terms[end:]]


_STOPS = frozenset({"in", "on", "at", "for", "with", "from", "to", "before", "after", "during", "and",
                    "or", "than", "when", "if", "because", "without"})  # fmt: skip


def _is_participle(word: str) -> bool:
    return (word.endswith("ed") and len(word) > 3) or word in _PARTICIPLES


# Stems

_IRREGULAR = {
    form: base
    for base, forms in {
        "be": "", "become": "became", "begin": "began begun", "bite": "bit bitten",
        "blow": "blew blown", "break": "broke broken", "bring": "brought", "build": "built",
        "buy": "bought", "catch": "caught", "choose": "chose chosen", "come": "came",
        "deal": "dealt", "draw": "drew drawn", "drink": "drank drunk", "drive": "drove driven",
        "eat": "ate eaten", "fall": "fell fallen", "feed": "fed", "feel": "felt",
        "fight": "fought", "find": "found", "fly": "flew flown", "forget": "forgot forgotten",
        "freeze": "froze frozen", "get": "got gotten", "give": "gave given", "go": "went gone",
        "grow": "grew grown", "hear": "heard", "hide": "hid hidden", "hold": "held",
        "keep": "kept", "know": "knew known", "lead": "led", "leave": "left", "lend": "lent",
        "lose": "lost", "make": "made", "mean": "meant", "meet": "met", "pay": "paid",
        "ride": "rode ridden", "run": "ran", "say": "said", "see": "saw seen",
        "sell": "sold", "send": "sent", "shake": "shook shaken", "shoot": "shot",
        "sing": "sang sung", "sit": "sat", "sleep": "slept", "speak": "spoke spoken",
        "spend": "spent", "stand": "stood", "steal": "stole stolen", "swim": "swam swum",
        "take": "took taken", "teach": "taught", "tell": "told", "think": "thought",
        "throw": "threw thrown", "understand": "understood", "wake": "woke woken",
        "wear": "wore worn", "win": "won", "write": "wrote written",
        "child": "children", "man": "men", "woman": "women", "person": "people",
        "foot": "feet", "tooth": "teeth", "mouse": "mice", "goose": "geese", "life": "lives",
        "knife": "knives", "wife": "wives", "leaf": "leaves", "half": "halves",
    }.items()
    for form in forms.split()
}  # fmt: skip
_PARTICIPLES = frozenset(_IRREGULAR) | {"put", "cut", "hit", "hurt", "read", "set", "let", "cost"}
_KEPT = frozenset(
    """is was has does this us bus gas news plus less yes always perhaps species series need speed
    bed red feed seed bleed weed shed sled hundred kindred embed during morning evening ceiling king
    ring sing thing bring spring string wing nothing something anything everything wedding building
    paste bathe breathe clothe tense lens physics maths mathematics politics economics diabetes
    measles rabies texas paris james wales fastest""".split()  # noqa: SIM905
)
_VOWELS = frozenset("aeiou")


def stem(word: str, language: str) -> str:
    """A word without inflection, near enough that two forms of one word are equal.

    English: Porter's steps 1a, 1b and 5, after irregular forms. Spanish: plural ending.
    """
    if language == "es":
        return _spanish_stem(word)
    if language != "en" or len(word) < 3 or not word.isascii():
        return word
    word = _IRREGULAR.get(word, word)
    if word in _KEPT:
        return word
    return _without_e(_american(_without_past(_without_plural(word))))


def _american(word: str) -> str:
    """ "organise" as "organize", "harbour" as "harbor"; it is no matter that "exercize" is none."""
    if len(word) < 6:
        return word
    for ending, other in (("ise", "ize"), ("yse", "yze"), ("is", "iz"), ("our", "or")):
        if word.endswith(ending):
            return word[: -len(ending)] + other
    return word


def _spanish_stem(word: str) -> str:
    if len(word) > 4 and word.endswith("es") and word[-3] not in _VOWELS:
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and word[-2] in _VOWELS:
        return word[:-1]
    return word


def _without_plural(word: str) -> str:
    if word.endswith("sses") or (len(word) > 4 and word.endswith(("xes", "ches", "shes", "zes"))):
        return word[:-2]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        return word[:-1]
    return word


def _without_past(word: str) -> str:
    if word.endswith("ied") and len(word) > 4:
        return word[:-3] + "y"
    for ending in ("ing", "ed"):
        base = word[: -len(ending)]
        if word.endswith(ending) and len(base) > 2 and any(c in "aeiouy" for c in base):
            if word.endswith("eed"):
                return word
            if base.endswith(("at", "bl", "iz")):
                return base + "e"
            if base[-1] == base[-2] and base[-1] not in "lszaeiou":
                return base[:-1]
            return base + "e" if _is_short(base) else base
    return word


def _without_e(word: str) -> str:
    if len(word) > 4 and word.endswith("e") and not word.endswith("ee"):
        base = word[:-1]
        return word if _is_short(base) else base
    return word[:-1] if len(word) > 5 and word.endswith("ll") else word


def _is_short(base: str) -> bool:
    """Whether it has one syllable and ends consonant, vowel, consonant: "hop", "fil"."""
    if len(base) < 3 or base[-1] in "aeiouwxy" or base[-2] not in "aeiouy" or base[-3] in _VOWELS:
        return False
    return sum(c in _VOWELS and base[i - 1] not in _VOWELS for i, c in enumerate(base) if i) <= 1


# Kinds of question

_COUNTS = frozenset({"many", "much", "long", "often", "far", "old", "tall", "big", "high", "deep",
                     "wide", "heavy", "fast", "soon", "early", "late"})  # fmt: skip
_TELLING = frozenset(
    """tell explain describe list write give name compare summarize show convert calculate compute
    create find what""".split()  # noqa: SIM905
)


def _ask(terms: Sequence[Term], is_question: bool) -> str:
    """The kind of question, by the first word that asks."""
    begins = True
    for place, term in enumerate(terms):
        if begins and term.text in _WH | _AUXILIARIES:
            following = terms[place + 1].text if place + 1 < len(terms) else ""
            if term.text == "how" and following in _COUNTS:
                return f"how {following}"
            if term.text in ("who", "whom"):
                return "who"
            if term.text == "how" and following == "come":
                return "why"
            if term.text in ("what", "which"):
                return _what([t.text for t in terms[place + 1 :]])
            return term.text if term.text in _WH else "whether"
        begins = term.kind == "mark"
    is_told = bool(terms) and terms[0].text in _TELLING
    if is_question or is_told:
        return next((t.text for t in terms if t.text in _WH), "tell" if is_told else "whether")
    return "do"


def _what(texts: list[str]) -> str:
    """ "What" in other words: "what time" is when, "what is the way to" is how."""
    if texts[:1] in (["time"], ["date"], ["day"]):
        return "when"
    is_way = not _WAYS.isdisjoint(texts) or any(
        texts[i : i + 2] == ["do", "to"] for i in range(len(texts) - 1)
    )
    return "how" if is_way else "what"


_WAYS = frozenset({"way", "method", "process", "steps", "procedure"})


_FOREIGN_ASKS = {
    "es": {"qué": "what", "cuál": "what", "cuáles": "what", "quién": "who", "dónde": "where",
           "cuándo": "when", "cómo": "how", "cuánto": "how much", "cuánta": "how much",
           "cuántos": "how many", "cuántas": "how many", "por qué": "why"},
    "de": {"was": "what", "welche": "what", "welcher": "what", "welches": "what", "wer": "who",
           "wo": "where", "wann": "when", "wie": "how", "warum": "why", "wohin": "where to",
           "woher": "where from", "wen": "whom", "wem": "to whom"},
    "zh": {},
}  # fmt: skip


def _foreign_ask(terms: Sequence[Term], language: str) -> str:
    known = _FOREIGN_ASKS[language]
    texts = [term.text for term in terms]
    for place, text in enumerate(texts):
        if language == "es" and text == "por" and texts[place + 1 : place + 2] == ["qué"]:
            return "why"
        if language == "de" and text == "wie" and texts[place + 1 : place + 2] != []:
            following = texts[place + 1]
            if following in ("viel", "viele", "lange", "oft", "weit", "alt", "hoch", "groß"):
                return f"how {following}"
        if text in known:
            return known[text]
    return ""


# Tokens


class _Reader:
    """Walks over the terms once; holds what is known so far."""

    def __init__(self, known: _Lists, language: str, has_case: bool) -> None:
        self._known = known
        self._language = language
        self._has_case = has_case
        self._tokens: list[Token] = []
        self._markers: list[str] = []
        self._persons: list[str] = []
        self._negations = 0
        self._role = ""

    def read(self, wording: Wording, terms: list[Term], ask: str, letters: str) -> Reading:
        stems = [
            stem(term.text, self._language) if term.kind == "word" else term.text for term in terms
        ]
        texts = [term.text for term in terms]
        place = 0
        while place < len(terms):
            place += self._take(terms, texts, stems, place)
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
        )

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
        for size in range(min(MAX_PHRASE, len(terms) - place), 0, -1):
            if size > 1 and stems[place] not in known.openings and text not in known.openings:
                continue
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
            return 2 if texts[place + 1] in _COUNTS | {"come"} else 1
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
            if self._language == "en" and text in _AUXILIARIES | _WH:
                self._role = ""
        else:
            self._add(known.concepts.get((base,), base), term, place, is_name=False, base=base)

    def _add_cost(self, texts: list[str]) -> None:
        """ "How much is it?" asks what it costs."""
        place = next(
            (i for i in range(len(texts) - 2) if texts[i : i + 2] == ["how", "much"]), None
        )
        if place is None or texts[place + 2] not in _AUXILIARIES | {"for"}:
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
        if self._language in ("de", "zh") or not self._has_case:
            return False
        return term.shown[:1].isupper() and term.text != "i"

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


_MEASURES = frozenset({"cost", "weigh", "weight", "pay", "owe", "spend", "earn", "need", "charg"})
_PAST = frozenset({"was", "were", "did", "had"})


def _tense(texts: list[str], ask: str) -> Iterator[str]:
    """Markers of the time and mood that auxiliaries give a question."""
    if not _PAST.isdisjoint(texts) or (_AUXILIARIES.isdisjoint(texts) and _is_past(texts, ask)):
        yield "past"
    if "will" in texts and ask != "when":
        yield "future"
    if texts[:1] == ["would"]:
        yield "would"
    if ask in ("whether", "why") and not {"should", "ought"}.isdisjoint(texts):
        yield "should"


def _is_past(texts: list[str], ask: str) -> bool:
    return ask in ("who", "what") and any(
        text in _IRREGULAR or text.endswith("ed")
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
