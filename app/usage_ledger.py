"""The usage ledger: what each tenant used, by day, written behind.

Counting is an addition in memory. A task writes what came together every few seconds,
in one transaction; what cannot be written is kept and tried again, as the same batch
under the same number, so that the store can tell whether it has it already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

MAX_ROWS = 100_000
"""Tenants times days that wait for the store, at most."""
FLUSH_TIMEOUT_S = 10.0


class Used(NamedTuple):
    """What was used.

    Attributes:
        cached_tokens: prompt tokens that the model had computed before.
        saved_tokens: tokens of answers that the model did not compute for this request: the
            cache had them, or an equal request shared its generation.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    saved_tokens: int = 0

    def plus(self, other: Used) -> Used:
        return Used(*(mine + its for mine, its in zip(self, other, strict=True)))


class Row(NamedTuple):
    """Whose use, and when."""

    tenant: str
    day: str
    """`YYYY-MM-DD`, in UTC."""


@dataclass(frozen=True)
class Batch:
    """What is written at once. A writer's numbers rise, and each number is one batch."""

    writer: str
    number: int
    rows: Mapping[Row, Used]


class UsageLedger:
    """Counts and writes; one instance an ingress replica. Belongs to one event loop.

    Args:
        write: stores a batch, whole or not at all, and a second time not again. May raise.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        write: Callable[[Batch], Awaitable[None]],
        *,
        max_rows: int = MAX_ROWS,
        timeout_s: float = FLUSH_TIMEOUT_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._write = write
        self._max_rows = max_rows
        self._timeout_s = timeout_s
        self._wall_clock = wall_clock
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._pending: dict[Row, Used] = {}
        self._batch: Batch | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._errors_total = 0
        self._lost_total = 0

    def count(self, tenant: str, used: Used) -> None:
        """Adds to the tenant's use of today."""
        row = Row(tenant, datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%d"))
        before = self._pending.get(row)
        if before is None and self._num_rows >= self._max_rows:
            if not self._lost_total:
                logger.error("usage is lost: %d rows wait for the store", self._num_rows)
            self._lost_total += used.requests
            return
        self._pending[row] = used if before is None else before.plus(used)

    def start(self, flush_s: float) -> None:
        """Writes every `flush_s` from now on."""
        self._task = asyncio.create_task(self._run(flush_s), name="usage ledger")

    async def close(self) -> None:
        """Writes what is left, if the store takes it now."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        # A batch that was on its way, and what came since.
        if not (await self.flush() and await self.flush()):
            logger.error("usage of %d tenants and days is lost with this process", self._num_rows)

    async def flush(self) -> bool:
        """Writes one batch; whether nothing failed. Raises nothing but cancellation."""
        if self._batch is None:
            if not self._pending:
                return True
            self._number += 1
            self._batch = Batch(self._writer, self._number, self._pending)
            self._pending = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._write(self._batch)
        except Exception as error:
            self._errors_total += 1
            if not self._is_failing:
                logger.warning("usage cannot be written, it is kept: %r", error)
            self._is_failing = True
            return False
        self._batch = None
        if self._is_failing:
            logger.info("usage is written again")
        self._is_failing = False
        return True

    def stats(self) -> dict[str, Any]:
        return {
            "pending_rows": self._num_rows,
            "flush_errors_total": self._errors_total,
            "lost_requests_total": self._lost_total,
        }

    @property
    def _num_rows(self) -> int:
        return len(self._pending) + (len(self._batch.rows) if self._batch is not None else 0)

    async def _run(self, flush_s: float) -> None:
        while True:
            await asyncio.sleep(flush_s)
            await self.flush()
