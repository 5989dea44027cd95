"""How a client gets its socket: the address, the handshake, and what a refusal means."""

from __future__ import annotations

import json
import logging
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from app.client_stream import ConnectionLost
from protocol.errors import Overloaded, RateLimited, Unauthorized

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 1024 * 1024
PING_TIMEOUT_S = 60.0
"""Wide, since a busy server is not a dead one."""


def infer_url(url: str) -> str:
    """The WebSocket address of a server, from that address itself or from its HTTP address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/")
    if not path.endswith("/v1/infer"):
        path = path.removesuffix("/v1") + "/v1/infer"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


async def open_socket(url: str, api_key: str | None, *, binary: bool) -> ClientConnection:
    """Connects to an `infer_url`; frames go in the form that `binary` says. Has no time-out.

    Raises:
        Unauthorized, RateLimited, Overloaded: the server refused, and says so.
        ConnectionLost: no `seedance.v1` server answered there.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return await connect(
            url,
            additional_headers=headers,
            subprotocols=[Subprotocol(f"seedance.v1.{'bin' if binary else 'json'}")],
            compression=None,
            max_size=MAX_FRAME_BYTES,
            ping_timeout=PING_TIMEOUT_S,
            open_timeout=None,
            close_timeout=2.0,
            # A proxy named in the environment cannot reach this machine's own loopback.
            proxy=None if urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1") else True,
        )
    except InvalidStatus as exc:
        raise _refusal(exc) from exc
    except (OSError, InvalidHandshake, InvalidURI) as exc:
        raise ConnectionLost(f"cannot connect to {url}: {exc}") from exc


def _refusal(exc: InvalidStatus) -> Exception:
    """What a refused handshake means, in the server's own words where it gave some."""
    status, headers = exc.response.status_code, exc.response.headers
    message = f"the server refused the connection with HTTP status {status}"
    try:
        message = json.loads(exc.response.body or b"")["error"]["message"]
    except (ValueError, TypeError, LookupError):
        logger.debug("a refusal without an error body")
    retry_after = headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    if status in (401, 403):
        return Unauthorized(message)
    if status == 429:
        return RateLimited(message, retry_after_s=retry_after_s)
    if status == 503:
        return Overloaded(message, retry_after_s=retry_after_s)
    return ConnectionLost(message)
