"""From a request to a sequence: its tokens, its limits, and an answer that was begun elsewhere."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NoReturn

import msgspec

from deployments.engine.config import EngineConfig
from deployments.engine.output import replay
from deployments.engine.sequence import Sequence
from deployments.engine.structured import grammar_for
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import ContextLengthExceeded, InternalError, InvalidRequest
from protocol.request import InferenceRequest, SamplingParams

UNSETTLED_TOKENS = 4
"""Of a text that may go on: a word that is cut off may become other tokens once it is whole."""


def prepare(
    request: InferenceRequest,
    tokenizer: ChatTokenizer,
    config: EngineConfig,
    clock: Callable[[], float],
    rng: random.Random,
    output_token_ids: SequenceOf[int] = (),
) -> Sequence:
    """Turns a request into a sequence: tokenises it and checks what needs the tokenizer.

    With `output_token_ids` the sequence goes on behind what was answered elsewhere: its next
    delta is the one that would have come there. It stays the same answer only if the request
    is, its seed included; `timeout_s` counts from now.

    Takes milliseconds to a second for the longest prompts: call it on a worker thread.
    A prompt and `max_tokens` that do not fit the context together lower `max_tokens`; the
    answer then ends with finish reason `length`.

    Args:
        output_token_ids: the joined `token_ids` of the deltas so far; a rest that no delta
            can have carried is dropped and made again.

    Raises:
        InvalidRequest: empty prompt, a token id outside the vocabulary, text that is not
            Unicode, a response format that cannot be followed, output tokens that cannot be
            this request's answer.
        ContextLengthExceeded: the prompt alone leaves no room for an answer.
    """
    arrival_s = clock()
    prompt_token_ids = _tokenize(request, tokenizer, config)
    _check_token_ids(request.sampling, tokenizer.vocab_size)
    room = 0 if request.is_prompt_only else config.max_model_len - len(prompt_token_ids)
    seq = Sequence(
        request_id=request.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_resolve(request.sampling, room),
        eos_token_ids=tokenizer.eos_token_ids,
        seed=rng.getrandbits(64) if request.sampling.seed is None else request.sampling.seed,
        priority=request.priority,
        arrival_s=arrival_s,
        deadline_s=None if request.timeout_s is None else arrival_s + request.timeout_s,
        grammar=grammar_for(request.response_format, tokenizer),
        tenant=request.tenant,
        share=request.share or request.tenant,
        prompt_logprobs=request.prompt_logprobs,
    )
    if output_token_ids:
        _continue(seq, output_token_ids, tokenizer)
    return seq


def prepare_warm_up(
    request: InferenceRequest,
    tokenizer: ChatTokenizer,
    config: EngineConfig,
    block_tokens: int,
    clock: Callable[[], float],
) -> Sequence | None:
    """The sequence that computes what is known of a prompt that is still being written.

    It has the tokens that stay as they are when a letter follows, but for the last few, and in
    whole blocks: so without the template's end and the last word. Where a continuation changes
    an earlier token, blocks were computed in vain: the request itself is tokenised as a whole.

    Returns:
        None where no block is known yet.

    Raises:
        ServingError: the request as it stands cannot run, see `prepare`.
    """
    arrival_s = clock()
    token_ids = _tokenize(request, tokenizer, config)
    if not isinstance(request.prompt, tuple):
        longer = _tokenize(_with_a_letter_more(request), tokenizer, config)
        token_ids = token_ids[: max(0, _num_shared(token_ids, longer) - UNSETTLED_TOKENS)]
    num_tokens = len(token_ids) // block_tokens * block_tokens
    if num_tokens == 0:
        return None
    return Sequence(
        request_id=request.request_id,
        prompt_token_ids=token_ids[:num_tokens],
        sampling=_resolve(request.sampling, config.max_model_len - num_tokens),
        arrival_s=arrival_s,
        tenant=request.tenant,
        share=request.share or request.tenant,
        is_warm_up=True,
    )


def _with_a_letter_more(request: InferenceRequest) -> InferenceRequest:
    if not request.messages:
        assert not isinstance(request.prompt, tuple), "ids have no letters"
        return msgspec.structs.replace(request, prompt=(request.prompt or "") + "a")
    *before, last = request.messages
    last = msgspec.structs.replace(last, content=(last.content or "") + "a")
    return msgspec.structs.replace(request, messages=(*before, last))


def _num_shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _continue(seq: Sequence, output_token_ids: SequenceOf[int], tokenizer: ChatTokenizer) -> None:
    param = "output_token_ids"
    _check_range(output_token_ids, tokenizer.vocab_size, param)
    if len(output_token_ids) > seq.max_tokens:
        raise InvalidRequest(
            f"{param} has {len(output_token_ids)} tokens, max_tokens is {seq.max_tokens}",
            param=param,
            limit=seq.max_tokens,
        )
    try:
        replay(seq, output_token_ids, tokenizer)
    except InternalError as exc:  # the grammar allows something else
        raise InvalidRequest(f"{param} does not fit: {exc.message}", param=param) from exc


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
    # Clients of the OpenAI API know the case by its first words.
    message = f"this model's maximum context length is {limit} tokens, the prompt has {size}"
    raise ContextLengthExceeded(message, param=param, limit=limit)


def _check_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    _check_range(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    _check_range(sampling.logit_bias or (), vocab_size, "logit_bias")


def _check_range(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
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
