from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import replace
from typing import Any

import pytest

from app.account_store import Snapshot, StoredKey
from app.accounts import DEFAULT_TENANT, Accounts, Holder, hash_key
from app.rate_limits import Limits
from app.settings import AuthSettings, KeySettings, SettingsError
from protocol.errors import Forbidden, Overloaded, Unauthorized
from tests.app.stack import eventually

NAMES = ("red", "red ", "Red", "red|blue", "team:eu/1")


def accounts(
    *tenants: str, origins: tuple[str, ...] = (), allow_anonymous: bool | None = None
) -> Accounts:
    keys = tuple(KeySettings(tenant=name, sha256=hash_key(f"<key of {name}>")) for name in tenants)
    return Accounts(
        AuthSettings(keys=keys, allowed_origins=origins, allow_anonymous=allow_anonymous)
    )


def test_a_key_is_stored_as_its_sha256() -> None:
    assert hash_key("key") == hashlib.sha256(b"key").hexdigest()


def test_each_key_belongs_to_its_tenant_and_to_no_other() -> None:
    book = accounts(*NAMES)
    for name in NAMES:
        assert book.tenant_of(f"Bearer <key of {name}>") == name


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_is_read_as_http_has_it(scheme: str) -> None:
    assert accounts("red").tenant_of(f"{scheme} <key of red> ") == "red"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "<key of red>",
        "Basic <key of red>",
        "Bearer <key of blue>",
        "Bearer <key of RED>",
        "Bearer <key of red>, <key of red>",
        f"Bearer {hash_key('<key of red>')}",
        "Bearer \xff\xfe",
        "Bearer \udcff",
    ],
)
def test_anything_else_is_unauthorised(header: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        accounts("red").tenant_of(header)
    assert caught.value.param == "Authorization"
    assert "key of" not in caught.value.message


def test_without_keys_everyone_is_the_default_tenant() -> None:
    for header in (None, "Bearer anything", "nonsense"):
        assert accounts().tenant_of(header) == DEFAULT_TENANT


def test_anonymous_askers_may_be_let_in_beside_keys_but_a_wrong_key_may_not() -> None:
    book = accounts("red", allow_anonymous=True)
    assert book.tenant_of(None) == DEFAULT_TENANT
    assert book.tenant_of("Bearer <key of red>") == "red"
    with pytest.raises(Unauthorized):
        book.tenant_of("Bearer key of blue")


def test_anonymous_askers_may_be_shut_out_without_any_key() -> None:
    with pytest.raises(Unauthorized):
        accounts(allow_anonymous=False).tenant_of(None)


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        (None, True),
        ("http://chat.local:8000", True),
        ("https://chat.local:8000", True),
        ("https://listed.example", True),
        ("https://listed.example:444", False),
        ("http://listed.example", False),
        ("http://chat.local", False),
        ("http://evil.example", False),
        ("http://chat.local:8000.evil.example", False),
        ("http://evil@chat.local:8000", False),
        ("null", False),
        ("", False),
        ("http://[::1", False),
    ],
)
def test_pages_may_connect_from_here_and_from_the_list(
    origin: str | None, is_allowed: bool
) -> None:
    headers = {"host": "chat.local:8000"} | ({} if origin is None else {"origin": origin})
    book = accounts(origins=("https://listed.example",))
    assert book.allows_origin(headers) is is_allowed


def test_a_star_lets_every_page_in() -> None:
    assert accounts(origins=("*",)).allows_origin({"origin": "null"})


def test_a_page_without_a_host_to_compare_with_is_refused() -> None:
    assert not accounts().allows_origin({"origin": "null"})


# ------------------------------------------------------------------ keys of a store


