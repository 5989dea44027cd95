"""Chunked input: pieces become the request that would have been sent whole, and room is kept."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.events import CancelRequest, EndRequest, InputArrived, ReceiveRequest, StartRequest
from protocol.frames import InferReq
from protocol.input_buffer import InputBuffer
from protocol.parse import inference_request
from protocol.session import Session
from protocol.token_log import Terminal
from tests.protocol.fakes import (
    MISS,
    FakeClock,
    cancel,
    framed,
    infer_req,
    only_error,
    open_session,
    piece,
    read,
    sent,
)

SYSTEM = {"role": "system", "content": "Be brief."}


def receiving(session: Session, id: str = "a", **fields: Any) -> None:
    (event,) = session.receive(infer_req(id, input="chunked", **fields))
    assert isinstance(event, ReceiveRequest)


def started(events: list[Any]) -> InferReq:
    (event,) = events
    assert isinstance(event, StartRequest)
    return event.req


def request_of(req: InferReq) -> Any:
    return inference_request(req, request_id="r", tenant="t", model="m")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(
    text=TEXT,
    cuts=st.lists(st.integers(0, 40), max_size=6),
    opening=st.sampled_from(["prompt", "nothing", "message", "parts"]),
    repeats=st.sets(st.integers(0, 6)),
)
def test_any_pieces_make_the_request_that_the_whole_text_makes(
    text: str, cuts: list[int], opening: str, repeats: set[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "x"}]
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "prompt": ({"prompt": "x"}, {"prompt": "x" + text}),
        "nothing": ({}, {"messages": [{"role": "user", "content": text}]}),
        "message": (
            {"messages": [SYSTEM, {"role": "user", "content": ""}]},
            {"messages": [SYSTEM, {"role": "user", "content": text}]},
        ),
        "parts": (
            {"messages": [{"role": "user", "content": parts}]},
            {"messages": [{"role": "user", "content": "Look:\nx" + text}]},
        ),
    }
    begun, whole = cases[opening]
    session = open_session()
    raw = {"type": "INFER_REQ", "id": "a", "input": "chunked", "max_tokens": 5, **begun}
    session.receive(json.dumps(raw))
    for input_id, part in enumerate(pieces[:-1]):
        assert session.receive(piece("a", input_id, part)) == [InputArrived("a")]
        if input_id in repeats:
            assert session.receive(piece("a", input_id, "another text")) == []
            session.input_so_far("a")
    req = started(session.receive(piece("a", len(pieces) - 1, pieces[-1], is_last=True)))
    expected = InferReq(id="a", max_tokens=5, **{k: v for k, v in whole.items() if k == "prompt"})
    if "messages" in whole:
        given_whole = json.dumps({"type": "INFER_REQ", "id": "b", "max_tokens": 5, **whole})
        (event,) = open_session().receive(given_whole)
        assert isinstance(event, StartRequest)
        expected = event.req
    assert req.input is None
    assert request_of(req) == request_of(expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role"),
        ({"prompt": None, "messages": [SYSTEM]}, "messages[0].role"),
        ({"prompt": None, "messages": [SYSTEM, {"role": "user"}]}, "messages[1].content"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": []}]},
            "messages[0].content",
        ),
        (
            {
                "prompt": None,
                "messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}],
            },
            "messages[0].content",
        ),
    ],
)
def test_a_request_that_no_text_can_go_on_with_is_refused_at_once(
    fields: dict[str, Any], param: str
) -> None:
    session = open_session()
    error = only_error(session.receive(infer_req("a", input="chunked", **fields)))
    assert (error["code"], error["param"], error["id"]) == ("invalid_request", param, "a")
    assert session.live_ids == ()
    receiving(session)


def test_a_piece_that_comes_twice_counts_once_and_a_gap_is_refused() -> None:
    session = open_session()
    receiving(session, prompt="")
    session.receive(piece("a", 0, "one "))
    error = only_error(session.receive(piece("a", 2, "three")))
    assert (error["code"], error["param"], error["limit"]) == ("invalid_request", "input_id", 1)
    assert "id" not in error
    assert session.receive(piece("a", 0, "again", is_last=True)) == []
    assert started(session.receive(piece("a", 1, "two", is_last=True))).prompt == "one two"


@pytest.mark.parametrize("state", ["queued", "streaming", "done"])
def test_a_piece_of_a_request_that_is_complete_does_not_fit(state: str) -> None:
    session = open_session()
    receiving(session)
    session.receive(piece("a", 0, is_last=True))
    if state != "queued":
        session.accept("a", stream="s", cache=MISS)
    if state == "done":
        session.done("a", Terminal(finish_reason="stop"), 0)
    error = only_error(session.receive(piece("a", 1)))
    assert error["code"] == "bad_state"
    assert error.get("id") == ("a" if state == "done" else None)


def test_a_piece_for_a_request_that_came_whole_does_not_fit() -> None:
    session = open_session()
    session.receive(infer_req("a"))
    assert only_error(session.receive(piece("a", 0)))["code"] == "bad_state"
    assert only_error(session.receive(piece("b", 0)))["code"] == "unknown_id"


@pytest.mark.parametrize("binary", [False, True])
def test_a_request_may_be_cancelled_while_it_is_received(binary: bool) -> None:
    session = open_session()
    raw = infer_req("a", input="chunked")
    session.receive(framed(raw) if binary else raw)
    session.receive(piece("a", 0))
    assert session.receive(cancel("a")) == [CancelRequest("a")]
    data = session.done("a", Terminal(finish_reason="cancelled"), 0)
    assert isinstance(data, bytes) is binary
    assert read(data)["finish_reason"] == "cancelled"
    assert only_error(session.receive(piece("a", 1)))["code"] == "bad_state"
    receiving(session)


def test_a_draining_server_takes_the_rest_of_what_was_begun() -> None:
    session = open_session()
    receiving(session, prompt="")
    session.drain(5.0)
    assert session.receive(piece("a", 0, "all", is_last=True))
    assert only_error(session.receive(infer_req("b", input="chunked")))["code"] == "overloaded"


# Room


def level(events: list[Any]) -> list[tuple[int, str]]:
    frames = [frame for frame in sent(events) if frame["type"] == "INPUT_STATE"]
    assert all(frame["capacity"] == 100 for frame in frames)
    return [(frame["buffered"], frame["level"]) for frame in frames]


def test_the_level_is_high_from_80_percent_on_and_ok_again_under_50() -> None:
    session = open_session(input_buffer_bytes=100)
    receiving(session)
    assert level(session.receive(piece("a", 0, "x" * 40))) == []
    assert level(session.receive(piece("a", 1, "x" * 39))) == []
    assert level(session.receive(piece("a", 2, "x"))) == [(80, "high")]
    assert level(session.receive(piece("a", 3, "x" * 10))) == []
    assert level(session.take_input("a", 0)) == []
    assert level(session.take_input("a", 1)) == [(11, "ok")]
    assert level(session.receive(piece("a", 4, "é" * 35))) == [(81, "high")]


def test_what_the_model_has_taken_is_told_once_and_in_order() -> None:
    clock = FakeClock(2.5)
    session = open_session(clock)
    receiving(session)
    for input_id in range(4):
        session.receive(piece("a", input_id))
    (anchor,) = sent(session.take_input("a", 1))
    assert anchor == {
        "type": "ANCHOR",
        "id": "a",
        "input_id": 1,
        "offset": 0,
        "ts": 2_500_000_000,
    }
    assert session.take_input("a", 1) == session.take_input("a", 0) == []
    session.receive(piece("a", 4, is_last=True))
    assert session.take_input("a", 3) == []
    session.accept("a", stream="s", cache=MISS)
    assert [frame["input_id"] for frame in sent(session.take_input("a"))] == [4]
    assert session.take_input("a") == []
    assert read(session.anchor("a", 32))["input_id"] == 4


@pytest.mark.parametrize(("anchor", "has_digest"), [("sha256", True), ("none", None)])
def test_anchors_are_as_they_were_asked_for(anchor: str, has_digest: bool | None) -> None:
    session = open_session()
    receiving(session, anchor=anchor)
    session.receive(piece("a", 0))
    frames = sent(session.take_input("a", 0))
    assert [("sha256" in frame) for frame in frames] == ([has_digest] if has_digest else [])


def test_a_piece_over_the_capacity_is_refused_and_may_come_again() -> None:
    session = open_session(input_buffer_bytes=100)
    receiving(session, prompt="")
    session.receive(piece("a", 0, "x" * 30))
    events = session.receive(piece("a", 1, "y" * 71))
    error, state = sent(events)
    assert (error["code"], error["param"], error["limit"]) == ("input_too_large", "text", 100)
    assert "id" not in error
    assert (state["type"], state["level"]) == ("INPUT_STATE", "high")
    # What follows cannot be taken before it.
    assert only_error(session.receive(piece("a", 2)))["param"] == "input_id"
    assert level(session.take_input("a", 0)) == [(0, "ok")]
    session.receive(piece("a", 1, "y" * 71))
    req = started(session.receive(piece("a", 2, "z", is_last=True)))
    assert req.prompt == "x" * 30 + "y" * 71 + "z"


def test_a_piece_that_fits_no_buffer_does_not_make_the_client_wait() -> None:
    session = open_session(input_buffer_bytes=100)
    receiving(session)
    assert only_error(session.receive(piece("a", 0, "é" * 51)))["code"] == "input_too_large"
    assert session.receive(piece("a", 0, "é" * 40)) != []


@pytest.mark.parametrize("binary", [False, True])
def test_an_input_over_its_limit_ends_the_request(binary: bool) -> None:
    session = open_session(max_input_bytes=150, input_buffer_bytes=100)
    raw = infer_req("a", input="chunked")
    session.receive(framed(raw) if binary else raw)
    session.receive(piece("a", 0, "x" * 90))
    session.take_input("a", 0)
    events = session.receive(piece("a", 1, "x" * 61))
    assert [type(event) for event in events[1:]] == [EndRequest]
    (error,) = sent(events)
    assert (error["code"], error["id"]) == ("input_too_large", "a")
    assert (error["param"], error["limit"]) == ("text", 150)
    assert session.live_ids == ()
    assert only_error(session.receive(piece("a", 2)))["code"] == "bad_state"


def test_the_inputs_of_one_connection_are_bounded_together() -> None:
    session = open_session(max_input_bytes=100, input_buffer_bytes=100)
    for number in range(5):
        receiving(session, f"r{number}")
    for number in range(4):
        session.receive(piece(f"r{number}", 0, "x" * 100))
    events = session.receive(piece("r4", 0))
    assert [frame["code"] for frame in sent(events)] == ["rate_limited"]
    assert sent(events)[0]["id"] == "r4"
    assert len(session.live_ids) == 4
    session.done("r0", Terminal(finish_reason="cancelled"), 0)
    receiving(session, "r5")
    assert session.receive(piece("r5", 0)) == [InputArrived("r5")]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "again", "gap", "take"]), st.integers(0, 120)),
        max_size=60,
    )
)
def test_a_buffer_counts_what_a_list_of_pieces_counts(steps: list[tuple[str, int]]) -> None:
    buffer = InputBuffer(InferReq(id="a", prompt=""), capacity=200, max_bytes=1000)
    pieces: list[int] = []
    taken = 0
    for step, size in steps:
        if step == "take":
            upto = min(len(pieces), size % 7)
            assert buffer.take(upto - 1) == (upto > taken)
            taken = max(taken, upto)
        else:
            shift = {"add": 0, "again": -1, "gap": 1}[step]
            input_id = max(0, len(pieces) + shift)
            fits = sum(pieces) + size <= 1000 and sum(pieces[taken:]) + size <= 200
            if input_id < len(pieces):
                assert not buffer.add(input_id, "x" * size)
            elif input_id > len(pieces) or not fits:
                with pytest.raises(Exception, match=r"input_id|the limit|free"):
                    buffer.add(input_id, "x" * size)
            else:
                assert buffer.add(input_id, "x" * size)
                pieces.append(size)
        assert buffer.buffered == sum(pieces[taken:])
        assert (buffer.next_id, buffer.taken_id) == (len(pieces), taken - 1)
        assert len(buffer.so_far.prompt or "") == buffer.num_bytes == sum(pieces)
        if buffer.buffered >= 160:
            assert buffer.level == "high"
