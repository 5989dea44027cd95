"""From logs to `text_completion` objects, which are their own chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from app.openai_logprobs import completion_logprobs
from app.openai_replies import (
    DONE,
    Event,
    Heading,
    UsageCounter,
    encode,
    failure_events,
    finish_reason,
)
from app.openai_requests import Plan
from app.openai_types import Completion, CompletionChoice, Usage
from app.serving import Stream
from protocol.errors import ServingError
from protocol.token_log import TokenDelta, TokenLog


class CompletionWriter:
    """Writes the replies of /v1/completions."""

    last_line = DONE

    def __init__(self, heading: Heading, plan: Plan) -> None:
        self._heading = heading
        self._include_usage = plan.include_usage
        self._counter = UsageCounter(plan.n) if plan.counts_usage else None
        self._lengths: dict[int, int] = {}

    def begin(self, streams: Sequence[Stream]) -> None:
        if self._counter is not None:
            self._counter.begin(streams)

    def rename(self, reply_id: str) -> None:
        self._heading = dataclasses.replace(self._heading, id=reply_id)

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        return self._object(
            [
                CompletionChoice(
                    index=index,
                    text=log.text,
                    logprobs=completion_logprobs(log.deltas, offset=0),
                    finish_reason=finish_reason(log),
                )
                for index, log in enumerate(logs)
            ],
            usage,
        )

    def opening(self, index: int) -> list[Event]:
        return []

    def piece(self, index: int, delta: TokenDelta) -> list[Event]:
        if not delta.text and not delta.logprobs:
            return []
        if self._counter is not None:
            self._counter.count(index, delta.seq + 1)
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(delta.text)
        logprobs = completion_logprobs([delta], offset=offset)
        return self._chunk([CompletionChoice(index=index, text=delta.text, logprobs=logprobs)])

    def closing(self, index: int, log: TokenLog) -> list[Event]:
        if self._counter is not None and log.terminal is not None:
            self._counter.count(index, log.terminal.usage.completion_tokens)
        return self._chunk(
            [CompletionChoice(index=index, text="", finish_reason=finish_reason(log))]
        )

    def usage(self, usage: Usage) -> list[Event]:
        return [Event(self._object([], usage))] if self._include_usage else []

    def failure(self, error: ServingError) -> list[Event]:
        return failure_events(error)

    def _chunk(self, choices: list[CompletionChoice]) -> list[Event]:
        usage: Usage | msgspec.UnsetType | None = None if self._include_usage else msgspec.UNSET
        if self._counter is not None:
            usage = self._counter.usage
        return [Event(self._object(choices, usage))]

    def _object(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> bytes:
        heading = self._heading
        return encode(
            Completion(
                id=heading.id,
                created=heading.created,
                model=heading.model,
                system_fingerprint=heading.revision,
                choices=choices,
                usage=usage,
            )
        )
