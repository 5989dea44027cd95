"""Records in one SQLite file. Several processes of one machine may share it.

What a process does is left in a log beside the records, which the others read. A file that is
damaged or somebody else's is moved aside, and a new one is begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cache.cold import ColdStoreError
from cache.write_behind import LEARNT, UNTOLD, Change, Key, Write, WriteBehindStore

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x53454544
SCHEMA_VERSION = 1
SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    partition TEXT NOT NULL, id TEXT NOT NULL, expires REAL, data BLOB NOT NULL,
    UNIQUE (partition, id)
);
CREATE INDEX records_by_expiry ON records (expires);
CREATE TABLE log (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    origin TEXT NOT NULL, kind TEXT NOT NULL,
    partition TEXT NOT NULL DEFAULT '', id TEXT NOT NULL DEFAULT '', data BLOB NOT NULL DEFAULT x''
);
"""
MAX_LOG = 20_000
"""Rows that others may be behind; one that is further behind reads everything anew."""
WRITE_PATIENCE_S, READ_PATIENCE_S = 5.0, 0.05
TIDY_S = 60.0
PAGE_ROWS = 200
KEPT_ASIDE = 3
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
LEAST_BYTES = 2**20
TABLES = ("records", "learnt")
SCHEMA_OF_LEARNT = """
CREATE TABLE IF NOT EXISTS learnt (
    number INTEGER PRIMARY KEY,
    partition TEXT NOT NULL, id TEXT NOT NULL, expires REAL, data BLOB NOT NULL,
    UNIQUE (partition, id)
);
"""
PUT = "INSERT OR REPLACE INTO {table} (partition, id, expires, data) VALUES (?, ?, ?, ?)"
DELETE = "DELETE FROM {table} WHERE partition = ? AND id = ?"
READ = "SELECT data FROM {table} WHERE partition = ? AND id = ?"
LOG = "INSERT INTO log (origin, kind, partition, id, data) VALUES (?, ?, ?, ?, ?)"


class _ForeignFile(Exception):
    """The file is a database, but not one of ours."""


def sqlite_store(
    path: Path, *, max_bytes: int, wall_clock: Callable[[], float] = time.time
) -> WriteBehindStore:
    """A store in the file `path`, with its folder; the file grows no larger than `max_bytes`."""
    return WriteBehindStore(SqliteBackend(path, max_bytes=max_bytes, wall_clock=wall_clock))


