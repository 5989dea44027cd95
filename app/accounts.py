"""Tenants and keys: who asks. The tenant comes from the credential, never from the request."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from app.settings import AuthSettings
from protocol.errors import Unauthorized

DEFAULT_TENANT = "default"


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


class Accounts:
    """Answers one question: which tenant does this credential belong to?"""

    def __init__(self, settings: AuthSettings) -> None:
        # Looked up by digest: the time it takes tells nothing of a key that is nearly right.
        self._tenant_by_digest = {key.sha256: key.tenant for key in settings.keys}
        self._is_open = (
            not settings.keys if settings.allow_anonymous is None else settings.allow_anonymous
        )
        self._origins = frozenset(settings.allowed_origins)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header.

        Where no key is configured at all, any key will do: clients often must send one.

        Raises:
            Unauthorized: the header is missing, malformed, or names no known key.
        """
        if self._is_open and (authorization is None or not self._tenant_by_digest):
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("send an API key: Authorization: Bearer KEY", param="Authorization")
        tenant = self._tenant_by_digest.get(hash_key(key.strip()))
        if tenant is None:
            raise Unauthorized("this API key is not known here", param="Authorization")
        return tenant

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
