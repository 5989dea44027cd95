"""One-use tickets: how a browser, which cannot set a header on a WebSocket, shows who it is.

A ticket is signed, so every ingress that has the key knows one when it sees it. It names
the ingress that issued it, and that one alone says whether it is still good: so that it
is good once, whichever ingresses it is shown to, and on one clock.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import hmac
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
from pydantic import BaseModel

from app.accounts import Holder
from protocol.errors import Overloaded, Unauthorized

SUBPROTOCOL = "seedance.ticket."
"""What a ticket stands behind among the subprotocols that a handshake offers."""
LIFE_S = 30.0
MAX_TICKET_CHARS = 1024
_MAC_BYTES = 16


class Claim(NamedTuple):
    """Which ticket it is: its issuer, its number there, and when it ends on the issuer's clock."""

    issuer: str
    number: int
    expires_s: float


Ask = Callable[[Claim], Awaitable[bool | None]]
"""Has the other ingresses `spend` a claim; None when its issuer did not answer."""


async def nobody(claim: Claim) -> bool | None:
    return None


class Tickets:
    """Issues and redeems tickets; one instance an ingress.

    Args:
        key: the same at every ingress.
        issuer: this ingress's name, unique among all that ever were.
        ask: reaches the others.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        key: bytes | None = None,
        issuer: str = "",
        *,
        ask: Ask = nobody,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key or secrets.token_bytes(32)
        self._issuer = issuer
        self._ask = ask
        self._clock = clock
        self._numbers = itertools.count()
        self._used: set[int] = set()
        self._expiries: list[tuple[float, int]] = []

    def issue(self, holder: Holder) -> str:
        """A ticket for one connection of the holder, within `LIFE_S`."""
        claim = Claim(self._issuer, next(self._numbers), self._clock() + LIFE_S)
        words = msgspec.msgpack.encode((*claim, *holder))
        return _armour(self._mac(words) + words)

    async def redeem(self, ticket: str) -> Holder:
        """Who got the ticket; it is good no more. Their key may be revoked meanwhile.

        Raises:
            Unauthorized: it is not one of ours, or was used, or its time is over.
            Overloaded: its issuer, at another ingress, cannot be asked.
        """
        claim, holder = self._read(ticket)
        is_good = self.spend(claim)
        if is_good is None:
            is_good = await self._ask(claim)
        if is_good is None:
            raise Overloaded(
                "the ingress that issued this ticket is away: get another", retry_after_s=0
            )
        if not is_good:
            raise _not_good()
        return holder

    def spend(self, claim: Claim) -> bool | None:
        """Whether it was good until now; None when another ingress is to tell."""
        if claim.issuer != self._issuer:
            return None
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            self._used.discard(heapq.heappop(self._expiries)[1])
        if claim.expires_s <= now_s or claim.number in self._used:
            return False
        self._used.add(claim.number)
        heapq.heappush(self._expiries, (claim.expires_s, claim.number))
        return True

    def _read(self, ticket: str) -> tuple[Claim, Holder]:
        if len(ticket) > MAX_TICKET_CHARS:
            raise _not_good()
        try:
            raw = base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))
        except ValueError:
            raise _not_good() from None
        mac, words = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        # The decoder skips what it does not know, and a ticket has one spelling only.
        if not hmac.compare_digest(mac, self._mac(words)) or _armour(raw) != ticket:
            raise _not_good()
        issuer, number, expires_s, tenant, key = msgspec.msgpack.decode(words)
        return Claim(issuer, number, expires_s), Holder(tenant, key)

    def _mac(self, words: bytes) -> bytes:
        signed = msgspec.msgpack.encode(("seedance.ticket.v2", words))
        return hmac.digest(self._key, signed, hashlib.sha256)[:_MAC_BYTES]


def offered_ticket(subprotocols: Sequence[str]) -> str | None:
    """The ticket among the subprotocols of a handshake.

    Raises:
        Unauthorized: there are several.
    """
    tickets = [name for name in subprotocols if name.startswith(SUBPROTOCOL)]
    if len(tickets) > 1:
        raise Unauthorized("offer one ticket, not several", param="Sec-WebSocket-Protocol")
    return tickets[0].removeprefix(SUBPROTOCOL) if tickets else None


class TicketReply(BaseModel):
    """A ticket, to be offered as the subprotocol `seedance.ticket.<ticket>`."""

    ticket: str
    expires_in_s: float


def _not_good() -> Unauthorized:
    """The one refusal of every ticket: it must not tell what is wrong with it."""
    return Unauthorized(
        "this ticket is unknown, used or expired: get another", param="Sec-WebSocket-Protocol"
    )


def _armour(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
