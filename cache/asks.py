"""Kinds of question."""

from __future__ import annotations

from collections.abc import Sequence

from cache.english_grammar import AUXILIARIES, WH
from cache.splitting import Term

COUNTS = frozenset({"many", "much", "long", "often", "far", "old", "tall", "big", "high", "deep",
                    "wide", "heavy", "fast", "soon", "early", "late"})  # fmt: skip
_ASKING = WH | AUXILIARIES
_TELLING = frozenset(
    """tell explain describe list write give name compare summarize show convert calculate compute
    create find what""".split()  # noqa: SIM905
)
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


def ask_of(terms: Sequence[Term], is_question: bool) -> str:
    """The kind of question, by the first word that asks."""
    begins = True
    for place, term in enumerate(terms):
        if begins and term.text in _ASKING:
            following = terms[place + 1].text if place + 1 < len(terms) else ""
            if term.text == "how" and following in COUNTS:
                return f"how {following}"
            if term.text in ("who", "whom"):
                return "who"
            if term.text == "how" and following == "come":
                return "why"
            if term.text in ("what", "which"):
                return _what([t.text for t in terms[place + 1 :]])
            return term.text if term.text in WH else "whether"
        begins = term.kind == "mark"
    is_told = bool(terms) and terms[0].text in _TELLING
    if is_question or is_told:
        return next((t.text for t in terms if t.text in WH), "tell" if is_told else "whether")
    return "do"


def _what(texts: list[str]) -> str:
    """ "What" in other words: "what time" is when, "what is the way to" is how."""
    if texts[:1] in (["time"], ["date"], ["day"]):
        return "when"
    is_way = not _WAYS.isdisjoint(texts) or any(
        texts[i : i + 2] == ["do", "to"] for i in range(len(texts) - 1)
    )
    return "how" if is_way else "what"


def foreign_ask_of(terms: Sequence[Term], language: str) -> str:
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
