"""A request as the engine sees it: tokens, progress and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from deployments.engine.structured import Grammar
from protocol.request import SamplingParams
from protocol.token_log import FinishReason, Timing, Usage

if TYPE_CHECKING:
    from deployments.engine.output import AnswerText
    from deployments.engine.scoring import PromptScores
    from deployments.engine.speculation import Drafter


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One request's tokens and progress.

    `num_tokens - num_computed_tokens` is what is left to compute: a whole prompt, the
    rest of one, or the one token sampled last. Prefill and decode are the same case.

    Only the engine's thread changes a sequence, but for `is_abandoned`, which anyone may
    set at any time: the engine drops the sequence before it plans its next step.

    Attributes:
        sampling: with `max_tokens` resolved to a number.
        seed: of the sampling noise; drawn at random when the request named none.
        arrival_s, deadline_s: in seconds of the engine's clock.
        tenant: whose it is; computed prefixes are shared within one tenant only.
        share: whose part of the places and of the turns it takes: the tenant's, or a part of it.
        output_token_ids: at first empty, or what was answered elsewhere; such a sequence goes
            on behind them, and they are computed together with the prompt.
        answer: the text side of an answer that goes on; the engine makes one for any other.
        drafter: guesses what comes next; made when it is first asked.
        finish_reason: of an answer that was complete when it came.
        num_cached_tokens: first tokens of the prompt that needed no computing.
        num_preemptions: how often it lost its place to another, and waited again.
        num_tokens_at_preemption: it had the last time.
        is_warm_up: it computes the beginning of a prompt that is still being written, and answers
            nothing.
        prompt_logprobs: how many of the likeliest tokens are told at each place of the prompt, with
            the probability of the prompt's own; None tells nothing.
        prompt_scores: what is known of these, and was not told yet.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    grammar: Grammar | None = None
    tenant: str = ""
    share: str = ""
    is_warm_up: bool = False
    prompt_logprobs: int | None = None

    output_token_ids: list[int] = field(default_factory=list)
    answer: AnswerText | None = None
    drafter: Drafter | None = None
    prompt_scores: PromptScores | None = None
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_tokens_at_preemption: int = 0
    state: SequenceState = SequenceState.WAITING
    is_abandoned: bool = False
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether the logits behind each token of its prompt are wanted, which it has to compute
        itself. An answer that was begun has had them."""
        return self.prompt_logprobs is not None and not self.output_token_ids

    @property
    def max_tokens(self) -> int:
        assert self.sampling.max_tokens is not None, "prepare() resolves max_tokens"
        return self.sampling.max_tokens

    @property
    def num_tokens_left(self) -> int:
        """Work to its end at the most: prompt tokens not computed, and tokens it may generate."""
        num_prompt_left = max(0, len(self.prompt_token_ids) - self.num_computed_tokens)
        return num_prompt_left + self.max_tokens - len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at positions `start` to `end`, prompt and output in one row."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        taken = self.prompt_token_ids[start:end]
        if end > num_prompt:
            taken = taken + self.output_token_ids[: end - num_prompt]
        return taken

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=len(self.output_token_ids),
            cached_tokens=self.num_cached_tokens,
        )

    def timing(self, now_s: float) -> Timing:
        """Milliseconds since arrival; a phase that was never reached lasted until now."""

        def since_arrival_ms(at_s: float | None) -> float:
            return 1000.0 * max(0.0, (now_s if at_s is None else at_s) - self.arrival_s)

        return Timing(
            queue_ms=since_arrival_ms(self.first_scheduled_s),
            ttft_ms=since_arrival_ms(self.first_token_s),
            total_ms=since_arrival_ms(now_s),
        )
