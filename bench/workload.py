"""What the simulated clients ask: varied questions with a mix of prompt and answer lengths.

The same seed makes the same requests, whoever is asked.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ASKED = (
    "Explain {topic} to someone who has never heard of it.",
    "What are the three most common mistakes people make with {topic}?",
    "Give me a short history of {topic}.",
    "How would you teach {topic} to a ten year old?",
    "List what I need to get started with {topic}.",
    "Is {topic} worth learning today? Give reasons for and against.",
    "Write a friendly e-mail that invites a colleague to a workshop on {topic}.",
    "Which questions should I ask an expert on {topic}?",
)
TOPICS = (
    "baking sourdough bread", "binary search", "the water cycle", "compound interest",
    "growing tomatoes on a balcony", "the French Revolution", "public key cryptography",
    "how vaccines work", "playing the violin", "photosynthesis", "travelling by night train",
    "the rules of chess", "writing unit tests", "plate tectonics", "repairing a bicycle",
    "the Roman aqueducts", "black holes", "making a household budget", "bird migration",
    "solar panels", "learning Portuguese", "first aid for burns", "the printing press",
    "database indexes", "long distance running", "tea ceremonies", "weather forecasts",
    "container ships", "meditation", "wooden furniture", "jazz improvisation", "glaciers",
)  # fmt: skip
PADDING = (
    "The notes below were taken during a meeting and are in no particular order.",
    "Several people asked for concrete examples rather than definitions.",
    "We agreed that the answer should be understandable without a technical background.",
    "Costs were discussed twice, and both times the estimate went up by a tenth.",
    "Somebody pointed out that the older material is still useful for beginners.",
    "The group meets again on the second Tuesday of next month at half past nine.",
    "A draft was sent around last week; only four of the eleven readers replied.",
    "Please keep in mind that some of us read this on a phone while travelling.",
    "One participant remembered a similar case from 2009 that ended rather well.",
    "The room was warm, the coffee was cold, and the projector failed after an hour.",
    "There was no objection to publishing the summary once names are removed.",
    "It remains unclear who is responsible for keeping the list up to date.",
)
PADDING_SENTENCES = (0, 4, 8, 16)
"""Sentences before the question, drawn evenly: prompts of about 45, 105, 165 and 285 tokens
with SmolLM2's chat template."""


@dataclass(frozen=True)
class Ask:
    """One request: a question, and how long its answer may get.

    With `ignore_eos` the answer is exactly `max_tokens` long.
    """

    prompt: str
    max_tokens: int
    ignore_eos: bool


def make_asks(
    count: int, seed: int, *, min_tokens: int, max_tokens: int, ignore_eos: bool
) -> list[Ask]:
    """Requests whose answers are `min_tokens` to `max_tokens` long, drawn evenly.

    A question comes twice only after all were asked once, so that the reuse of an earlier
    prompt's computation, where a server has it, gains nothing.
    """
    rng = random.Random(seed)
    questions = [pattern.format(topic=topic) for pattern in ASKED for topic in TOPICS]
    rng.shuffle(questions)
    asks = []
    for index in range(count):
        padding = rng.choices(PADDING, k=rng.choice(PADDING_SENTENCES))
        prompt = " ".join([*padding, questions[index % len(questions)]])
        asks.append(Ask(prompt, rng.randint(min_tokens, max_tokens), ignore_eos))
    return asks


def make_arrivals(count: int, seed: int, rate_per_s: float) -> list[float]:
    """Seconds after the start at which requests of a Poisson process arrive, rising."""
    rng = random.Random(seed)
    at_s = 0.0
    arrivals = []
    for _ in range(count):
        arrivals.append(at_s)
        at_s += rng.expovariate(rate_per_s)
    return arrivals
