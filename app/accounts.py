"""Tenants and keys: who asks. The tenant comes from the credential, never from the request.

Keys are those of the settings and those of the store, which requests never wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from app.account_store import Snapshot
from app.rate_limits import Limits
from app.settings import AuthSettings, SettingsError
from protocol.errors import Forbidden, Overloaded, ServingError, Unauthorized

logger = logging.getLogger(__name__)

DEFAULT_TENANT = "default"
NO_LIMITS = Limits()
UNREAD_RETRY_S = 2.0
HINT_CHARS = 4


class CredentialFilter(logging.Filter):
    """Drops the headers that hold a credential from what the WebSocket library logs at debug."""

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if record.levelno > logging.DEBUG or not isinstance(args, tuple) or not args:
            return True
        return str(args[0]).lower() not in ("authorization", "sec-websocket-protocol")


_CREDENTIAL_FILTER = CredentialFilter()


def hide_credentials() -> None:
    """Keeps keys and tickets out of the log, at any level; further calls do nothing."""
    logging.getLogger("uvicorn.error").addFilter(_CREDENTIAL_FILTER)


def hash_key(key: str) -> str:
    """SHA-256 of an API key, as it stands in the settings.

    Keys are long random strings, so a plain digest cannot be guessed backwards.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    """A key that nobody has had before."""
    return f"sk-seedance-{secrets.token_urlsafe(32)}"


def hint_of(key: str) -> str:
    """By what its holder knows it again."""
    return key[-HINT_CHARS:]


class Holder(NamedTuple):
    """Who holds a credential.

    Attributes:
        key: digest of the API key; empty for one who needs none.
    """

    tenant: str
    key: str = ""


class SnapshotStore(Protocol):
    """What is needed of the store."""

    async def snapshot(self, known: Snapshot | None = None) -> Snapshot: ...


