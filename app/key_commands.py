"""What `seedance keys` does with the store of accounts, and what `seedance serve` asks of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from app.account_store import AccountStore, StoredKey, open_store
from app.accounts import Accounts, hash_key, hint_of, new_key
from app.rate_limits import Limits
from app.settings import Settings, SettingsError, parse_settings

LIMIT_NAMES = {
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "concurrent": "concurrent_requests",
}
MAX_LIMIT = 1_000_000_000_000

Result = TypeVar("Result")


class KeyCommands:
    """Each command does its one thing and prints what came of it.

    Raises:
        StoreUnavailable: the store does not answer.
        SettingsError: what was given cannot be so.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def create(self, tenant: str, limits: Sequence[str], *, is_admin: bool = False) -> None:
        key = new_key()
        digest = hash_key(key)
        parse_settings({"auth": {"keys": [{"tenant": tenant, "sha256": digest}]}})
        given = parse_limits(limits)

        async def make(store: AccountStore) -> tuple[StoredKey, bool]:
            is_first = (await store.snapshot()).num_keys == 0
            made = await store.create_key(tenant, digest, hint_of(key), is_admin=is_admin)
            if limits:
                await store.set_limits(tenant, given)
            return made, is_first and not self._settings.auth.keys

        made, is_first = self._with_store(make)
        print(f"id:               {made.id}")
        print(f"key (shown once): {key}")
        if is_first:
            print("This is the first key: from now on every request needs one.")

    def show(self, tenant: str | None) -> None:
        async def read(store: AccountStore) -> list[tuple[StoredKey, Limits]]:
            return await store.list_keys(tenant)

        rows: list[tuple[str, ...]] = [("ID", "TENANT", "KEY", "CREATED", "STATE", "LIMITS")]
        rows += [_row(key, limits) for key, limits in self._with_store(read)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())

    def revoke(self, id: str) -> None:
        async def end(store: AccountStore) -> StoredKey:
            return await store.revoke_key(id)

        key = self._with_store(end)
        print(f"{key.id} of {key.tenant}: revoked {_when(key.revoked_at)}")

    def limit(self, tenant: str, limits: Sequence[str]) -> None:
        given = parse_limits(limits)
        parse_settings({"auth": {"keys": [{"tenant": tenant, "sha256": "0" * 64}]}})

        async def change(store: AccountStore) -> None:
            await store.set_limits(tenant, given)

        self._with_store(change)
        print(f"{tenant}: {_limits(given) or 'no limits of its own'}")

    def _with_store(self, work: Callable[[AccountStore], Awaitable[Result]]) -> Result:
        async def run() -> Result:
            async with _opened(self._settings) as store:
                return await work(store)

        return asyncio.run(run())


def is_auth_off(settings: Settings, *, is_on_loopback: bool) -> bool:
    """Whether a server with these settings will let everyone in.

    A store that does not answer tells nothing; the server asks it again.

    Raises:
        SettingsError: it would, though other machines reach it.
    """

    async def ask() -> bool:
        async with _opened(settings) as store:
            accounts = Accounts(
                settings.auth,
                store,
                is_on_loopback=is_on_loopback,
                timeout_s=settings.accounts.timeout_s,
            )
            await accounts.refresh()
        accounts.check_open()
        return accounts.is_open is True

    return asyncio.run(ask())


def parse_limits(given: Sequence[str]) -> Limits:
    """The limits that `requests=60 tokens=10000 concurrent=4` stand for.

    Raises:
        SettingsError: one is none.
    """
    limits = Limits()
    for each in given:
        name, _, value = each.partition("=")
        number = int(value) if value.isascii() and value.isdecimal() else 0
        if name not in LIMIT_NAMES or not 1 <= number <= MAX_LIMIT:
            raise SettingsError(
                f"--limit {each}: give NAME=NUMBER with {', '.join(LIMIT_NAMES)} and 1 or more"
            )
        limits = replace(limits, **{LIMIT_NAMES[name]: number})
    return limits


@contextlib.asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[AccountStore]:
    store = open_store(settings.accounts, settings.home)
    try:
        yield store
    finally:
        await store.close()


def _row(key: StoredKey, limits: Limits) -> tuple[str, ...]:
    state = "revoked" if key.revoked_at is not None else "admin" if key.is_admin else "good"
    created = _when(key.created_at)
    return (key.id, key.tenant, f"…{key.hint}", created, state, _limits(limits))


def _limits(limits: Limits) -> str:
    values = {name: getattr(limits, field) for name, field in LIMIT_NAMES.items()}
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _when(seconds: int | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(" ")[:16]
