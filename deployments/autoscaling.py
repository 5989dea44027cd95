"""Serve shell of the scaling policy: replicas' own load in, a replica count out.

Serve's default policy counts ongoing calls, and an idle WebSocket or an open bus is one for its
whole life. Here only what replicas tell through `record_autoscaling_stats` counts.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.scaling import (
    Decision,
    Fleet,
    ReplicaLoad,
    ScalingRules,
    ScalingState,
    SurgeRule,
    WorkPolicy,
)
from deployments.scaling_alert import WebhookAlert

# The policy runs in Serve's controller, which writes only Serve's own loggers to its file.
logger = logging.getLogger(f"ray.serve.{__name__}")

PUSH_INTERVAL_S = 2.0
"""How often a replica samples its load and sends it to the controller."""
LOOK_BACK_S = 10.0
"""Serve averages a replica's samples over this long."""
STALE_AFTER_S = 5 * PUSH_INTERVAL_S
DECISION_INTERVAL_S = 1.0
"""The controller asks ten times a second; nothing changes as fast."""
METRICS = tuple(field.name for field in dataclasses.fields(ReplicaLoad))
STATE_KEY = "seedance"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlertSettings:
    """Where a broken surge rule is told, and how often at most."""

    url: str
    interval_s: float = 300.0
    timeout_s: float = 5.0


def autoscaling_config(
    *,
    min_replicas: int,
    max_replicas: int,
    target_requests_per_replica: float,
    rules: ScalingRules,
    alert: AlertSettings | None = None,
) -> AutoscalingConfig:
    """What `Deployment.options(autoscaling_config=...)` takes, with our policy in it.

    Raises:
        ValueError: the bounds are not in order.
    """
    policy = AutoscalingPolicy(
        policy_function=f"{WorkAutoscaling.__module__}:{WorkAutoscaling.__name__}",
        policy_kwargs={
            "rules": dataclasses.asdict(rules),
            "alert": None if alert is None else dataclasses.asdict(alert),
        },
    )
    with warnings.catch_warnings():
        # Serve deprecates `metrics_interval_s` for an environment variable that 2.60 never reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            # No `initial_replicas`: Serve falls back to it at each deploy that changes anything.
            target_ongoing_requests=target_requests_per_replica,
            metrics_interval_s=PUSH_INTERVAL_S,
            look_back_period_s=LOOK_BACK_S,
            # The cool-downs are ours; Serve's delays on top would only add up.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        )


@dataclasses.dataclass(frozen=True)
class _Heard:
    """A replica's newest sample: its own time stamp, and when we first saw that stamp."""

    stamp: float
    at_s: float


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What one call leaves to the next, in Serve's `policy_state`."""

    scaling: ScalingState = dataclasses.field(default_factory=ScalingState)
    heard: Mapping[str, _Heard] = dataclasses.field(default_factory=dict)
    last: Decision | None = None


