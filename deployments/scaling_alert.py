"""A JSON POST to an operator's webhook, from a thread of its own.

Whoever raises an alert decides about replicas meanwhile: it is never held up by a slow
receiver, and never hurt by a broken one.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

TRIES = 3


class WebhookAlert:
    """Posts at most one alert an interval; a second one meanwhile is dropped.

    Args:
        url: of http or https. Log lines name its host only, for the rest may be a secret.
        timeout_s: of one try.
        retry_after_s: wait before the second try; twice as long before the third.
        logger: of the process that runs it.

    Raises:
        ValueError: the URL is not one of http or https.
    """

    def __init__(
        self,
        url: str,
        *,
        interval_s: float = 300.0,
        timeout_s: float = 5.0,
        retry_after_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        logger: logging.Logger,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"alert url has scheme {parts.scheme!r}, it must be http or https")
        self._url = url
        self._host = parts.hostname
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._logger = logger
        self._last_s = -math.inf
        self._thread: threading.Thread | None = None
        # A redirected POST would arrive as a GET without its body.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, alert: Mapping[str, Any]) -> bool:
        """Starts to post, and returns at once; False where it was dropped."""
        now_s = self._clock()
        if now_s - self._last_s < self._interval_s:
            return False
        if self._thread is not None and self._thread.is_alive():
            return False
        self._last_s = now_s
        body = json.dumps(alert).encode()
        self._thread = threading.Thread(
            target=self._post, args=(body,), name="scaling-alert", daemon=True
        )
        self._thread.start()
        return True

    def join(self, timeout_s: float) -> None:
        """Waits for the post under way, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _post(self, body: bytes) -> None:
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self._retry_after_s * attempt)
            try:
                request = urllib.request.Request(
                    self._url, data=body, headers={"content-type": "application/json"}
                )
                with self._opener.open(request, timeout=self._timeout_s) as reply:
                    self._logger.info("alert sent to %s: %d", self._host, reply.status)
                return
            except urllib.error.HTTPError as exc:
                self._logger.warning("alert refused by %s: %d", self._host, exc.code)
                exc.close()
            except Exception as exc:
                # Nobody waits for this thread, so what it does not tell is lost.
                self._logger.warning("alert not sent to %s: %s", self._host, type(exc).__name__)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
