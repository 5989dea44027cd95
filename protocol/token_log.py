"""The `TokenLog`: one answer as an append-only record, and the cursors that read it.

A stream is a log and everyone is a cursor: a live client waits at the tail, a
cache hit reads a finished log, a lagging client is a cursor that lags. The log
belongs to one event loop (or one thread); it does no IO and never blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec

from protocol.errors import ErrorInfo

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
CacheResult = Literal["miss", "exact", "semantic", "coalesced"]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One kept token's log probability; `top` holds the best alternatives, best first."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """One token of a prompt; `offset`: where it begins in the prompt's text, in code points.

    `logprob` and `top` are as in `TokenLogprob`; the first token has none, because nothing comes
    before it.
    """

    token_id: int
    token: str
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, str, float], ...] = ()


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """The next piece of an answer: text that can no longer change, and the tokens it completes.

    `seq` is the zero-based number of the last token the piece completes, strictly
    rising along a log. `token_ids` are the tokens since the previous delta (several
    when a character, or a possible stop string, spanned them). `logprobs` has one
    entry a token in `token_ids`, when the request asked for them. `prompt` are all tokens of the
    prompt, in the first delta, when the request asked for their log probabilities; where no token
    is answered, that delta has none.
    """

    seq: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt: tuple[PromptToken, ...] | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Token counts; `completion_tokens` counts every sampled token, an end-of-text token included."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds since the request was accepted."""

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class Terminal(msgspec.Struct, frozen=True, kw_only=True):
    """The one last record of a log."""

    finish_reason: FinishReason
    usage: Usage = Usage()
    timing: Timing = Timing()
    error: ErrorInfo | None = None


class CacheOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the prompt cache decided. On a miss, `similarity` and `reason` tell of the best candidate.

    `id` names the stored answer that was given, or, on a miss, what this one is stored as.
    """

    # Made by a factory because omit_defaults leaves out plain defaults, and this must be there.
    outcome: CacheResult = msgspec.field(default_factory=lambda: "miss")
    tier: str | None = None
    similarity: float | None = None
    age_s: float | None = None
    reason: str | None = None
    id: str | None = None


class TokenLog:
    """Append-only record of one answer: numbered deltas, then one `Terminal`."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._terminal: Terminal | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def terminal(self) -> Terminal | None:
        return self._terminal

    @property
    def next_seq(self) -> int:
        """Number that the first token of the next delta gets; the terminal frame's `seq`."""
        return self._deltas[-1].seq + 1 if self._deltas else 0

    @property
    def deltas(self) -> tuple[TokenDelta, ...]:
        return tuple(self._deltas)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self._deltas)

    def append(self, *deltas: TokenDelta) -> None:
        """Adds deltas, all or none, and wakes the cursors once.

        Raises:
            ValueError: a `seq` does not rise, or the log has ended.
        """
        if self._terminal is not None:
            raise ValueError("append to a finished log")
        next_seq = self.next_seq
        for delta in deltas:
            if delta.seq < next_seq:
                raise ValueError(f"seq {delta.seq} after {next_seq - 1}")
            next_seq = delta.seq + 1
        self._deltas.extend(deltas)
        self._wake()

    def finish(self, terminal: Terminal) -> bool:
        """Ends the log; False when it had ended already (the first terminal record stays)."""
        if self._terminal is not None:
            return False
        self._terminal = terminal
        self._wake()
        return True

    def cursor(self, next_seq: int = 0) -> Cursor:
        """A reader that gets every delta whose `seq` is at least `next_seq`."""
        return Cursor(self, next_seq)

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after each change; returns the function that stops it."""
        self._listeners.append(listener)
        is_subscribed = True

        def unsubscribe() -> None:
            nonlocal is_subscribed
            if is_subscribed:
                is_subscribed = False
                self._listeners.remove(listener)

        return unsubscribe

    def _wake(self) -> None:
        for listener in tuple(self._listeners):
            # One that was called before it may have made it leave.
            if listener in self._listeners:
                listener()


class Cursor:
    """A place in a log: everything before it was taken, everything after it is still to come."""

    def __init__(self, log: TokenLog, next_seq: int = 0) -> None:
        self.log = log
        self._next_seq = next_seq
        self._index = 0

    def take(self, limit: int | None = None) -> list[TokenDelta]:
        """The deltas that are there now (at most `limit`), without waiting."""
        self._skip()
        end = None if limit is None else self._index + limit
        taken = self.log._deltas[self._index : end]
        self._index += len(taken)
        return taken

    @property
    def is_at_end(self) -> bool:
        """Whether every delta was taken and the log has ended."""
        self._skip()
        return self.log.terminal is not None and self._index == len(self.log._deltas)

    async def wait(self) -> list[TokenDelta]:
        """Waits for new deltas and takes them all; an empty list means the log has ended."""
        taken = self.take()
        if taken or self.log.terminal is not None:
            return taken
        changed = asyncio.Event()
        unsubscribe = self.log.subscribe(changed.set)
        try:
            while not taken and self.log.terminal is None:
                await changed.wait()
                changed.clear()
                taken = self.take()
            return taken
        finally:
            unsubscribe()

    def _skip(self) -> None:
        """Passes what lies before the cursor's first place, which may be ahead of the log."""
        deltas = self.log._deltas
        while self._index < len(deltas) and deltas[self._index].seq < self._next_seq:
            self._index += 1
