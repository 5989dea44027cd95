"""vLLM as the engine: it computes tokens and log probabilities, all the rest is ours.

Prompts come from our tokenizer, and text, stop strings, ends, usage, limits, fair turns between
tenants, deadlines and cancels are the same code as for our own engine. So vLLM never sees a stop
string, and at most `max_num_seqs` requests at a time; what waits, waits in our queue.

The package is an extra (`seedance[vllm]`) and is imported only when an engine is built on it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from deployments.engine.admission import Admission, FairQueue
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Emission, EngineStats, deadline_exceeded, internal_error
from deployments.engine.front import EngineFront
from deployments.engine.guard import ProcessGuard, child_pids
from deployments.engine.output import AnswerText
from deployments.engine.sampler import LEAST_LOGPROB, Logprobs, SampledToken
from deployments.engine.sequence import Sequence, SequenceState
from deployments.engine.structured import Constraint, constraint_of
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import DuplicateId, InternalError, InvalidRequest, Overloaded, ServingError
from protocol.request import MAX_LOGPROBS, InferenceRequest
from protocol.token_log import FinishReason, Terminal, TokenDelta

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 1.0
LARGEST_SEED = 2**63 - 1
TOLD_ENDS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
"""What vLLM calls the ends of an answer that did not fail."""


class VllmClient(Protocol):
    """What is used of vLLM's `AsyncLLM`."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int
    ) -> AsyncGenerator[Any]:
        """`RequestOutput`s; closing the generator aborts the request."""
        ...

    async def check_health(self) -> None:
        """Raises when the engine's process is dead."""
        ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class VllmApi:
    """The names that are used of the package; `delta` is the kind of output with new tokens only."""

    async_llm: Any
    engine_args: Callable[..., Any]
    sampling_params: Callable[..., Any]
    structured_outputs: Callable[..., Any]
    delta: Any
    client_error: type[Exception]