class Accounts:
    """Who a credential belongs to, and the limits of its tenant; one instance an ingress.

    Answers from memory. With a store, `start` reads what is in it, again and again; while it
    is down, what was read last stays in force. A key of the settings goes before one of the
    store. Once there was a key, keys are needed, whether that one is revoked or not.

    Args:
        store: without, the keys of the settings are all.
        limits: of tenants without limits of their own.
        is_on_loopback: whether nobody but this machine can reach the server.
    """

    def __init__(
        self,
        settings: AuthSettings,
        store: SnapshotStore | None = None,
        *,
        limits: Limits = NO_LIMITS,
        is_on_loopback: bool = True,
        timeout_s: float = 5.0,
    ) -> None:
        self._settings = settings
        self._store = store
        self._default_limits = limits
        self._may_be_open = is_on_loopback or settings.allow_open
        self._timeout_s = timeout_s
        self._origins = frozenset(settings.allowed_origins)
        self._stored = None if store is not None else Snapshot()
        self._is_down = False
        self._errors_total = 0
        self._task: asyncio.Task[None] | None = None
        # Looked up by digest: the time it takes tells nothing of a key that is nearly right.
        self._holders: dict[str, Holder] = {}
        self._admins: frozenset[str] = frozenset()
        self._take()

    @property
    def is_open(self) -> bool | None:
        """Whether nobody needs a key, since there is none; None: not known yet."""
        if self._settings.keys:
            return False
        if self._stored is None:
            return None
        return self._stored.num_keys == 0 and self._settings.allow_anonymous is not False

    async def start(self, refresh_s: float) -> None:
        """Reads the store, once, and then every `refresh_s`.

        Raises:
            SettingsError: no key is needed, though other machines reach the server.
        """
        if self._store is not None:
            await self.refresh()
            self._task = asyncio.create_task(self._keep_fresh(refresh_s), name="accounts")
        try:
            self.check_open()
        except SettingsError:
            await self.close()
            raise
        if self.is_open:
            logger.warning("auth is off: there are no keys, and everyone is %r", DEFAULT_TENANT)

    def check_open(self) -> None:
        """Passes unless no key is needed, though other machines reach the server.

        Raises:
            SettingsError: they do, and nobody has said that they may.
        """
        if self.is_open and not self._may_be_open:
            raise SettingsError(
                "there is no API key, and other machines reach this server: make a key "
                "(`seedance keys create TENANT`), set http_options.host to 127.0.0.1, "
                "or set auth.allow_open to true"
            )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def refresh(self) -> None:
        """Reads the store. Raises nothing but cancellation."""
        assert self._store is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                snapshot = await self._store.snapshot(self._stored)
        except Exception as error:
            self._errors_total += 1
            if not self._is_down:
                kept = "no key of it is known" if self._stored is None else "its last keys hold"
                logger.warning("the store of accounts cannot be read, %s: %r", kept, error)
            self._is_down = True
            return
        if self._is_down:
            logger.info("the store of accounts is read again")
        self._is_down = False
        if snapshot is not self._stored:
            self._stored = snapshot
            self._take()

    def stats(self) -> dict[str, Any]:
        """Whether the store answered last time, and how often it did not; nothing without one."""
        if self._store is None:
            return {}
        return {
            "store_up": int(not self._is_down and self._stored is not None),
            "read_errors_total": self._errors_total,
        }

    def limits_of(self, tenant: str) -> Limits:
        own = self._stored.limits.get(tenant) if self._stored is not None else None
        return self._default_limits if own is None else own

    def holder_of(self, authorization: str | None) -> Holder:
        """Whose an `Authorization` header is.

        Where there is no key at all, any will do: clients often must send one.

        Raises:
            Unauthorized: the header is missing, malformed, or names no known key.
            Overloaded: the keys are not known yet.
        """
        if self._allows_anonymous and (authorization is None or self.is_open):
            return Holder(DEFAULT_TENANT)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            self._check_known()
            raise Unauthorized("send an API key: Authorization: Bearer KEY", param="Authorization")
        holder = self._holders.get(hash_key(key.strip()))
        if holder is None:
            self._check_known()
            raise Unauthorized("this API key is not known here", param="Authorization")
        return holder

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of `holder_of`."""
        return self.holder_of(authorization).tenant

    def check(self, holder: Holder) -> None:
        """Passes one whose credential is still good.

        Raises:
            Unauthorized: it was revoked, or one needs a key by now.
            Overloaded: the keys are not known yet.
        """
        if holder.key in self._holders or (not holder.key and self._allows_anonymous):
            return
        self._check_known()
        raise Unauthorized("this API key is good no more", param="Authorization")

    def check_admin(self, authorization: str | None, *, is_local: bool) -> None:
        """Passes who may see and change what is all tenants'.

        Where there is no key at all, that is whoever asks from this machine.

        Raises:
            Unauthorized: the credential is missing or unknown.
            Forbidden: it is another's.
        """
        if self.is_open:
            if not is_local:
                raise Forbidden("without keys this can be done from the server's machine only")
            return
        digest = hash_key((authorization or "").partition(" ")[2].strip())
        if digest not in self._admins:
            self.tenant_of(authorization)
            raise Forbidden("this needs the key of an admin", param="Authorization")

    def is_admin(self, authorization: str | None, *, is_local: bool) -> bool:
        """Whether `check_admin` passes."""
        try:
            self.check_admin(authorization, is_local=is_local)
        except ServingError:
            return False
        return True

    @property
    def _allows_anonymous(self) -> bool:
        if self.is_open:
            return self._may_be_open
        return self._settings.allow_anonymous is True

    def _check_known(self) -> None:
        """Nobody is turned away for good by a store that has not told its keys yet."""
        if self._stored is None:
            raise Overloaded(
                "the store of keys cannot be read yet: try again", retry_after_s=UNREAD_RETRY_S
            )

    def _take(self) -> None:
        stored = {} if self._stored is None else self._stored.keys
        configured = self._settings.keys
        self._holders = {
            **{digest: Holder(key.tenant, digest) for digest, key in stored.items()},
            **{key.sha256: Holder(key.tenant, key.sha256) for key in configured},
        }
        named = {key.sha256 for key in configured}
        self._admins = frozenset(
            {key.sha256 for key in configured if key.admin}
            | {digest for digest, key in stored.items() if key.is_admin and digest not in named}
        )

    async def _keep_fresh(self, refresh_s: float) -> None:
        while True:
            await asyncio.sleep(refresh_s)
            await self.refresh()

    def allows_origin(self, headers: Mapping[str, str]) -> bool:
        """Whether a browser page may open a socket: our own pages and the listed ones.

        Clients that are no browsers send no Origin.
        """
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return True
        try:
            host = urlsplit(origin).netloc
        except ValueError:  # an unbalanced bracket, for one
            return False
        return bool(host) and host == headers.get("host")
