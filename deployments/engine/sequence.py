"""A request as the engine sees it: tokens, progress and where it stands."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

import msgspec

from deployments.engine.config import EngineConfig
from deployments.engine.structured import Grammar, grammar_for
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import ContextLengthExceeded, InvalidRequest
from protocol.request import InferenceRequest, SamplingParams
from protocol.token_log import Timing, Usage


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

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    state: SequenceState = SequenceState.WAITING
    is_abandoned: bool = False
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_tokens(self) -> int:
        assert self.sampling.max_tokens is not None, "prepare() resolves max_tokens"
        return self.sampling.max_tokens

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
            prompt_tokens=len(self.prompt_token_ids), completion_tokens=len(self.output_token_ids)
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


def prepare(
    request: InferenceRequest,
    tokenizer: ChatTokenizer,
    config: EngineConfig,
    clock: Callable[[], float],
    rng: random.Random,
) -> Sequence:
    """Turns a request into a sequence: tokenises it and checks what needs the tokenizer.

    Takes milliseconds to a second for the longest prompts: call it on a worker thread.
    A prompt and `max_tokens` that do not fit the context together lower `max_tokens`; the
    answer then ends with finish reason `length`.

    Raises:
        InvalidRequest: empty prompt, a token id outside the vocabulary, text that is not
            Unicode, a response format that cannot be followed.
        ContextLengthExceeded: the prompt alone leaves no room for an answer.
    """
    arrival_s = clock()
    prompt_token_ids = _tokenize(request, tokenizer, config)
    _check_token_ids(request.sampling, tokenizer.vocab_size)
    return Sequence(
        request_id=request.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_resolve(request.sampling, config.max_model_len - len(prompt_token_ids)),
        eos_token_ids=tokenizer.eos_token_ids,
        seed=rng.getrandbits(64) if request.sampling.seed is None else request.sampling.seed,
        priority=request.priority,
        arrival_s=arrival_s,
        deadline_s=None if request.timeout_s is None else arrival_s + request.timeout_s,
        grammar=grammar_for(request.response_format, tokenizer),
    )


def _tokenize(
    request: InferenceRequest, tokenizer: ChatTokenizer, config: EngineConfig
) -> list[int]:
    param = "prompt" if request.messages is None else "messages"
    if isinstance(request.prompt, tuple):
        token_ids = list(request.prompt)
        _check_range(token_ids, tokenizer.vocab_size, param)
    else:
        _check_bytes(_size_bytes(request), tokenizer, config.max_model_len, param)
        if request.messages is not None:
            token_ids = tokenizer.encode_chat(request.messages, request.tools)
        else:
            token_ids = tokenizer.encode_prompt(request.prompt or "")
    if not token_ids:
        raise InvalidRequest(f"{param} is empty, it must hold at least one token", param=param)
    if len(token_ids) >= config.max_model_len:
        _refuse_length(f"{len(token_ids)} tokens", config.max_model_len, param)
    return token_ids


def _size_bytes(request: InferenceRequest) -> int:
    texts = (
        [message.content for message in request.messages]
        if request.messages is not None
        else [request.prompt if isinstance(request.prompt, str) else None]
    )
    # The tokenizer refuses lone surrogates; here they only count.
    return sum(len(text.encode(errors="surrogatepass")) for text in texts if text)


def _check_bytes(size_bytes: int, tokenizer: ChatTokenizer, limit: int, param: str) -> None:
    """Refuses what cannot fit before it is tokenised: one long word takes the tokenizer seconds."""
    least_tokens = math.ceil(size_bytes / tokenizer.longest_token_bytes)
    if least_tokens >= limit:
        _refuse_length(f"at least {least_tokens} tokens", limit, param)


def _refuse_length(size: str, limit: int, param: str) -> NoReturn:
    raise ContextLengthExceeded(
        f"prompt has {size}, the model takes {limit}", param=param, limit=limit
    )


def _check_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    _check_range(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    _check_range(sampling.logit_bias or (), vocab_size, "logit_bias")


def _check_range(
    token_ids: list[int] | tuple[int, ...] | dict[int, float], vocab_size: int, param: str
) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} has token id {token_id}, the vocabulary has {vocab_size} "
                f"(0 to {vocab_size - 1})",
                param=param,
                limit=vocab_size - 1,
            )


def _resolve(sampling: SamplingParams, room: int) -> SamplingParams:
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return msgspec.structs.replace(
        sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)
    )