def load_vllm() -> VllmApi:
    """Imports the package.

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        importlib.import_module("vllm")
    except ModuleNotFoundError as exc:
        if exc.name != "vllm":
            raise
        raise RuntimeError(
            "backend vllm needs a package that is not installed: pip install 'seedance[vllm]'"
        ) from None
    sampling = importlib.import_module("vllm.sampling_params")
    return VllmApi(
        async_llm=importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM,
        engine_args=importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs,
        sampling_params=sampling.SamplingParams,
        structured_outputs=sampling.StructuredOutputsParams,
        delta=sampling.RequestOutputKind.DELTA,
        client_error=importlib.import_module("vllm.exceptions").VLLMClientError,
    )


def build_vllm_engine(folder: Path, config: EngineConfig) -> VllmEngine:
    """Starts vLLM's process on a prepared model folder. Takes seconds to minutes.

    Raises:
        RuntimeError: vLLM is not installed.
        Exception: why vLLM does not start.
    """
    api = load_vllm()
    tokenizer = ChatTokenizer.load(folder)
    before = child_pids()
    client = api.async_llm.from_engine_args(api.engine_args(**engine_arguments(folder, config)))
    # They outlive a killed parent, and keep its GPU.
    guard = ProcessGuard(child_pids() - before)
    return VllmEngine(client, api, tokenizer, config, guard=guard)


def engine_arguments(folder: Path, config: EngineConfig) -> dict[str, Any]:
    """Our configuration in vLLM's terms. Where it runs is decided by the package and its machine.

    Raises:
        ValueError: the configuration asks for what vLLM decides.
    """
    for name, only in (("device", "auto"), ("quantization", "none")):
        if (value := getattr(config, name)) != only:
            raise ValueError(f"{name} is {value}, backend vllm takes {only}")
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_logprobs": MAX_LOGPROBS,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "structured_outputs_config": {"backend": "guidance"},
        # Parameters of the model's folder would change what a request asks for.
        "generation_config": "vllm",
        "enforce_eager": not config.cuda_graphs,
        "trust_remote_code": False,
        "disable_log_stats": True,
    }
    if config.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    return arguments


def sampling_arguments(seq: Sequence) -> dict[str, Any]:
    """A sequence's parameters in vLLM's terms, but for the output's form.

    Stop strings are left out, because text is ours; the end-of-text tokens are given as stop
    tokens, so that our tokenizer decides what they are. An answer that goes on elsewhere has
    less to go, and other noise than at its beginning.
    """
    sampling = seq.sampling
    num_before = len(seq.output_token_ids)
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends |= seq.eos_token_ids
    return {
        "max_tokens": seq.max_tokens - num_before,
        "min_tokens": max(0, sampling.min_tokens - num_before),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),
        "min_p": sampling.min_p,
        # Without a seed of its own a row is drawn together with the others.
        "seed": None if sampling.seed is None else (seq.seed + num_before) & LARGEST_SEED,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": sampling.logit_bias,
        "stop_token_ids": sorted(ends),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }


@dataclass(eq=False)
class _Request:
    """An accepted sequence. `task`: reads it from vLLM; None while it is queued.

    `error`: why it is being dropped, unless it is cancelled.
    """

    seq: Sequence
    answer: AnswerText
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    error: ServingError | None = None


class VllmEngine(EngineFront):
    """vLLM's `AsyncLLM` behind the interface of our own engine. For one event loop's thread.

    Not offered: prompts are not computed while they are written, a running request is not
    preempted for one of a higher priority (vLLM does so where its memory is short), and a
    constrained answer does not go on elsewhere. The frequency and presence penalties of an
    answer that goes on count from there.

    Args:
        client: used by nobody else.
        guard: over its processes.
    """

    def __init__(
        self,
        client: VllmClient,
        api: VllmApi,
        tokenizer: ChatTokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        guard: ProcessGuard | None = None,
        health_period_s: float = HEALTH_PERIOD_S,
    ) -> None:
        super().__init__(tokenizer, config, clock, rng)
        self._client = client
        self._api = api
        self._guard = guard
        self._health_period_s = health_period_s
        self._admission = Admission(config, clock)
        self._queue = FairQueue()
        self._live: dict[str, _Request] = {}
        self._running: set[_Request] = set()
        # Also those whose answers have ended and which vLLM is yet to drop.
        self._tasks: set[asyncio.Task[None]] = set()
        self._params: WeakKeyDictionary[Sequence, Any] = WeakKeyDictionary()
        self._watch_task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._failure: Exception | None = None
        self._last_output_s = clock()
        self._finished: Counter[str] = Counter()
        self._refused = self._generated_tokens = self._prompt_tokens = 0
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    async def start(self) -> None:
        await self._client.check_health()
        await self._rehearse()
        self._watch_task = asyncio.create_task(self._watch())

    async def warm(self, request: InferenceRequest) -> None:
        """Computes nothing: vLLM has no step that takes only what requests leave."""

    def abort(self, seq: Sequence) -> None:
        seq.is_abandoned = True
        request = self._live.get(seq.request_id)
        if request is not None and request.seq is seq:
            self._drop(request)

    @property
    def is_healthy(self) -> bool:
        return (
            self._watch_task is not None
            and self._failure is None
            and not self._is_closing
            and self.heartbeat_age_s() < self.config.stall_after_s
        )

    def heartbeat_age_s(self) -> float:
        """Seconds since vLLM last gave a token, or was last given work without any before."""
        return max(0.0, self._clock() - self._last_output_s) if self._running else 0.0

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._drop_all(Overloaded("the engine is shutting down", retry_after_s=1.0))
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait([self._watch_task])
        # In one go with the event loop's own work, which would take the end of the process for a death.
        self._client.shutdown()
        if self._guard is not None:
            self._guard.dismiss()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _rehearse(self) -> None:
        """Has vLLM compile what it would in the first request with log probabilities, which took
        48 s on a CPU and looked like an engine that stands still."""
        params = self._api.sampling_params(
            max_tokens=1, logprobs=1, detokenize=False, output_kind=self._api.delta
        )
        prompt = {"prompt_token_ids": [0]}
        outputs = self._client.generate(prompt, params, "rehearsal", priority=0)
        async with aclosing(outputs):
            async for _ in outputs:
                pass

    def _prepare(self, request: InferenceRequest, output_token_ids: SequenceOf[int]) -> Sequence:
        if request.is_prompt_only or request.prompt_logprobs is not None:
            raise InvalidRequest(
                "the vllm backend echoes no prompt that has to be computed: ask without logprobs, "
                "and for a token at least",
                param="echo",
            )
        seq = super()._prepare(request, output_token_ids)
        constraint = constraint_of(request.response_format)
        if constraint is not None and seq.output_token_ids:
            raise InvalidRequest(
                "an answer with a response_format cannot go on elsewhere on the vllm backend",
                param="response_format",
            )
        if seq.finish_reason is None:
            self._params[seq] = self._sampling_params(seq, constraint)
        return seq

    def _sampling_params(self, seq: Sequence, constraint: Constraint | None) -> Any:
        structured = None
        if constraint is not None:
            given = {name: value for name, value in asdict(constraint).items() if value is not None}
            structured = self._api.structured_outputs(**given)
        try:
            return self._api.sampling_params(
                **sampling_arguments(seq),
                structured_outputs=structured,
                output_kind=self._api.delta,
            )
        except self._api.client_error as exc:
            raise InvalidRequest(f"vllm refuses the request: {exc}") from exc

    def _submit(self, seq: Sequence) -> None:
        try:
            self._accept(seq)
        except ServingError:
            self._refused += 1
            raise
        request = _Request(seq, seq.answer or AnswerText(seq, self.tokenizer))
        self._live[seq.request_id] = request
        loop = asyncio.get_running_loop()
        if seq.finish_reason is not None:
            loop.call_soon(self._end, request, seq.finish_reason)
            return
        if seq.deadline_s is not None:
            left_s = max(0.0, seq.deadline_s - self._clock())
            request.timer = loop.call_later(left_s, self._expire, request)
        self._queue.push(seq)
        self._fill()

    def _accept(self, seq: Sequence) -> None:
        if self._is_closing or self._failure is not None:
            raise Overloaded("the engine is shutting down", retry_after_s=1.0)
        if seq.request_id in self._live:
            raise DuplicateId(f"request {seq.request_id} is already running")
        self._admission.take(seq)

    def _fill(self) -> None:
        """Gives vLLM what waits, as far as places are free."""
        while len(self._running) < self.config.max_num_seqs and (seq := self._queue.head):
            self._queue.remove(seq)
            self._admission.start(seq)
            now_s = self._clock()
            if not self._running:
                self._last_output_s = now_s
            seq.state, seq.first_scheduled_s = SequenceState.RUNNING, now_s
            request = self._live[seq.request_id]
            self._running.add(request)
            request.task = asyncio.create_task(self._read(request))
            self._tasks.add(request.task)
            request.task.add_done_callback(partial(self._done, request))

    async def _read(self, request: _Request) -> None:
        """Takes a request's tokens from vLLM until its answer has ended."""
        seq = request.seq
        prompt: dict[str, Any] = {"prompt_token_ids": seq.prompt_token_ids + seq.output_token_ids}
        if seq.tenant:
            prompt["cache_salt"] = seq.tenant
        outputs = self._client.generate(
            # vLLM serves the lowest number first.
            prompt,
            self._params[seq],
            seq.request_id,
            priority=-seq.priority,
        )
        # Closing it early makes vLLM drop the request.
        async with aclosing(outputs):
            async for output in outputs:
                self._take(request, output)
                if request.seq.state is SequenceState.FINISHED:
                    return

    def _take(self, request: _Request, output: Any) -> None:
        """Moves a sequence on by the tokens of one `RequestOutput`, to its end if they bring it."""
        seq = request.seq
        self._last_output_s = self._clock()
        (completion,) = output.outputs
        if completion.token_ids and seq.first_token_s is None:
            self._count_prompt(seq, output.num_cached_tokens or 0)
        deltas: list[TokenDelta] = []
        for i, token_id in enumerate(completion.token_ids):
            found = None if completion.logprobs is None else completion.logprobs[i]
            delta, reason = self._append(request, _sampled(token_id, found, seq))
            deltas += [] if delta is None else [delta]
            if reason is not None:
                self._end(request, reason, deltas)
                return
        if output.finished:
            self._end_as_told(request, completion.finish_reason, deltas)
        elif deltas:
            self._apply([Emission(seq, deltas)])

    def _append(
        self, request: _Request, token: SampledToken
    ) -> tuple[TokenDelta | None, FinishReason | None]:
        seq = request.seq
        seq.output_token_ids.append(token.token_id)
        self._generated_tokens += 1
        if seq.grammar is not None:
            seq.grammar.accept(token.token_id)
        return request.answer.push(token)

    def _end_as_told(
        self, request: _Request, finish_reason: str | None, deltas: list[TokenDelta]
    ) -> None:
        """Ends an answer that vLLM has ended, and by our own rules would go on."""
        rest = request.answer.finish()
        deltas += [] if rest is None else [rest]
        reason = TOLD_ENDS.get(finish_reason)
        error = None
        if reason is None:
            cause = RuntimeError(f"vllm ended it with {finish_reason}")
            error = internal_error(f"request {request.seq.request_id} failed", cause)
        self._end(request, reason or "error", deltas, error)

    def _count_prompt(self, seq: Sequence, num_cached_tokens: int) -> None:
        num_prompt = len(seq.prompt_token_ids)
        seq.first_token_s = self._clock()
        seq.num_computed_tokens = num_prompt
        seq.num_cached_tokens = min(num_cached_tokens, num_prompt)
        self._prompt_tokens += num_prompt - seq.num_cached_tokens
        self._prefix_query_tokens += num_prompt
        self._prefix_hit_tokens += seq.num_cached_tokens

    def _expire(self, request: _Request) -> None:
        request.error = deadline_exceeded(request.seq, self._clock())
        self._drop(request)

    def _drop(self, request: _Request) -> None:
        """Ends a request early: cancelled, or with its `error`."""
        if request.task is not None:
            request.task.cancel()
            return
        if request.seq.finish_reason is None:
            self._queue.remove(request.seq)
        self._end_dropped(request)

    def _drop_all(self, error: ServingError) -> None:
        for request in list(self._live.values()):
            request.error = error
            self._drop(request)

    def _done(self, request: _Request, task: asyncio.Task[None]) -> None:
        """Ends what vLLM, or a cancel, has ended before the answer had."""
        self._tasks.discard(task)
        if task.cancelled():
            self._end_dropped(request)
        elif (exc := task.exception()) is not None:
            self._end(request, "error", error=self._error_of(request, exc))
        elif request.seq.state is not SequenceState.FINISHED:
            self._end_as_told(request, None, [])

    def _error_of(self, request: _Request, exc: BaseException) -> ServingError:
        if isinstance(exc, ServingError):
            return exc
        if isinstance(exc, self._api.client_error):
            return InvalidRequest(f"vllm refuses the request: {exc}")
        return internal_error(f"request {request.seq.request_id} failed", exc)

    def _end_dropped(self, request: _Request) -> None:
        if request.error is None:
            self._end(request, "cancelled")
        else:
            self._end(request, "error", error=request.error)

    def _end(
        self,
        request: _Request,
        reason: FinishReason,
        deltas: list[TokenDelta] | None = None,
        error: ServingError | None = None,
    ) -> None:
        """Takes a request out for good, tells its end, and gives its place to the next one.

        Harmless after its end.
        """
        seq = request.seq
        if self._live.get(seq.request_id) is not request:
            return
        del self._live[seq.request_id]
        self._running.discard(request)
        if request.timer is not None:
            request.timer.cancel()
        seq.state = SequenceState.FINISHED
        self._admission.release(seq)
        self._finished[reason if error is None else error.code] += 1
        terminal = Terminal(
            finish_reason=reason,
            usage=seq.usage(),
            timing=seq.timing(self._clock()),
            error=None if error is None else error.info,
        )
        self._apply([Emission(seq, deltas or [], terminal)])
        self._fill()

    async def _watch(self) -> None:
        """Asks vLLM from time to time whether it lives; ends everything when it does not."""
        try:
            while True:
                await asyncio.sleep(self._health_period_s)
                await self._client.check_health()
        except Exception as exc:
            logger.exception("vllm is dead")
            self._failure = exc
            self._drop_all(InternalError("the model's engine has died"))

    def _stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._queue),
            tokens=sum(request.seq.num_tokens_left for request in self._live.values()),
            waiting_tokens=self._admission.num_waiting_tokens,
            generated_tokens_total=self._generated_tokens,
            prompt_tokens_total=self._prompt_tokens,
            prefix_query_tokens_total=self._prefix_query_tokens,
            prefix_hit_tokens_total=self._prefix_hit_tokens,
            finished_total=dict(self._finished),
            refused_total=self._refused,
            stalled_s=self.heartbeat_age_s(),
        )


def _sampled(token_id: int, found: Mapping[int, Any] | None, seq: Sequence) -> SampledToken:
    """A token with what vLLM tells of it: its own log probability, and those of the best."""
    asked = seq.sampling.logprobs
    if asked is None or found is None:
        return SampledToken(token_id)
    values = {
        other: max(LEAST_LOGPROB, told.logprob) if math.isfinite(told.logprob) else LEAST_LOGPROB
        for other, told in found.items()
    }
    # The sampled one is always told, and belongs to the best only by its rank.
    best = sorted((told.rank, other) for other, told in found.items() if told.rank <= asked)
    return SampledToken(
        token_id, Logprobs(values[token_id], tuple((other, values[other]) for _, other in best))
    )
