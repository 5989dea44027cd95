"""A stand-in for the part of vLLM that the backend uses: `AsyncLLM` over scripted answers.

It behaves as vLLM 0.32 does: an output carries the new tokens only, the token that ends an answer
among them; a generator that is closed or cancelled aborts its request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from deployments.engine.vllm_backend import VllmApi

DELTA = "delta"


class FakeClientError(Exception):
    """vLLM's error for a request that it refuses."""


@dataclass(frozen=True)
class FakeStructuredOutputs:
    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class FakeSamplingParams:
    """The parameters that the backend sets, with vLLM's own defaults and one of its checks."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    structured_outputs: FakeStructuredOutputs | None = None
    output_kind: str = "cumulative"

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise FakeClientError(f"max_tokens must be at least 1, got {self.max_tokens}.")


@dataclass
class Call:
    """One `generate`, and how it went. `is_aborted`: closed or cancelled before its end."""

    prompt: dict[str, Any]
    params: FakeSamplingParams
    request_id: str
    priority: int
    is_aborted: bool = False


class FakeAsyncLLM:
    """`AsyncLLM` without a model.

    Args:
        answer: all tokens of a prompt's answer from its start; the end token follows them.
        eos_token_id: vLLM's own, which ends an answer unless `ignore_eos` is set.
        tokens_at_once: most new tokens of one output.
        fault: what `generate` raises for a request, if anything, before its first output.
    """

    def __init__(
        self,
        answer: Callable[[Call], list[int]],
        eos_token_id: int,
        *,
        tokens_at_once: int = 1,
        num_cached_tokens: int = 0,
        fault: Callable[[str], Exception | None] = lambda request_id: None,
    ) -> None:
        self._answer = answer
        self._eos_token_id = eos_token_id
        self._tokens_at_once = tokens_at_once
        self._num_cached_tokens = num_cached_tokens
        self._fault = fault
        self._opened = threading.Event()
        self._opened.set()
        self.entered = threading.Event()
        self.calls: list[Call] = []
        self.num_live = self.most_live = self.num_shutdowns = 0
        self.death: Exception | None = None

    def hold(self) -> None:
        """Stops every answer before its next token."""
        self._opened.clear()

    def release(self) -> None:
        self._opened.set()

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: FakeSamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[Any]:
        call = Call(prompt, sampling_params, request_id, priority)
        self.calls.append(call)
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            fault = self._fault(request_id)
            if fault is not None:
                raise fault
            for output in self._outputs(call):
                self.entered.set()
                if not self._opened.is_set():
                    await asyncio.to_thread(self._opened.wait)
                await asyncio.sleep(0)
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            call.is_aborted = True
            raise
        finally:
            self.num_live -= 1

    async def check_health(self) -> None:
        if self.death is not None:
            raise self.death

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def _outputs(self, call: Call) -> list[Any]:
        token_ids, finish_reason = self._tokens(call)
        cuts = range(0, len(token_ids), self._tokens_at_once)
        return [
            self._output(
                call,
                token_ids[cut : cut + self._tokens_at_once],
                finish_reason if cut == cuts[-1] else None,
            )
            for cut in cuts
        ]

    def _tokens(self, call: Call) -> tuple[list[int], str]:
        params = call.params
        ends = {*params.stop_token_ids, *([] if params.ignore_eos else [self._eos_token_id])}
        taken: list[int] = []
        script = self._answer(call)
        while params.max_tokens is None or len(taken) < params.max_tokens:
            at = len(taken)
            taken.append(script[at] if at < len(script) else self._eos_token_id)
            if taken[-1] in ends and len(taken) > params.min_tokens:
                return taken, "stop"
        return taken, "length"

    def _output(self, call: Call, token_ids: list[int], finish_reason: str | None) -> Any:
        logprobs = None
        if call.params.logprobs is not None:
            logprobs = [_logprobs(token_id, call.params.logprobs) for token_id in token_ids]
        completion = SimpleNamespace(
            index=0,
            text="",
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=None,
        )
        return SimpleNamespace(
            request_id=call.request_id,
            outputs=[completion],
            finished=finish_reason is not None,
            num_cached_tokens=self._num_cached_tokens,
        )


def _logprobs(token_id: int, num_best: int) -> dict[int, Any]:
    """The sampled token is the second best: where one is asked for, it comes as an extra."""
    told = {token_id: SimpleNamespace(logprob=-1.5, rank=2, decoded_token=None)}
    if num_best >= 1:
        told[token_id ^ 1] = SimpleNamespace(logprob=-0.5, rank=1, decoded_token=None)
    if num_best >= 3:
        told[token_id ^ 2] = SimpleNamespace(logprob=float("-inf"), rank=3, decoded_token=None)
    return told


API = VllmApi(
    async_llm=FakeAsyncLLM,
    engine_args=SimpleNamespace,
    sampling_params=FakeSamplingParams,
    structured_outputs=FakeStructuredOutputs,
    delta=DELTA,
    client_error=FakeClientError,
)
