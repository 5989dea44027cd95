"""Who may wait, and who is next: a bounded ledger and a fair queue.

Both are plain bookkeeping. `Admission` decides at the door, once, over everything that is
accepted and not ended, so that no other queue can grow behind it. `FairQueue` is the order
in which the accepted are served.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count

from deployments.engine.config import EngineConfig
from deployments.engine.sequence import Sequence
from protocol.errors import DuplicateId, Overloaded

CLAIM_S = 3.0
"""How long a refused tenant counts as one that asks: its share is kept free so long."""
LEAST_RETRY_S, MOST_RETRY_S = 0.1, 30.0
UNKNOWN_RETRY_S = 1.0
NUM_MEASURED_ENDS = 32


@dataclass
class _Tenant:
    """What one tenant holds. `claim`: its place in the line of those refused without holding any."""

    num_held: int = 0
    num_waiting_tokens: int = 0
    refused_s: float | None = None
    claim: int | None = None


@dataclass
class _Holding:
    seq: Sequence
    is_waiting: bool = True


@dataclass
class Admission:
    """Accepts sequences up to the limits of one engine, and each tenant up to its share.

    Alone, a tenant may take every place. Where several ask, that is hold something or were
    refused in the last `CLAIM_S`, each holds at most its part of the places and of the queued
    tokens; but a place nobody else asked for lately is never left idle. A refused tenant that holds
    nothing is before everyone who asks after it, so that none starves even where there are
    more tenants than places.

    An answer that was begun elsewhere was accepted once: it is refused only when the places are
    taken twice over, so that one replica can take in what another one lost.

    Every method may be called from any thread.
    """

    config: EngineConfig
    clock: Callable[[], float]
    _held: dict[str, _Holding] = field(default_factory=dict)
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _num_waiting: int = 0
    _num_waiting_tokens: int = 0
    _claims: Iterator[int] = field(default_factory=count)
    _ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASURED_ENDS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the accepted sequences that no step has begun with."""
        return self._num_waiting_tokens

    def take(self, seq: Sequence) -> None:
        """Accepts a sequence, or refuses it at once; harmless when it is accepted already.

        Raises:
            Overloaded: no place, no room for its prompt, or its tenant has its share.
            DuplicateId: another accepted sequence has its request id.
        """
        with self._lock:
            holding = self._held.get(seq.request_id)
            if holding is not None:
                if holding.seq is seq:
                    return
                raise DuplicateId(f"request {seq.request_id} is already running")
            now_s = self.clock()
            self._forget_claims(now_s)
            tenant = self._tenants.setdefault(seq.share, _Tenant())
            refusal = self._refusal(seq, tenant)
            if refusal is not None:
                tenant.refused_s = now_s
                if tenant.num_held == 0 and tenant.claim is None:
                    tenant.claim = next(self._claims)
                raise refusal
            tenant.refused_s = tenant.claim = None
            tenant.num_held += 1
            tenant.num_waiting_tokens += len(seq.prompt_token_ids)
            self._num_waiting += 1
            self._num_waiting_tokens += len(seq.prompt_token_ids)
            self._held[seq.request_id] = _Holding(seq)

    def start(self, seq: Sequence) -> None:
        """Notes that a sequence no longer waits; harmless when it is not accepted."""
        with self._lock:
            holding = self._held.get(seq.request_id)
            if holding is not None and holding.seq is seq:
                self._stop_waiting(holding)

    def release(self, seq: Sequence) -> None:
        """Notes a sequence's end; harmless when it is not accepted."""
        with self._lock:
            holding = self._held.get(seq.request_id)
            if holding is None or holding.seq is not seq:
                return
            if not holding.is_waiting:
                self._ends_s.append(self.clock())
            self._stop_waiting(holding)
            del self._held[seq.request_id]
            tenant = self._tenants[seq.share]
            tenant.num_held -= 1
            self._drop_idle(seq.share)

    def retry_after_s(self) -> float:
        """When half of the queue will have been served, by the rate of the last ends."""
        if len(self._ends_s) < 2:
            return UNKNOWN_RETRY_S
        # Up to now, not to the last end: an engine that no longer moves becomes a slow one.
        seconds_per_end = (self.clock() - self._ends_s[0]) / (len(self._ends_s) - 1)
        wait_s = seconds_per_end * max(1.0, self._num_waiting / 2)
        return round(min(MOST_RETRY_S, max(LEAST_RETRY_S, wait_s)), 1)

    def _refusal(self, seq: Sequence, tenant: _Tenant) -> Overloaded | None:
        num_free = self.config.capacity - len(self._held)
        if seq.output_token_ids and num_free > -self.config.capacity:
            return None
        if num_free <= 0:
            return self._overloaded(
                f"{len(self._held)} requests are running or waiting", self.config.capacity
            )
        num_tokens = len(seq.prompt_token_ids)
        is_queued = len(self._held) >= self.config.max_num_seqs
        limit = self.config.queue_tokens
        if is_queued and self._num_waiting_tokens + num_tokens > limit:
            return self._overloaded(
                f"{self._num_waiting_tokens} prompt tokens are waiting, the request has "
                f"{num_tokens}",
                limit,
            )
        others = [other for other in self._tenants.values() if other is not tenant]
        if not others:
            return None
        if not is_queued and all(other.refused_s is None for other in others):
            return None
        num_tenants = len(others) + 1
        share = max(1, self.config.capacity // num_tenants)
        if tenant.num_held >= share:
            return self._overloaded(
                f"the tenant has {tenant.num_held} requests running or waiting, its share "
                f"among {num_tenants} tenants is {share}",
                share,
            )
        token_share = limit // num_tenants
        # A tenant's only queued prompt may be longer than its share.
        if tenant.num_waiting_tokens and tenant.num_waiting_tokens + num_tokens > token_share:
            return self._overloaded(
                f"the tenant has {tenant.num_waiting_tokens} prompt tokens waiting and the "
                f"request {num_tokens}, its share among {num_tenants} tenants is {token_share}",
                token_share,
            )
        num_ahead = sum(_is_ahead(other, tenant) for other in others)
        if num_free <= num_ahead:
            return self._overloaded(
                f"{num_ahead} tenants without a request asked before, {num_free} places are free",
                num_free,
            )
        return None

    def _overloaded(self, what: str, limit: int) -> Overloaded:
        return Overloaded(
            f"{what}, the limit is {limit}", limit=limit, retry_after_s=self.retry_after_s()
        )

    def _stop_waiting(self, holding: _Holding) -> None:
        if not holding.is_waiting:
            return
        holding.is_waiting = False
        num_tokens = len(holding.seq.prompt_token_ids)
        self._tenants[holding.seq.share].num_waiting_tokens -= num_tokens
        self._num_waiting -= 1
        self._num_waiting_tokens -= num_tokens

    def _forget_claims(self, now_s: float) -> None:
        for name, tenant in list(self._tenants.items()):
            if tenant.refused_s is not None and now_s - tenant.refused_s >= CLAIM_S:
                tenant.refused_s = tenant.claim = None
                self._drop_idle(name)

    def _drop_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if tenant.num_held == 0 and tenant.refused_s is None:
            del self._tenants[name]


def _is_ahead(other: _Tenant, tenant: _Tenant) -> bool:
    """Whether another tenant has asked for its first place for longer."""
    if other.claim is None:
        return False
    return tenant.claim is None or other.claim < tenant.claim


class FairQueue:
    """Waiting sequences, served round robin over their tenants.

    Within a tenant answers that were begun elsewhere are first, because somebody is reading
    them, then the higher priority, and among equals who had a place and lost it, then the
    earlier one: a tenant's backlog and its priorities hold up nobody but itself.
    """

    def __init__(self) -> None:
        # In the order of their turns; none is empty.
        self._queues: dict[str, list[Sequence]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def head(self) -> Sequence | None:
        """The next one to be served."""
        return next(iter(self._queues.values()))[0] if self._queues else None

    @property
    def heads(self) -> Iterator[Sequence]:
        """Every tenant's next one, in the order of their turns."""
        return (queue[0] for queue in self._queues.values())

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._queues.values())

    def push(self, seq: Sequence) -> None:
        """Adds a sequence; a tenant that has none waiting gets the last turn."""
        insort(self._queues.setdefault(seq.share, []), seq, key=_rank)
        self._length += 1

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out; taking the head ends its tenant's turn.

        Raises:
            ValueError: it is not in the queue.
        """
        is_head = seq is self.head
        queue = self._queues.get(seq.share, [])
        queue.remove(seq)
        self._length -= 1
        if is_head or not queue:
            del self._queues[seq.share]
            if queue:
                self._queues[seq.share] = queue


def _rank(seq: Sequence) -> tuple[bool, int, bool]:
    was_preempted = seq.num_preemptions > 0
    is_begun_elsewhere = bool(seq.output_token_ids) and not was_preempted
    return not is_begun_elsewhere, -seq.priority, not was_preempted
