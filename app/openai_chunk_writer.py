"""What the writers of chat and text completions have in common: chunks, usage, how they fail."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from app.openai_errors import error_reply
from app.openai_replies import DONE, Event, Heading, encode
from app.openai_requests import Plan
from app.openai_types import ChatChunkChoice, CompletionChoice, PromptTokensDetails, Usage
from app.serving import Stream
from protocol.errors import ServingError
from protocol.token_log import TokenLog

MaybeUsage = Usage | msgspec.UnsetType | None
"""Unset where a chunk has no such field."""
Choice = TypeVar("Choice", ChatChunkChoice, CompletionChoice)


class UsageCounter:
    """Usage so far, for every chunk of a stream that asks for it."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt_tokens = 0
        self._completion_tokens: dict[int, int] = {}

    def begin(self, streams: Sequence[Stream]) -> None:
        for stream in streams[:: self._n]:
            terminal = stream.log.terminal
            known = 0 if terminal is None else terminal.usage.prompt_tokens
            self._prompt_tokens += known or stream.prompt_tokens

    def count(self, index: int, num_tokens: int) -> None:
        self._completion_tokens[index] = num_tokens

    @property
    def usage(self) -> Usage:
        completion_tokens = sum(self._completion_tokens.values())
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(),
        )


class ChunkWriter(ABC, Generic[Choice]):
    """A `Writer` but for its choices."""

    last_line = DONE

    def __init__(self, heading: Heading, plan: Plan) -> None:
        self._heading = heading
        self._include_usage = plan.include_usage
        self._counter = UsageCounter(plan.n) if plan.counts_usage else None

    @abstractmethod
    def _pack(self, choices: list[Choice], usage: MaybeUsage) -> bytes:
        """The JSON of a chunk."""

    def begin(self, streams: Sequence[Stream]) -> None:
        if self._counter is not None:
            self._counter.begin(streams)

    def rename(self, reply_id: str) -> None:
        self._heading = dataclasses.replace(self._heading, id=reply_id)

    def usage(self, usage: Usage) -> list[Event]:
        return [Event(self._pack([], usage))] if self._include_usage else []

    def failure(self, error: ServingError) -> list[Event]:
        return [Event(encode(error_reply(error)))]

    def _chunk(self, choice: Choice, num_tokens: int) -> list[Event]:
        """The one chunk of a choice, of which so many tokens are told with it."""
        usage: MaybeUsage = None if self._include_usage else msgspec.UNSET
        if self._counter is not None:
            self._counter.count(choice.index, num_tokens)
            usage = self._counter.usage
        return [Event(self._pack([choice], usage))]


def num_tokens(log: TokenLog) -> int:
    """Of an answer that has ended."""
    assert log.terminal is not None
    return log.terminal.usage.completion_tokens
