"""Notes when a server is done with a WebSocket. Knows nothing of Ray."""

from __future__ import annotations

import json
import time
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

ENDS_FILE = "SEEDANCE_BENCH_ENDS"
"""Environment variable with the file that gets a line an end: `{"name": …, "at_s": …}`."""
NAME_HEADER = "x-bench-name"


class NotingEnds:
    """Notes the moment at which all of a WebSocket is over for the application."""

    def __init__(self, app: ASGIApp, file: Path) -> None:
        self._app = app
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "websocket":
                self._note(dict(scope["headers"]).get(NAME_HEADER.encode(), b"").decode())

    def _note(self, name: str) -> None:
        with self._file.open("a") as file:
            print(json.dumps({"name": name, "at_s": time.monotonic()}), file=file)
