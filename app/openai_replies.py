"""What all replies of the API have in common: heading, events, finish reason, usage, cache header.

Knows nothing of HTTP. A writer belongs to one exchange: id, time and model are
the same in everything it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from app.openai_types import FinishReason, PromptTokensDetails, Usage
from app.serving import Stream
from protocol.errors import ServingError
from protocol.token_log import CacheOutcome, TokenDelta, TokenLog
from protocol.token_log import Usage as LogUsage

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What all parts of one reply have in common."""

    id: str
    created: int
    model: str
    revision: str


def bare_id(reply_id: str) -> str:
    """A reply's id without its kind, to name its parts after it."""
    return reply_id[max(reply_id.find("-"), reply_id.find("_")) + 1 :]


class Event(NamedTuple):
    """One event of a stream, as JSON; `name` is for formats that name theirs beside the data."""

    data: bytes
    name: str = ""


class Writer(Protocol):
    """Puts the answers of one exchange into JSON; `index` is the choice."""

    last_line: bytes
    """Ends an event stream that went well."""

    def begin(self, streams: Sequence[Stream]) -> None:
        """The streams are open; comes before all that follows."""
        ...

    def rename(self, reply_id: str) -> None:
        """The reply goes on under the name that it was begun with."""
        ...

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        """The one reply to a plain request; every log has ended well."""
        ...

    def opening(self, index: int) -> list[Event]:
        """What comes before the first piece, where the format has it."""
        ...

    def piece(self, index: int, delta: TokenDelta) -> list[Event]:
        """What tells of `delta`; nothing when there is nothing to show."""
        ...

    def closing(self, index: int, log: TokenLog) -> list[Event]:
        """The end of a choice, with its finish reason."""
        ...

    def usage(self, usage: Usage) -> list[Event]:
        """What comes after the last choice."""
        ...

    def failure(self, error: ServingError) -> list[Event]:
        """The end of a stream that failed in its middle."""
        ...


def finish_reason(log: TokenLog) -> FinishReason:
    """The finish reason of a log that ended well, in the words of the API."""
    assert log.terminal is not None
    return "length" if log.terminal.finish_reason == "length" else "stop"


def total_usage(logs: Sequence[TokenLog], *, n: int) -> Usage:
    """Usage of a whole exchange: each prompt counts once, however many answers it got.

    Args:
        logs: all ended, the `n` answers to one prompt next to each other.
    """
    each = [log.terminal.usage if log.terminal else LogUsage() for log in logs]
    prompts = each[::n]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in each)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(usage.cached_tokens for usage in prompts)
        ),
    )


def cache_header(outcomes: Sequence[CacheOutcome]) -> str:
    """The value of `x-seedance-cache`: `outcome; tier=…; similarity=…; age=…`, as far as known.

    Several choices are told as one: a miss if any was computed, else the first.
    """
    told = next((item for item in outcomes if item.outcome == "miss"), outcomes[0])
    parts: list[str] = [told.outcome]
    if told.tier is not None:
        parts.append(f"tier={_token(told.tier)}")
    if told.similarity is not None:
        parts.append(f"similarity={told.similarity:.4f}")
    if told.age_s is not None:
        parts.append(f"age={told.age_s:.1f}")
    if told.reason is not None:
        parts.append(f"reason={_token(told.reason)}")
    return "; ".join(parts)


def _token(text: str) -> str:
    """`text` as one word that may stand in a header."""
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in text)
