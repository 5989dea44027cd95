"""The baseline: Ray Serve's documented way to batch and stream a language model.

A separate application that uses nothing of Seedance: `@serve.batch` collects requests, the
prompts are padded on the left into one tensor, `model.generate` runs in a thread, a streamer
hands over one token of every row a step, and the batch lives until its longest row ends. See
"Streaming responses" in Ray's dynamic batching guide and its streaming chatbot tutorial.

It is that pattern at its best: a row that ended ends its own reply at once, the batch stops
as soon as every row is done, the event loop sleeps between steps instead of polling, and
prompts of one batch share one padded prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /generate`: always greedy."""

    prompt: str
    max_tokens: int
    ignore_eos: bool = False


class StepStreamer(BaseStreamer):  # type: ignore[misc]
    """Carries each step's token ids, one of every row, from `generate`'s thread to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._is_past_prompt = False

    def put(self, value: torch.Tensor) -> None:
        # The first call carries the prompts.
        if self._is_past_prompt:
            self._hand_over(value.tolist())
        self._is_past_prompt = True

    def end(self) -> None:
        self._hand_over(None)

    def _hand_over(self, step: list[int] | None) -> None:
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)

    async def steps(self) -> AsyncIterator[list[int]]:
        while (step := await self._steps.get()) is not None:
            yield step


class RowLimits(StoppingCriteria):  # type: ignore[misc]
    """Ends each row at its own `max_tokens`; `generate` itself only knows the batch's."""

    def __init__(self, limits: list[int], prompt_length: int) -> None:
        self._ends = torch.tensor(limits) + prompt_length  # (B,)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


class Row:
    """One request of a batch: what it still has to say."""

    def __init__(self, question: Question, prompt_tokens: int, eos_token_id: int) -> None:
        self._max_tokens = question.max_tokens
        self._eos_token_id = None if question.ignore_eos else eos_token_id
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self.is_done = False

    def take(self, token_id: int, text: str) -> dict[str, Any] | None:
        """The row's next piece, the last one with its usage; None once it is done."""
        if self.is_done:
            return None
        self._completion_tokens += 1
        has_stopped = token_id == self._eos_token_id
        self.is_done = has_stopped or self._completion_tokens == self._max_tokens
        piece: dict[str, Any] = {"text": text}
        if self.is_done:
            piece["finish_reason"] = "stop" if has_stopped else "length"
            piece["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._completion_tokens,
            }
        return piece


@serve.deployment(max_ongoing_requests=4096)
class StaticBatching:
    """Ingress and model in one replica, as in the tutorial: no call between deployments."""

    def __init__(
        self,
        model_folder: str,
        dtype: str,
        num_threads: int,
        max_batch_size: int,
        batch_wait_timeout_s: float,
    ) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
        self._eos_token_id = self._tokenizer.eos_token_id
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # Otherwise `generate` fills in the model's own where a batch is to ignore it.
        self._model.generation_config.eos_token_id = None
        self._thread = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(num_threads,)
        )
        self._answer.set_max_batch_size(max_batch_size)
        self._answer.set_batch_wait_timeout_s(batch_wait_timeout_s)

    async def __call__(self, request: Request) -> Response:
        if request.method == "GET":  # /readyz
            return PlainTextResponse("ready")
        question = msgspec.json.decode(await request.body(), type=Question)
        return StreamingResponse(self._lines(question), media_type="application/x-ndjson")

    async def _lines(self, question: Question) -> AsyncIterator[bytes]:
        async for piece in self._answer(question):
            if piece is not None:
                yield msgspec.json.encode(piece) + b"\n"

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.1)  # type: ignore[untyped-decorator]
    async def _answer(self, questions: list[Question]) -> AsyncIterator[list[Any]]:
        """One list a step: each row's piece."""
        prompts = self._tokenizer.apply_chat_template(
            [[{"role": "user", "content": question.prompt}] for question in questions],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        lengths = prompts["attention_mask"].sum(dim=1).tolist()
        rows = [
            Row(question, length, self._eos_token_id)
            for question, length in zip(questions, lengths, strict=True)
        ]
        loop = asyncio.get_running_loop()
        streamer = StepStreamer(loop)
        generation = loop.run_in_executor(self._thread, self._run, prompts, questions, streamer)
        async for step in streamer.steps():
            texts = self._tokenizer.batch_decode([[id] for id in step], skip_special_tokens=True)
            before = [row.is_done for row in rows]
            yield [row.take(id, text) for row, id, text in zip(rows, step, texts, strict=True)]
            if before != (now := [row.is_done for row in rows]):
                # Rows that just ended: their replies need not wait for the next step.
                yield [StopAsyncIteration if is_done else None for is_done in now]
        await generation

    def _run(self, prompts: Any, questions: list[Question], streamer: StepStreamer) -> None:
        limits = [question.max_tokens for question in questions]
        try:
            self._model.generate(
                **prompts,
                do_sample=False,
                max_new_tokens=max(limits),
                eos_token_id=None if any(q.ignore_eos for q in questions) else self._eos_token_id,
                pad_token_id=self._tokenizer.pad_token_id,
                stopping_criteria=[RowLimits(limits, prompts["input_ids"].shape[1])],
                streamer=streamer,
            )
        finally:
            streamer.end()


def app(args: dict[str, Any]) -> Application:
    """What `serve run` builds; `args` are the replica's constructor arguments."""
    return StaticBatching.bind(**args)  # type: ignore[attr-defined]
