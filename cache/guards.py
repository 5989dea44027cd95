"""May two prompts share an answer? Reasons why not, from their wording alone.

Two questions, both pure and symmetric. `disagreement`: is it the same wording? Then nothing more
is asked. `compare`: if not, is there a difference in what they ask that no likeness can outweigh? What
passes goes to `cache.verifier`. Similarity is not looked at: prompts that ask opposite things are
often nearer to each other than paraphrases are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from cache import lexicon
from cache.alignment import Alignment, align
from cache.concepts import concept_of
from cache.languages import BY_LANGUAGE
from cache.prompts import Prompt
from cache.reading import Reading, Token
from cache.splitting import Term
from cache.wording import Wording

MAX_PROMPT_CHARS = 4096
"""Longer prompts equal only themselves: an embedder's window holds less, and reading takes time."""
MAX_SHOWN = 3


def disagreement(a: str, b: str) -> str | None:
    """Why an answer to `a` must not be given for `b`; None when nothing speaks against it."""
    return wording_differs(Prompt(a), Prompt(b))


def wording_differs(one: Prompt, other: Prompt, *, is_worded: bool = True) -> str | None:
    """As `disagreement`; not `is_worded` where nobody reads the reason, only whether there is one."""
    if one.text.strip() == other.text.strip():
        return None
    longest = max(len(one.text), len(other.text))
    if longest > MAX_PROMPT_CHARS:
        return f"prompt has {longest} characters, the limit is {MAX_PROMPT_CHARS}"
    first, second = one.wording, other.wording
    if one.row != other.row:
        return _difference(first, second) if is_worded else "words differ"
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
    texts, kinds = (
        counts[0].keys() | counts[1].keys(),
        {term.kind for side in only for term in side},
    )
    for label, belongs, words, own_kinds in _LABELS:
        if words.isdisjoint(texts) and own_kinds.isdisjoint(kinds):
            continue
        chosen = [[term.shown for term in terms if belongs(term)] for terms in only]
        if chosen[0] or chosen[1]:
            return _phrase(label, chosen)
    return _phrase("words differ", [[term.shown for term in terms] for terms in only])


def _is_number(term: Term) -> bool:
    if term.kind in ("number", "identifier") and any(map(str.isdigit, term.text)):
        return True
    return term.text in lexicon.NUMBER_WORDS


def _is_negation(term: Term) -> bool:
    if term.text.isascii():
        return term.text in lexicon.NEGATIONS
    return term.text in lexicon.NEGATIONS or any(
        character in lexicon.NEGATION_CHARACTERS for character in term.text
    )


def _is_name(term: Term) -> bool:
    return term.kind == "word" and term.shown[:1].isupper()


_ANY_KIND = frozenset({"word", "number", "identifier", "quote", "mark"})
_NO_WORDS: frozenset[str] = frozenset()
_LABELS: tuple[tuple[str, Callable[[Term], bool], frozenset[str], frozenset[str]], ...] = (
    ("quotes differ", lambda term: term.kind == "quote", _NO_WORDS, frozenset({"quote"})),
    ("numbers differ", _is_number, lexicon.NUMBER_WORDS, frozenset({"number", "identifier"})),
    ("units differ", lambda term: term.text in lexicon.UNITS, lexicon.UNITS, frozenset()),
    ("dates differ", lambda term: term.text in lexicon.DATES, lexicon.DATES, frozenset()),
    (
        "identifiers differ",
        lambda term: term.kind == "identifier",
        _NO_WORDS,
        frozenset({"identifier"}),
    ),
    ("negation differs", _is_negation, _NO_WORDS, _ANY_KIND),
    ("names differ", _is_name, _NO_WORDS, frozenset({"word"})),
    ("punctuation differs", lambda term: term.kind == "mark", _NO_WORDS, frozenset({"mark"})),
)
"""Kinds of difference, the most telling first, each with words and kinds of terms without one of which
there is no such difference. They word the refusal, they do not decide it."""


def _is_opposite(one: str, other: str) -> bool:
    if frozenset((one, other)) in lexicon.OPPOSITES:
        return True
    short, long = sorted((one, other), key=len)
    return any(prefix + short == long for prefix in lexicon.NEGATIVE_PREFIXES)


def _phrase(label: str, sides: Sequence[Sequence[str]]) -> str:
    """ "numbers differ: 23 / 28"; at most three terms a side."""
    return f"{label}: " + " / ".join(" ".join(side[:MAX_SHOWN]) or "none" for side in sides)


