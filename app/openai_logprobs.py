"""Log probabilities as the OpenAI API shows them."""

from __future__ import annotations

from collections.abc import Sequence

from app.openai_types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from protocol.token_log import PromptToken, TokenDelta, TokenLogprob

REPLACEMENT_CHARACTER = "\ufffd"


def chat_logprobs(deltas: Sequence[TokenDelta]) -> ChatLogprobs | None:
    """Those of chats; None where they were not asked for."""
    entries = logprob_entries(deltas)
    if entries is None:
        return None
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=entry.token,
                logprob=entry.logprob,
                bytes=bytes_of(entry.token),
                top_logprobs=[
                    TopLogprob(token=token, logprob=logprob, bytes=bytes_of(token))
                    for _, token, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(tokens: Sequence[PromptToken], text: str) -> CompletionLogprobs:
    """Those of a prompt that comes back as `text`."""
    return CompletionLogprobs(
        tokens=[entry.token for entry in tokens],
        token_logprobs=[entry.logprob for entry in tokens],
        top_logprobs=[
            None if entry.logprob is None else _best(entry.top, entry.token, entry.logprob)
            for entry in tokens
        ],
        # Where a tokenizer changes a text, its tokens may be longer.
        text_offset=[min(entry.offset, len(text)) for entry in tokens],
    )


def joined(
    first: CompletionLogprobs | None, second: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    """Those of a text and of the one behind it."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def completion_logprobs(deltas: Sequence[TokenDelta], *, offset: int) -> CompletionLogprobs | None:
    """Those of text completions, whose text goes on at `offset`; None where not asked for."""
    entries = logprob_entries(deltas)
    if entries is None:
        return None
    return CompletionLogprobs(
        tokens=[entry.token for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_best(entry.top, entry.token, entry.logprob) for entry in entries],
        text_offset=list(_offsets(deltas, offset)),
    )


def logprob_entries(deltas: Sequence[TokenDelta]) -> list[TokenLogprob] | None:
    """One entry a token; None where they were not asked for."""
    if all(delta.logprobs is None for delta in deltas):
        return None
    return [entry for delta in deltas for entry in delta.logprobs or ()]


def _best(top: Sequence[tuple[int, str, float]], token: str, logprob: float) -> dict[str, float]:
    """The alternatives by their text, the token itself among them.

    Tokens that are only parts of a character share one text: the likeliest is kept.
    """
    best: dict[str, float] = {}
    for _, other, value in top:
        best.setdefault(other, value)
    best.setdefault(token, logprob)
    return best


def _offsets(deltas: Sequence[TokenDelta], offset: int) -> list[int]:
    """Where each token begins in the text of its choice, in code points.

    Within one delta the tokens' own texts are counted, but never past its end: where
    tokens are parts of a character, their texts are longer than what they make.
    """
    offsets = []
    for delta in deltas:
        end = offset + len(delta.text)
        place = offset
        for entry in delta.logprobs or ():
            offsets.append(min(place, end))
            place += len(entry.token)
        offset = end
    return offsets


def bytes_of(token: str) -> list[int] | None:
    """UTF-8 of a token; None where its text stands for bytes that are no whole character."""
    return None if REPLACEMENT_CHARACTER in token else list(token.encode("utf-8", "replace"))
