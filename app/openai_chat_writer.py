"""From logs to `chat.completion` and `chat.completion.chunk` objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from app.openai_chunk_writer import ChunkWriter, MaybeUsage, num_tokens
from app.openai_logprobs import chat_logprobs
from app.openai_replies import Event, Heading, bare_id, encode, finish_reason
from app.openai_requests import Plan
from app.openai_tools import CallPart, Parts, ToolCallReader
from app.openai_types import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FinishReason,
    ReplyMessage,
    ToolCall,
    Usage,
)
from app.serving import Stream
from protocol.token_log import TokenDelta, TokenLog


class ChatWriter(ChunkWriter[ChatChunkChoice]):
    """Writes the replies of /v1/chat/completions."""

    def __init__(self, heading: Heading, plan: Plan) -> None:
        super().__init__(heading, plan)
        self._tools = plan.tools
        self._readers: dict[int, ToolCallReader] = {}

    def begin(self, streams: Sequence[Stream]) -> None:
        super().begin(streams)
        self._readers = {index: self._tools.reader() for index in range(len(streams))}

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        heading = self._heading
        return encode(
            ChatCompletion(
                id=heading.id,
                created=heading.created,
                model=heading.model,
                system_fingerprint=heading.revision,
                choices=[self._choice(index, log) for index, log in enumerate(logs)],
                usage=usage,
            )
        )

    def opening(self, index: int) -> list[Event]:
        delta = ChatDelta(role="assistant", content="")
        return self._chunk(ChatChunkChoice(index=index, delta=delta), num_tokens=0)

    def piece(self, index: int, delta: TokenDelta) -> list[Event]:
        parts = self._readers[index].feed(delta.text)
        if not parts.text and not parts.calls and not delta.logprobs:
            return []
        choice = ChatChunkChoice(
            index=index, delta=self._delta(index, parts), logprobs=chat_logprobs([delta])
        )
        return self._chunk(choice, num_tokens=delta.seq + 1)

    def closing(self, index: int, log: TokenLog) -> list[Event]:
        parts = self._readers[index].end()
        delta = self._delta(index, parts) if parts.text or parts.calls else ChatDelta()
        reason = self._finish_reason(index, log)
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=reason)
        return self._chunk(choice, num_tokens=num_tokens(log))

    def _choice(self, index: int, log: TokenLog) -> ChatChoice:
        reader = self._readers[index]
        first, last = reader.feed(log.text), reader.end()
        text, calls = first.text + last.text, _joined(first.calls + last.calls)
        message = ReplyMessage(
            content=text if text or not calls else None,
            tool_calls=[self._call(index, call, is_whole=True) for call in calls] or msgspec.UNSET,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=chat_logprobs(log.deltas),
            finish_reason=self._finish_reason(index, log),
        )

    def _finish_reason(self, index: int, log: TokenLog) -> FinishReason:
        reason = finish_reason(log)
        return "tool_calls" if reason == "stop" and self._readers[index].num_calls else reason

    def _delta(self, index: int, parts: Parts) -> ChatDelta:
        calls = [self._call(index, call) for call in parts.calls]
        if calls:
            return ChatDelta(content=parts.text or msgspec.UNSET, tool_calls=calls)
        return ChatDelta(content=parts.text)

    def _call(self, choice: int, part: CallPart, *, is_whole: bool = False) -> ToolCall:
        position = msgspec.UNSET if is_whole else part.index
        if part.name is None:
            return ToolCall(index=position, function=CalledFunction(arguments=part.arguments))
        return ToolCall(
            index=position,
            id=call_id(self._heading.id, choice, part.index),
            type="function",
            function=CalledFunction(name=part.name, arguments=part.arguments),
        )

    def _pack(self, choices: list[ChatChunkChoice], usage: MaybeUsage) -> bytes:
        heading = self._heading
        return encode(
            ChatChunk(
                id=heading.id,
                created=heading.created,
                model=heading.model,
                system_fingerprint=heading.revision,
                choices=choices,
                usage=usage,
            )
        )


def call_id(reply_id: str, choice: int, number: int) -> str:
    """The name of a call, the same whenever the reply is written."""
    return f"call_{bare_id(reply_id)}_{choice}_{number}"


def _joined(parts: Sequence[CallPart]) -> list[CallPart]:
    """Whole calls from their pieces."""
    calls: list[CallPart] = []
    for part in parts:
        if part.name is not None:
            calls.append(part)
        else:
            whole = calls[-1]
            calls[-1] = dataclasses.replace(whole, arguments=whole.arguments + part.arguments)
    return calls
