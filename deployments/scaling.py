"""How many replicas the work wants: a pure policy with its state and its clock as arguments.

Knows nothing of Ray; `autoscaling.py` is its Serve shell, `bench/autoscaling.py` replays traces
through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Literal

ROUNDING = 1e-9
"""Keeps a load of exactly n targets at n replicas."""
NAMED_REPLICAS = 3

Kind = Literal["up", "down", "fits", "cooling", "unknown"]


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """What one replica has to do, averaged over the last seconds.

    Args:
        tokens: still to be computed, prompts and answers, of all accepted requests.
        ttft_p95_ms: of the requests that got their first token lately; 0 when there are none.
        cpu_percent: of the cores that the replica may use.
    """

    tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    ttft_p95_ms: float = 0.0
    cpu_percent: float = 0.0

    @property
    def is_sound(self) -> bool:
        return all(math.isfinite(value) and value >= 0 for value in astuple(self))


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """One deployment at one moment.

    Args:
        replicas: how many were asked for last; some may still be starting.
        loads: of those that run, by name; None where nothing was heard lately.
        target_requests_per_replica: Serve's `target_ongoing_requests`, which we hold against
            requests that run or wait and never against open sockets and buses.
    """

    replicas: int
    loads: Mapping[str, ReplicaLoad | None]
    min_replicas: int
    max_replicas: int
    target_requests_per_replica: float


@dataclass(frozen=True, kw_only=True)
class SurgeRule:
    """Clients wait, cores are busy, requests queue: more replicas than the work alone asks for.

    All three must be exceeded: the slowest replica's p95 TTFT, the mean CPU load, and the
    number of waiting requests over all replicas.
    """

    ttft_p95_ms: float = 800.0
    cpu_percent: float = 85.0
    waiting: float = 3.0
    add_replicas: int = 2


@dataclass(frozen=True, kw_only=True)
class ScalingRules:
    """What an operator decides.

    Args:
        target_tokens_per_replica: None counts requests only.
        upscale_cooldown_s: least time between two additions.
        downscale_cooldown_s: time that the load must fit fewer replicas before one is taken away,
            and then before the next one.
        max_step_up: most replicas that one decision adds.
        surge: None switches it off.
        max_pause_s: after a longer silence of the decider nothing is known of the time between.

    Raises:
        ValueError: a value is out of range; the message names it and the limit.
    """

    target_tokens_per_replica: float | None = None
    upscale_cooldown_s: float = 30.0
    downscale_cooldown_s: float = 300.0
    max_step_up: int = 4
    surge: SurgeRule | None = None
    max_pause_s: float = 30.0

    def __post_init__(self) -> None:
        tokens = self.target_tokens_per_replica
        if tokens is not None and not 0 < tokens < math.inf:
            raise ValueError(f"target_tokens_per_replica is {tokens}, it must be above 0")
        if self.max_step_up < 1:
            raise ValueError(f"max_step_up is {self.max_step_up}, it must be at least 1")
        for name in ("upscale_cooldown_s", "downscale_cooldown_s", "max_pause_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class ScalingState:
    """What a decision must remember for the next; times are of the caller's monotonic clock."""

    decided_s: float | None = None
    raised_s: float | None = None
    below_since_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Surge:
    """The figures that broke the surge rule."""

    ttft_p95_ms: float
    cpu_percent: float
    waiting: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many replicas there should be, and why."""

    replicas: int
    kind: Kind
    reason: str
    surge: Surge | None = None


class WorkPolicy:
    """Adds replicas for work that does not fit, and takes them away one by one when it long has.

    Where the picture has a hole (a replica that did not report, a value that is no number, a
    clock that jumped) the count stays as it is, for a hole looks just like an idle replica.
    """

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules

    def decide(
        self, fleet: Fleet, state: ScalingState, now_s: float
    ) -> tuple[Decision, ScalingState]:
        """One decision, and the state to bring to the next."""
        hole = self._hole(fleet, state, now_s)
        if hole is not None:
            bounded = max(fleet.min_replicas, min(fleet.replicas, fleet.max_replicas))
            raised_s = state.raised_s
            if raised_s is not None:
                raised_s = min(raised_s, now_s)
            blind = ScalingState(decided_s=now_s, raised_s=raised_s)
            return Decision(replicas=bounded, kind="unknown", reason=hole), blind
        loads = [load for load in fleet.loads.values() if load is not None]
        demand, reason = self._demand(fleet, loads)
        surge = self._surge(loads)
        # Those that were asked for and are still starting are the answer to the same surge.
        if surge is not None and self.rules.surge is not None and len(loads) >= fleet.replicas:
            surged = fleet.replicas + self.rules.surge.add_replicas
            if surged > demand:
                demand, reason = surged, _surge_reason(surge)
        demand = max(fleet.min_replicas, min(demand, fleet.max_replicas))
        decision, state = self._move(fleet, demand, reason, replace(state, decided_s=now_s), now_s)
        return replace(decision, surge=surge), state

    def _hole(self, fleet: Fleet, state: ScalingState, now_s: float) -> str | None:
        if state.decided_s is not None:
            pause_s = now_s - state.decided_s
            if not 0 <= pause_s <= self.rules.max_pause_s:
                return f"the clock moved by {pause_s:.1f} s since the last decision"
        if not fleet.loads:
            return "no replica is running"
        silent = [name for name, load in fleet.loads.items() if load is None or not load.is_sound]
        if silent:
            named = ", ".join(sorted(silent)[:NAMED_REPLICAS])
            return f"{len(silent)} of {len(fleet.loads)} replicas sent no usable load ({named})"
        return None

    def _demand(self, fleet: Fleet, loads: list[ReplicaLoad]) -> tuple[int, str]:
        """The least number of replicas that holds the work.

        Requests are held against Serve's own target by Serve's own formula, so that there are
        never fewer replicas than its default policy would want for the same work.
        """
        requests = sum(load.running + load.waiting for load in loads)
        demand = _replicas_for(requests, fleet.target_requests_per_replica)
        reason = f"{requests:.1f} requests, {fleet.target_requests_per_replica:g} a replica"
        target_tokens = self.rules.target_tokens_per_replica
        if target_tokens is not None:
            tokens = sum(load.tokens for load in loads)
            by_tokens = _replicas_for(tokens, target_tokens)
            if by_tokens >= demand:
                demand, reason = by_tokens, f"{tokens:.0f} tokens, {target_tokens:g} a replica"
        return demand, reason

    def _surge(self, loads: list[ReplicaLoad]) -> Surge | None:
        rule = self.rules.surge
        if rule is None:
            return None
        now = Surge(
            ttft_p95_ms=max(load.ttft_p95_ms for load in loads),
            cpu_percent=sum(load.cpu_percent for load in loads) / len(loads),
            waiting=sum(load.waiting for load in loads),
        )
        is_broken = (
            now.ttft_p95_ms > rule.ttft_p95_ms
            and now.cpu_percent > rule.cpu_percent
            and now.waiting > rule.waiting
        )
        return now if is_broken else None

    def _move(
        self, fleet: Fleet, demand: int, reason: str, state: ScalingState, now_s: float
    ) -> tuple[Decision, ScalingState]:
        current, rules = fleet.replicas, self.rules
        if not fleet.min_replicas <= current <= fleet.max_replicas:
            # The operator moved a bound: that is an order, and no cool-down holds it up.
            bounded = max(fleet.min_replicas, min(current, fleet.max_replicas))
            kind: Kind = "up" if bounded > current else "down"
            limits = f"{fleet.min_replicas} to {fleet.max_replicas} replicas are allowed"
            return Decision(replicas=bounded, kind=kind, reason=limits), state
        if demand > current:
            state = replace(state, below_since_s=None)
            rested_s = math.inf if state.raised_s is None else now_s - state.raised_s
            if rested_s < rules.upscale_cooldown_s:
                return Decision(replicas=current, kind="cooling", reason=reason), state
            raised = min(demand, current + rules.max_step_up)
            return Decision(replicas=raised, kind="up", reason=reason), replace(
                state, raised_s=now_s
            )
        if demand == current:
            state = replace(state, below_since_s=None)
            return Decision(replicas=current, kind="fits", reason=reason), state
        below_since_s = now_s if state.below_since_s is None else state.below_since_s
        if now_s - below_since_s < rules.downscale_cooldown_s:
            state = replace(state, below_since_s=below_since_s)
            return Decision(replicas=current, kind="cooling", reason=reason), state
        state = replace(state, below_since_s=now_s)
        return Decision(replicas=current - 1, kind="down", reason=reason), state


def _replicas_for(load: float, target: float) -> int:
    return math.ceil(load / target - ROUNDING)


def _surge_reason(surge: Surge) -> str:
    return (
        f"surge: p95 TTFT {surge.ttft_p95_ms:.0f} ms, CPU {surge.cpu_percent:.0f} %, "
        f"{surge.waiting:.1f} requests waiting"
    )
