from __future__ import annotations

import hashlib

import pytest

from app.accounts import DEFAULT_TENANT, Accounts, hash_key
from app.settings import AuthSettings, KeySettings
from protocol.errors import Unauthorized

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
