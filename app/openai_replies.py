"""From logs to OpenAI's JSON: whole replies, and the chunks of an event stream.

Knows nothing of HTTP. A writer belongs to one exchange: id, time and model are
the same in everything it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from app.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    PromptTokensDetails,
    ReplyMessage,
    TopLogprob,
    Usage,
)
from protocol.token_log import CacheOutcome, TokenDelta, TokenLog, TokenLogprob
from protocol.token_log import Usage as LogUsage

REPLACEMENT_CHARACTER = "\ufffd"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What all parts of one reply have in common."""

    id: str
    created: int
    model: str
    revision: str


class Writer(Protocol):
    """Puts the answers of one exchange into JSON; `index` is the choice."""

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        """The one reply to a plain request; every log has ended well."""
        ...

    def opening(self, index: int) -> bytes | None:
        """The chunk before the first piece, where the format has one."""
        ...

    def piece(self, index: int, delta: TokenDelta) -> bytes | None:
        """The chunk for `delta`; None when there is nothing to show."""
        ...

    def closing(self, index: int, log: TokenLog) -> bytes:
        """The one chunk with a finish reason."""
        ...

    def usage(self, usage: Usage) -> bytes | None:
        """The chunk after the last choice, when the client asked for it."""
        ...


class ChatWriter:
    """Writes `chat.completion` and `chat.completion.chunk` objects."""

    def __init__(self, heading: Heading, *, include_usage: bool = False) -> None:
        self._heading = heading
        self._include_usage = include_usage

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        heading = self._heading
        return _encode(
            ChatCompletion(
                id=heading.id,
                created=heading.created,
                model=heading.model,
                system_fingerprint=heading.revision,
                choices=[
                    ChatChoice(
                        index=index,
                        message=ReplyMessage(content=log.text),
                        logprobs=_chat_logprobs(log.deltas),
                        finish_reason=finish_reason(log),
                    )
                    for index, log in enumerate(logs)
                ],
                usage=usage,
            )
        )

    def opening(self, index: int) -> bytes | None:
        delta = ChatDelta(role="assistant", content="")
        return self._chunk([ChatChunkChoice(index=index, delta=delta)])

    def piece(self, index: int, delta: TokenDelta) -> bytes | None:
        if not delta.text and not delta.logprobs:
            return None
        return self._chunk(
            [
                ChatChunkChoice(
                    index=index,
                    delta=ChatDelta(content=delta.text),
                    logprobs=_chat_logprobs([delta]),
                )
            ]
        )

    def closing(self, index: int, log: TokenLog) -> bytes:
        return self._chunk(
            [ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=finish_reason(log))]
        )

    def usage(self, usage: Usage) -> bytes | None:
        return self._chunk([], usage) if self._include_usage else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        heading = self._heading
        return _encode(
            ChatChunk(
                id=heading.id,
                created=heading.created,
                model=heading.model,
                system_fingerprint=heading.revision,
                choices=choices,
                usage=usage if self._include_usage else msgspec.UNSET,
            )
        )


