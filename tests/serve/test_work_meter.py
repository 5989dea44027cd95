from __future__ import annotations

import dataclasses
import math
import time

import pytest

from deployments.scaling import ReplicaLoad
from deployments.work_meter import WorkMeter


class Clocks:
    def __init__(self) -> None:
        self.now_s = self.cpu_s = 50.0

    def meter(self, num_cores: float = 1) -> WorkMeter:
        return WorkMeter(
            num_cores=num_cores,
            window_s=60,
            clock=lambda: self.now_s,
            cpu_clock=lambda: self.cpu_s,
        )


def read(meter: WorkMeter) -> ReplicaLoad:
    return ReplicaLoad(**meter.stats(tokens=7, running=2, waiting=1))


def test_a_meter_tells_exactly_what_the_policy_reads() -> None:
    stats = Clocks().meter().stats(tokens=7, running=2, waiting=1)
    assert list(stats) == [field.name for field in dataclasses.fields(ReplicaLoad)]
    assert {name: stats[name] for name in ("tokens", "running", "waiting")} == {
        "tokens": 7,
        "running": 2,
        "waiting": 1,
    }
    assert all(isinstance(value, float) for value in stats.values()), "Serve refuses others"


def test_p95_is_the_time_that_19_of_20_stay_within() -> None:
    meter = Clocks().meter()
    for ttft_ms in range(1, 101):
        meter.first_token(ttft_ms)
    assert read(meter).ttft_p95_ms == 95


def test_old_times_are_forgotten_and_none_is_zero() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    assert read(meter).ttft_p95_ms == 0
    meter.first_token(900)
    clocks.now_s += 61
    meter.first_token(100)
    assert read(meter).ttft_p95_ms == 100
    clocks.now_s += 61
    assert read(meter).ttft_p95_ms == 0


def test_cpu_load_is_a_share_of_the_replicas_cores() -> None:
    clocks = Clocks()
    meter = clocks.meter(num_cores=4)
    clocks.now_s += 2
    clocks.cpu_s += 6
    assert read(meter).cpu_percent == pytest.approx(75)
    clocks.now_s += 2
    assert read(meter).cpu_percent == 0


def test_readings_in_quick_succession_repeat_the_last_one() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    clocks.now_s += 1
    clocks.cpu_s += 1
    assert read(meter).cpu_percent == pytest.approx(100)
    clocks.now_s += 0.001
    clocks.cpu_s += 0.01
    assert read(meter).cpu_percent == pytest.approx(100)


def test_the_real_clocks_give_a_usable_load() -> None:
    meter = WorkMeter()
    busy_until_s = time.monotonic() + 0.6
    while time.monotonic() < busy_until_s:
        math.factorial(500)
    assert read(meter).is_sound
    assert read(meter).cpu_percent > 1
