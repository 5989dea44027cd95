"""What one process knows of the replicas of a deployment, and the choice it makes from that.

The request router tells which replicas there are, the bus tells how busy each is, and whoever
calls them tells which failed. Knows nothing of Ray. A replica goes by its short name, Serve's
`replica_id.unique_id`.

Serve may run the router in a thread of its own: every method may be called from any thread.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deployments.wire import Load, Route

logger = logging.getLogger(__name__)

MODEL = "Model"
"""Name of the model's deployment."""
MARGIN_TOKENS = 2048
MAX_HASHES = 8192
"""Prompt prefixes remembered of one replica: about 1 MB, and a hundred prompts or more."""
SETTLE_S = 0.25
"""A load report may have left before work that was sent this recently had arrived."""
IDLE_WITHIN_S = 1.0
"""Replicas report four times a second."""
CHARGE_S = 10.0
"""Work that no load report confirms in this time was refused or lost."""


class ReplicaGone(Exception):
    """The replica that a call was pinned to is unknown, dead, full, or did not take the call."""


@dataclass
class _Charge:
    at_s: float
    cost: int


@dataclass
class _Replica:
    """`prefixes` has the least recently used first; `charges` the oldest."""

    load: Load = field(default_factory=Load)
    reported_s: float | None = None
    charges: deque[_Charge] = field(default_factory=deque)
    charged: int = 0
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def tokens(self) -> int:
        return self.load.tokens + self.charged

    @property
    def requests(self) -> int:
        return self.load.running + self.load.waiting + len(self.charges)

    def drop_charges(self, before_s: float) -> None:
        while self.charges and self.charges[0].at_s <= before_s:
            self.charged -= self.charges.popleft().cost

    def depth(self, chain: tuple[int, ...]) -> int:
        """How many links of `chain` reach the longest prefix held here; 0 for none."""
        for index in range(len(chain) - 1, -1, -1):
            if chain[index] in self.prefixes:
                return index + 1
        return 0


