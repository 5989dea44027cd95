"""The store of tenants, keys and usage: SQLAlchemy's async engine over SQLite or PostgreSQL.

Every unit of work is one database session and one transaction, and nobody else ever has
that session. No request waits for this: `Accounts` polls it, `UsageLedger` writes behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import (
    URL,
    Table,
    create_engine,
    delete,
    event,
    func,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from app.account_tables import (
    KeyRow,
    RevisionRow,
    TableRow,
    TenantRow,
    UsageRow,
    WriterRow,
    create_missing,
)
from app.rate_limits import Limits
from app.settings import AccountSettings, SettingsError
from app.usage_ledger import Batch, Row, Used
from protocol.errors import InvalidRequest, Overloaded

DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
}
"""By what stands before `://` of a URL, without a driver of its own."""
SCHEMA_LOCK = 0x5EEDA9CE
"""Of PostgreSQL: ingresses that start together create the tables one after the other."""
RECYCLE_S = 1800
WRITER_LIFE_S = 7 * 86_400
"""No ledger tries a batch again after so long."""
ROWS_AT_A_TIME = 500


class StoreUnavailable(Overloaded):
    """The store cannot be read or written now."""


@dataclass(frozen=True)
class StoredKey:
    """A key as it is known afterwards; times are seconds since 1970."""

    id: str
    tenant: str
    sha256: str = field(repr=False)
    hint: str
    is_admin: bool
    created_at: int
    revoked_at: int | None


@dataclass(frozen=True)
class Snapshot:
    """All that requests need to know.

    Args:
        revision: changes with everything else here.
        keys: those that are good, by digest.
        num_keys: all that ever were, revoked ones too.
        limits: of the tenants that have some of their own.
    """

    revision: str = ""
    keys: Mapping[str, StoredKey] = field(default_factory=dict)
    num_keys: int = 0
    limits: Mapping[str, Limits] = field(default_factory=dict)


class AccountStore:
    """Reads and writes accounts. Belongs to one event loop; closed by whoever opened it.

    Every method raises `StoreUnavailable` when the database does not do what it is asked.
    """

    def __init__(self, url: URL, settings: AccountSettings) -> None:
        self._url = url
        self._timeout_s = settings.timeout_s
        self._dialect = postgresql if url.get_backend_name() == "postgresql" else sqlite
        try:
            self._engine = create_async_engine(
                url,
                pool_size=settings.pool_size,
                max_overflow=settings.pool_overflow,
                pool_timeout=settings.pool_timeout_s,
                pool_pre_ping=True,
                pool_recycle=RECYCLE_S,
                connect_args=_connect_args(url, settings.timeout_s),
            )
        except ImportError as error:
            raise SettingsError(
                f"accounts.url: {error.name} is not installed (`pip install 'seedance[postgres]'`)"
            ) from None
        if self._dialect is sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)
        self._has_tables = False

    def __str__(self) -> str:
        """Where it is, without the password."""
        return self._url.render_as_string(hide_password=True)

    async def close(self) -> None:
        await self._engine.dispose()

    @contextlib.asynccontextmanager
    async def unit_of_work(self) -> AsyncIterator[AsyncSession]:
        """A session of its own and one transaction, committed at the end or rolled back.

        Raises:
            StoreUnavailable: the database failed.
        """
        try:
            if not self._has_tables:
                await self._create_tables()
        except Exception as error:  # drivers raise what they like until there is a connection
            raise _unavailable(error) from error
        async with self._sessions() as session:
            try:
                await session.connection()
            except Exception as error:
                raise _unavailable(error) from error
            try:
                yield session
                await session.commit()
            except (SQLAlchemyError, OSError, TimeoutError) as error:
                raise _unavailable(error) from error

    async def snapshot(self, known: Snapshot | None = None) -> Snapshot:
        """What is in force now; `known` itself while nothing has changed."""
        async with self.unit_of_work() as session:
            # First, so that rows are never older than it.
            revision = await session.scalar(select(RevisionRow.revision)) or ""
            if known is not None and known.revision == revision:
                return known
            tenants = (await session.scalars(select(TenantRow))).all()
            keys = (await session.scalars(select(KeyRow).where(KeyRow.revoked_at.is_(None)))).all()
            num_keys = await session.scalar(select(func.count()).select_from(KeyRow)) or 0
        limits = {tenant.name: _limits(tenant) for tenant in tenants}
        return Snapshot(
            revision=revision,
            keys={key.sha256: _stored_key(key) for key in keys},
            num_keys=num_keys,
            limits={name: own for name, own in limits.items() if own != Limits()},
        )

    async def create_key(
        self, tenant: str, sha256: str, hint: str, *, is_admin: bool = False
    ) -> StoredKey:
        """A new key of a tenant, which is made if need be."""
        key = KeyRow(
            id=f"key_{secrets.token_hex(6)}",
            tenant=tenant,
            sha256=sha256,
            hint=hint,
            is_admin=is_admin,
            created_at=int(time.time()),
            revoked_at=None,
        )
        async with self.unit_of_work() as session:
            await self._revise(session)
            made = self._insert(TenantRow).values(name=tenant).on_conflict_do_nothing()
            await session.execute(made)
            session.add(key)
        return _stored_key(key)

    async def set_limits(self, tenant: str, limits: Limits) -> None:
        """Gives a tenant these limits in place of those it had."""
        values = asdict(limits)
        async with self.unit_of_work() as session:
            await self._revise(session)
            made = self._insert(TenantRow).values(name=tenant, **values)
            await session.execute(made.on_conflict_do_update(index_elements=["name"], set_=values))

    async def revoke_key(self, id: str) -> StoredKey:
        """Makes a key worthless, for ever.

        Raises:
            InvalidRequest: there is none of that id.
        """
        async with self.unit_of_work() as session:
            await self._revise(session)
            await session.execute(
                update(KeyRow)
                .where(KeyRow.id == id, KeyRow.revoked_at.is_(None))
                .values(revoked_at=int(time.time()))
            )
            key = await session.get(KeyRow, id)
            if key is None:
                raise InvalidRequest(f"no key has the id {id[:64]!a}", param="id")
        return _stored_key(key)

    async def list_keys(self, tenant: str | None = None) -> list[tuple[StoredKey, Limits]]:
        """All keys, the revoked ones too, with the limits of their tenants; oldest first."""
        asked = select(KeyRow, TenantRow).join(TenantRow, KeyRow.tenant == TenantRow.name)
        if tenant is not None:
            asked = asked.where(KeyRow.tenant == tenant)
        async with self.unit_of_work() as session:
            found = await session.execute(asked.order_by(KeyRow.created_at, KeyRow.id))
            return [(_stored_key(key), _limits(of)) for key, of in found]

    async def add_usage(self, batch: Batch) -> None:
        """Adds a batch of a ledger, unless it was added before."""
        now_s = int(time.time())
        mark = self._insert(WriterRow).values(
            writer=batch.writer, last_batch=batch.number, written_at=now_s
        )
        # Both a check and a lock: an attempt that was given up may still be at work.
        mark = mark.on_conflict_do_update(
            index_elements=["writer"],
            set_={"last_batch": batch.number, "written_at": now_s},
            where=WriterRow.last_batch < batch.number,
        )
        new = self._insert(UsageRow)
        sums = {name: getattr(UsageRow, name) + new.excluded[name] for name in Used._fields}
        add = new.on_conflict_do_update(index_elements=["day", "tenant"], set_=sums)
        # In one order, so that two ledgers never wait for each other.
        rows = [{**row._asdict(), **batch.rows[row]._asdict()} for row in sorted(batch.rows)]
        async with self.unit_of_work() as session:
            is_new = await session.scalar(mark.returning(WriterRow.writer))
            if is_new is None:
                return
            for start in range(0, len(rows), ROWS_AT_A_TIME):
                await session.execute(add, rows[start : start + ROWS_AT_A_TIME])
            gone = WriterRow.written_at < now_s - WRITER_LIFE_S
            await session.execute(delete(WriterRow).where(gone))

    async def usage(
        self, tenant: str | None, *, first_day: str, last_day: str, limit: int
    ) -> Sequence[tuple[Row, Used]]:
        """What a tenant used, or all of them; newest day first."""
        asked = select(UsageRow).where(UsageRow.day.between(first_day, last_day))
        if tenant is not None:
            asked = asked.where(UsageRow.tenant == tenant)
        asked = asked.order_by(UsageRow.day.desc(), UsageRow.tenant).limit(limit)
        async with self.unit_of_work() as session:
            days = (await session.scalars(asked)).all()
        return [
            (Row(day.tenant, day.day), Used(*(getattr(day, name) for name in Used._fields)))
            for day in days
        ]

    async def _create_tables(self) -> None:
        if self._dialect is sqlite:
            await asyncio.to_thread(_make_file, Path(str(self._url.database)), self._timeout_s)
        else:
            async with self._engine.begin() as connection:
                await connection.execute(text(f"SELECT pg_advisory_xact_lock({SCHEMA_LOCK})"))
                await connection.run_sync(create_missing)
        self._has_tables = True

    async def _revise(self, session: AsyncSession) -> None:
        """The first statement of a change: it also makes changes wait for each other."""
        values = {"revision": uuid.uuid4().hex}
        made = self._insert(RevisionRow).values(id=1, **values)
        await session.execute(made.on_conflict_do_update(index_elements=["id"], set_=values))

    def _insert(self, model: type[TableRow]) -> Any:
        """An `INSERT` that knows `ON CONFLICT`, which each dialect spells in a class of its own."""
        assert isinstance(model.__table__, Table)
        return self._dialect.insert(model.__table__)


def open_store(settings: AccountSettings, home: Path) -> AccountStore:
    """The store that the settings name; connects when it is first used.

    Raises:
        SettingsError: it cannot be used as it is named.
    """
    return AccountStore(store_url(settings, home), settings)


def store_url(settings: AccountSettings, home: Path) -> URL:
    """With its driver; a file in `home` where none is named.

    Raises:
        SettingsError: it is no such URL.
    """
    if settings.url is None:
        file = home.expanduser() / "accounts.sqlite3"
        return URL.create(DRIVERS["sqlite"], database=str(file))
    try:
        url = make_url(settings.url)
    except (ArgumentError, ValueError):
        raise SettingsError("accounts.url: not a database URL") from None
    url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
    if url.drivername not in DRIVERS.values():
        raise SettingsError(f"accounts.url: {url.drivername} is neither sqlite nor postgresql")
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database.startswith((":memory:", "file:")):
            raise SettingsError("accounts.url: name a file: sqlite:////var/lib/seedance/accounts")
        url = url.set(database=str(Path(url.database).expanduser()))
    return url


def _connect_args(url: URL, timeout_s: float) -> dict[str, Any]:
    if url.get_backend_name() == "postgresql":
        return {"timeout": timeout_s, "command_timeout": timeout_s}
    return {"timeout": timeout_s}


def _prepare_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _make_file(file: Path, timeout_s: float) -> None:
    """Makes the database of SQLite, for its owner only. Others may be at it: one at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=timeout_s, mode=0o600):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        engine = create_engine(
            URL.create("sqlite", database=str(file)), connect_args={"timeout": timeout_s}
        )
        try:
            with engine.begin() as connection:
                # Stays with the file: readers and a writer go on beside each other.
                connection.execute(text("PRAGMA journal_mode=WAL"))
                create_missing(connection)
        finally:
            engine.dispose()


def _unavailable(error: Exception) -> StoreUnavailable:
    """With the kind of the failure only: the rest may hold an address or a password."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return StoreUnavailable(
        f"the store of accounts does not answer ({type(cause).__name__})", retry_after_s=5
    )


def _stored_key(key: KeyRow) -> StoredKey:
    return StoredKey(
        id=key.id,
        tenant=key.tenant,
        sha256=key.sha256,
        hint=key.hint,
        is_admin=key.is_admin,
        created_at=key.created_at,
        revoked_at=key.revoked_at,
    )


def _limits(tenant: TenantRow) -> Limits:
    return Limits(
        requests_per_minute=tenant.requests_per_minute,
        tokens_per_minute=tenant.tokens_per_minute,
        concurrent_requests=tenant.concurrent_requests,
    )