class FakeStore:
    """A store in memory, which may be down or hang."""

    def __init__(self, *tenants: str, admin: str = "") -> None:
        self.is_down = False
        self.hangs = False
        self.num_reads = 0
        self._snapshot = Snapshot(revision="0")
        for tenant in tenants:
            self.create(tenant, is_admin=tenant == admin)

    def create(self, tenant: str, key: str = "", *, is_admin: bool = False) -> None:
        digest = hash_key(key or f"<key of {tenant}>")
        made = StoredKey(f"key_{tenant}", tenant, digest, "key>", is_admin, 0, None)
        self._change(
            keys={**self._snapshot.keys, digest: made}, num_keys=self._snapshot.num_keys + 1
        )

    def revoke(self, tenant: str) -> None:
        kept = {at: key for at, key in self._snapshot.keys.items() if key.tenant != tenant}
        self._change(keys=kept)

    def limit(self, tenant: str, limits: Limits) -> None:
        self._change(limits={tenant: limits})

    def _change(self, **changes: Any) -> None:
        revision = str(int(self._snapshot.revision) + 1)
        self._snapshot = replace(self._snapshot, revision=revision, **changes)

    async def snapshot(self, known: Snapshot | None = None) -> Snapshot:
        self.num_reads += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.is_down:
            raise ConnectionError("down")
        return known if known is not None and known == self._snapshot else self._snapshot


async def over(store: FakeStore, *tenants: str, **settings: Any) -> Accounts:
    """Accounts that have read the store, once."""
    keys = tuple(KeySettings(tenant=name, sha256=hash_key(f"<key of {name}>")) for name in tenants)
    options = {name: settings.pop(name) for name in ("is_on_loopback", "limits") & settings.keys()}
    book = Accounts(AuthSettings(keys=keys, **settings), store, timeout_s=0.05, **options)
    await book.refresh()
    return book


async def test_keys_of_the_store_and_of_the_settings_hold_together() -> None:
    book = await over(FakeStore("red", "blue"), "green")
    for name in ("red", "blue", "green"):
        holder = book.holder_of(f"Bearer <key of {name}>")
        assert holder == Holder(name, hash_key(f"<key of {name}>"))
        book.check(holder)
    with pytest.raises(Unauthorized):
        book.tenant_of(None)


async def test_a_key_of_the_settings_goes_before_the_same_of_the_store() -> None:
    store = FakeStore()
    store.create("blue", "<key of red>", is_admin=True)
    book = await over(store, "red")
    assert book.tenant_of("Bearer <key of red>") == "red"
    assert not book.is_admin("Bearer <key of red>", is_local=True)


async def test_a_revoked_key_is_refused_wherever_it_was_shown_before() -> None:
    store = FakeStore("red", "blue")
    book = await over(store)
    holder = book.holder_of("Bearer <key of red>")
    store.revoke("red")
    await book.refresh()
    with pytest.raises(Unauthorized):
        book.holder_of("Bearer <key of red>")
    with pytest.raises(Unauthorized):
        book.check(holder)
    assert book.tenant_of("Bearer <key of blue>") == "blue"


async def test_revoking_the_last_key_opens_nothing() -> None:
    store = FakeStore("red")
    book = await over(store)
    store.revoke("red")
    await book.refresh()
    assert book.is_open is False
    for header in (None, "Bearer <key of red>"):
        with pytest.raises(Unauthorized):
            book.tenant_of(header)


async def test_the_first_key_closes_an_open_house_also_to_those_inside() -> None:
    store = FakeStore()
    book = await over(store)
    holder = book.holder_of(None)
    book.check(holder)
    store.create("red")
    await book.refresh()
    with pytest.raises(Unauthorized):
        book.check(holder)
    with pytest.raises(Unauthorized):
        book.holder_of(None)


async def test_a_store_that_is_down_leaves_what_was_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore("red")
    book = await over(store)
    assert book.stats() == {"store_up": 1, "read_errors_total": 0}
    store.is_down = True
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            await book.refresh()
        assert book.tenant_of("Bearer <key of red>") == "red"
        assert book.stats() == {"store_up": 0, "read_errors_total": 3}
        store.is_down = False
        await book.refresh()
    assert book.stats()["store_up"] == 1
    told = [record.message for record in caplog.records if record.name == "app.accounts"]
    assert len(told) == 2, "an outage is told once, and its end"
    assert "its last keys hold" in told[0]


async def test_a_store_that_hangs_is_a_store_that_is_down() -> None:
    store = FakeStore("red")
    book = await over(store)
    store.hangs = True
    await book.refresh()
    assert book.stats()["store_up"] == 0
    assert book.tenant_of("Bearer <key of red>") == "red"


