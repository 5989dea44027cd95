"""Tasks that no request owns."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any


class Background:
    """What goes on behind the requests of an ingress.

    Attributes:
        context: in which it runs, that of this constructor's caller. In HAProxy mode Serve
            cancels every call made in a request's context when its client leaves: whatever
            outlives one request must not run there.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=self.context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends whatever still runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
