"""A store that outlives its process: written behind the caller's back, and shared with others.

One thread of its own does everything that may take long: it commits what was written in
batches, hears what other processes did to the same store, and finds the way back to a store
that failed. The caller's thread only reads, and what it wrote itself it reads at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cache.cold import ColdStoreError, OutOfReach

logger = logging.getLogger(__name__)

FLUSH_S = 0.2
"""What was written is in the store after this time and that of one commit."""
HEAR_S = 0.05
"""What others did is heard of after this time, unless a commit is under way."""
MAX_PENDING_BYTES = 64 * 2**20
MAX_HEARD = 10_000
"""Changes of others that wait to be taken in. More are dropped, and all is read anew."""
MAX_BATCH = 500
MAX_BATCH_WITH_NOTICE = 50
"""Others wait for a notice: what is written with it must not take long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
"""Between two attempts to reach a store that fails."""

Key = tuple[str, str]
"""Partition and record id."""
ALIASES, BUDGET = "aliases", "budget"
LEARNT = frozenset({ALIASES, BUDGET})
"""Partitions of what was learnt beside the answers: only a scan of their own shows them."""
UNTOLD = frozenset({BUDGET})
"""Partitions whose records others are not told of."""
ChangeKind = Literal["put", "gone", "notice", "emptied", "reset"]


