"""`seedance chat`: one question, or a conversation, in a terminal.

Every question opens its own connection, so a conversation may rest for hours
at the prompt without a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from app.client import ClientStream, ConnectionLost, SeedanceClient
from protocol.errors import ContextLengthExceeded, ServingError, Unauthorized
from protocol.request import Message
from protocol.token_log import CacheOutcome

EXIT_OK, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 130

# What a model writes must not drive the terminal: escape sequences become visible symbols.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


@dataclass(frozen=True)
class ChatOptions:
    """What is sent along with every question; None leaves it to the server.

    Temperature 0, since only replies that were not sampled are cached by themselves.
    """

    api_key: str | None = None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = 0.0
    system: str | None = None
    cache: str | None = None


def run_chat(
    url: str,
    prompt: str | None,
    options: ChatOptions,
    *,
    console: Console | None = None,
    errors: Console | None = None,
    read_line: Callable[[], str] | None = None,
) -> int:
    """Answers `prompt` and returns, or talks until the user leaves; returns the exit code.

    Without a prompt it reads questions with `read_line`, which raises EOFError at
    their end; when that is not given and the input is no terminal, all of the
    input is the prompt. Ctrl-C cancels a running reply, and leaves when none runs
    or when pressed again.
    """
    chat = Chat(url, options, console or Console(), errors or Console(stderr=True))
    if prompt is None and read_line is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    try:
        if prompt is None:
            return chat.talk(read_line or _line_editor())
        return chat.answer(prompt)
    except KeyboardInterrupt:
        chat.console.print()
        return EXIT_INTERRUPTED


class Chat:
    """A conversation: what was said so far, and how to say the next thing."""

    def __init__(self, url: str, options: ChatOptions, console: Console, errors: Console) -> None:
        self.console = console
        self._errors = errors
        self._url = url
        self._options = options
        self._turns: list[Message] = []

    def talk(self, read_line: Callable[[], str]) -> int:
        """Asks for questions and answers them until the user leaves or no server is there."""
        try:
            model = asyncio.run(self._greet())
        except (ServingError, ConnectionLost) as error:
            return self._report(error)
        self._print_dim(f"{model} · Ctrl-C cancels a reply · /new starts over · /exit leaves")
        while True:
            try:
                question = read_line().strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return EXIT_OK
            if question in ("/exit", "/quit"):
                return EXIT_OK
            if question == "/new":
                self._turns.clear()
                self._print_dim("a new conversation")
            elif question:
                self.answer(question)

    def answer(self, question: str) -> int:
        """Streams the reply to one question; it joins the conversation unless it failed."""
        asked = Message(role="user", content=question)
        try:
            stream, text = asyncio.run(self._stream(asked))
        except (ServingError, ConnectionLost) as error:
            return self._report(error)
        assert stream.done is not None
        self._print_dim(describe(stream))
        if text:
            self._turns += [asked, Message(role="assistant", content=text)]
        return EXIT_INTERRUPTED if stream.done.finish_reason == "cancelled" else EXIT_OK

    def _client(self) -> SeedanceClient:
        return SeedanceClient(self._url, self._options.api_key)

    async def _greet(self) -> str:
        async with self._client() as client:
            return client.hello.model if client.hello else ""

    async def _stream(self, asked: Message) -> tuple[ClientStream, str]:
        options = self._options
        system = [Message(role="system", content=options.system)] if options.system else []
        async with self._client() as client:
            stream = client.stream(
                [*system, *self._turns, asked],
                model=options.model,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                cache=options.cache,
            )
            printing = asyncio.create_task(self._print_reply(stream))
            try:
                text = await asyncio.shield(printing)
            except asyncio.CancelledError:
                # Ctrl-C, which asyncio turns into a cancellation of this task the first time.
                # The reply is stopped on the server, and its last frame still read.
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
                await stream.cancel()
                text = await printing
            finally:
                # Only a second Ctrl-C finds it running.
                printing.cancel()
                await asyncio.wait([printing])
            return stream, text

    async def _print_reply(self, stream: ClientStream) -> str:
        pieces: list[str] = []
        try:
            async for delta in stream:
                pieces.append(delta.text)
                # Not through the console, which wraps lines and expands tabs.
                shown = delta.text.translate(_VISIBLE) if self.console.is_terminal else delta.text
                self.console.file.write(shown)
                self.console.file.flush()
        finally:
            if pieces:
                self.console.print()
        return "".join(pieces)

    def _print_dim(self, line: str) -> None:
        self.console.print(Text(line, style="dim"), soft_wrap=True)

    def _report(self, error: ServingError | ConnectionLost) -> int:
        line = Text("error: ", style="bold red")
        line.append(str(error), style="not bold default")
        if isinstance(error, ServingError) and error.retry_after_s is not None:
            line.append(f" (try again in {math.ceil(error.retry_after_s)} s)")
        if isinstance(error, Unauthorized):
            line.append(" (give a key with --key)")
        if isinstance(error, ContextLengthExceeded) and self._turns:
            line.append(" (/new starts a new conversation)")
        self._errors.print(line, soft_wrap=True)
        return EXIT_ERROR


def describe(stream: ClientStream) -> str:
    """One line about a finished reply: waiting time, speed, size, and what the cache did.

    Tokens a second are the reply's tokens over the time from sending to the end.
    """
    assert stream.done is not None
    parts = []
    if stream.ttft_s is not None:
        parts.append(f"TTFT {_milliseconds(stream.ttft_s)}")
    num_tokens = stream.done.usage.completion_tokens
    if num_tokens and stream.total_s:
        parts.append(f"{num_tokens / stream.total_s:.1f} tokens/s")
    parts.append(f"{num_tokens} token{'' if num_tokens == 1 else 's'}")
    parts.append(f"cache: {describe_cache(stream.done.cache)}")
    if stream.done.finish_reason == "length":
        parts.append("cut at the token limit")
    elif stream.done.finish_reason != "stop":
        parts.append(stream.done.finish_reason)
    return " · ".join(parts)


def describe_cache(cache: CacheOutcome) -> str:
    """What the cache did, and why not more: `exact (L2, similarity 1.00, 3 s old)`."""
    details = []
    if cache.outcome == "miss":
        candidate = (
            None if cache.similarity is None else f"best candidate {_score(cache.similarity)}"
        )
        details.append(": ".join(filter(None, (candidate, cache.reason))))
    else:
        details.append(cache.tier or "")
        details.append("" if cache.similarity is None else f"similarity {_score(cache.similarity)}")
        details.append("" if cache.age_s is None else f"{_age(cache.age_s)} old")
    inside = ", ".join(filter(None, details))
    return f"{cache.outcome} ({inside})" if inside else cache.outcome


def _score(similarity: float) -> str:
    # Cut, not rounded: 0.949 must not read as the 0.95 that it missed.
    return f"{math.floor(similarity * 100 + 1e-6) / 100:.2f}"


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.0f} h"


def _line_editor() -> Callable[[], str]:
    with contextlib.suppress(ImportError):
        # Its import alone gives `input` arrow keys and the lines typed before.
        import readline  # noqa: F401
    return lambda: input("> ")
