"""From logs to `text_completion` objects, which are their own chunks."""

from __future__ import annotations

from collections.abc import Sequence

from app.openai_chunk_writer import ChunkWriter, MaybeUsage, num_tokens
from app.openai_logprobs import completion_logprobs
from app.openai_replies import Event, Heading, encode, finish_reason
from app.openai_requests import Plan
from app.openai_types import Completion, CompletionChoice, Usage
from protocol.token_log import TokenDelta, TokenLog


class CompletionWriter(ChunkWriter[CompletionChoice]):
    """Writes the replies of /v1/completions."""

    def __init__(self, heading: Heading, plan: Plan) -> None:
        super().__init__(heading, plan)
        self._lengths: dict[int, int] = {}

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        return self._pack(
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
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(delta.text)
        logprobs = completion_logprobs([delta], offset=offset)
        choice = CompletionChoice(index=index, text=delta.text, logprobs=logprobs)
        return self._chunk(choice, num_tokens=delta.seq + 1)

    def closing(self, index: int, log: TokenLog) -> list[Event]:
        choice = CompletionChoice(index=index, text="", finish_reason=finish_reason(log))
        return self._chunk(choice, num_tokens=num_tokens(log))

    def _pack(self, choices: list[CompletionChoice], usage: MaybeUsage) -> bytes:
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
