"""May this request be given that stored answer? One function, whatever path or tier asks."""

from __future__ import annotations

from cache.answer import StoredAnswer
from cache.guards import disagreement
from cache.key import PromptKey


def refusal(
    stored: PromptKey,
    answer: StoredAnswer,
    asked: PromptKey,
    *,
    age_s: float,
    ttl_s: float,
    similarity: float | None,
    threshold: float,
) -> str | None:
    """Why `asked` must not get `answer`, which was stored for `stored`; None means it may.

    `similarity` None asks for the exact path, where the texts must be equal;
    else the texts must be as near as `threshold` and the guards must agree.
    """
    if stored.partition != asked.partition:
        return "other partition"
    if age_s >= ttl_s:
        return "expired"
    if asked.max_tokens is not None and answer.completion_tokens > asked.max_tokens:
        return f"answer has {answer.completion_tokens} tokens, max_tokens is {asked.max_tokens}"
    if answer.is_truncated and stored.max_tokens != asked.max_tokens:
        return "answer was cut at another limit"
    if similarity is None:
        return None if stored.text == asked.text else "other text"
    if answer.is_truncated:
        return "answer was cut"
    if not (stored.allow_semantic and asked.allow_semantic):
        return "semantic matching is off"
    # Written so that NaN is refused.
    if not similarity >= threshold:
        return "below threshold"
    return disagreement(stored.text, asked.text)
