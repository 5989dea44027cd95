"""Questions that are being answered right now, for those that mean the same.

Only remembers who is near; whether one may be given the other's answer is the decision's to say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from cache.answer import StoredAnswer
from cache.decision import Candidate
from cache.index import Vector
from cache.key import PromptKey

LIFE_S = 60.0
"""An answer that takes longer is not waited for by anyone who comes later."""
MAX_QUESTIONS = 4096
MAX_OF_ONE = 64
"""Questions of one partition that a look-up compares itself with, the latest."""
TO_COME = StoredAnswer(b"", 0, "")
"""Stands for an answer that nobody knows yet. Its length is bounded by an equal limit of tokens."""

Id = tuple[str, str, str]
"""Partition, exact key, and who answers."""


@dataclass(frozen=True, slots=True)
class Question:
    """One that is being answered, under a name that only its answerer (`by`) knows."""

    key: PromptKey
    vector: Vector
    name: str
    by: str
    begun_s: float


class Underway:
    """Bounded in number and in time. Belongs to one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._questions: OrderedDict[Id, Question] = OrderedDict()
        self._partitions: dict[str, dict[Id, None]] = {}

    def __len__(self) -> int:
        return len(self._questions)

    def begin(self, key: PromptKey, vector: Vector, name: str, by: str) -> None:
        """Takes note of a question that `by` begins to answer."""
        own = (key.partition, key.exact, by)
        self._remove(own)
        self._questions[own] = Question(key, vector, name, by, self._clock())
        self._partitions.setdefault(key.partition, {})[own] = None
        self._forget_old()

    def end(self, key: PromptKey) -> None:
        """Takes note that a question is answered, whoever did it."""
        for own in [own for own in self._partitions.get(key.partition, ()) if own[1] == key.exact]:
            self._remove(own)

    def give_up(self, names: Container[str], by: Callable[[str], bool]) -> None:
        """Takes note that answers did not come to their end, of answerers that `by` is true of."""
        for own, question in list(self._questions.items()):
            if question.name in names and by(question.by):
                self._remove(own)

    def near(self, key: PromptKey, embedding: Vector, by: str, limit: int) -> list[Question]:
        """Other questions of the partition with an equal limit of tokens, the nearest first."""
        self._forget_old()
        latest = list(self._partitions.get(key.partition, ()))[-MAX_OF_ONE:]
        fit = [
            question
            for question in map(self._questions.__getitem__, latest)
            if question.by == by
            and question.key.exact != key.exact
            and question.key.max_tokens == key.max_tokens
            and question.vector.shape == embedding.shape
        ]
        if not fit:
            return []
        similarities = np.stack([question.vector for question in fit]) @ embedding
        order = np.argsort(-similarities, kind="stable")[:limit]
        return [fit[place] for place in order]

    def _forget_old(self) -> None:
        oldest_s = self._clock() - LIFE_S
        while self._questions:
            own, question = next(iter(self._questions.items()))
            if question.begun_s >= oldest_s and len(self._questions) <= MAX_QUESTIONS:
                return
            self._remove(own)

    def _remove(self, own: Id) -> None:
        if self._questions.pop(own, None) is None:
            return
        of_one = self._partitions[own[0]]
        del of_one[own]
        if not of_one:
            del self._partitions[own[0]]


def as_candidate(question: Question, embedding: Vector) -> Candidate:
    """The question as the decision takes it, to be given to one of that embedding."""
    similarity = float(question.vector @ embedding)
    return Candidate(question.key, TO_COME, 0.0, similarity, question.vector)