class CompletionWriter:
    """Writes `text_completion` objects, which are their own chunks."""

    def __init__(self, heading: Heading, *, include_usage: bool = False) -> None:
        self._heading = heading
        self._include_usage = include_usage
        self._lengths: dict[int, int] = {}

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        return self._object(
            [
                CompletionChoice(
                    index=index,
                    text=log.text,
                    logprobs=_completion_logprobs(log.deltas, offset=0),
                    finish_reason=finish_reason(log, has_tools=False),
                )
                for index, log in enumerate(logs)
            ],
            usage,
        )

    def opening(self, index: int) -> bytes | None:
        return None

    def piece(self, index: int, delta: TokenDelta) -> bytes | None:
        if not delta.text and not delta.logprobs:
            return None
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(delta.text)
        logprobs = _completion_logprobs([delta], offset=offset)
        return self._chunk([CompletionChoice(index=index, text=delta.text, logprobs=logprobs)])

    def closing(self, index: int, log: TokenLog) -> bytes:
        reason = finish_reason(log, has_tools=False)
        return self._chunk([CompletionChoice(index=index, text="", finish_reason=reason)])

    def usage(self, usage: Usage) -> bytes | None:
        return self._chunk([], usage) if self._include_usage else None

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return self._object(choices, usage if self._include_usage else msgspec.UNSET)

    def _object(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> bytes:
        heading = self._heading
        return _encode(
            Completion(
                id=heading.id,
                created=heading.created,
                model=heading.model,
                system_fingerprint=heading.revision,
                choices=choices,
                usage=usage,
            )
        )


def finish_reason(log: TokenLog, *, has_tools: bool = True) -> FinishReason:
    """The finish reason of a log that ended well, in the words of the API."""
    assert log.terminal is not None
    reason = log.terminal.finish_reason
    if reason == "length":
        return "length"
    return "tool_calls" if reason == "tool_calls" and has_tools else "stop"


def total_usage(logs: Sequence[TokenLog], *, n: int) -> Usage:
    """Usage of a whole exchange: each prompt counts once, however many answers it got.

    Args:
        logs: all ended, the `n` answers to one prompt next to each other.
    """
    each = [log.terminal.usage if log.terminal else LogUsage() for log in logs]
    prompts = each[::n]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in each)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(usage.cached_tokens for usage in prompts)
        ),
    )


def cache_header(outcomes: Sequence[CacheOutcome]) -> str:
    """The value of `x-seedance-cache`: `outcome; tier=…; similarity=…; age=…`, as far as known.

    Several choices are told as one: a miss if any was computed, else the first.
    """
    told = next((item for item in outcomes if item.outcome == "miss"), outcomes[0])
    parts: list[str] = [told.outcome]
    if told.tier is not None:
        parts.append(f"tier={_token(told.tier)}")
    if told.similarity is not None:
        parts.append(f"similarity={told.similarity:.4f}")
    if told.age_s is not None:
        parts.append(f"age={told.age_s:.1f}")
    if told.reason is not None:
        parts.append(f"reason={_token(told.reason)}")
    return "; ".join(parts)


def _token(text: str) -> str:
    """`text` as one word that may stand in a header."""
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in text)


def _chat_logprobs(deltas: Sequence[TokenDelta]) -> ChatLogprobs | None:
    entries = _entries(deltas)
    if entries is None:
        return None
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=entry.token,
                logprob=entry.logprob,
                bytes=_bytes_of(entry.token),
                top_logprobs=[
                    TopLogprob(token=token, logprob=logprob, bytes=_bytes_of(token))
                    for _, token, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


def _completion_logprobs(deltas: Sequence[TokenDelta], *, offset: int) -> CompletionLogprobs | None:
    entries = _entries(deltas)
    if entries is None:
        return None
    return CompletionLogprobs(
        tokens=[entry.token for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_best(entry) for entry in entries],
        text_offset=list(_offsets(deltas, offset)),
    )


def _entries(deltas: Sequence[TokenDelta]) -> list[TokenLogprob] | None:
    if all(delta.logprobs is None for delta in deltas):
        return None
    return [entry for delta in deltas for entry in delta.logprobs or ()]


def _best(entry: TokenLogprob) -> dict[str, float]:
    """The alternatives by their text, the token itself among them.

    Tokens that are only parts of a character share one text: the likeliest is kept.
    """
    best: dict[str, float] = {}
    for _, token, logprob in entry.top:
        best.setdefault(token, logprob)
    best.setdefault(entry.token, entry.logprob)
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


def _bytes_of(token: str) -> list[int] | None:
    """UTF-8 of a token; None where its text stands for bytes that are no whole character."""
    return None if REPLACEMENT_CHARACTER in token else list(token.encode("utf-8", "replace"))
