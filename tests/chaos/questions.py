"""What the swarm asks, and what it must hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.scripted_engine import answer_to
from tests.chaos.swarm import Question

ANSWER_TOKENS = 120
"""Six seconds at the scripted engine's pace."""


def scripted(
    subject: str, num_tokens: int = ANSWER_TOKENS, **fields: Any
) -> Callable[[int], Question]:
    """Questions that all differ, to the scripted engine, past the cache unless told otherwise."""

    def ask(number: int) -> Question:
        prompt = f"{subject}, question {number}"
        truth = answer_to(prompt, num_tokens)
        sent = {"max_tokens": num_tokens, "temperature": 0, "cache": "bypass"} | fields
        return Question(prompt, truth, sent)

    return ask
