"""Reads a prompt as a row of terms, such that equal rows ask the same question.

The row keeps everything: each word, number, symbol and identifier, in order.
Only what provably changes nothing is evened out: capitals and end marks in
English prose, contractions, number words, British spelling, politeness, and a
closed list of ways to open a question. Where letters matter (code, quotes, several
lines, text after a colon, "spell", "translate") a prompt equals only itself, and so
does prose that is not plainly English, apart from end marks and spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cache import lexicon
from cache.splitting import AMOUNTS, SENTENCE_MARKS, Term, split

STRICT_MARKS = frozenset(":;：；")
MAX_FRONTED_TERMS = 8
# What most prompts hold nothing of; asked for first, since reading is part of every look-up.
_STRICT = STRICT_MARKS | lexicon.SPELLING_CUES
_LAST_OF_TRAILERS = frozenset(phrase[-1] for phrase in lexicon.TRAILERS)
_EXPANDABLE = lexicon.SAME_SPELLINGS.keys() | lexicon.CONTRACTIONS.keys()
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")


@dataclass(frozen=True, slots=True)
class Wording:
    """A prompt as read. A literal one equals only itself: then `terms` only tell what it is made of.

    `has_case` tells whether its capitals carry meaning.
    """

    terms: tuple[Term, ...]
    is_question: bool
    is_english: bool
    is_literal: bool
    has_case: bool


def read(prompt: str, *, is_english: bool | None = None) -> Wording:
    """The wording of a prompt; `is_english` None looks for English words in it."""
    prompt = prompt.strip()
    terms = split(prompt)
    if len(prompt.splitlines()) > 1:
        return _literal(terms)
    words = [term.shown for term in terms if term.kind == "word"]
    has_case = _has_case(words)
    if not (_is_english(words) if is_english is None else is_english):
        terms, is_question = _without_end_marks(terms, is_question=False)
        terms = _without_foreign_politeness(terms)
        if any(term.text in STRICT_MARKS for term in terms):
            return _literal(terms)
        return Wording(tuple(terms), is_question, is_english=False, is_literal=False, has_case=True)
    terms = [_folded(term) for term in terms]
    terms = _without_lead_in(terms)
    texts = [term.text for term in terms]
    if not _STRICT.isdisjoint(texts):
        return _literal(terms)
    terms, is_question = _without_politeness(terms)
    if not lexicon.HESITATIONS.isdisjoint(texts):
        terms = _without_hesitations(terms, has_case)
    if "'" in "".join(texts) or not _EXPANDABLE.isdisjoint(texts):
        terms = [word for term in terms for word in _expanded(term)]
    terms, is_request = _plain_opening(_in_natural_order(_with_numbers(terms)))
    opens_as_question = bool(terms) and terms[0].text in lexicon.QUESTION_WORDS
    is_question = opens_as_question or (is_question and not is_request)
    return Wording(
        tuple(_as_sentence(terms)),
        is_question,
        is_english=True,
        is_literal=False,
        has_case=has_case,
    )


def _literal(terms: list[Term]) -> Wording:
    return Wording(
        tuple(terms), is_question=False, is_english=False, is_literal=True, has_case=True
    )


def _has_case(words: list[str]) -> bool:
    telling = [word for word in words if word != "I"]
    if all(word == word.lower() for word in telling):
        return False
    if all(word == word.upper() for word in telling):
        return False
    return len(telling) < 3 or not all(word[0].isupper() for word in telling)


def _is_english(words: list[str]) -> bool:
    lowered = {word.lower() for word in words}
    if not lexicon.FOREIGN_MARKERS.isdisjoint(lowered):
        return False
    stems = {word.split("'")[0] if "'" in word else word for word in lowered}
    # "i" alone is Italian too.
    return (
        not lexicon.ENGLISH_MARKERS.isdisjoint(stems)
        or {"can", "i"} <= stems
        or {"do", "i"} <= stems
    )


def _folded(term: Term) -> Term:
    if term.kind != "word" or term.text == (lowered := term.text.lower()):
        return term
    return Term("word", lowered, term.shown)


def _matches(terms: list[Term], start: int, phrase: tuple[str, ...]) -> bool:
    return len(terms) >= start + len(phrase) and all(
        term.text == word for term, word in zip(terms[start:], phrase, strict=False)
    )


def _without_lead_in(terms: list[Term]) -> list[Term]:
    while terms:
        if terms[0].text == "please" and len(terms) > 1 and terms[1].text not in ("please", "me"):
            terms = terms[1:]
            continue
        rest = next(
            (
                _without_marks_ahead(terms[size:])
                for size in (2, 1)
                if tuple(term.text for term in terms[:size]) in lexicon.LEAD_INS
            ),
            None,
        )
        if not rest or rest[0].text not in lexicon.OPENERS:
            return terms
        terms = rest
    return terms


def _without_marks_ahead(terms: list[Term]) -> list[Term]:
    start = 0
    while start < len(terms) and terms[start].kind == "mark" and terms[start].text in ",:.!":
        start += 1
    return terms[start:]


def _without_politeness(terms: list[Term]) -> tuple[list[Term], bool]:
    """Drops thanks and end marks; also tells whether a question mark was among those."""
    terms, is_question = _without_end_marks(terms, is_question=False)
    while True:
        if not terms or terms[-1].text not in _LAST_OF_TRAILERS:
            return terms, is_question
        for size in (4, 3, 2, 1):
            head = terms[:-size]
            phrase = tuple(term.text for term in terms[-size:])
            if head and phrase in lexicon.TRAILERS and _may_drop_after(head, phrase):
                terms, is_question = _without_end_marks(head, is_question)
                break
        else:
            return terms, is_question


def _may_drop_after(head: list[Term], phrase: tuple[str, ...]) -> bool:
    if head[-1].kind == "mark":
        return head[-1].text[-1] in SENTENCE_MARKS
    return phrase == ("please",) and head[-1].text not in lexicon.NOT_BEFORE_PLEASE


def _without_end_marks(terms: list[Term], is_question: bool) -> tuple[list[Term], bool]:
    end = len(terms)
    while end > 1 and terms[end - 1].kind == "mark" and terms[end - 1].text[0] in SENTENCE_MARKS:
        end -= 1
    marks = "".join(term.text for term in terms[end:])
    return terms[:end], is_question or "?" in marks or "？" in marks


def _without_hesitations(terms: list[Term], has_case: bool) -> list[Term]:
    kept: list[Term] = []
    for term in terms:
        if term.text in lexicon.HESITATIONS and not (has_case and term.shown.isupper()):
            if kept and kept[-1].text == ",":
                kept.pop()
            continue
        kept.append(term)
    return kept


def _without_foreign_politeness(terms: list[Term]) -> list[Term]:
    if (
        len(terms) > 1
        and terms[-1].shown in ("bitte", "danke", "gracias")
        and terms[-2].text == ","
    ):
        return terms[:-2]
    if terms and terms[0].text.startswith("请问") and len(terms[0].text) > 2:
        return [terms[0]._replace(text=terms[0].text[2:].lstrip("，")), *terms[1:]]
    return terms


def _expanded(term: Term) -> tuple[Term, ...]:
    if term.kind != "word":
        return (term,)
    word = term.text
    if spelled := lexicon.SAME_SPELLINGS.get(word):
        shown = spelled.capitalize() if term.shown[0].isupper() else spelled
        return (term._replace(text=spelled, shown=shown),)
    if parts := lexicon.CONTRACTIONS.get(word):
        return tuple(Term("word", part, part) for part in parts)
    if word.endswith("n't"):
        return Term("word", word[:-3], word[:-3]), Term("word", "not", "not")
    if word.endswith("'s") and word[:-2] in lexicon.IS_HOSTS:
        return Term("word", word[:-2], term.shown[:-2]), Term("word", "is", "is")
    if (ending := word[-3:]) in lexicon.CONTRACTION_ENDINGS:
        will = lexicon.CONTRACTION_ENDINGS[ending]
        return Term("word", word[:-3], term.shown[:-3]), Term("word", will, will)
    return (term,)


def _with_numbers(terms: list[Term]) -> list[Term]:
    """Number words up to ninety-nine as digits, larger ones stay words; 1,000 as 1000."""
    result: list[Term] = []
    for term in terms:
        if term.kind == "word":
            if term.text in AMOUNTS or "-" in term.text:
                value = _number_of(term.text)
                term = term if value is None else Term("number", str(value), term.shown)
        elif term.kind == "number" and _THOUSANDS.fullmatch(term.text):
            term = term._replace(text=term.text.replace(",", ""))
        result.append(term)
    return result


def _number_of(word: str) -> int | None:
    if word in lexicon.UNITS_OF_NUMBERS:
        return lexicon.UNITS_OF_NUMBERS[word]
    tens, hyphen, unit = word.partition("-")
    if tens not in lexicon.TENS_OF_NUMBERS:
        return None
    if not hyphen:
        return lexicon.TENS_OF_NUMBERS[tens]
    value = lexicon.UNITS_OF_NUMBERS.get(unit, 0)
    return lexicon.TENS_OF_NUMBERS[tens] + value if 0 < value < 10 else None


def _in_natural_order(terms: list[Term]) -> list[Term]:
    """ "On the menu, what is there?" as "What is there on the menu?", when nothing is ambiguous."""
    if not terms or terms[0].text not in lexicon.FRONTABLE:
        return terms
    texts = [term.text for term in terms]
    if texts.count(",") != 1:
        return terms
    comma = texts.index(",")
    front, rest = terms[:comma], terms[comma + 1 :]
    if not 1 < len(front) <= MAX_FRONTED_TERMS or not rest:
        return terms
    if any(term.kind == "mark" for term in terms[:comma] + rest):
        return terms
    # A second phrase, clause or quantifier could attach the fronted phrase elsewhere.
    is_plain = lexicon.SCOPE_WORDS.isdisjoint(texts[comma + 2 :])
    if rest[0].text not in lexicon.QUESTION_WORDS or not is_plain:
        return terms
    return [*rest, front[0]._replace(shown=front[0].text), *front[1:]]


def _plain_opening(terms: list[Term]) -> tuple[list[Term], bool]:
    """One form for each closed set of openings; also tells whether the prompt was a request."""
    terms, is_request = _without_request(terms)
    texts = tuple(term.text for term in terms[:6])
    match texts:
        case ("how", "do" | "can", "i", verb, *_) if verb not in lexicon.STATIVE_VERBS:
            terms = _words("how to") + terms[3:]
        case ("how", "i", "can", verb, *_) if verb not in lexicon.STATIVE_VERBS:
            terms = _words("how to") + terms[3:]
        case ("what", "is", "the", "way", "to", *_):
            terms = _words("how to") + terms[5:]
        case ("how", "much", "does", "it", "cost", *_):
            terms = _words("what does it cost") + terms[5:]
        case ("who", "should", "i", "contact", *_):
            terms = _words("who do i contact") + terms[4:]
        case ("what", "is" | "are", *_):
            terms = terms[:2] + _of_possessive(terms[2:])
    return terms, is_request


def _without_request(terms: list[Term]) -> tuple[list[Term], bool]:
    texts = [term.text for term in terms[:6]]
    start = 0
    if texts[:2] in (["can", "you"], ["could", "you"]):
        start = 3 if texts[2:3] == ["please"] else 2
        if len(texts) == start or texts[start] not in lexicon.REQUEST_VERBS:
            return terms, False
    opening = texts[start : start + 2]
    if opening not in (["tell", "me"], ["give", "me"]):
        return terms[start:], start > 0
    rest = terms[start + 2 :]
    if rest and rest[0].text in ("the", "my", "your"):
        return _words("what is") + rest, True
    if opening[0] == "tell" and rest and rest[0].text in ("what", "who", "where", "when", "how"):
        return _as_direct_question(rest), True
    return terms[start:], start > 0


def _as_direct_question(terms: list[Term]) -> list[Term]:
    """ "what the capital is" as "what is the capital", "where I can" as "where can I"."""
    texts = [term.text for term in terms]
    if texts[1:2] == ["i"] and len(texts) > 2 and texts[2] in lexicon.MODALS and texts[0] != "how":
        return [terms[0], terms[2], terms[1], *terms[3:]]
    inner = texts[1:-1]
    if texts[-1] in lexicon.BE_FORMS and inner and inner[0] in lexicon.DETERMINERS:
        verbs = lexicon.BE_FORMS | lexicon.MODALS | {"that", "which", "who", "does", "do", "did"}
        if verbs.isdisjoint(inner[1:]) and texts[0] != "how":
            return [terms[0], terms[-1], *terms[1:-1]]
    return terms


def _of_possessive(terms: list[Term]) -> list[Term]:
    """The complement of "what is": "France's capital" as "the capital of France"."""
    texts = [term.text for term in terms]
    owners = [place for place, text in enumerate(texts) if text.endswith("'s")]
    if len(owners) == 1 and terms[owners[0]].kind == "word":
        owner, owned = terms[: owners[0] + 1], terms[owners[0] + 1 :]
        plain = all(term.kind == "word" for term in terms)
        function_words = lexicon.SCOPE_WORDS | lexicon.QUESTION_WORDS | {"a", "the"}
        if plain and owned and function_words.isdisjoint(texts[owners[0] + 1 :]):
            last = owner[-1]
            owner[-1] = last._replace(text=last.text[:-2], shown=last.shown[:-2])
            terms = [*_words("the"), *owned, *_words("of"), *owner]
    texts = [term.text for term in terms[:4]]
    if texts == ["the", "capital", "city", "of"]:
        terms = terms[:2] + terms[3:]
    return terms


def _as_sentence(terms: list[Term]) -> Iterator[Term]:
    """Lower-cases what is capital only because a sentence begins there, and "I"."""
    begins = True
    for term in terms:
        if term.kind == "word" and (begins or term.text == "i"):
            term = Term("word", term.text, term.text)
        begins = term.kind == "mark" and term.text[-1] in ".!?"
        yield term


def _words(text: str) -> list[Term]:
    return [Term("word", word, word) for word in text.split()]
