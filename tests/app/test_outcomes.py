"""What became of requests: each is counted once, with the tokens that its client was told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.outcomes import RequestOutcomes
from app.rate_limits import Limits, RateLimits
from app.serving import Stream
from app.usage_ledger import Used
from protocol.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    RateLimited,
    ServingError,
    Unauthorized,
)
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, Terminal, TokenDelta, TokenLog, Usage
from tests.protocol.fakes import FakeClock

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)


def a_stream(outcome: Any = "miss") -> Stream:
    request = InferenceRequest(request_id="r", tenant="red", model="m", prompt="hi")
    return Stream(request=request, log=TokenLog(), cache=CacheOutcome(outcome=outcome))


def ended(reason: Any = "stop", error: ServingError | None = None) -> Terminal:
    info = None if error is None else error.info
    return Terminal(finish_reason=reason, usage=USAGE, error=info)


class Desk:
    """Counts, and what a test asks of them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.limits = Limits(concurrent_requests=1)
        self.uses: list[tuple[str, Used]] = []
        self.outcomes = RequestOutcomes(
            limits=RateLimits(lambda tenant: self.limits, clock=self.clock),
            on_use=lambda tenant, used: self.uses.append((tenant, used)),
            clock=self.clock,
        )

    def __getitem__(self, name: str) -> Any:
        return self.outcomes.stats()[name]

    def serve(self, *terminals: Terminal, source: Any = "miss", n: int = 1) -> None:
        record = self.outcomes.begin()
        streams = [a_stream(source) for _ in terminals]
        record.opened(streams)
        for stream, terminal in zip(streams, terminals, strict=True):
            stream.log.append(TokenDelta(0, "x", (0,)))
            stream.log.finish(terminal)
        record.ended(n=n)


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "cancelled"])
def test_a_request_counts_by_its_end(reason: str) -> None:
    desk = Desk()
    desk.serve(ended(reason))
    assert desk["ended"] == {reason: {"miss": 1}}
    assert desk["tokens"] == {
        "prompt": {"miss": 7},
        "completion": {"miss": 3},
        "cached": {"miss": 2},
    }


@pytest.mark.parametrize("source", ["exact", "semantic", "coalesced"])
def test_a_request_counts_by_where_its_answer_came_from(source: str) -> None:
    desk = Desk()
    desk.serve(ended(), source=source)
    assert desk["ended"] == {"stop": {source: 1}}
    assert desk["tokens"]["completion"] == {source: 3}


@pytest.mark.parametrize(
    "error",
    [ContextLengthExceeded("long"), Unauthorized("who"), RateLimited("often"), Overloaded("full")],
    ids=lambda error: error.code,
)
def test_what_is_not_begun_is_refused(error: ServingError) -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    record.failed(error)
    record.ended()
    assert desk["ended"] == {"refused": {"miss": 1}}
    assert desk["refused"] == {error.code: 1}
    assert desk["failed"] == {}


@pytest.mark.parametrize("error", [InternalError("bug"), DeadlineExceeded("late")])
def test_what_breaks_before_it_begins_has_failed(error: ServingError) -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    record.failed(error)
    record.ended()
    assert desk["ended"] == {"failed": {"miss": 1}}
    assert desk["failed"] == {error.code: 1}


def test_an_error_after_the_acceptance_is_a_failure() -> None:
    desk = Desk()
    desk.serve(ended("error", Overloaded("gone")))
    desk.serve(ended("error"))
    record = desk.outcomes.begin()
    record.opened([a_stream()])
    record.failed(InternalError("bug in the writer"))
    record.ended()
    assert desk["ended"] == {"failed": {"miss": 3}}
    assert desk["failed"] == {"overloaded": 1, "internal": 2}
    assert desk["tokens"] == {}


def test_who_leaves_is_neither_a_success_nor_a_failure() -> None:
    desk = Desk()
    for streams in ([], [a_stream()]):
        record = desk.outcomes.begin()
        record.opened(streams)
        record.ended(has_left=True)
    assert desk["ended"] == {"disconnected": {"miss": 2}}
    assert desk["tokens"] == {}


def test_a_request_that_is_cancelled_before_it_begins_is_cancelled() -> None:
    desk = Desk()
    desk.outcomes.begin().ended()
    assert desk["ended"] == {"cancelled": {"miss": 1}}


def test_a_request_is_counted_once_however_often_it_ends() -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    assert desk["live"] == 1
    for _ in range(3):
        record.failed(Overloaded("full"))
        record.ended()
        record.ended(has_left=True)
    assert desk["ended"] == {"refused": {"miss": 1}}
    assert desk["live"] == 0


def test_refusals_of_the_session_count_as_requests_and_those_of_handshakes_do_not() -> None:
    desk = Desk()
    desk.outcomes.refuse("duplicate_id")
    desk.outcomes.refuse_handshake("unauthorized")
    assert desk["ended"] == {"refused": {"miss": 1}}
    assert desk["refused"] == {"duplicate_id": 1}
    assert desk["handshakes_refused"] == {"unauthorized": 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Unauthorized("who"), "refused"),
        (ValueError("bug"), "failed"),
        (asyncio.CancelledError(), "disconnected"),
    ],
)
def test_a_request_that_cannot_be_prepared_ends_there(error: BaseException, outcome: str) -> None:
    desk = Desk()
    with pytest.raises(type(error)), desk.outcomes.begin().preparing():
        raise error
    assert desk["ended"] == {outcome: {"miss": 1}}
    assert desk["live"] == 0


