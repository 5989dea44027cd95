"""From logs to `text_completion` objects, which are their own chunks."""

from __future__ import annotations

from collections.abc import Sequence

from app.openai_chunk_writer import ChunkWriter, MaybeUsage, num_tokens
from app.openai_logprobs import completion_logprobs, joined, prompt_logprobs
from app.openai_replies import Event, Heading, encode, finish_reason
from app.openai_requests import Plan
from app.openai_types import Completion, CompletionChoice, Usage
from protocol.token_log import TokenDelta, TokenLog


class CompletionWriter(ChunkWriter[CompletionChoice]):
    """Writes the replies of /v1/completions."""

    def __init__(self, heading: Heading, plan: Plan) -> None:
        super().__init__(heading, plan)
        self._lengths: dict[int, int] = {}
        self._n = plan.n
        self._echo = plan.echo
        # The probabilities of a prompt come with its first token; its text waits for them.
        self._is_scored = any(request.prompt_logprobs is not None for request in plan.requests)

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        return self._pack([self._whole(index, log) for index, log in enumerate(logs)], usage)

    def opening(self, index: int) -> list[Event]:
        if self._echo is None or self._is_scored:
            return []
        return self._chunk(CompletionChoice(index=index, text=self._prompt(index)), num_tokens=0)

    def piece(self, index: int, delta: TokenDelta) -> list[Event]:
        events: list[Event] = []
        if delta.prompt is not None:
            text = self._prompt(index)
            told = prompt_logprobs(delta.prompt, text)
            choice = CompletionChoice(index=index, text=text, logprobs=told)
            events += self._chunk(choice, num_tokens=0)
        if not delta.text and not delta.logprobs:
            return events
        offset = self._lengths.get(index, len(self._prompt(index)))
        self._lengths[index] = offset + len(delta.text)
        logprobs = completion_logprobs([delta], offset=offset)
        choice = CompletionChoice(index=index, text=delta.text, logprobs=logprobs)
        return events + self._chunk(choice, num_tokens=delta.seq + 1)

    def closing(self, index: int, log: TokenLog) -> list[Event]:
        choice = CompletionChoice(index=index, text="", finish_reason=finish_reason(log))
        return self._chunk(choice, num_tokens=num_tokens(log))

    def _whole(self, index: int, log: TokenLog) -> CompletionChoice:
        prompt = self._prompt(index)
        logprobs = completion_logprobs(log.deltas, offset=len(prompt))
        for delta in log.deltas[:1]:
            if delta.prompt is not None:
                logprobs = joined(prompt_logprobs(delta.prompt, prompt), logprobs)
        return CompletionChoice(
            index=index,
            text=prompt + log.text,
            logprobs=logprobs,
            finish_reason=finish_reason(log),
        )

    def _prompt(self, index: int) -> str:
        """What comes before a choice's answer."""
        return "" if self._echo is None else self._echo[index // self._n]

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
