"""Keeps an answer inside a JSON schema, by masking the tokens that would leave it.

A thin layer over llguidance, which turns a schema into a grammar over token bytes. One `Grammar`
follows one answer. `oneOf` is read as `anyOf`: an answer may fit more than one of the branches.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits

from deployments.engine.cuda import to_device
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import InternalError, InvalidRequest

MAX_SCHEMA_BYTES = 64 * 1024

# Enough to indent with; without a bound a small model may write blanks until it runs out of tokens.
_BLANKS = r"(\n[ \t]{0,32}|[ \t]{1,4})"
_GUIDANCE = {"whitespace_pattern": _BLANKS, "coerce_one_of": True}


class Grammar:
    """What an answer may still become. For one thread, one answer.

    Args:
        matcher: fresh, and not in error.
        vocab_size: tokens that llguidance knows; ids above are never allowed.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but an end token could follow."""
        return bool(self._matcher.is_stopped())

    def mask(self, logits: torch.Tensor) -> None:
        """Sets the logits of disallowed tokens to -inf, in place. `logits`: (V,) float32.

        Raises:
            InternalError: no token is allowed, or the grammar became too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.zeros(logits.shape[0], dtype=np.bool_)
        known = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: logits.shape[0]]
        allowed[: known.shape[0]] = known
        if not allowed.any():
            raise InternalError("response_format leaves no token that could follow")
        logits.masked_fill_(to_device(~allowed, torch.bool, logits.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        """Takes the token that was picked from the masked logits.

        Raises:
            InternalError: the token was not allowed.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def rewind(self) -> None:
        """Goes back to the beginning of the answer."""
        self._matcher.reset()
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InternalError(f"response_format failed: {_first_line(self._matcher.get_error())}")


def grammar_for(response_format: dict[str, Any] | None, tokenizer: ChatTokenizer) -> Grammar | None:
    """The grammar that `response_format`, as in the OpenAI API, asks for; None for free text.

    Raises:
        InvalidRequest: an unknown type, or a schema that is invalid, unsupported or too large.
    """
    schema = _schema(response_format)
    if schema is None:
        return None
    text = _serialise(schema)
    vocabulary = tokenizer.grammar_tokenizer
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_GUIDANCE)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
        matcher.compute_bitmask()  # some faults (endless recursion) show only at the first token
    except ValueError as exc:
        raise _refused(str(exc)) from exc
    if matcher.is_error():
        raise _refused(matcher.get_error())
    return Grammar(matcher, vocabulary.vocab_size)


def guided_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema for another engine that reads it with llguidance, to the same grammar.

    Raises:
        InvalidRequest: an unknown type, or no schema.
    """
    schema = _schema(response_format)
    return None if schema is None else schema | {"x-guidance": _GUIDANCE}


def _schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format type is {kind!r}, known are text, json_object and json_schema",
            param="response_format",
        )
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            "response_format json_schema has no schema object", param="response_format"
        )
    return schema


def _serialise(schema: dict[str, Any]) -> str:
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as exc:
        raise _refused(str(exc)) from exc
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"response_format schema has {len(text)} bytes, the limit is {MAX_SCHEMA_BYTES}",
            param="response_format",
            limit=MAX_SCHEMA_BYTES,
        )
    return text


def _limits() -> LLParserLimits:
    """Bounds on compiling and on each mask; at most about 0.2 s for the worst schemas we found."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_grammar_size=50_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"response_format schema cannot be used: {_first_line(reason)}", param="response_format"
    )


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
