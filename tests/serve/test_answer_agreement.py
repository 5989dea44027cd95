"""Do two answers say the same? The truth of a shadow check, and where it errs."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.answer_agreement import agreement, contradiction
from deployments.embedder import Vector

LONG = "It takes some time to do this, and there are many things that one should know of it. " * 3


async def found(one: str, other: str, cosine: float | None = 1.0) -> str:
    async def embed(text: str) -> Vector | None:
        if cosine is None:
            return None
        x = cosine if text == other[:600] else 1.0
        return np.array([x, np.sqrt(max(0.0, 1 - x * x))], dtype=np.float32)

    both = await agreement(one, other, embed), await agreement(other, one, embed)
    assert both[0] == both[1], "who was first does not matter"
    return both[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [("Paris.", "paris"), ("It is Paris.", " It is  Paris"), ("Yes, of course!", "yes of course")],
)
async def test_the_same_text_agrees_whatever_its_dress(one: str, other: str) -> None:
    assert await found(one, other, cosine=None) == "right"


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ("It takes 3 days.", "It takes 30 days.", "numbers"),
        ("The capital is Paris.", "The capital is Lyon.", "names"),
        ("Yes, you can.", "No, you have to ask.", "yes or no"),
        ("You may enter.", "You may not enter.", "negation"),
        ("You can do that.", "You can't do that.", "negation"),
    ],
)
async def test_what_contradicts_differs_however_near_it_is(one: str, other: str, why: str) -> None:
    assert contradiction(one, other) == why
    assert await found(one, other) == "wrong"


async def test_a_side_may_say_more() -> None:
    assert contradiction("It is Paris.", "It is Paris, since 987 at the latest.") is None


async def test_what_contradicts_in_long_answers_is_unclear() -> None:
    one, other = f"{LONG}Ask Ann.", f"{LONG}Ask Bob."
    assert await found(one, other) == "unclear"
    assert await found(f"Yes. {LONG}", f"No. {LONG}") == "wrong"


async def test_else_meaning_decides() -> None:
    one, other = f"{LONG}Begin now.", f"{LONG}Start at once."
    assert await found(one, other, cosine=0.95) == "right"
    assert await found(one, other, cosine=0.8) == "unclear"
    assert await found(one, other, cosine=0.3) == "wrong"
    assert await found(one, other, cosine=float("nan")) == "wrong"
    assert await found(one, other, cosine=None) == "unclear"
    assert await agreement(one, other, None) == "unclear"


async def test_an_exchanged_word_in_a_short_answer_is_not_right() -> None:
    assert await found("Press the red button.", "Press the green button.") == "unclear"
