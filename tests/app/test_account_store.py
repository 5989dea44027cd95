"""The store of accounts: one contract, on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from app.account_store import AccountStore, Snapshot, StoreUnavailable, open_store, store_url
from app.rate_limits import Limits
from app.settings import AccountSettings, SettingsError, parse_settings
from app.usage_ledger import Batch, Row, Used
from protocol.errors import InvalidRequest
from tests.app.postgres_server import PostgresServer

USED = Used(1, 10, 5, 2, 0)
DAY = "2026-03-04"


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'accounts.sqlite3'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


Opener = Callable[..., AccountStore]


@pytest.fixture
async def opened(url: str) -> AsyncIterator[Opener]:
    """Opens the same store again and again, as several ingresses do."""
    stores: list[AccountStore] = []

    def open_one(**settings: object) -> AccountStore:
        accounts = parse_settings({"accounts": {"url": url, **settings}}).accounts
        stores.append(open_store(accounts, Path("/nowhere")))
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


@pytest.fixture
async def store(opened: Opener) -> AccountStore:
    return opened()


def batch(number: int, used: Used = USED, *, writer: str = "w", tenant: str = "red") -> Batch:
    return Batch(writer, number, {Row(tenant, DAY): used})


async def all_usage(store: AccountStore, tenant: str | None = None) -> dict[Row, Used]:
    rows = await store.usage(tenant, first_day="0001-01-01", last_day="9999-12-31", limit=10_000)
    return dict(rows)


async def test_a_new_store_is_empty(store: AccountStore) -> None:
    assert await store.snapshot() == Snapshot()
    assert await store.list_keys() == []
    assert await all_usage(store) == {}


@pytest.mark.parametrize("tenant", ["red", "team:eu/1", "größe 🙂", "'; DROP TABLE x", "x" * 128])
async def test_a_key_is_known_by_its_digest_until_it_is_revoked(
    store: AccountStore, tenant: str
) -> None:
    made = await store.create_key(tenant, "a" * 64, "wxyz", is_admin=True)
    other = await store.create_key(tenant, "b" * 64, "1234")
    first = await store.snapshot()
    assert first.keys == {"a" * 64: made, "b" * 64: other}
    assert (made.tenant, made.is_admin, other.is_admin) == (tenant, True, False)
    revoked = await store.revoke_key(made.id)
    assert revoked.revoked_at is not None
    last = await store.snapshot(first)
    assert last.keys == {"b" * 64: other}
    assert last.num_keys == 2
    assert await store.revoke_key(made.id) == revoked, "once is for ever"
    assert [key.id for key, _ in await store.list_keys(tenant)] == [
        key.id for key in sorted((made, other), key=lambda key: (key.created_at, key.id))
    ]
    assert await store.list_keys("nobody") == []


async def test_a_key_that_never_was_cannot_be_revoked(store: AccountStore) -> None:
    with pytest.raises(InvalidRequest, match="'key_x'"):
        await store.revoke_key("key_x")


async def test_what_has_not_changed_is_not_read_again(opened: Opener) -> None:
    ours, theirs = opened(), opened()
    await theirs.create_key("red", "a" * 64, "wxyz")
    known = await ours.snapshot()
    assert await ours.snapshot(known) is known
    await theirs.add_usage(batch(1))
    assert await ours.snapshot(known) is known
    await theirs.set_limits("red", Limits(requests_per_minute=3))
    assert (await ours.snapshot(known)).limits == {"red": Limits(requests_per_minute=3)}


async def test_limits_are_the_tenants_and_each_setting_of_them_is_whole(
    store: AccountStore,
) -> None:
    await store.set_limits("new", Limits(tokens_per_minute=10**12, concurrent_requests=2))
    await store.create_key("red", "a" * 64, "wxyz")
    await store.set_limits("red", Limits(requests_per_minute=3))
    await store.set_limits("red", Limits(concurrent_requests=1))
    ((_, limits),) = await store.list_keys("red")
    assert limits == Limits(concurrent_requests=1)
    await store.set_limits("red", Limits())
    own = (await store.snapshot()).limits
    assert own == {"new": Limits(tokens_per_minute=10**12, concurrent_requests=2)}


async def test_a_digest_stands_for_one_key(store: AccountStore) -> None:
    await store.create_key("red", "a" * 64, "wxyz")
    with pytest.raises(StoreUnavailable):
        await store.create_key("blue", "a" * 64, "wxyz")
    snapshot = await store.snapshot()
    assert [key.tenant for key in snapshot.keys.values()] == ["red"]


async def test_usage_adds_up_by_tenant_and_day(store: AccountStore) -> None:
    big = Used(1, 2**40, 5, 2, 7)
    other = Batch("v", 1, {Row("red", DAY): big, Row("red", "2026-03-05"): USED})
    await store.add_usage(batch(1))
    await store.add_usage(other)
    await store.add_usage(batch(2, tenant="blue"))
    assert await all_usage(store) == {
        Row("red", DAY): USED.plus(big),
        Row("red", "2026-03-05"): USED,
        Row("blue", DAY): USED,
    }
    assert await all_usage(store, "blue") == {Row("blue", DAY): USED}


async def test_days_are_bounded_sorted_and_cut(store: AccountStore) -> None:
    days = [f"2026-03-{day:02}" for day in range(1, 11)]
    await store.add_usage(Batch("w", 1, {Row("red", day): USED for day in days}))
    found = await store.usage("red", first_day=days[2], last_day=days[7], limit=4)
    assert [row.day for row, _ in found] == [days[7], days[6], days[5], days[4]]


async def test_a_batch_counts_once_however_often_it_is_written(store: AccountStore) -> None:
    for number in (1, 1, 2, 2, 1):
        await store.add_usage(batch(number))
    await asyncio.gather(*(store.add_usage(batch(3)) for _ in range(5)))
    assert await all_usage(store) == {Row("red", DAY): Used(3, 30, 15, 6, 0)}


async def test_a_batch_is_written_whole_or_not_at_all(store: AccountStore) -> None:
    broken = Batch("w", 1, {Row("a", DAY): USED, Row("b", DAY): USED._replace(requests=None)})  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        await store.add_usage(broken)
    assert await all_usage(store) == {}
    await store.add_usage(batch(1))
    assert await all_usage(store) == {Row("red", DAY): USED}


async def test_many_ledgers_write_the_same_rows_at_once(opened: Opener) -> None:
    stores = [opened(pool_size=2, pool_overflow=1) for _ in range(3)]
    rows = {Row(f"t{number}", DAY): USED for number in range(20)}
    await asyncio.gather(
        *(
            store.add_usage(Batch(f"{index}-{writer}", 1, dict(reversed(rows.items()))))
            for index, store in enumerate(stores)
            for writer in range(10)
        )
    )
    used = await all_usage(stores[0])
    assert set(used.values()) == {Used(*(30 * each for each in USED))}
    assert used.keys() == rows.keys()


async def test_every_unit_of_work_has_a_session_of_its_own_and_the_pool_is_bounded(
    opened: Opener,
) -> None:
    store = opened(pool_size=2, pool_overflow=1)
    sessions: set[int] = set()
    connections: list[int] = []
    most = now = 0

    async def work() -> None:
        nonlocal most, now
        async with store.unit_of_work() as session:
            assert id(session) not in sessions
            sessions.add(id(session))
            raw = await (await session.connection()).get_raw_connection()
            held = id(raw.driver_connection)
            assert held not in connections, "two units share a connection"
            connections.append(held)
            now += 1
            most = max(most, now)
            await session.execute(text("SELECT 1"))
            await asyncio.sleep(0)
            now -= 1
            connections.remove(held)
            sessions.discard(id(session))

    await asyncio.gather(*(work() for _ in range(30)))
    assert 1 <= most <= 3


async def test_what_fails_in_a_unit_of_work_undoes_it(store: AccountStore) -> None:
    async def fail() -> None:
        async with store.unit_of_work() as session:
            await session.execute(text("INSERT INTO tenants (name) VALUES ('red')"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    async with store.unit_of_work() as session:
        assert (await session.scalars(text("SELECT name FROM tenants"))).all() == []


async def test_a_full_pool_is_told_and_not_waited_for(opened: Opener) -> None:
    store = opened(pool_size=1, pool_overflow=0, pool_timeout_s=0.05)
    async with store.unit_of_work():
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            await store.snapshot()
    assert await store.snapshot() == Snapshot()


async def test_ingresses_that_start_together_make_the_tables_once(opened: Opener) -> None:
    snapshots = await asyncio.gather(*(opened().snapshot() for _ in range(6)))
    assert snapshots == [Snapshot()] * 6


async def test_a_store_outlives_the_server_behind_it(postgres: PostgresServer) -> None:
    accounts = AccountSettings(url=postgres.new_database())
    store = open_store(accounts, Path("/nowhere"))
    try:
        await store.create_key("red", "a" * 64, "wxyz")
        postgres.stop()
        with pytest.raises(StoreUnavailable):
            await store.snapshot()
        postgres.start()
        assert (await store.snapshot()).num_keys == 1
    finally:
        await store.close()


async def test_a_server_that_takes_a_connection_and_says_nothing_is_given_up() -> None:
    pytest.importorskip("asyncpg")

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    accounts = AccountSettings(url=f"postgresql://u:secret@127.0.0.1:{port}/d", timeout_s=0.1)
    store = open_store(accounts, Path("/nowhere"))
    try:
        with pytest.raises(StoreUnavailable) as caught:
            await store.snapshot()
        assert "secret" not in str(caught.value)
        assert "secret" not in str(store)
    finally:
        await store.close()
        server.close()
        await server.wait_closed()


async def test_the_file_is_its_owners_only_and_lies_in_home(tmp_path: Path) -> None:
    store = open_store(AccountSettings(), tmp_path / "home")
    try:
        await store.snapshot()
    finally:
        await store.close()
    file = tmp_path / "home" / "accounts.sqlite3"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


async def test_a_file_that_is_no_database_is_no_store(tmp_path: Path) -> None:
    file = tmp_path / "accounts.sqlite3"
    file.write_text("this is something else entirely, and long enough to be read as a page" * 99)
    store = open_store(AccountSettings(), tmp_path)
    try:
        with pytest.raises(StoreUnavailable):
            await store.snapshot()
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("sqlite:////a/b", "sqlite+aiosqlite"),
        ("sqlite+aiosqlite:////a/b", "sqlite+aiosqlite"),
        ("postgres://u@h/d", "postgresql+asyncpg"),
        ("postgresql://u:p%40@h:1/d", "postgresql+asyncpg"),
        ("postgresql+asyncpg://h/d", "postgresql+asyncpg"),
    ],
)
def test_a_url_gets_its_driver(given: str, driver: str) -> None:
    made = store_url(AccountSettings(url=given), Path("/home"))
    assert made.drivername == driver
    assert made.database == make_url(given).database


@pytest.mark.parametrize(
    "given",
    ["postgresql+psycopg2://h/d", "sqlite://", "sqlite:///:memory:", "postgresql://h:x/d"],
)
def test_a_url_that_cannot_be_used_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=r"accounts\.url"):
        store_url(AccountSettings(url=given), Path("/home"))


@pytest.mark.parametrize("given", ["mysql://u:secret@h/d", "secret"])
def test_a_url_of_another_kind_is_refused_without_telling_it(given: str) -> None:
    with pytest.raises(SettingsError, match=r"accounts\.url") as caught:
        parse_settings({"accounts": {"url": given}})
    assert "secret" not in str(caught.value)
