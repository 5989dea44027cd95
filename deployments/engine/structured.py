"""Keeps an answer to a JSON schema, a regular expression or a choice, by masking other tokens.

A thin layer over llguidance, which turns each into a grammar over token bytes. One `Grammar`
follows one answer. `oneOf` is read as `anyOf`: an answer may fit more than one of the branches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    constraint = constraint_of(response_format)
    if constraint is None:
        return None
    vocabulary = tokenizer.grammar_tokenizer
    try:
        matcher = LLMatcher(vocabulary, _compiled(constraint), log_level=0, limits=_limits())
        matcher.compute_bitmask()  # some faults (endless recursion) show only at the first token
    except ValueError as exc:
        raise _refused(str(exc)) from exc
    if matcher.is_error():
        raise _refused(matcher.get_error())
    return Grammar(matcher, vocabulary.vocab_size)


@dataclass(frozen=True)
class Constraint:
    """What an answer is held to: exactly one is not None."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None


def constraint_of(response_format: dict[str, Any] | None) -> Constraint | None:
    """What `response_format` asks for; None for free text.

    The schema comes with what llguidance needs to read it as we do, for other engines too.

    Raises:
        InvalidRequest: an unknown type, nothing that belongs to it, or too much of it.
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(json={"type": "object", "x-guidance": _GUIDANCE})
    if kind == "json_schema":
        schema = _schema(response_format)
        _measure("schema", _serialise(schema))
        return Constraint(json=schema | {"x-guidance": _GUIDANCE})
    if kind == "regex":
        return Constraint(regex=_regex(response_format))
    if kind == "choice":
        return Constraint(choice=_choice(response_format))
    raise InvalidRequest(
        f"response_format type is {kind!r}, known are text, json_object, json_schema, regex "
        "and choice",
        param="response_format",
    )


def _compiled(constraint: Constraint) -> str:
    """Raises: ValueError: llguidance cannot read it."""
    if constraint.json is not None:
        text = _serialise(constraint.json)
        return str(LLMatcher.grammar_from_json_schema(text, overrides=_GUIDANCE))
    if constraint.regex is not None:
        return str(LLMatcher.grammar_from_regex(constraint.regex))
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choice or ())
    return str(LLMatcher.grammar_from_lark(f"start: {choices}"))


def _schema(response_format: dict[str, Any]) -> dict[str, Any]:
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            "response_format json_schema has no schema object", param="response_format"
        )
    return schema


def _regex(response_format: dict[str, Any]) -> str:
    pattern = response_format.get("regex")
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest("response_format regex has no pattern", param="response_format")
    _measure("regex", pattern)
    return pattern


def _choice(response_format: dict[str, Any]) -> list[str]:
    given = response_format.get("choice")
    choice = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    if not choice or choice != given or "" in choice:
        raise InvalidRequest(
            "response_format choice must be a list of texts that are not empty",
            param="response_format",
        )
    _measure("choice", "".join(choice))
    return choice


def _measure(what: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as exc:
        raise _refused("it holds half a surrogate pair") from exc
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"response_format {what} has {size} bytes, the limit is {MAX_SCHEMA_BYTES}",
            param="response_format",
            limit=MAX_SCHEMA_BYTES,
        )


def _serialise(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as exc:
        raise _refused(str(exc)) from exc


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
        f"response_format cannot be used: {_first_line(reason)}", param="response_format"
    )


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