def test_a_request_that_is_prepared_goes_on() -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    with record.preparing():
        pass
    assert desk["live"] == 1
    record.ended()
    assert desk["ended"] == {"cancelled": {"miss": 1}}


def test_several_choices_are_one_request_and_their_prompt_is_told_once() -> None:
    desk = Desk()
    desk.serve(ended(), ended("length"), ended(), ended(), n=2)
    assert desk["ended"] == {"length": {"miss": 1}}
    assert desk["tokens"]["completion"] == {"miss": 12}
    assert desk["tokens"]["prompt"] == {"miss": 14}


def test_the_first_token_and_the_whole_answer_are_timed() -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    stream = a_stream()
    desk.clock.now += 0.02
    record.opened([stream])
    desk.clock.now += 0.05
    for seq in range(3):
        stream.log.append(TokenDelta(seq, "x", (seq,)))
        desk.clock.now += 1
    stream.log.finish(ended())
    record.ended()
    ttft, duration = desk["ttft_s"]["miss"], desk["duration_s"]["miss"]
    assert ttft["sum"] == pytest.approx(0.07)
    assert duration["sum"] == pytest.approx(3.07)
    assert ttft["counts"][ttft["bounds"].index(0.1)] == 1
    assert duration["counts"][duration["bounds"].index(5.0)] == 1
    assert stream.log._listeners == [], "nothing of the record is left on the log"


def test_an_answer_that_is_there_already_has_its_first_token_at_once() -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    stream = a_stream("exact")
    stream.log.append(TokenDelta(0, "x", (0,)))
    stream.log.finish(ended())
    record.opened([stream])
    record.ended()
    assert sum(desk["ttft_s"]["exact"]["counts"]) == 1


def test_only_whole_answers_have_a_duration() -> None:
    desk = Desk()
    desk.serve(ended("cancelled"))
    desk.serve(ended("error"))
    assert desk["duration_s"] == {}


def test_a_very_long_one_lies_past_the_last_bound() -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    stream = a_stream()
    record.opened([stream])
    desk.clock.now += 1000
    stream.log.finish(ended())
    record.ended()
    assert desk["duration_s"]["miss"]["counts"][-1] == 1


# ------------------------------------------------------------------ use and limits


def test_a_stream_tells_its_use_at_its_end() -> None:
    desk = Desk()
    desk.serve(ended())
    assert desk.uses == [("red", Used(1, 7, 3, 2, 0))]


@pytest.mark.parametrize("source", ["exact", "semantic", "coalesced"])
def test_what_the_model_did_not_compute_is_saved(source: str) -> None:
    desk = Desk()
    desk.serve(ended(), source=source)
    assert desk.uses == [("red", Used(1, 7, 3, 2, 10))]


def test_several_choices_are_one_request_of_the_ledger_too() -> None:
    desk = Desk()
    desk.serve(ended(), ended("length"), ended(), ended(), n=2)
    total = Used()
    for _, used in desk.uses:
        total = total.plus(used)
    assert total == Used(1, 14, 12, 4, 0)


def test_what_failed_is_given_away() -> None:
    desk = Desk()
    desk.serve(ended("error", InternalError("bug")))
    assert desk.uses == []


def test_a_stream_whose_client_left_tells_its_use_when_it_ends_and_only_once() -> None:
    desk = Desk()
    stream = a_stream()
    for _ in range(3):
        record = desk.outcomes.begin()
        record.opened([stream])
        record.ended(has_left=True)
    assert desk.uses == []
    stream.log.append(TokenDelta(0, "x", (0,)))
    stream.log.finish(ended("cancelled"))
    assert desk.uses == [("red", Used(1, 7, 3, 2, 0))]
    assert stream.log._listeners == [], "nothing of the record is left on the log"
    record = desk.outcomes.begin()
    record.opened([stream])
    record.ended()
    assert len(desk.uses) == 1


def test_a_place_is_held_from_the_admission_to_the_end() -> None:
    desk = Desk()
    record = desk.outcomes.begin()
    record.admit("red")
    late = desk.outcomes.begin()
    with pytest.raises(RateLimited), late.preparing():
        late.admit("red")
    desk.outcomes.begin().admit("blue")
    for _ in range(2):
        record.ended()
    desk.outcomes.begin().admit("red")
    with pytest.raises(RateLimited):
        desk.outcomes.begin().admit("red")
    assert desk["refused"] == {"rate_limited": 1}


def test_what_makes_no_stream_takes_a_place_and_tells_its_use_too() -> None:
    desk = Desk()
    with desk.outcomes.place("red"):
        with pytest.raises(RateLimited), desk.outcomes.place("red"):
            pass
        desk.outcomes.note_use("red", Used(1, 4))
    with desk.outcomes.place("red"):
        pass
    assert desk.uses == [("red", Used(1, 4))]
