"""Do two answers say the same? What a shadow check takes for the truth.

The rule, in this order:

1. the same text but for case, punctuation and white space: they agree;
2. a yes against a no, or, in answers of up to forty words, numbers, negations or names that
   contradict each other: they differ; in longer ones that is unclear;
3. else their embeddings decide, of the beginnings that fit the embedder: near ones agree, far
   ones differ, and what lies between, or cannot be embedded, is unclear.

It errs to the safe side where an answer is only worded otherwise: two good answers in other words
may be unclear or differ, which costs hits. It errs to the other side where two answers differ in
something that is no number, negation or name, and past their beginnings.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Awaitable, Callable
from typing import Literal

from cache.guards import compare
from cache.lexicon import NEGATIONS
from cache.reading import Reading, understand
from deployments.embedder import Vector

Agreement = Literal["right", "wrong", "unclear"]

NEAR, FAR = 0.9, 0.7
"""Cosines of two answers: from the first up they say the same, under the second they do not."""
HEAD_CHARS = 600
"""Of an answer, for its meaning: more rarely fits the embedder's window."""
BRIEF_WORDS = 40
"""In longer answers two tellings of the same have numbers and names that the other lacks."""
SHORT_WORDS = 12
"""In answers of so few words an exchanged one is the answer."""

_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_SENTENCE = re.compile(r"[.!?:\n]+")
_YES_NO = {"yes": True, "no": False, "true": True, "false": False}


async def agreement(
    stored: str, given: str, embed: Callable[[str], Awaitable[Vector | None]] | None
) -> Agreement:
    """What comparing two answers finds; raises whatever `embed` raises."""
    if _bare(stored) == _bare(given):
        return "right"
    heads = stored[:HEAD_CHARS], given[:HEAD_CHARS]
    against = contradiction(*heads)
    if against is not None:
        is_brief = all(len(_WORD.findall(head)) <= BRIEF_WORDS for head in heads)
        return "wrong" if is_brief or against == "yes or no" else "unclear"
    if embed is None:
        return "unclear"
    first, second = await embed(heads[0]), await embed(heads[1])
    if first is None or second is None:
        return "unclear"
    cosine = float(first @ second)
    if not cosine >= FAR:
        return "wrong"
    return "right" if cosine >= NEAR and not _is_exchanged(*heads) else "unclear"


def contradiction(one: str, other: str) -> str | None:
    """What two answers cannot both be right about; None when nothing is found.

    A side may say more than the other; it contradicts where each says what the other does not.
    """
    for what, said in (("numbers", _numbers), ("names", _names)):
        mine, theirs = said(one), said(other)
        if mine - theirs and theirs - mine:
            return what
    verdicts = _verdict(one), _verdict(other)
    if None not in verdicts and verdicts[0] != verdicts[1]:
        return "yes or no"
    return "negation" if _negations(one) != _negations(other) else None


def _is_exchanged(one: str, other: str) -> bool:
    """Whether one short answer has a word in the place of another's."""
    if max(len(_WORD.findall(one)), len(_WORD.findall(other))) > SHORT_WORDS:
        return False
    readings: tuple[Reading, Reading] = understand(one), understand(other)
    if None in (readings[0].language, readings[1].language):
        return True
    only = compare(*readings).alignment.only
    return bool(only[0] and only[1])


def _bare(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _numbers(text: str) -> set[str]:
    return set(_NUMBER.findall(unicodedata.normalize("NFKC", text)))


def _names(text: str) -> set[str]:
    """Words with a capital that do not begin a sentence; German nouns are among them."""
    names: set[str] = set()
    for sentence in _SENTENCE.split(text):
        words: list[str] = _WORD.findall(sentence)
        names.update(word for word in words[1:] if word[0].isupper() and word != "I")
    return names


def _verdict(text: str) -> bool | None:
    words = _bare(text[:40])
    return _YES_NO.get(words[0]) if words else None


def _negations(text: str) -> int:
    return sum(word in NEGATIONS or word.endswith(("n't", "n’t")) for word in _bare(text))