class ReplicaBoard:
    """The replicas of one deployment, as this process knows them.

    Args:
        margin_tokens: how much more work than the least busy a replica may have and still get
            a request whose prefix it holds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        margin_tokens: int = MARGIN_TOKENS,
        max_hashes: int = MAX_HASHES,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.margin_tokens = margin_tokens
        self.routed_total = 0
        self.prefix_routed_total = 0
        """Requests that went to the replica with the longest prefix of theirs."""
        self.overflow_total = 0
        """Requests whose prefix was held, and that went elsewhere all the same: because of
        the margin, or because the holder was suspect or to be avoided."""
        self._max_hashes = max_hashes
        self._clock = clock
        self._rng = rng or random.Random()
        self._lock = threading.RLock()
        self._replicas: dict[str, _Replica] = {}
        self._names: frozenset[str] = frozenset()
        self._suspect_until_s: dict[str, float] = {}
        self._listeners: dict[object, Callable[[], None]] = {}

    @property
    def replicas(self) -> frozenset[str]:
        """Those that take new work."""
        return self._names

    def set_replicas(self, names: Iterable[str]) -> None:
        """Replaces the set; of those that left only suspicions are kept."""
        with self._lock:
            new = frozenset(names)
            if new == self._names:
                return
            self._replicas = {name: self._replicas.get(name) or _Replica() for name in new}
            self._names = new
            listeners = list(self._listeners.values())
        for listener in listeners:
            try:
                listener()
            except Exception:
                logger.exception("a listener to the set of replicas failed")

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after each change of the set, in the thread that changed it.

        Returns:
            Ends the subscription.
        """
        key = object()
        with self._lock:
            self._listeners[key] = listener

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return unsubscribe

    def set_load(self, name: str, load: Load) -> None:
        """Takes a replica's own report; work charged to it earlier is contained in that."""
        with self._lock:
            replica = self._replicas.get(name)
            if replica is not None:
                now_s = self._clock()
                replica.load = load
                replica.reported_s = now_s
                replica.drop_charges(now_s - SETTLE_S)

    def load_of(self, name: str) -> Load | None:
        """The last report, if any."""
        replica = self._replicas.get(name)
        return None if replica is None or replica.reported_s is None else replica.load

    def num_reported(self) -> int:
        """Requests on all replicas, as they last told."""
        with self._lock:
            return sum(each.load.running + each.load.waiting for each in self._replicas.values())

    def is_idle(self) -> bool:
        """Whether a replica has told lately how it is, and none has or was sent anything to do."""
        with self._lock:
            is_known = any(self.has_reported(name, IDLE_WITHIN_S) for name in self._names)
            return is_known and not any(each.requests for each in self._replicas.values())

    def has_reported(self, name: str, within_s: float) -> bool:
        """Whether the replica showed a sign of life so recently."""
        replica = self._replicas.get(name)
        if replica is None or replica.reported_s is None:
            return False
        return self._clock() - replica.reported_s <= within_s

    def charge(self, name: str, cost: int) -> None:
        """Counts work that was just sent to a replica, until its reports do."""
        with self._lock:
            replica = self._replicas.get(name)
            if replica is not None:
                replica.charges.append(_Charge(self._clock(), cost))
                replica.charged += cost

    def suspect(self, name: str, for_s: float) -> None:
        """Ranks a replica that failed or hung last for a while.

        Holds for one that is not in the set too: a dead one may come back into it before the
        controller has noticed.
        """
        with self._lock:
            now_s = self._clock()
            until_s = max(self._suspect_until_s.get(name, 0.0), now_s + for_s)
            self._suspect_until_s = {
                each: s for each, s in self._suspect_until_s.items() if s > now_s
            } | {name: until_s}

    def clear(self, name: str) -> None:
        """Takes back `suspect`."""
        with self._lock:
            self._suspect_until_s.pop(name, None)

    def is_suspect(self, name: str) -> bool:
        return self._clock() < self._suspect_until_s.get(name, 0.0)

    def remember(self, name: str, chain: tuple[int, ...]) -> None:
        """Notes that a replica holds these prefixes now."""
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return
            # A short prefix serves more prompts than the long one that contains it: of one
            # chain, the longest is the first to be forgotten.
            for link in reversed(chain):
                replica.prefixes[link] = None
                replica.prefixes.move_to_end(link)
            while len(replica.prefixes) > self._max_hashes:
                replica.prefixes.popitem(last=False)

    def rank(self, candidates: Iterable[str], route: Route) -> list[str]:
        """All candidates, the best first.

        The best is, of those with at most `margin_tokens` more to do than the least busy, the
        one that holds the longest prefix of the prompt; the others follow by load. Suspects
        and those to be avoided come last.
        """
        with self._lock:
            oldest_s = self._clock() - CHARGE_S
            names = sorted(set(candidates))
            self._rng.shuffle(names)  # the sort below is stable: equals stay in random order
            known = {name: self._replicas.get(name) or _Replica() for name in names}
            for replica in known.values():
                replica.drop_charges(oldest_s)
            names.sort(key=lambda name: (known[name].tokens, known[name].requests))
            good = [name for name in names if name not in route.avoid and not self.is_suspect(name)]
            bad = [name for name in names if name not in good]
            if route.chain and good:
                most = known[good[0]].tokens + self.margin_tokens
                near = [name for name in good if known[name].tokens <= most]
                # Of those that hold equally much, `max` takes the first, the least busy.
                best = max(near, key=lambda name: known[name].depth(route.chain))
                good.remove(best)
                good.insert(0, best)
            return good + bad

    def place(self, name: str, route: Route) -> None:
        """Notes that a request goes to this replica: its work, its prefixes, and the counters."""
        with self._lock:
            if not route.is_warm_up:
                self._count(name, route)
            self.charge(name, route.cost)
            self.remember(name, route.chain)

    def choose(self, route: Route) -> str | None:
        """Places a request on the best replica, for a caller that then pins its call to it.

        None without any replica.
        """
        with self._lock:
            ranked = self.rank(self._names, route)
            if not ranked:
                return None
            self.place(ranked[0], route)
            return ranked[0]

    def _count(self, name: str, route: Route) -> None:
        depth = {each: known.depth(route.chain) for each, known in self._replicas.items()}
        longest = max(depth.values(), default=0)
        self.routed_total += 1
        if longest > 0 and depth.get(name) == longest:
            self.prefix_routed_total += 1
        elif longest > 0:
            self.overflow_total += 1


_boards: dict[str, ReplicaBoard] = {}
_boards_lock = threading.Lock()


def board_of(deployment: str) -> ReplicaBoard:
    """This process's board of a deployment.

    The one way to share it: Serve builds the router itself, from a pickled copy of its module.
    """
    with _boards_lock:
        return _boards.setdefault(deployment, ReplicaBoard())