class SqliteBackend:
    """`write_behind.Backend` over a file.

    Commits reach the disk (WAL, synchronous=FULL): neither a killed process nor a power cut
    takes back what was committed. Past `max_bytes` the oldest records leave.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._max_bytes = max(max_bytes, LEAST_BYTES)
        self._wall_clock = wall_clock
        self._origin = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._position = 0
        self._data_version = -1
        self._own_losses: list[Change] = []
        self._is_damaged = False
        self._tidied_s = 0.0

    def open(self) -> bool:
        before = self._file
        with self._lock, _translated("cannot be opened"), self._alone():
            self._close()
            if self._is_damaged and self._identity() == before:
                self._move_aside("is damaged")
            self._is_damaged = False
            try:
                self._connect()
            except (sqlite3.DatabaseError, _ForeignFile) as exc:
                code = getattr(exc, "sqlite_errorcode", None)
                if not isinstance(exc, _ForeignFile) and _primary(code) not in DAMAGED:
                    raise
                self._close()
                self._move_aside(str(exc))
                self._connect()
            self._file = self._identity()
            if before == self._file:
                return True
            assert self._writer is not None
            row = self._writer.execute("SELECT seq FROM sqlite_sequence").fetchone()
            self._position = 0 if row is None else row[0]
            return before is None

    def commit(self, notices: Sequence[bytes], writes: dict[Key, Write]) -> None:
        try:
            self._write(notices, writes)
        except sqlite3.Error as exc:
            if _primary(exc.sqlite_errorcode) != sqlite3.SQLITE_FULL:
                raise self._failure(exc) from exc
            with self._failures():
                self._drop_oldest()
                self._write(notices, writes)

    def hear(self) -> list[Change]:
        with self._failures():
            writer = self._checked()
            changes, self._own_losses = self._own_losses, []
            (version,) = writer.execute("PRAGMA data_version").fetchone()
            if version != self._data_version:
                changes += self._news(writer)
                self._data_version = version
            if time.monotonic() - self._tidied_s >= TIDY_S:
                self._tidy(writer)
                self._tidied_s = time.monotonic()
        return changes

    def read(self, partition: str, record_id: str) -> bytes | None:
        with self._lock, self._failures():
            if self._reader is None:
                raise ColdStoreError(f"{self._path} is not open")
            row = self._reader.execute(
                _in_table(READ, partition), (partition, record_id)
            ).fetchone()
        return None if row is None else bytes(row[0])

    def scan(self, partition: str | None) -> Iterator[tuple[str, str, bytes]]:
        """The newest first."""
        which = "" if partition is None else "AND partition = :partition"
        query = (
            "SELECT number, partition, id, data FROM {table} WHERE number < :number "
            f"{which} ORDER BY number DESC LIMIT {PAGE_ROWS}"
        )
        query = _in_table(query, partition)
        number = 2**63 - 1
        while True:
            with self._lock, self._failures():
                if self._reader is None:
                    raise ColdStoreError(f"{self._path} is not open")
                rows = self._reader.execute(
                    query, {"number": number, "partition": partition}
                ).fetchall()
            for number, place, record_id, data in rows:  # noqa: B007
                yield place, record_id, bytes(data)
            if len(rows) < PAGE_ROWS:
                return

    def close(self) -> None:
        with self._lock:
            self._close()

    def _connect(self) -> None:
        # Prompts are nobody else's business; SQLite gives its other files the same mode.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        self._writer = writer = self._connection(WRITE_PATIENCE_S)
        (application_id,) = writer.execute("PRAGMA application_id").fetchone()
        (version,) = writer.execute("PRAGMA user_version").fetchone()
        (num_tables,) = writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if num_tables == 0 and application_id == 0:
            writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
            writer.execute("PRAGMA journal_mode = WAL")
            writer.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {SCHEMA_OF_LEARNT} COMMIT;")
        elif application_id != APPLICATION_ID:
            raise _ForeignFile("is another application's")
        elif version != SCHEMA_VERSION:
            raise _ForeignFile(f"has version {version}, ours is {SCHEMA_VERSION}")
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = FULL")
        writer.execute("PRAGMA journal_size_limit = 16777216")
        # A file of before is kept as it is, with a table more.
        writer.execute(SCHEMA_OF_LEARNT)
        (page_size,) = writer.execute("PRAGMA page_size").fetchone()
        writer.execute(f"PRAGMA max_page_count = {self._max_bytes // page_size}")
        writer.execute(
            "SELECT number, partition, id, expires, data FROM records LIMIT 1"
        ).fetchone()
        writer.execute(
            "SELECT number, origin, kind, partition, id, data FROM log LIMIT 1"
        ).fetchone()
        self._data_version = -1
        self._reader = self._connection(READ_PATIENCE_S)

    def _connection(self, patience_s: float) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=patience_s, isolation_level=None, check_same_thread=False
        )

    def _close(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
        self._reader = self._writer = None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Only one process at a time decides what becomes of a file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _identity(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        return stat.st_dev, stat.st_ino

    def _move_aside(self, why: str) -> None:
        aside = Path(f"{self._path}.damaged-{time.time_ns()}")
        logger.error("the cache's file %s %s: moved to %s, a new one is begun",
                     self._path, why, aside)  # fmt: skip
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self._path}{suffix}", f"{aside}{suffix}")
        kept = sorted(self._path.parent.glob(f"{self._path.name}.damaged-*[0-9]"))
        for old in kept[:-KEPT_ASIDE]:
            for suffix in ("-wal", "-shm", ""):
                Path(f"{old}{suffix}").unlink(missing_ok=True)

    def _checked(self) -> sqlite3.Connection:
        """The connection to the file that is there now.

        Raises:
            ColdStoreError: another process has moved it aside, or somebody has removed it.
        """
        if self._writer is None or self._is_damaged or self._identity() != self._file:
            raise ColdStoreError(f"{self._path} is not the file any more that was opened")
        return self._writer

    def _write(self, notices: Sequence[bytes], writes: dict[Key, Write]) -> None:
        origin = self._origin
        kinds = [("gone" if write.data is None else "put", *key) for key, write in writes.items()
                 if key[0] not in UNTOLD]  # fmt: skip
        with _transaction(self._checked()) as writer:
            writer.executemany(LOG, [(origin, "notice", "", "", notice) for notice in notices])
            for table in TABLES:
                own = {key: write for key, write in writes.items() if _table(key[0]) == table}
                gone = [key for key, write in own.items() if write.data is None]
                put = [(*key, write.expires, write.data) for key, write in own.items()
                       if write.data is not None]  # fmt: skip
                writer.executemany(DELETE.format(table=table), gone)
                writer.executemany(PUT.format(table=table), put)
            writer.executemany(LOG, [(origin, *kind, b"") for kind in kinds])
            writer.execute("DELETE FROM log WHERE number <= (SELECT max(number) FROM log) - ?",
                           (MAX_LOG,))  # fmt: skip

    def _news(self, writer: sqlite3.Connection) -> list[Change]:
        first, last = writer.execute("SELECT min(number), max(number) FROM log").fetchone()
        if last is None or last == self._position:
            return []
        if first > self._position + 1:
            self._position = last
            return [Change("reset")]
        rows = writer.execute(
            "SELECT kind, partition, id, data FROM log WHERE number > ? AND number <= ? "
            "AND origin != ? ORDER BY number",
            (self._position, last, self._origin),
        ).fetchall()
        changes = []
        for kind, partition, record_id, data in rows:
            if kind == "put":
                row = writer.execute(_in_table(READ, partition), (partition, record_id)).fetchone()
                if row is None:
                    continue
                (data,) = row
            changes.append(Change(kind, partition, record_id, bytes(data)))
        self._position = last
        return changes

    def _tidy(self, writer: sqlite3.Connection) -> None:
        """Removes what nobody held when its life ended, and gives free pages back."""
        for table in TABLES:
            writer.execute(
                f"DELETE FROM {table} WHERE number IN "
                f"(SELECT number FROM {table} WHERE expires <= ? LIMIT 5000)",
                (self._wall_clock(),),
            )
        writer.execute("PRAGMA incremental_vacuum(1000)").fetchall()

    def _drop_oldest(self) -> None:
        """An eighth of the records makes room for others."""
        with _transaction(self._checked()) as writer:
            oldest = writer.execute(
                "SELECT partition, id FROM records ORDER BY number "
                "LIMIT (SELECT count(*) / 8 + 1 FROM records)"
            ).fetchall()
            writer.executemany(DELETE.format(table="records"), oldest)
            writer.executemany(LOG, [(self._origin, "gone", *key, b"") for key in oldest])
        self._own_losses += [Change("gone", *key) for key in oldest]
        logger.warning("%s is full: its %d oldest records were removed", self._path, len(oldest))

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise self._failure(exc) from exc

    def _failure(self, exc: sqlite3.Error) -> ColdStoreError:
        if _primary(getattr(exc, "sqlite_errorcode", None)) in DAMAGED:
            self._is_damaged = True
        return ColdStoreError(f"{self._path}: {exc}")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except ColdStoreError:
        raise
    except (sqlite3.Error, OSError) as exc:
        raise ColdStoreError(f"{what}: {exc}") from exc


def _table(partition: str | None) -> str:
    return "learnt" if partition in LEARNT else "records"


def _in_table(statement: str, partition: str | None) -> str:
    return statement.format(table=_table(partition))


def _primary(code: int | None) -> int | None:
    """SQLite's extended codes hold the general one in their low byte."""
    return None if code is None else code & 0xFF
