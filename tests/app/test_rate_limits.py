"""Limits of tenants, on a clock that the test advances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rate_limits import Limits, RateLimits
from protocol.errors import RateLimited
from tests.protocol.fakes import FakeClock


class Desk:
    """The limits of everybody, which may be changed."""

    def __init__(self, **limits: int) -> None:
        self.clock = FakeClock()
        self.of = {"red": Limits(**limits)}
        self.limits = RateLimits(lambda tenant: self.of.get(tenant, Limits()), clock=self.clock)

    def try_to(self, tenant: str = "red", times: int = 1) -> int:
        """How many of so many requests, one after the other, are let in."""
        admitted = 0
        for _ in range(times):
            try:
                self.limits.admit(tenant)
            except RateLimited:
                continue
            self.limits.release(tenant)
            admitted += 1
        return admitted

    def refusal(self) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            self.limits.admit("red")
        return caught.value


def test_without_limits_everything_goes_and_nothing_is_told() -> None:
    desk = Desk()
    assert desk.try_to(times=1000) == 1000
    desk.limits.charge("red", 10**9)
    assert desk.try_to() == 1
    assert desk.limits.headers("red") == {}


def test_requests_come_back_evenly_over_the_minute() -> None:
    desk = Desk(requests_per_minute=6)
    assert desk.try_to(times=10) == 6
    refused = desk.refusal()
    assert (refused.limit, refused.retry_after_s) == (6, 10)
    desk.clock.now += 9.9
    assert desk.try_to() == 0
    desk.clock.now += 0.2
    assert desk.try_to(times=3) == 1
    desk.clock.now += 3600
    assert desk.try_to(times=10) == 6


def test_tokens_are_taken_when_they_are_known_and_a_debt_is_paid_back() -> None:
    desk = Desk(tokens_per_minute=60)
    assert desk.try_to(times=100) == 100
    desk.limits.charge("red", 120)
    refused = desk.refusal()
    assert (refused.limit, refused.retry_after_s) == (60, 61)
    desk.clock.now += 60.5
    assert desk.try_to() == 0
    desk.clock.now += 0.6
    assert desk.try_to() == 1


def test_what_runs_is_bounded_until_it_ends() -> None:
    desk = Desk(concurrent_requests=2)
    desk.limits.admit("red")
    desk.limits.admit("red")
    refused = desk.refusal()
    assert (refused.limit, refused.retry_after_s) == (2, 1)
    assert refused.message == "2 requests of this tenant are running, the limit is 2"
    desk.limits.release("red")
    assert desk.try_to(times=5) == 5


def test_a_refused_request_takes_nothing() -> None:
    desk = Desk(requests_per_minute=2, concurrent_requests=1)
    desk.limits.admit("red")
    for _ in range(5):
        desk.refusal()
    desk.limits.release("red")
    assert desk.try_to(times=5) == 1


def test_tenants_do_not_share_their_limits() -> None:
    desk = Desk(requests_per_minute=1)
    desk.of["blue"] = Limits(requests_per_minute=1)
    assert desk.try_to("red", times=2) == 1
    assert desk.try_to("blue", times=2) == 1
    assert desk.try_to("green", times=9) == 9


def test_the_headers_are_those_of_openai() -> None:
    desk = Desk(requests_per_minute=60, tokens_per_minute=600)
    assert desk.try_to(times=3) == 3
    desk.limits.charge("red", 700)
    assert desk.limits.headers("red") == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "57",
        "x-ratelimit-reset-requests": "3s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m10s",
    }
    desk.clock.now += 2.985
    told = desk.limits.headers("red")
    assert told["x-ratelimit-reset-requests"] == "15ms"
    assert told["x-ratelimit-reset-tokens"] == "1m7.015s"


def test_a_changed_limit_holds_at_once_and_forgets_nothing() -> None:
    desk = Desk(requests_per_minute=10)
    assert desk.try_to(times=6) == 6
    desk.of["red"] = Limits(requests_per_minute=7)
    assert desk.try_to(times=9) == 1
    desk.of["red"] = Limits(requests_per_minute=10)
    assert desk.try_to(times=9) == 3
    desk.of["red"] = Limits()
    assert desk.try_to(times=99) == 99


@given(
    limit=st.integers(1, 100),
    pauses=st.lists(st.floats(0, 120, allow_nan=False), min_size=1, max_size=100),
)
def test_no_minute_has_more_than_twice_the_limit_and_a_steady_asker_gets_the_limit(
    limit: int, pauses: list[float]
) -> None:
    desk = Desk(requests_per_minute=limit)
    admitted: list[float] = []
    for pause_s in pauses:
        desk.clock.now += pause_s
        admitted += [desk.clock.now] * desk.try_to(times=limit + 1)
    for start_s in admitted:
        assert sum(start_s <= at_s < start_s + 60 for at_s in admitted) <= 2 * limit
    first_s = admitted[0]
    elapsed_s = desk.clock.now - first_s
    assert len(admitted) <= limit + elapsed_s * limit / 60 + 1e-6
