"""What a client asks for, as data that crosses every room: request, messages, sampling.

Both transports (WebSocket frames, OpenAI HTTP bodies) are turned into one
`InferenceRequest`; the cache keys it, the engine runs it. All range checks of
the sampling parameters live here, so that no path can skip them. Knows nothing
of tokens: the model replica checks what needs the tokenizer (context length,
token ids).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]
CachePolicy = Literal["auto", "bypass", "only", "refresh", "sampled"]
"""`auto` looks up, and stores replies that were not sampled · `bypass` does neither ·
`only` answers from the cache or fails · `refresh` skips the look-up and stores ·
`sampled` is `auto` for sampled replies too."""

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
"""Far below any vocabulary, so that `min_tokens` always leaves a token to pick."""
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 1_000_000
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a chat. `content` is plain text: parts were joined by whoever decoded them."""

    role: Role
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick tokens and when to stop; names and meaning as in the OpenAI and vLLM APIs.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps all tokens. `max_tokens` None means:
    as many as the context holds. `logprobs` None returns none; n returns the
    sampled token's and the n best tokens' log probabilities.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=SEED_MIN, le=SEED_MAX)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def __post_init__(self) -> None:
        for name in _FLOAT_FIELDS:
            # NaN passes every range check, because each comparison with it is false.
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequest(f"{name} must be a finite number", param=name)
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias):
                raise InvalidRequest(
                    f"logit_bias of token {token} must be a finite number", param="logit_bias"
                )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}",
                param="stop",
                limit=MAX_STOP_STRINGS,
            )
        if "" in self.stop:
            raise InvalidRequest("stop must not contain an empty string", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, "
                f"the limit is {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
                limit=MAX_STOP_TOKEN_IDS,
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}",
                param="min_tokens",
                limit=self.max_tokens,
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


_FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation, ready for the cache and the engine.

    Exactly one of `messages` and `prompt` is set. `request_id` is made by the
    server and unique; the id a client chose is only a name on its connection.
    `tenant` comes from the credential, never from the body. `share` names whose part of the
    engine it takes, where that is not the tenant's as a whole. `prompt_logprobs` asks for the log
    probabilities of the prompt's own tokens, as `logprobs` for those of the answer; the first
    delta brings them. With `is_prompt_only` the prompt is computed and nothing is answered,
    whatever `max_tokens` says. No cache knows of these two.
    """

    request_id: str
    tenant: str
    share: str = ""
    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    cache: CachePolicy = "auto"
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    is_prompt_only: bool = False
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None