# Vetoes: what a likeness must not outweigh


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two readings side by side, in an order that does not depend on who was first.

    `veto` is why an answer to one must not be given for the other, however alike they are.
    """

    first: Reading
    second: Reading
    alignment: Alignment
    veto: str | None


def compare(one: Reading, other: Reading) -> Comparison:
    """Puts two readings side by side; meant for prompts that `disagreement` keeps apart."""
    first, second = (one, other) if one.letters <= other.letters else (other, one)
    alignment = align(first, second)
    return Comparison(first, second, alignment, _veto(first, second, alignment))


def compare_unless_vetoed(one: Reading, other: Reading) -> Comparison | str:
    """What `compare` gives, or only its veto: most are found before anything is paired off."""
    first, second = (one, other) if one.letters <= other.letters else (other, one)
    if (veto := _plain_veto(first, second)) is not None:
        return veto
    alignment = align(first, second)
    veto = _veto_of_alignment(first, second, alignment)
    return Comparison(first, second, alignment, None) if veto is None else veto


def _veto(first: Reading, second: Reading, alignment: Alignment) -> str | None:
    return _plain_veto(first, second) or _veto_of_alignment(first, second, alignment)


def _plain_veto(first: Reading, second: Reading) -> str | None:
    if first.language is None or second.language is None:
        return "wording matters and differs"
    if first.language != second.language:
        return f"languages differ: {first.language} / {second.language}"
    for plain_check in _PLAIN_CHECKS:
        if (reason := plain_check(first, second)) is not None:
            return reason
    return None


def _veto_of_alignment(first: Reading, second: Reading, alignment: Alignment) -> str | None:
    for check in _CHECKS:
        if (reason := check(first, second, alignment)) is not None:
            return reason
    return None


def _literals_differ(first: Reading, second: Reading) -> str | None:
    if first.literals == second.literals:
        return None
    return _phrase("identifiers differ", (first.literals, second.literals))


def _numbers_differ(first: Reading, second: Reading) -> str | None:
    if first.numbers == second.numbers:
        return None
    return _phrase("numbers differ", (first.numbers, second.numbers))


def _negation_differs(first: Reading, second: Reading) -> str | None:
    if first.negations == second.negations:
        return None
    return f"negation differs: {first.negations} / {second.negations}"


def _markers_differ(first: Reading, second: Reading) -> str | None:
    if first.markers == second.markers:
        return None
    counts = Counter(first.markers), Counter(second.markers)
    sides = [list(counts[0] - counts[1]), list(counts[1] - counts[0])]
    return _phrase("turning words differ", sides)


def _persons_differ(first: Reading, second: Reading, _: Alignment) -> str | None:
    """Who is spoken of: nobody may be exchanged for somebody else, nor change places."""
    readings = (first, second)
    spoken_of = [{p.split(":")[0] for p in reading.persons} for reading in readings]
    owners = [{p for p in reading.persons if p.endswith(":has")} for reading in readings]
    actors = [
        [p.split(":")[0] for p in reading.persons if not p.endswith(":has")] for reading in readings
    ]
    third = [side - {"me", "you"} for side in spoken_of]
    if third[0] != third[1] or (all(owners) and owners[0] != owners[1]):
        return _phrase("persons differ", [sorted(side) for side in spoken_of])
    if all(actors) and actors[0][0] != actors[1][0]:
        return _phrase("roles differ", actors)
    return None


_MEASURING = frozenset({"tell", "how much", "how many", "how long"})


def _asks_differ(first: Reading, second: Reading, _: Alignment) -> str | None:
    if are_askable(first.ask, second.ask):
        return None
    return f"kinds of question differ: {first.ask} / {second.ask}"


def are_askable(one: str, other: str) -> bool:
    """Whether two kinds of question may ask for the same thing: "what price", "how much"."""
    if one == other or not one or not other:
        return True
    kinds = {one, other}
    return "what" in kinds and not kinds.isdisjoint(_MEASURING)


def _names_differ(_: Reading, __: Reading, alignment: Alignment) -> str | None:
    sides = [[t for t in side if t.is_name] for side in alignment.only]
    if sides[0] or sides[1]:
        return _phrase("names differ", [[t.shown for t in side] for side in alignment.only])
    for one, other in alignment.shared:
        is_capital = one.shown.lower() in lexicon.CAPITAL_WORDS
        if is_capital and one.is_name != other.is_name and one.shown.lower() == other.shown.lower():
            return f"capitals differ: {one.shown} / {other.shown}"
    return None


def _opposites(first: Reading, _: Reading, alignment: Alignment) -> str | None:
    language = first.language or ""
    prefixes = BY_LANGUAGE[language].negative_prefixes
    opposites, kinds = _groups_of(language)
    others = alignment.only[1] + alignment.light[1]
    for one in alignment.only[0] + alignment.light[0]:
        concept = one.concept
        of_opposites = opposites.get(concept, _NONE)
        of_kinds = kinds.get(concept, _NONE)
        for other in others:
            if not of_opposites.isdisjoint(opposites.get(other.concept, _NONE)) or _is_negated(
                concept, other.concept, prefixes
            ):
                return f"opposites: {one.shown} / {other.shown}"
            if not of_kinds.isdisjoint(kinds.get(other.concept, _NONE)):
                return f"kinds differ: {one.shown} / {other.shown}"
    return None


_NONE: frozenset[int] = frozenset()
_Groups = dict[str, frozenset[int]]


@cache
def _groups_of(language: str) -> tuple[_Groups, _Groups]:
    """In which lines of opposites, and in which of kinds, a concept stands."""
    known = BY_LANGUAGE[language]
    both: list[_Groups] = []
    for lines in (known.opposite, known.kinds):
        places: dict[str, set[int]] = {}
        for number, line in enumerate(lines):
            for word in line:
                places.setdefault(concept_of(word, language), set()).add(number)
        both.append({concept: frozenset(numbers) for concept, numbers in places.items()})
    return both[0], both[1]


def _is_negated(one: str, other: str, prefixes: tuple[str, ...]) -> bool:
    """Whether one word is the other behind a prefix that turns it round."""
    short, long = (one, other) if len(one) < len(other) else (other, one)
    if len(short) < 3 or not long.endswith(short):
        return False
    return any(prefix + short == long for prefix in prefixes)


def _words_differ(first: Reading, second: Reading, alignment: Alignment) -> str | None:
    """One word exchanged for another, not known to mean the same, is most often another thing.

    So are several, each in the place of another. Where more is reworded the verifier may weigh it,
    in English; of the other languages too little is known.
    """
    if not any(alignment.only):
        return None
    if first.language == "en" and min(map(len, alignment.only)) > 1:
        frames = [
            ["" if token in only else token.concept for token in reading.tokens]
            for reading, only in zip((first, second), alignment.only, strict=True)
        ]
        if frames[0] != frames[1]:
            return None
    return _phrase("words differ", [[t.shown for t in side] for side in alignment.only])


def _voices_differ(first: Reading, _: Reading, alignment: Alignment) -> str | None:
    """ "Is Ann bullying?" and "Is Ann bullied?"."""
    if first.language != "en":
        return None
    for pair in alignment.shared:
        endings = {_ending(token.shown.lower()) for token in pair}
        if endings == {"ing", "ed"}:
            return f"voices differ: {pair[0].shown} / {pair[1].shown}"
    return None


def _ending(word: str) -> str:
    return next((ending for ending in ("ing", "ed") if word.endswith(ending)), "")


def _one_adds(first: Reading, second: Reading, alignment: Alignment) -> str | None:
    """One prompt narrows what the other asks in general."""
    one, other = alignment.only
    if first.ask == second.ask == "do" and any(alignment.light):
        # "I want to pay" and "I know how to pay": no question makes up for what is dropped.
        return _phrase("one adds", [[t.shown for t in side] for side in alignment.light])
    if bool(one) == bool(other):
        return None
    return _phrase("one adds", [[t.shown for t in side] for side in (one, other)])


def _roles_differ(first: Reading, _: Reading, alignment: Alignment) -> str | None:
    """Whether things changed places: "from A to B" and "from B to A", "A loves B", "B loves A"."""
    movable = BY_LANGUAGE[first.language or ""].movable
    pairs = [pair for pair in alignment.shared if pair[0].concept not in movable]
    for place, (one, other) in enumerate(pairs):
        if one.role != other.role and _is_turned(one.role, other.role):
            return f"roles differ: {one.role} {one.shown} / {other.role} {other.shown}"
        for later, twin in pairs[place + 1 :]:
            if one.role == twin.role != later.role == other.role:
                return f"roles differ: {one.shown} / {later.shown}"
            if other.place > twin.place and not _may_move((one, other), (later, twin)):
                return f"word order differs: {one.shown} / {later.shown}"
    return None


def _is_turned(one: str, other: str) -> bool:
    """Whether two prepositions give what follows different parts to play."""
    if not one or not other:
        return False
    is_origin = one in ("from", "by") or other in ("from", "by")
    return is_origin or {one, other} in ({"on", "off"}, {"into", "out of"}, {"in", "out of"})


def _may_move(one: tuple[Token, Token], other: tuple[Token, Token]) -> bool:
    """Whether two things that stand in another order play the same parts nevertheless."""
    for moved, fixed in ((one, other), (other, one)):
        is_phrase = moved[0].role == moved[1].role != ""
        if is_phrase and moved[0].role != fixed[0].role:
            return True
        # "the password for guests", "the guest password"
        for close, apart in ((0, 1), (1, 0)):
            is_head = fixed[0].role == fixed[1].role == moved[close].role
            is_ahead = moved[close].place < fixed[close].place
            if is_head and is_ahead and moved[apart].role in _COMPOUNDING - {fixed[0].role}:
                return True
    return False


_COMPOUNDING = frozenset({"of", "for", "in", "on", "at", "about", "with"})
_Check = Callable[[Reading, Reading, Alignment], str | None]
_PLAIN_CHECKS: tuple[Callable[[Reading, Reading], str | None], ...] = (
    _literals_differ,
    _numbers_differ,
    _negation_differs,
    _markers_differ,
)
_CHECKS: tuple[_Check, ...] = (
    _names_differ,
    _opposites,
    _persons_differ,
    _asks_differ,
    _roles_differ,
    _voices_differ,
    _one_adds,
    _words_differ,
)
"""After the plain ones; the most telling first, and the first that finds something words the
refusal."""