class WorkAutoscaling:
    """`autoscaling_config.policy`: Serve builds one for each deployment and calls it for ever.

    It never raises, because one exception stops the controller's care for every application.

    Args:
        rules: `ScalingRules` as a mapping, for Serve takes JSON only.
        alert: `AlertSettings` as a mapping.
        clock: monotonic; the ages of samples are measured with it, since the clocks of two
            machines differ.
    """

    def __init__(
        self,
        rules: Mapping[str, Any],
        alert: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        surge = rules.get("surge")
        parsed = {**rules, "surge": None if surge is None else SurgeRule(**surge)}
        self._policy = WorkPolicy(ScalingRules(**parsed))
        settings = None if alert is None else AlertSettings(**alert)
        self.alert = (
            None
            if settings is None
            else WebhookAlert(
                settings.url,
                interval_s=settings.interval_s,
                timeout_s=settings.timeout_s,
                clock=clock,
                logger=logger,
            )
        )
        self._clock = clock
        self._last_failure: str | None = None

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state that the next call finds in `ctx.policy_state`."""
        memory = ctx.policy_state.get(STATE_KEY) or _Memory()
        try:
            replicas, memory = self._decide(ctx, memory)
            self._last_failure = None
        except Exception as exc:
            replicas = ctx.target_num_replicas
            if repr(exc) != self._last_failure:
                self._last_failure = repr(exc)
                logger.exception("%s stays at %d replicas", ctx.deployment_id, replicas)
        return replicas, {STATE_KEY: memory}

    def _decide(self, ctx: AutoscalingContext, memory: _Memory) -> tuple[int, _Memory]:
        now_s = self._clock()
        decided_s = memory.scaling.decided_s
        if decided_s is not None and 0 <= now_s - decided_s < DECISION_INTERVAL_S:
            return ctx.target_num_replicas, memory
        heard = _listen(ctx, memory.heard, now_s)
        fleet = Fleet(
            replicas=ctx.target_num_replicas,
            loads=_loads(ctx, heard, now_s),
            min_replicas=ctx.capacity_adjusted_min_replicas,
            max_replicas=ctx.capacity_adjusted_max_replicas,
            target_requests_per_replica=ctx.config.get_target_ongoing_requests(),
        )
        decision, scaling = self._policy.decide(fleet, memory.scaling, now_s)
        self._tell(ctx, fleet, decision, memory.last)
        return decision.replicas, _Memory(scaling, heard, decision)

    def _tell(
        self, ctx: AutoscalingContext, fleet: Fleet, decision: Decision, last: Decision | None
    ) -> None:
        if decision.replicas != fleet.replicas:
            logger.info(
                "%s from %d to %d replicas: %s",
                ctx.deployment_id,
                fleet.replicas,
                decision.replicas,
                decision.reason,
            )
        elif decision.kind == "unknown" and (last is None or last.kind != "unknown"):
            # Each start of a replica is such a moment.
            logger.info(
                "%s stays at %d replicas: %s", ctx.deployment_id, decision.replicas, decision.reason
            )
        if decision.surge is not None and self.alert is not None:
            self.alert.send(
                {
                    "alert": "surge",
                    "at": datetime.now(UTC).isoformat(timespec="seconds"),
                    "application": ctx.app_name,
                    "deployment": ctx.deployment_name,
                    "replicas": fleet.replicas,
                    "wanted": decision.replicas,
                    "max_replicas": fleet.max_replicas,
                    **dataclasses.asdict(decision.surge),
                }
            )


def _listen(
    ctx: AutoscalingContext, before: Mapping[str, _Heard], now_s: float
) -> dict[str, _Heard]:
    """When each running replica last sent something new, by our own clock."""
    heard = {}
    series = (ctx.raw_metrics or {}).get(METRICS[0]) or {}
    for replica in ctx.running_replicas:
        samples = series.get(replica)
        if samples:
            stamp = samples[-1].timestamp
            known = before.get(replica.unique_id)
            is_new = known is None or known.stamp != stamp
            heard[replica.unique_id] = _Heard(stamp, now_s) if is_new or known is None else known
    return heard


def _loads(
    ctx: AutoscalingContext, heard: Mapping[str, _Heard], now_s: float
) -> dict[str, ReplicaLoad | None]:
    """The loads of all running replicas; None for one without a full, fresh set of numbers."""
    means, raw = ctx.aggregated_metrics or {}, ctx.raw_metrics or {}
    loads: dict[str, ReplicaLoad | None] = {}
    for replica in ctx.running_replicas:
        last = heard.get(replica.unique_id)
        is_fresh = last is not None and now_s - last.at_s <= STALE_AFTER_S
        samples = [raw.get(metric, {}).get(replica, ()) for metric in METRICS]
        # The samples and not their mean, for Serve's mean of a NaN need not be one.
        is_sound = all(
            series and all(math.isfinite(sample.value) for sample in series) for series in samples
        )
        loads[replica.unique_id] = (
            ReplicaLoad(**{metric: means[metric][replica] for metric in METRICS})
            if is_fresh and is_sound
            else None
        )
    return loads
