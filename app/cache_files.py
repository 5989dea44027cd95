"""`seedance cache`: the cache of a running server out to a file and back, and warm-up from prompts."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from protocol.errors import ERROR_BY_CODE, InternalError, InvalidRequest, Overloaded, ServingError

TIMEOUT_S = 600.0
MAX_TRIES = 20
CHUNK_BYTES = 2**16


class Server:
    """A server's HTTP side.

    Args:
        url: as the client's; `key` is an API key.
    """

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"url must begin with http:// or https://, got {url[:80]!a}")
        self._parts = parts
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    @contextmanager
    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        content_type: str = "application/json",
    ) -> Iterator[http.client.HTTPResponse]:
        """The reply, to be read within.

        Raises:
            ServingError: the server refuses.
            OSError: it cannot be reached.
        """
        parts = self._parts
        port = parts.port
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname or "", port, timeout=TIMEOUT_S, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname or "", port, timeout=TIMEOUT_S)
        headers = {**self._headers, **({} if body is None else {"content-type": content_type})}
        with closing(connection):
            connection.request(method, parts.path.rstrip("/") + path, body=body, headers=headers)
            with connection.getresponse() as reply:
                if reply.status >= 400:
                    raise _error_of(reply.status, reply.read())
                yield reply


def export_entries(
    server: Server, file: Path, which: Mapping[str, Any], console: Console | None = None
) -> int:
    """Writes the entries that are meant to `file`, one a line; returns how many.

    The file is there only once it is whole.
    """
    query = urlencode({name: value for name, value in which.items() if value is not None})
    partial = file.with_name(file.name + ".part")
    num_lines = 0
    with (
        server.call("GET", f"/v1/cache/export?{query}") as reply,
        _progress(console) as progress,
        partial.open("wb") as out,
    ):
        bar = progress.add_task("export", total=int(reply.headers["x-seedance-entries"] or 0))
        for line in reply:
            out.write(line)
            num_lines += 1
            progress.update(bar, completed=num_lines)
        # What expired meanwhile is not missing.
        progress.update(bar, total=num_lines)
    partial.replace(file)
    return num_lines


def import_entries(server: Server, file: Path, console: Console | None = None) -> tuple[int, int]:
    """Sends exported entries back; returns how many were read and kept."""
    size = file.stat().st_size
    with _progress(console, unit="bytes") as progress, file.open("rb") as source:
        bar = progress.add_task("import", total=size)

        def chunks() -> Iterator[bytes]:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
                progress.advance(bar, len(chunk))

        path = "/v1/cache/import"
        with server.call("POST", path, chunks(), "application/x-ndjson") as reply:
            told = json.loads(reply.read())
    return told["read"], told["kept"]


def warm_cache(
    server: Server,
    file: Path,
    *,
    num_parallel: int = 4,
    max_tokens: int | None = None,
    console: Console | None = None,
) -> Counter[str]:
    """Asks every prompt of `file`, so that its answer is stored; returns how each was answered.

    A line is a prompt, or the JSON body of a chat completion. Prompts that are answered from the
    cache already cost nothing.

    Raises:
        InvalidRequest: a line is neither; nothing was asked then.
    """
    bodies = list(_bodies(file, max_tokens))
    outcomes: Counter[str] = Counter()
    with _progress(console) as progress, ThreadPoolExecutor(num_parallel) as pool:
        bar = progress.add_task("warm", total=len(bodies))
        left = iter(bodies)
        running: set[Future[str]] = set()
        while True:
            # No more than that are on their way, so that an error ends it soon.
            while len(running) < num_parallel and (body := next(left, None)) is not None:
                running.add(pool.submit(_ask, server, body))
            if not running:
                return outcomes
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                outcomes[one.result()] += 1
                progress.advance(bar)


def _bodies(file: Path, max_tokens: int | None) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text:
                continue
            if not text.startswith("{"):
                body: Any = {"messages": [{"role": "user", "content": text}]}
            else:
                try:
                    body = json.loads(text)
                except ValueError as error:
                    raise InvalidRequest(f"line {number}: not JSON: {error}") from None
                if "prompt" in body and "messages" not in body:
                    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
                if "messages" not in body:
                    raise InvalidRequest(f"line {number}: neither prompt nor messages")
            defaults = {"temperature": 0} | (
                {} if max_tokens is None else {"max_tokens": max_tokens}
            )
            yield defaults | body | {"stream": False}


def _ask(server: Server, body: dict[str, Any]) -> str:
    """How the cache answered, or the code of the error."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            with server.call("POST", "/v1/chat/completions", json.dumps(body).encode()) as reply:
                reply.read()
                return (reply.headers.get("x-seedance-cache") or "miss").partition(";")[0]
        except Overloaded as error:
            if not tries_left:
                return error.code
            time.sleep(error.retry_after_s or 1.0)
        except InvalidRequest as error:
            return error.code
    return Overloaded.code


def _error_of(status: int, body: bytes) -> ServingError:
    try:
        told = json.loads(body)["error"]
        kind = ERROR_BY_CODE.get(told["code"], InternalError)
        return kind(str(told["message"]), param=told.get("param"))
    except (ValueError, KeyError, TypeError):
        return InternalError(f"the server answered with status {status}")


def _progress(console: Console | None, unit: str = "items") -> Progress:
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn()]
    columns.append(
        MofNCompleteColumn() if unit == "items" else TextColumn("{task.percentage:>3.0f} %")
    )
    return Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True))
