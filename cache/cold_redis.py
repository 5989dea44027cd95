"""Records on a Redis or Valkey server, which any number of processes and machines share.

A record is a string that expires by itself at the end of the answer's life. What a process
does is left in a stream, which the others read.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cache.cold import ColdStoreError
from cache.write_behind import LEARNT, UNTOLD, Change, Key, Write, WriteBehindStore

if TYPE_CHECKING:
    import redis

LAYOUT = 1
MAX_LOG = 20_000
"""Entries that others may be behind, about; one that is further behind reads everything anew."""
NEWS = 2000
PAGE_RECORDS = 200
BULK_TIMEOUT_S = 2.0


def redis_store(url: str, *, name: str, timeout_s: float) -> WriteBehindStore:
    """A store on the server at `url`.

    `name` is shared by those who share their records. A look-up waits for the server no
    longer than `timeout_s`, once; then not at all, until it answers again.

    Raises:
        ImportError: the client is not installed.
        ValueError: `url` is none.
    """
    return WriteBehindStore(RedisBackend(url, name=name, timeout_s=timeout_s))


class RedisBackend:
    """`write_behind.Backend` over a server."""

    def __init__(self, url: str, *, name: str, timeout_s: float) -> None:
        self._prefix = f"seedance:{LAYOUT}:{{{name}}}"
        self._log = f"{self._prefix}:log"
        self._origin = secrets.token_hex(8).encode()
        self._reader = _client(url, timeout_s)
        self._bulk = _client(url, BULK_TIMEOUT_S)
        self._position: bytes | None = None

    def open(self) -> bool:
        with _failures():
            self._reader.ping()
            if self._position is None:
                # There is always an entry that we know: when it is gone, so may others be.
                self._position = self._greet()
        return True

    def commit(self, notices: Sequence[bytes], writes: dict[Key, Write]) -> None:
        with _failures():
            batch = self._bulk.pipeline(transaction=True)
            for notice in notices:
                batch.xadd(self._log, self._entry("notice", data=notice))
            for (partition, record_id), write in writes.items():
                key = self._key(partition, record_id)
                if write.data is None:
                    batch.delete(key)
                else:
                    expires = write.expires
                    batch.set(key, write.data, pxat=None if expires is None else int(expires * 1e3))
                if partition not in UNTOLD:
                    kind = "gone" if write.data is None else "put"
                    batch.xadd(self._log, self._entry(kind, partition, record_id))
            batch.xtrim(self._log, maxlen=MAX_LOG, approximate=True)
            batch.execute()

    def hear(self) -> list[Change]:
        changes: list[Change] = []
        with _failures():
            while True:
                assert self._position is not None
                entries: Any = self._bulk.xrange(self._log, min=self._position, count=NEWS + 1)
                if not entries or entries[0][0] != self._position:
                    # The server has forgotten what was between, or everything.
                    self._position = self._greet()
                    return [Change("reset")]
                news = [fields for _, fields in entries[1:] if fields[b"o"] != self._origin]
                changes += self._with_records(news)
                self._position = entries[-1][0]
                if len(entries) <= NEWS:
                    return changes

    def read(self, partition: str, record_id: str) -> bytes | None:
        with _failures():
            data: Any = self._reader.get(self._key(partition, record_id))
        return None if data is None else bytes(data)

    def scan(self, partition: str | None) -> Iterator[tuple[str, str, bytes]]:
        pattern = self._key(partition or "*", "*")
        cursor = 0
        seen: set[bytes] = set()
        while True:
            with _failures():
                found: Any = self._bulk.scan(cursor, match=pattern, count=PAGE_RECORDS)
                cursor = int(found[0])
                keys = [key for key in found[1] if key not in seen]
                seen.update(keys)
                values: Any = self._bulk.mget(keys) if keys else []
            for key, data in zip(keys, values, strict=True):
                if data is not None:
                    place, record_id = key.decode().split(":")[-2:]
                    yield place, record_id, bytes(data)
            if cursor == 0:
                return

    def close(self) -> None:
        self._reader.close()
        self._bulk.close()

    def _key(self, partition: str, record_id: str) -> str:
        kind = "l" if partition in LEARNT else "r"
        return f"{self._prefix}:{kind}:{partition}:{record_id}"

    def _entry(
        self, kind: str, partition: str = "", record_id: str = "", data: bytes = b""
    ) -> dict[Any, Any]:
        return {"o": self._origin, "k": kind, "p": partition, "i": record_id, "d": data}

    def _greet(self) -> bytes:
        position: Any = self._bulk.xadd(self._log, self._entry("notice"))
        return bytes(position)

    def _with_records(self, news: list[dict[bytes, bytes]]) -> list[Change]:
        puts = [fields for fields in news if fields[b"k"] == b"put"]
        keys = [self._key(fields[b"p"].decode(), fields[b"i"].decode()) for fields in puts]
        values: Any = self._bulk.mget(keys) if keys else []
        records = dict(zip(keys, values, strict=True))
        changes = []
        for fields in news:
            partition, record_id = fields[b"p"].decode(), fields[b"i"].decode()
            match fields[b"k"]:
                case b"put":
                    data = records[self._key(partition, record_id)]
                    if data is not None:
                        changes.append(Change("put", partition, record_id, data))
                case b"gone":
                    changes.append(Change("gone", partition, record_id))
                case b"notice" if fields[b"d"]:
                    changes.append(Change("notice", data=fields[b"d"]))
        return changes


def _client(url: str, timeout_s: float) -> redis.Redis:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as exc:
        raise ImportError(
            "a cache on Redis needs its client: pip install 'seedance[redis]'"
        ) from exc
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        # Whoever waits for an answer does not wait for attempts; the writer makes its own.
        retry=Retry(NoBackoff(), 0),
    )


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as exc:
        raise ColdStoreError(f"cache server: {exc}") from exc
