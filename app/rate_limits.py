"""What each tenant may ask for at this ingress: requests and tokens a minute, requests at a time.

Every ingress replica counts for itself and gives each tenant the whole of its limits:
with N replicas behind a balancer a tenant may get up to N times as much.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import RateLimited

MINUTE_S = 60.0
TURN_RETRY_S = 1.0
"""Nobody knows when a running request ends."""

ROUNDING = 1e-6
"""Of a request, a token or a millisecond; sums of fractions may be so far off."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one tenant; None: no bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class _Allowance:
    """A bucket that holds a minute's worth and fills evenly. It may fall below zero."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def settle(self, per_minute: int, now_s: float) -> None:
        """Brings it up to now; with a new limit it keeps what was used."""
        self._level += per_minute - self._per_minute
        self._per_minute = per_minute
        gained = (now_s - self._at_s) * per_minute / MINUTE_S
        self._level = min(float(per_minute), self._level + gained)
        self._at_s = now_s

    def take(self, amount: int) -> None:
        self._level -= amount

    @property
    def left(self) -> int:
        return max(0, math.floor(self._level + ROUNDING))

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self._level) * MINUTE_S / self._per_minute

    @property
    def full_in_s(self) -> float:
        return self.seconds_until(float(self._per_minute))


class RateLimits:
    """Admits requests and is told what they used; one instance an ingress replica.

    Tokens are taken when a request has ended, since nobody knows before how many it will be.
    So a tenant may overdraw its minute by what runs at the time, and pays that back.
    """

    def __init__(
        self, limits_of: Callable[[str], Limits], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._requests: dict[str, _Allowance] = {}
        self._tokens: dict[str, _Allowance] = {}
        self._running: Counter[str] = Counter()

    def admit(self, tenant: str) -> None:
        """Takes a place, which `release` gives back.

        Raises:
            RateLimited: the tenant has to wait; nothing was taken.
        """
        limits = self._limits_of(tenant)
        most = limits.concurrent_requests
        if most is not None and self._running[tenant] >= most:
            raise RateLimited(
                f"{self._running[tenant]} requests of this tenant are running, the limit is {most}",
                limit=most,
                retry_after_s=TURN_RETRY_S,
            )
        tokens = self._allowance(self._tokens, tenant, limits.tokens_per_minute)
        if tokens is not None and tokens.left < 1:
            raise _used_up("tokens", limits.tokens_per_minute, tokens)
        requests = self._allowance(self._requests, tenant, limits.requests_per_minute)
        if requests is not None:
            if requests.left < 1:
                raise _used_up("requests", limits.requests_per_minute, requests)
            requests.take(1)
        self._running[tenant] += 1

    def release(self, tenant: str) -> None:
        """A request that was admitted has ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant has used so many tokens."""
        limit = self._limits_of(tenant).tokens_per_minute
        allowance = self._allowance(self._tokens, tenant, limit)
        if allowance is not None:
            allowance.take(tokens)

    def headers(self, tenant: str) -> dict[str, str]:
        """The headers of a reply, as OpenAI names them; none for what has no limit."""
        limits = self._limits_of(tenant)
        told: dict[str, str] = {}
        for name, limit, allowances in (
            ("requests", limits.requests_per_minute, self._requests),
            ("tokens", limits.tokens_per_minute, self._tokens),
        ):
            allowance = self._allowance(allowances, tenant, limit)
            if allowance is not None:
                told[f"x-ratelimit-limit-{name}"] = str(limit)
                told[f"x-ratelimit-remaining-{name}"] = str(allowance.left)
                told[f"x-ratelimit-reset-{name}"] = _duration(allowance.full_in_s)
        return told

    def _allowance(
        self, allowances: dict[str, _Allowance], tenant: str, limit: int | None
    ) -> _Allowance | None:
        """The tenant's, up to date; none without a limit."""
        if limit is None:
            allowances.pop(tenant, None)
            return None
        now_s = self._clock()
        allowance = allowances.get(tenant)
        if allowance is None:
            allowance = allowances[tenant] = _Allowance(limit, now_s)
        allowance.settle(limit, now_s)
        return allowance


def _used_up(what: str, limit: int | None, allowance: _Allowance) -> RateLimited:
    return RateLimited(
        f"this tenant has used its {what} of this minute, the limit is {limit}",
        limit=limit,
        retry_after_s=round(allowance.seconds_until(1.0), 3),
    )


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `6m0s`, `1.5s`, `20ms`."""
    millis = math.ceil(seconds * 1000 - ROUNDING)
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest_s = divmod(millis / 1000, MINUTE_S)
    shown = f"{rest_s:.3f}".rstrip("0").rstrip(".")
    return f"{minutes:.0f}m{shown}s" if minutes else f"{shown}s"
