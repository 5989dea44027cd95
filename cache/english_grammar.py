"""Rewrites English sentences so that one that says the same in another order reads alike."""

from __future__ import annotations

from cache import lexicon
from cache.splitting import Term
from cache.stems import is_participle

MAX_PARTICLE_GAP = 5
"""Words between a verb and its particle: "turn my water supply on"."""
BE = frozenset({"is", "are", "was", "were", "am", "be", "been", "being"})
_PAST_BE = frozenset({"was", "were"})
AUXILIARIES = BE | {"do", "does", "did", "can", "could", "will", "would", "should", "must", "may",
                     "might", "shall", "have", "has", "had"}  # fmt: skip
WH = frozenset({"what", "which", "who", "whom", "whose", "where", "when", "why", "how"})
_OPINION = frozenset({"think", "believe", "say", "consider"})
_PARTICLES = {"on", "off", "up", "down", "out", "in", "back"}
_PARTICLE_VERBS = frozenset({"turn", "turning", "switch", "switching", "set", "cut", "call"})
_NOT_AGENTS = frozenset(
    """post mail email phone card cash bus train car bike plane default law mistake accident hand
    date time now then using paying going doing which what how whom me you""".split()  # noqa: SIM905
)
_STOPS = frozenset({"in", "on", "at", "for", "with", "from", "to", "before", "after", "during", "and",
                    "or", "than", "when", "if", "because", "without"})  # fmt: skip


def with_particles(terms: list[Term]) -> list[Term]:
    """ "turn the water on" as "turn on the water"."""
    for start, term in enumerate(terms):
        if term.text not in _PARTICLE_VERBS:
            continue
        for place in range(start + 2, min(start + 2 + MAX_PARTICLE_GAP, len(terms))):
            text = terms[place].text
            after = terms[place + 1].text if place + 1 < len(terms) else ""
            if terms[place].kind == "mark" or text in AUXILIARIES:
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


def with_opinion_last(terms: list[Term]) -> list[Term]:
    """ "Who do doctors think is the best" as "Who is the best according to doctors"."""
    texts = [term.text for term in terms]
    if len(texts) < 5 or texts[0] not in WH or texts[1] not in ("do", "does"):
        return terms
    verb = next((i for i in range(3, min(7, len(texts))) if texts[i] in _OPINION), None)
    if verb is None or verb + 1 >= len(texts) or texts[verb + 1] not in BE:
        return terms
    according = [Term("word", word, word) for word in ("according", "to")]
    return [terms[0], *terms[verb + 1 :], *according, *terms[2:verb]]


def in_active_voice(terms: list[Term]) -> list[Term]:
    """ "Was the book read by Ann?" as "did Ann read the book", so that roles can be compared."""
    texts = [term.text for term in terms]
    if texts.count("by") != 1:
        return terms
    by = texts.index("by")
    be = next((i for i in range(by - 2, -1, -1) if texts[i] in BE), None)
    if be is None or not is_participle(texts[by - 1]):
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
        first = next((i for i in range(be - 1, -1, -1) if texts[i] in AUXILIARIES), -1)
        before, patient = terms[: first + 1], terms[first + 1 : be]
    return [*before, Term("word", helper, helper), *agent, terms[by - 1], *patient, *terms[end:]]