async def test_before_the_store_was_ever_read_nobody_is_turned_away_for_good() -> None:
    store = FakeStore("red")
    store.is_down = True
    book = await over(store)
    assert book.is_open is None
    for header in (None, "Bearer <key of red>", "Bearer <key of nobody>"):
        with pytest.raises(Overloaded) as caught:
            book.tenant_of(header)
        assert caught.value.retry_after_s is not None
    assert not book.is_admin("Bearer <key of red>", is_local=True)
    store.is_down = False
    await book.refresh()
    assert book.tenant_of("Bearer <key of red>") == "red"


async def test_keys_of_the_settings_hold_before_the_store_was_ever_read() -> None:
    store = FakeStore()
    store.is_down = True
    book = await over(store, "green")
    assert book.tenant_of("Bearer <key of green>") == "green"
    with pytest.raises(Overloaded):
        book.tenant_of("Bearer <key of red>")


async def test_an_admin_is_who_has_an_admins_key() -> None:
    book = await over(FakeStore("red", "root", admin="root"))
    book.check_admin("Bearer <key of root>", is_local=False)
    with pytest.raises(Forbidden):
        book.check_admin("Bearer <key of red>", is_local=True)
    with pytest.raises(Unauthorized):
        book.check_admin(None, is_local=True)


async def test_a_tenant_without_limits_of_its_own_has_those_of_the_settings() -> None:
    store, common = FakeStore("red", "blue"), Limits(requests_per_minute=9)
    store.limit("red", Limits(concurrent_requests=1))
    book = await over(store, limits=common)
    assert book.limits_of("red") == Limits(concurrent_requests=1)
    assert book.limits_of("blue") == book.limits_of(DEFAULT_TENANT) == common


async def test_the_store_is_read_again_and_again_until_the_close() -> None:
    store = FakeStore("red")
    book = Accounts(AuthSettings(), store)
    await book.start(0.001)
    store.create("blue")
    await eventually(
        lambda: book.is_admin(None, is_local=True) or "blue" in _tenants(book), "no news"
    )
    await book.close()
    reads = store.num_reads
    await asyncio.sleep(0.01)
    assert store.num_reads == reads


def _tenants(book: Accounts) -> set[str]:
    try:
        return {book.tenant_of("Bearer <key of blue>")}
    except Unauthorized:
        return set()


# ------------------------------------------------------------------ who may be open


async def test_an_open_house_on_loopback_says_so(caplog: pytest.LogCaptureFixture) -> None:
    book = Accounts(AuthSettings(), FakeStore())
    await book.start(60)
    await book.close()
    assert "auth is off" in caplog.text


@pytest.mark.parametrize("allow_anonymous", [None, True])
async def test_a_house_that_others_reach_does_not_open_without_keys(
    allow_anonymous: bool | None,
) -> None:
    auth = AuthSettings(allow_anonymous=allow_anonymous)
    for store in (None, FakeStore()):
        book = Accounts(auth, store, is_on_loopback=False)
        with pytest.raises(SettingsError, match=r"keys create TENANT.*allow_open"):
            await book.start(60)
        with pytest.raises(Unauthorized):
            book.tenant_of(None)


async def test_with_a_key_or_with_the_operators_word_it_does() -> None:
    for auth, store in (
        (AuthSettings(allow_open=True), FakeStore()),
        (AuthSettings(allow_anonymous=False), FakeStore()),
        (AuthSettings(), FakeStore("red")),
        (AuthSettings(keys=(KeySettings(tenant="red", sha256="0" * 64),)), FakeStore()),
    ):
        book = Accounts(auth, store, is_on_loopback=False)
        await book.start(60)
        await book.close()
        is_let_in = not book.is_open or book.tenant_of(None) == DEFAULT_TENANT
        assert is_let_in


async def test_a_house_that_lost_its_store_of_no_keys_does_not_open_to_others() -> None:
    store = FakeStore("red")
    book = await over(store, is_on_loopback=False)
    store._snapshot = Snapshot(revision="99")
    await book.refresh()
    with pytest.raises(Unauthorized):
        book.tenant_of(None)
