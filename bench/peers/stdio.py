"""A worker's side of the protocol: requests are read from standard input, tokens written to standard output.

    in   {"id": 3, "prompt_token_ids": [1, 9690, …], "max_tokens": 40, "temperature": 0, "top_p": 1, "seed": 3}
    out  {"ready": {"threads": 2, …}}                     once, before anything is read
    out  {"id": 3, "n": 2, "t": 81.52, "token_ids": […]}  the next tokens, `t` by time.monotonic()
    out  {"id": 3, "end": true, "t": 81.97}
    out  {"id": 3, "error": "why"}                        instead of an end

An answer has exactly `max_tokens` tokens, whatever they are. The end of the input ends the worker.
Only the standard library: this runs in the environments of other projects.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class Request:
    """One prompt, and how to answer it; temperature 0 is greedy."""

    id: int
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Request:
        """Reads what `to_line` wrote.

        Raises:
            ValueError: the line is no request.
        """
        value = json.loads(line)
        known = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or not {"id", "prompt_token_ids"} <= value.keys() <= known:
            raise ValueError(f"no request: {line[:200]!r}")
        return cls(**value)


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is started with."""

    model: str
    threads: int
    precision: str
    max_seqs: int
    max_len: int


def read_options(arguments: list[str] | None = None) -> WorkerOptions:
    """Reads the command line that `process.worker_command` writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--max-seqs", type=int, default=32)
    parser.add_argument("--max-len", type=int, default=2048)
    return WorkerOptions(**vars(parser.parse_args(arguments)))


class Replies:
    """Writes answers, from any thread."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()

    def ready(self, **facts: Any) -> None:
        self._write({"ready": facts})

    def tokens(self, request_id: int, token_ids: list[int]) -> None:
        if token_ids:
            self._write(
                {
                    "id": request_id,
                    "n": len(token_ids),
                    "t": self._clock(),
                    "token_ids": token_ids,
                }
            )

    def end(self, request_id: int) -> None:
        self._write({"id": request_id, "end": True, "t": self._clock()})

    def error(self, request_id: int, message: str) -> None:
        self._write({"id": request_id, "error": message})

    def _write(self, value: dict[str, Any]) -> None:
        line = json.dumps(value) + "\n"
        with self._lock:
            self._stream.write(line)
            self._stream.flush()


class Peer(Protocol):
    """An engine that computes on threads of its own."""

    def submit(self, request: Request) -> None:
        """Takes a request and returns at once."""

    def close(self) -> None: ...


class AsyncPeer(Protocol):
    """An engine that lives on an event loop."""

    async def answer(self, request: Request) -> None:
        """Answers one request to its last token."""

    async def close(self) -> None: ...


def take_stdout() -> TextIO:
    """Standard output for the protocol alone: whatever a library prints goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return stream


def serve(peer: Peer, replies: Replies, lines: Iterable[str], **facts: Any) -> None:
    """Tells that the engine is ready and hands it what is asked, until the input ends."""
    replies.ready(**facts)
    for line in lines:
        request = Request.from_line(line)
        try:
            peer.submit(request)
        except Exception as exc:
            replies.error(request.id, f"{type(exc).__name__}: {exc}")
    peer.close()


async def serve_async(
    peer: AsyncPeer, replies: Replies, lines: Iterable[str], **facts: Any
) -> None:
    """The same for an engine on this event loop; `lines` are read on a thread."""
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[Request | None] = asyncio.Queue()

    def read() -> None:
        for line in lines:
            loop.call_soon_threadsafe(requests.put_nowait, Request.from_line(line))
        loop.call_soon_threadsafe(requests.put_nowait, None)

    async def answer(request: Request) -> None:
        try:
            await peer.answer(request)
        except Exception as exc:
            replies.error(request.id, f"{type(exc).__name__}: {exc}")

    replies.ready(**facts)
    threading.Thread(target=read, daemon=True).start()
    answers = set()
    while (request := await requests.get()) is not None:
        task = loop.create_task(answer(request))
        answers.add(task)
        task.add_done_callback(answers.discard)
    for task in answers:
        task.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    await peer.close()
