"""The pure policy: loads and a clock in, a replica count out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.scaling import (
    Decision,
    Fleet,
    ReplicaLoad,
    ScalingRules,
    ScalingState,
    SurgeRule,
    WorkPolicy,
)

RULES = ScalingRules(
    target_tokens_per_replica=1000,
    upscale_cooldown_s=30,
    downscale_cooldown_s=120,
    surge=SurgeRule(),
)
SURGING = {"ttft_p95_ms": 900.0, "cpu_percent": 95.0, "waiting": 4.0}


class Scaled:
    """A deployment whose replicas start at once, decided about once a second."""

    def __init__(
        self, rules: ScalingRules = RULES, *, replicas: int = 1, low: int = 1, high: int = 8
    ) -> None:
        self.policy = WorkPolicy(rules)
        self.replicas, self.low, self.high = replicas, low, high
        self.starting = 0
        self.now_s = 100.0
        self.state = ScalingState()

    def see(self, *, after_s: float = 1.0, **total: float) -> Decision:
        """Decides once about a load that is spread evenly."""
        running = self.replicas - self.starting
        spread = ("tokens", "running", "waiting")
        load = {name: value / running if name in spread else value for name, value in total.items()}
        return self.hear(
            {str(i): ReplicaLoad(**load) for i in range(running)} if running else {}, after_s
        )

    def hear(self, loads: dict[str, ReplicaLoad | None], after_s: float = 1.0) -> Decision:
        self.now_s += after_s
        fleet = Fleet(
            replicas=self.replicas,
            loads=loads,
            min_replicas=self.low,
            max_replicas=self.high,
            target_requests_per_replica=16,
        )
        decision, self.state = self.policy.decide(fleet, self.state, self.now_s)
        self.replicas = decision.replicas
        return decision

    def watch(self, seconds: int, **total: float) -> list[int]:
        return [self.see(**total).replicas for _ in range(seconds)]


def test_work_that_does_not_fit_adds_replicas_at_once() -> None:
    decision = Scaled().see(tokens=2500, running=5)
    assert (decision.replicas, decision.kind) == (3, "up")
    assert "2500 tokens" in decision.reason


def test_a_load_of_exactly_the_target_fits() -> None:
    assert Scaled(replicas=3).see(tokens=3 * 1000).kind == "fits"


def test_another_addition_waits_for_the_up_cool_down() -> None:
    scaled = Scaled()
    assert scaled.see(tokens=2000).replicas == 2
    assert scaled.watch(29, tokens=4000) == [2] * 29
    assert scaled.see(tokens=4000).replicas == 4


def test_one_decision_adds_no_more_than_the_largest_step() -> None:
    assert Scaled(high=100).see(tokens=50_000).replicas == 1 + RULES.max_step_up


def test_replicas_leave_one_by_one_and_only_after_the_load_stayed_below() -> None:
    scaled = Scaled(replicas=3)
    seen = scaled.watch(400, tokens=100)
    assert [seen.index(2), seen.index(1)] == [120, 240]
    assert seen[-1] == 1


def test_one_moment_of_load_starts_the_down_cool_down_again() -> None:
    scaled = Scaled(replicas=3)
    scaled.watch(119, tokens=100)
    assert scaled.see(tokens=2500).kind == "fits"
    assert set(scaled.watch(120, tokens=100)) == {3}
    assert scaled.see(tokens=100).replicas == 2


def test_a_load_that_swings_around_a_boundary_does_not_flap() -> None:
    scaled = Scaled()
    seen = [scaled.see(tokens=900 if second % 20 < 10 else 1100).replicas for second in range(1000)]
    assert seen[10:] == [2] * 990


def test_no_fewer_replicas_than_serves_default_formula_wants_for_the_same_requests() -> None:
    assert Scaled().see(tokens=10, running=40, waiting=8).replicas == 3


def test_requests_alone_decide_where_no_token_target_is_set() -> None:
    scaled = Scaled(ScalingRules())
    assert scaled.see(tokens=1e9, running=20).replicas == 2


def test_without_work_nothing_is_added_however_long_it_lasts() -> None:
    assert set(Scaled().watch(1000)) == {1}


def test_a_surge_adds_two_replicas_beyond_the_work_and_reports_its_figures() -> None:
    decision = Scaled().see(tokens=100, **SURGING)
    assert decision.replicas == 3
    assert decision.surge is not None
    assert (decision.surge.ttft_p95_ms, decision.surge.waiting) == (900, 4)
    assert decision.reason.startswith("surge")


@pytest.mark.parametrize(
    ("name", "value"), [("ttft_p95_ms", 800.0), ("cpu_percent", 85.0), ("waiting", 3.0)]
)
def test_a_surge_needs_all_three_limits_exceeded(name: str, value: float) -> None:
    decision = Scaled().see(tokens=100, **{**SURGING, name: value})
    assert decision.surge is None
    assert decision.replicas == 1


def test_a_surge_waits_for_the_replicas_that_it_asked_for() -> None:
    scaled = Scaled(high=20)
    assert scaled.see(tokens=100, **SURGING).replicas == 3
    scaled.starting = 2
    for _ in range(100):
        decision = scaled.see(tokens=100, **SURGING)
        assert decision.replicas == 3
        assert decision.surge is not None, "the alert does not wait"
    scaled.starting = 0
    assert scaled.see(tokens=100, **SURGING).replicas == 5


def test_a_surge_at_the_maximum_is_still_reported() -> None:
    decision = Scaled(replicas=2, high=2).see(tokens=100, **SURGING)
    assert decision.replicas == 2
    assert decision.surge is not None


def test_without_the_rule_there_is_no_surge() -> None:
    assert Scaled(ScalingRules()).see(tokens=100, **SURGING).surge is None


@pytest.mark.parametrize(
    "hole",
    [
        None,
        ReplicaLoad(tokens=math.nan),
        ReplicaLoad(cpu_percent=math.inf),
        ReplicaLoad(waiting=-1),
    ],
    ids=["silent", "nan", "infinite", "negative"],
)
@pytest.mark.parametrize("tokens", [0.0, 1e6])
def test_a_replica_without_a_usable_load_stops_all_scaling(
    hole: ReplicaLoad | None, tokens: float
) -> None:
    scaled = Scaled(replicas=2)
    for _ in range(1000):
        decision = scaled.hear({"a": ReplicaLoad(tokens=tokens), "b": hole})
        assert (decision.replicas, decision.kind) == (2, "unknown")
    assert decision.reason == "1 of 2 replicas sent no usable load (b)"


def test_no_running_replica_stops_all_scaling() -> None:
    decision = Scaled(replicas=3).hear({})
    assert (decision.replicas, decision.reason) == (3, "no replica is running")


def test_a_hole_in_the_picture_starts_the_down_cool_down_again() -> None:
    scaled = Scaled(replicas=2)
    scaled.watch(119, tokens=100)
    scaled.hear({"a": None})
    assert set(scaled.watch(120, tokens=100)) == {2}


@pytest.mark.parametrize("jump_s", [-1.0, -1e6, 31.0, 1e6])
def test_a_jump_of_the_clock_changes_nothing(jump_s: float) -> None:
    scaled = Scaled(replicas=2)
    scaled.watch(119, tokens=100)
    decision = scaled.see(tokens=1e6, after_s=jump_s)
    assert (decision.replicas, decision.kind) == (2, "unknown")
    assert set(scaled.watch(120, tokens=100)) == {2}, "what happened meanwhile is unknown"
    assert scaled.see(tokens=100).replicas == 1


def test_a_clock_that_went_back_does_not_stretch_the_up_cool_down() -> None:
    scaled = Scaled()
    scaled.see(tokens=2000)
    scaled.see(tokens=4000, after_s=-90)
    assert scaled.watch(30, tokens=4000)[-1] == 4


def test_a_moved_bound_is_followed_at_once_even_blindly() -> None:
    scaled = Scaled(replicas=2)
    scaled.low, scaled.high = 4, 6
    assert scaled.hear({"a": None}).replicas == 4
    scaled.low, scaled.high = 1, 2
    assert scaled.see(tokens=1e6).replicas == 2


def test_starting_replicas_are_no_hole() -> None:
    scaled = Scaled(replicas=4)
    scaled.starting = 3
    assert scaled.see(tokens=6000).replicas == 6


@pytest.mark.parametrize(
    "fault",
    [
        {"target_tokens_per_replica": 0},
        {"target_tokens_per_replica": math.nan},
        {"max_step_up": 0},
        {"upscale_cooldown_s": -1},
        {"downscale_cooldown_s": math.inf},
    ],
)
def test_impossible_rules_are_refused_by_name(fault: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fault))):
        ScalingRules(**fault)


numbers = st.floats(min_value=0, max_value=1e7)
loads = st.builds(
    ReplicaLoad,
    tokens=numbers,
    running=numbers,
    waiting=numbers,
    ttft_p95_ms=numbers,
    cpu_percent=numbers,
)
moments = st.tuples(st.integers(-5, 60), st.lists(st.one_of(st.none(), loads), max_size=4))


@given(st.lists(moments, max_size=60), st.integers(1, 4), st.integers(0, 6))
def test_whatever_happens_the_rules_hold(
    history: list[tuple[int, list[ReplicaLoad | None]]], low: int, room: int
) -> None:
    scaled = Scaled(replicas=low, low=low, high=low + room)
    scaled.hear({})
    raised_s = lowered_s = -math.inf
    for after_s, seen in history:
        before = scaled.replicas
        decision = scaled.hear({str(i): load for i, load in enumerate(seen)}, after_s)
        assert low <= decision.replicas <= low + room
        if any(load is None for load in seen) or not seen or after_s < 0 or after_s > 30:
            assert decision.replicas == before
        if after_s < 0:
            raised_s = lowered_s = -math.inf
        if decision.replicas > before:
            assert decision.replicas - before <= RULES.max_step_up
            assert scaled.now_s - raised_s >= RULES.upscale_cooldown_s
            raised_s = scaled.now_s
        if decision.replicas < before:
            assert decision.replicas == before - 1
            assert scaled.now_s - max(raised_s, lowered_s) >= RULES.downscale_cooldown_s
            lowered_s = scaled.now_s