@dataclass(frozen=True, slots=True)
class Write:
    """A record to put, or to delete when `data` is None; `expires` is in wall time."""

    data: bytes | None
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What another process did to the store.

    `put` comes with the record; `gone` is a record that was deleted; `notice` was announced,
    its text in `data`. `emptied`: the store has nothing any more. `reset`: what was done there
    meanwhile is not known, and it must be read anew.
    """

    kind: ChangeKind
    partition: str = ""
    record_id: str = ""
    data: bytes = b""


class Backend(Protocol):
    """Where the records are. All but `read` and `scan` are called by one thread only.

    Every method but `close` may raise ColdStoreError; then `open` is called again, after a
    while, before anything else.
    """

    def open(self) -> bool:
        """Gets ready, also once more; False when the records of before are not there any more."""

    def commit(self, notices: Sequence[bytes], writes: dict[Key, Write]) -> None:
        """Does all or nothing, and leaves word of it for other processes, the notices first."""

    def hear(self) -> list[Change]:
        """What other processes did since the last call."""

    def read(self, partition: str, record_id: str) -> bytes | None:
        """By any thread. Returns soon, or raises."""

    def scan(self, partition: str | None) -> Iterator[tuple[str, str, bytes]]:
        """By any thread. Those of all partitions are without what was learnt (`LEARNT`)."""

    def close(self) -> None: ...


class WriteBehindStore:
    """`cache.cold.ColdStore` over a backend, and what others did there.

    Args:
        backend: opened here; when that fails, it is tried again behind the caller's back.
        flush_s: how long a write may wait for others.
        max_pending_bytes: of writes that wait; more fail.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        flush_s: float = FLUSH_S,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._backend = backend
        self._flush_s = flush_s
        self._max_pending_bytes = max_pending_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: dict[Key, Write] = {}
        self._notices: list[bytes] = []
        self._writing: dict[Key, Write] = {}
        self._telling: list[bytes] = []
        self._pending_bytes = 0
        self._heard: deque[Change] = deque()
        self._heard_notices: deque[Change] = deque()
        self._is_hurried = self._is_closing = False
        self._is_open = False
        self.errors_total = 0
        try:
            self._backend.open()
            self._is_open = True
        except ColdStoreError as exc:
            self._note_failure(exc)
        self._thread = threading.Thread(target=self._run, name="cold-store", daemon=True)
        self._thread.start()

    @property
    def is_up(self) -> bool:
        """Whether the backend did what it was last told to."""
        return self._is_open

    def get(self, partition: str, record_id: str) -> bytes | None:
        with self._lock:
            write = self._waiting((partition, record_id))
        if write is not None:
            return write.data
        self._check_open()
        try:
            return self._backend.read(partition, record_id)
        except ColdStoreError as exc:
            # Until the other thread has reached it again, nobody waits for it any more.
            self._note_failure(exc)
            raise

    def put(
        self, partition: str, record_id: str, data: bytes, expires: float | None = None
    ) -> None:
        with self._lock:
            if self._is_closing:
                raise ColdStoreError("the store is closed")
            if self._pending_bytes + len(data) > self._max_pending_bytes:
                self.errors_total += 1
                raise ColdStoreError(
                    f"{self._pending_bytes} bytes wait to be written, "
                    f"the limit is {self._max_pending_bytes}"
                )
            self._add((partition, record_id), Write(data, expires))

    def delete(self, partition: str, record_id: str) -> None:
        with self._lock:
            self._add((partition, record_id), Write(None))

    def scan(self, partition: str | None = None) -> Iterator[tuple[str, str, bytes]]:
        """Records that come or go meanwhile may be in or not."""
        with self._lock:
            waiting = {**self._writing, **self._pending}
        self._check_open()
        try:
            for place, record_id, data in self._backend.scan(partition):
                if (place, record_id) not in waiting:
                    yield place, record_id, data
        except ColdStoreError as exc:
            self._note_failure(exc)
            raise
        for (place, record_id), write in waiting.items():
            is_meant = place == partition or (partition is None and place not in LEARNT)
            if write.data is not None and is_meant:
                yield place, record_id, write.data

    def announce(self, notice: bytes) -> None:
        """Tells other processes something, soon and before what is written after it."""
        with self._changed:
            self._notices.append(notice)
            self._is_hurried = True
            self._changed.notify_all()

    @property
    def has_heard(self) -> bool:
        """Whether another process did something."""
        return bool(self._heard or self._heard_notices)

    def take_change(self) -> Change | None:
        """The next thing that another process did: notices first, else in its order.

        A removal must not wait behind a thousand new records. Whoever obeys it remembers it
        for those that were written before it and come after it.
        """
        with self._lock:
            waiting = self._heard_notices or self._heard
            return waiting.popleft() if waiting else None

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Waits until all that was written is in the store; whether it is."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._is_unwritten, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what waits, if the store lets it, and ends."""
        with self._changed:
            self._is_closing = self._is_hurried = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _check_open(self) -> None:
        if not self._is_open:
            raise OutOfReach("the store is out of reach")

    def _waiting(self, key: Key) -> Write | None:
        return self._pending.get(key) or self._writing.get(key)

    @property
    def _is_unwritten(self) -> bool:
        return bool(self._pending or self._writing or self._notices or self._telling)

    def _add(self, key: Key, write: Write) -> None:
        before = self._pending.pop(key, None)
        self._pending_bytes += _size(write) - (0 if before is None else _size(before))
        self._pending[key] = write

    def _run(self) -> None:
        pause_s, written_s = FIRST_PAUSE_S, time.monotonic()
        while True:
            with self._changed:
                # While the store fails, nobody can hurry it.
                self._changed.wait_for(
                    lambda: self._is_closing or (self._is_hurried and self._is_open),
                    min(HEAR_S, self._flush_s) if self._is_open else pause_s,
                )
                is_last = self._is_closing
                is_due = is_last or self._is_hurried or not self._is_open
                self._is_hurried = False
            if is_due or time.monotonic() - written_s >= self._flush_s:
                is_due, written_s = True, time.monotonic()
            is_well = self._work(is_due)
            pause_s = FIRST_PAUSE_S if is_well else min(2 * pause_s, LONGEST_PAUSE_S)
            if is_last:
                self._backend.close()
                return

    def _work(self, writes_too: bool) -> bool:
        """Hears what is new and writes what waits; False when the store fails."""
        try:
            if not self._is_open:
                if not self._backend.open():
                    self._hear([Change("emptied")])
                logger.info("the store of the cache is in reach again")
                self._is_open = True
            while True:
                self._hear(self._backend.hear())
                notices, writes = self._take_batch() if writes_too else ([], {})
                if not notices and not writes:
                    break
                self._backend.commit(notices, writes)
                self._done()
                if not notices and len(writes) < MAX_BATCH:
                    break
        except ColdStoreError as exc:
            self._note_failure(exc)
            self._put_back()
            return False
        except Exception as exc:
            # This thread must not end: without it nothing is ever written again.
            logger.exception("the store of the cache failed in an unknown way")
            self._note_failure(exc)
            self._put_back()
            return False
        return True

    def _note_failure(self, exc: Exception) -> None:
        was_open, self._is_open = self._is_open, False
        self.errors_total += 1
        if was_open or self.errors_total == 1:
            logger.error("the store of the cache is out of reach, it answers nothing: %s", exc)

    def _take_batch(self) -> tuple[list[bytes], dict[Key, Write]]:
        with self._lock:
            self._telling, self._notices = self._notices, []
            most = MAX_BATCH_WITH_NOTICE if self._telling else MAX_BATCH
            if len(self._pending) <= most:
                self._writing, self._pending = self._pending, {}
            else:
                keys = list(self._pending)[:most]
                self._writing = {key: self._pending.pop(key) for key in keys}
            return self._telling, self._writing

    def _done(self) -> None:
        with self._changed:
            self._pending_bytes -= sum(map(_size, self._writing.values()))
            self._writing, self._telling = {}, []
            self._changed.notify_all()

    def _put_back(self) -> None:
        """What could not be written waits on, unless it was written anew meanwhile."""
        with self._changed:
            for key in self._writing.keys() & self._pending.keys():
                self._pending_bytes -= _size(self._writing[key])
            self._pending = {**self._writing, **self._pending}
            self._notices = [*self._telling, *self._notices]
            self._writing, self._telling = {}, []
            self._changed.notify_all()

    def _hear(self, changes: Sequence[Change]) -> None:
        with self._lock:
            for change in changes:
                is_whole = change.kind in ("emptied", "reset")
                if is_whole or len(self._heard) + len(self._heard_notices) >= MAX_HEARD:
                    # After it, what was heard before does not matter.
                    self._heard.clear()
                    self._heard_notices.clear()
                    self._heard.append(change if is_whole else Change("reset"))
                if change.kind == "notice":
                    self._heard_notices.append(change)
                elif not is_whole:
                    self._heard.append(change)


def _size(write: Write) -> int:
    return 200 + (0 if write.data is None else len(write.data))
