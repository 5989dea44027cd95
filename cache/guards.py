"""May two prompts share an answer? Reasons why not, from their wording alone.

Pure and symmetric: a prompt agrees with itself, and `disagreement(a, b)` is None
exactly when `disagreement(b, a)` is. Similarity is not looked at: prompts
that ask opposite things are often nearer to each other than paraphrases are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cache import lexicon
from cache.wording import Term, Wording, read

MAX_PROMPT_CHARS = 4096
"""Longer prompts equal only themselves: an embedder's window holds less, and reading takes time."""
MAX_SHOWN = 3


def disagreement(a: str, b: str) -> str | None:
    """Why an answer to `a` must not be given for `b`; None when nothing speaks against it."""
    if a.strip() == b.strip():
        return None
    if max(len(a), len(b)) > MAX_PROMPT_CHARS:
        return f"prompt has {max(len(a), len(b))} characters, the limit is {MAX_PROMPT_CHARS}"
    first, second = read(a), read(b)
    if [term.text for term in first.terms] != [term.text for term in second.terms]:
        return _difference(first, second)
    if first.is_literal or second.is_literal or first.is_english != second.is_english:
        return "wording matters and differs"
    if first.is_question != second.is_question:
        return "one asks, one tells"
    return _capitals(first, second)


def _capitals(first: Wording, second: Wording) -> str | None:
    is_careful = first.has_case and second.has_case
    for one, other in zip(first.terms, second.terms, strict=True):
        if one.shown == other.shown or one.kind != "word":
            continue
        if is_careful or one.text in lexicon.CAPITAL_WORDS:
            return f"capitals differ: {one.shown} / {other.shown}"
    return None


def _difference(first: Wording, second: Wording) -> str:
    """Names the most telling difference between two rows of terms that are not equal."""
    counts = Counter(term.text for term in first.terms), Counter(term.text for term in second.terms)
    only = (
        [term for term in first.terms if counts[0][term.text] > counts[1][term.text]],
        [term for term in second.terms if counts[1][term.text] > counts[0][term.text]],
    )
    if not only[0] and not only[1]:
        return "word order differs"
    if len(only[0]) == len(only[1]) == 1 and _is_opposite(only[0][0].text, only[1][0].text):
        return f"opposites: {only[0][0].shown} / {only[1][0].shown}"
    for label, belongs in _LABELS:
        chosen = [[term.shown for term in terms if belongs(term)] for terms in only]
        if chosen[0] or chosen[1]:
            return _phrase(label, chosen)
    return _phrase("words differ", [[term.shown for term in terms] for terms in only])


def _is_number(term: Term) -> bool:
    has_digit = any(character.isdigit() for character in term.text)
    is_amount = has_digit and term.kind in ("number", "identifier")
    return is_amount or term.text in lexicon.NUMBER_WORDS


def _is_negation(term: Term) -> bool:
    return term.text in lexicon.NEGATIONS or any(
        character in lexicon.NEGATION_CHARACTERS for character in term.text
    )


def _is_name(term: Term) -> bool:
    return term.kind == "word" and term.shown[:1].isupper()


_LABELS: tuple[tuple[str, Callable[[Term], bool]], ...] = (
    ("quotes differ", lambda term: term.kind == "quote"),
    ("numbers differ", _is_number),
    ("units differ", lambda term: term.text in lexicon.UNITS),
    ("dates differ", lambda term: term.text in lexicon.DATES),
    ("identifiers differ", lambda term: term.kind == "identifier"),
    ("negation differs", _is_negation),
    ("names differ", _is_name),
    ("punctuation differs", lambda term: term.kind == "mark"),
)
"""Kinds of difference, the most telling first; they word the refusal, they do not decide it."""


def _is_opposite(one: str, other: str) -> bool:
    if frozenset((one, other)) in lexicon.OPPOSITES:
        return True
    short, long = sorted((one, other), key=len)
    return any(prefix + short == long for prefix in lexicon.NEGATIVE_PREFIXES)


def _phrase(label: str, sides: list[list[str]]) -> str:
    """ "numbers differ: 23 / 28"; at most three terms a side."""
    return f"{label}: " + " / ".join(" ".join(side[:MAX_SHOWN]) or "none" for side in sides)
