from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import CLIENT_FRAMES, SERVER_FRAMES, encode
from protocol.errors import InternalError, InvalidRequest
from protocol.events import (
    CLOSE_CODES,
    CancelRequest,
    Close,
    GrantCredit,
    InputArrived,
    ReceiveRequest,
    ResumeRequest,
    Send,
    StartRequest,
)
from protocol.frames import (
    Ack,
    Anchor,
    Cancel,
    ClientFrame,
    Drain,
    ErrorFrame,
    Frame,
    Hello,
    InferAck,
    InferChunk,
    InferDone,
    InferReq,
    InputChunk,
    InputState,
    Ping,
    Pong,
    Resume,
)
from protocol.session import Session, SessionLimits
from protocol.states import TRANSITIONS, Action, ConnectionState, RequestState, State
from protocol.token_log import CacheOutcome, Terminal, TokenDelta
from tests.protocol.fakes import (
    MISS,
    STOP,
    FakeClock,
    ack,
    cancel,
    delta,
    framed,
    hello,
    infer_req,
    only_error,
    open_session,
    piece,
    read,
    resume,
    sent,
)

REFUSED = InvalidRequest("prompt must not be empty", param="prompt").info


def start(session: Session, id: str, *, binary: bool = False, **fields: Any) -> None:
    raw = infer_req(id, **fields)
    (event,) = session.receive(framed(raw) if binary else raw)
    assert isinstance(event, StartRequest)
    assert (event.id, event.binary) == (id, binary)


def accept(session: Session, id: str) -> dict[str, Any]:
    return read(session.accept(id, stream=f"s-{id}", cache=MISS))


def test_hello_comes_first_and_tells_the_limits() -> None:
    limits = SessionLimits(max_live_requests=3, heartbeat_s=7.0)
    session = Session(limits, FakeClock())
    (frame,) = sent(session.open(hello(limits)))
    assert frame["type"] == "HELLO"
    assert frame["limits"]["max_live_requests"] == 3
    assert frame["heartbeat_s"] == 7.0
    assert frame["resume_window_s"] == 0
    with pytest.raises(ValueError, match="HELLO"):
        session.open(hello(limits))


def test_one_request_from_its_first_frame_to_its_last() -> None:
    session = open_session()
    start(session, "a")
    ack = session.accept("a", stream="s-1", cache=MISS, queue_position=2)
    assert read(ack) == {
        "type": "INFER_ACK",
        "id": "a",
        "stream": "s-1",
        "cache": {"outcome": "miss"},
        "queue_position": 2,
    }
    assert read(session.chunk("a", TokenDelta(0, "Pa", (7,)))) == {
        "type": "INFER_CHUNK",
        "id": "a",
        "seq": 0,
        "text": "Pa",
    }
    assert read(session.chunk("a", TokenDelta(2, "ris", (8, 9))))["seq"] == 2
    hit = CacheOutcome(outcome="semantic", similarity=0.97, tier="memory")
    assert read(session.done("a", STOP, 3, hit)) == {
        "type": "INFER_DONE",
        "id": "a",
        "seq": 3,
        "is_final": True,
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "total_tokens": 5,
        },
        "timing": {"queue_ms": 0.0, "ttft_ms": 0.0, "total_ms": 0.0},
        "cache": {"outcome": "semantic", "tier": "memory", "similarity": 0.97},
    }
    assert session.live_ids == ()


def test_a_failed_answer_ends_with_the_error_in_its_last_frame() -> None:
    session = open_session()
    start(session, "a")
    accept(session, "a")
    session.chunk("a", delta(0))
    failed = Terminal(finish_reason="stop", error=InternalError("incident 1").info)
    done = read(session.done("a", failed, 1))
    assert done["finish_reason"] == "error"
    assert done["error"]["code"] == "internal"


def test_a_request_is_answered_in_the_form_in_which_it_came() -> None:
    session = open_session()
    start(session, "text")
    start(session, "bin", binary=True)
    for id, form in (("text", str), ("bin", bytes)):
        assert isinstance(session.accept(id, stream="s", cache=MISS), form)
        assert isinstance(session.chunk(id, delta(0)), form)
        assert isinstance(session.done(id, STOP, 1), form)
    start(session, "text", binary=True)
    assert isinstance(session.refuse("text", REFUSED), bytes)
    for data in (framed('{"type":"PING"}'), framed("?"), b""):
        (event,) = session.receive(data)
        assert isinstance(event, Send)
        assert isinstance(event.data, bytes)


@pytest.mark.parametrize(("binary", "form"), [(False, str), (True, bytes)])
def test_unasked_frames_come_in_the_negotiated_form(binary: bool, form: type) -> None:
    clock = FakeClock()
    limits = SessionLimits()
    session = Session(limits, clock, binary=binary)
    events = session.open(hello(limits))
    clock.now += limits.heartbeat_s
    events += session.tick(clock.now)
    assert [type(event.data) for event in events if isinstance(event, Send)] == [form, form]


def test_token_ids_are_sent_when_asked_for() -> None:
    session = open_session()
    start(session, "a", return_token_ids=True)
    start(session, "b")
    accept(session, "a")
    accept(session, "b")
    assert read(session.chunk("a", TokenDelta(1, "x", (7, 8))))["token_ids"] == [7, 8]
    assert "token_ids" not in read(session.chunk("b", TokenDelta(1, "x", (7, 8))))


# Resuming


@pytest.mark.parametrize("binary", [False, True])
def test_a_resumed_stream_is_answered_like_a_request(binary: bool) -> None:
    session = open_session()
    raw = resume("a", "token", 4)
    events = session.receive(framed(raw) if binary else raw)
    assert events == [ResumeRequest("a", Resume(id="a", stream="token", last_seq=4), binary)]
    assert accept(session, "a")["type"] == "INFER_ACK"
    chunk = session.chunk("a", delta(5))
    assert isinstance(chunk, bytes) is binary
    assert "token_ids" not in read(chunk)
    assert read(session.done("a", STOP, 6))["type"] == "INFER_DONE"
    assert session.live_ids == ()


def test_a_resumed_stream_brings_token_ids_when_it_asks_again() -> None:
    session = open_session()
    session.receive(resume("a", return_token_ids=True))
    accept(session, "a")
    assert read(session.chunk("a", delta(0)))["token_ids"] == [0]


def test_a_refused_resume_ends_its_id_and_takes_no_room() -> None:
    session = open_session(max_live_requests=1)
    for _ in range(3):
        session.receive(resume("a"))
        assert only_error(session.receive(resume("a")))["code"] == "duplicate_id"
        assert only_error(session.receive(resume("b")))["code"] == "rate_limited"
        assert read(session.refuse("a", REFUSED))["id"] == "a"
    start(session, "a")


def test_a_stream_may_be_cancelled_before_it_is_found() -> None:
    session = open_session()
    session.receive(resume("a"))
    assert session.receive(cancel("a")) == [CancelRequest("a")]
    accept(session, "a")
    session.done("a", Terminal(finish_reason="cancelled"), 0)


# Ids


def test_a_duplicate_of_a_live_id_is_refused_and_the_first_goes_on() -> None:
    session = open_session()
    start(session, "x")
    for _ in range(2):
        error = only_error(session.receive(infer_req("x")))
        assert (error["code"], error["id"], error["param"]) == ("duplicate_id", "x", "id")
    accept(session, "x")
    assert only_error(session.receive(infer_req("x")))["code"] == "duplicate_id"
    session.chunk("x", delta(0))
    assert read(session.done("x", STOP, 1))["type"] == "INFER_DONE"


def test_an_id_may_be_used_again_after_its_end() -> None:
    session = open_session()
    for _ in range(3):
        start(session, "x")
        accept(session, "x")
        session.done("x", STOP, 0)
    start(session, "x")
    session.refuse("x", REFUSED)
    start(session, "x")


def test_ids_are_names_inside_one_connection_only() -> None:
    one, other = open_session(), open_session()
    start(one, "x")
    start(other, "x")
    assert one.receive(cancel("x")) == [CancelRequest("x")]
    accept(other, "x")
    assert read(other.chunk("x", delta(0)))["type"] == "INFER_CHUNK"


def test_more_live_requests_than_the_limit_are_refused_until_one_ends() -> None:
    session = open_session(max_live_requests=2)
    start(session, "a")
    start(session, "b")
    error = only_error(session.receive(infer_req("c")))
    assert (error["code"], error["id"], error["limit"]) == ("rate_limited", "c", 2)
    assert error["retryable"] is True
    assert only_error(session.receive(infer_req("a")))["code"] == "duplicate_id"
    session.refuse("a", REFUSED)
    start(session, "c")


# Cancelling


@pytest.mark.parametrize("is_accepted", [False, True])
def test_cancel_asks_once_however_often_it_is_sent(is_accepted: bool) -> None:
    session = open_session()
    start(session, "a")
    if is_accepted:
        accept(session, "a")
    assert session.receive(cancel("a")) == [CancelRequest("a")]
    assert session.receive(cancel("a")) == []
    done = read(session.done("a", Terminal(finish_reason="cancelled"), 0))
    assert done["finish_reason"] == "cancelled"


def test_a_late_cancel_is_harmless() -> None:
    session = open_session()
    start(session, "a")
    accept(session, "a")
    session.done("a", STOP, 0)
    start(session, "b")
    session.refuse("b", REFUSED)
    assert session.receive(cancel("a")) == []
    assert session.receive(cancel("b")) == []


def test_cancel_of_an_unknown_id_is_answered_and_nothing_else_happens() -> None:
    session = open_session()
    start(session, "a")
    error = only_error(session.receive(cancel("b")))
    assert (error["code"], error["id"]) == ("unknown_id", "b")
    assert session.live_ids == ("a",)


def test_cancel_reaches_only_the_new_request_of_a_reused_id() -> None:
    session = open_session()
    start(session, "a")
    assert session.receive(cancel("a")) == [CancelRequest("a")]
    session.done("a", Terminal(finish_reason="cancelled"), 0)
    start(session, "a")
    assert session.receive(cancel("a")) == [CancelRequest("a")]


def test_only_so_many_ended_ids_are_remembered() -> None:
    session = open_session(max_remembered_ids=2)
    for id in ("a", "b", "c"):
        start(session, id)
        session.refuse(id, REFUSED)
    assert only_error(session.receive(cancel("a")))["code"] == "unknown_id"
    assert session.receive(cancel("b")) == session.receive(cancel("c")) == []


# Bad input


@pytest.mark.parametrize(
    "data",
    ["", "{", '{"type":"NOPE"}', b"", b"\x02\x00\x00\x00\x00\x00{}", "[" * 200_000, infer_req(5)],
)
def test_a_bad_message_gets_one_error_and_the_session_goes_on(data: str | bytes) -> None:
    session = open_session()
    start(session, "a")
    accept(session, "a")
    assert "id" not in only_error(session.receive(data))
    session.chunk("a", delta(0))
    start(session, "b")


def test_an_error_names_the_request_that_it_refuses() -> None:
    session = open_session()
    error = only_error(session.receive('{"type":"INFER_REQ","id":"r","prompt":"x","top_p":NaN}'))
    assert (error["id"], error["param"]) == ("r", "top_p")
    start(session, "r")


def test_a_bad_frame_with_a_live_id_does_not_look_like_the_end_of_that_request() -> None:
    session = open_session()
    start(session, "a")
    for data in (
        infer_req("a", temperature="hot"),
        '{"type":"NOPE","id":"a"}',
        framed(infer_req("a"), version=9),
        infer_req("a")[:-1],
    ):
        assert "id" not in only_error(session.receive(data))
    assert session.live_ids == ("a",)


@pytest.mark.parametrize("form", [str, bytes])
def test_a_message_over_the_limit_is_answered_and_closes_the_connection(form: type) -> None:
    session = open_session(max_message_bytes=100)
    start(session, "a")
    # 60 characters are within the limit, their 120 bytes of UTF-8 are not.
    text = "é" * 60
    events = session.receive(text if form is str else text.encode())
    error, close = events
    assert sent([error])[0]["code"] == "input_too_large"
    assert sent([error])[0]["limit"] == 100
    assert isinstance(close, Close)
    assert close.code == 1009
    assert session.receive(infer_req("b")) == []
    assert session.close() == [CancelRequest("a")]


def test_a_message_at_the_limit_is_taken() -> None:
    raw = infer_req("a")
    session = open_session(max_message_bytes=len(raw))
    start(session, "a")
    assert only_error(open_session(max_message_bytes=len(raw) - 1).receive(raw)[:1])


# Heartbeat


@pytest.mark.parametrize("ts", [0, 5, 1.25, -3, 2**63, None])
def test_ping_is_answered_at_once_with_its_ts(ts: float | None) -> None:
    session = open_session()
    (pong,) = sent(session.receive(json.dumps({"type": "PING", "ts": ts})))
    assert pong == ({"type": "PONG"} if ts is None else {"type": "PONG", "ts": ts})


def test_the_server_pings_once_a_heartbeat() -> None:
    clock = FakeClock()
    session = open_session(clock, heartbeat_s=15.0)
    pings = 0
    for _ in range(60):
        clock.now += 1.0
        frames = sent(session.tick(clock.now))
        assert all(frame["type"] == "PING" for frame in frames)
        pings += len(frames)
        session.receive('{"type":"PONG"}')
    assert pings == 4


def test_a_peer_that_is_silent_for_two_heartbeats_is_closed() -> None:
    clock = FakeClock()
    session = open_session(clock, heartbeat_s=15.0)
    start(session, "a")
    clock.now = session.next_tick_at
    assert [frame["type"] for frame in sent(session.tick(clock.now))] == ["PING"]
    clock.now = session.next_tick_at
    (event,) = session.tick(clock.now)
    assert isinstance(event, Close)
    assert event.code == 4408
    assert session.state is ConnectionState.CLOSED
    assert session.tick(clock.now + 100) == []
    assert session.close() == [CancelRequest("a")]
    assert session.close() == []


@pytest.mark.parametrize("life", ['{"type":"PONG"}', '{"type":"PING"}', "garbage", b"\x00"])
def test_any_message_counts_as_life(life: str | bytes) -> None:
    clock = FakeClock()
    session = open_session(clock, heartbeat_s=15.0)
    for _ in range(10):
        clock.now += 14.0
        session.receive(life)
        assert not any(isinstance(event, Close) for event in session.tick(clock.now))


def test_silence_while_we_ourselves_were_stopped_does_not_count() -> None:
    clock = FakeClock()
    session = open_session(clock, heartbeat_s=15.0)
    clock.now += 15.0
    session.tick(clock.now)
    clock.now += 300.0
    assert [frame["type"] for frame in sent(session.tick(clock.now))] == ["PING"]
    clock.now += 15.0
    (event,) = session.tick(clock.now)
    assert isinstance(event, Close)


# States


def test_frames_before_hello_do_not_fit() -> None:
    session = Session(SessionLimits(), FakeClock())
    error = only_error(session.receive(infer_req("a")))
    assert (error["code"], error["id"]) == ("bad_state", "a")
    assert only_error(session.receive('{"type":"PING"}'))["code"] == "bad_state"
    assert session.tick(1e9) == []


def test_a_draining_session_ends_what_runs_and_takes_nothing_new() -> None:
    session = open_session()
    start(session, "a")
    assert sent(session.drain(7.5)) == [{"type": "DRAIN", "deadline_s": 7.5}]
    assert session.drain(1.0) == []
    for raw in (infer_req("b"), resume("b")):
        error = only_error(session.receive(raw))
        assert (error["code"], error["id"], error["retryable"]) == ("overloaded", "b", True)
        assert error["retry_after_s"] == 0
    assert sent(session.receive('{"type":"PING","ts":1}')) == [{"type": "PONG", "ts": 1}]
    accept(session, "a")
    assert session.receive(cancel("a")) == [CancelRequest("a")]
    session.done("a", Terminal(finish_reason="cancelled"), 0)
    assert session.live_ids == ()


def test_closing_asks_for_every_live_request_to_be_stopped_once() -> None:
    session = open_session()
    for id in ("a", "b", "c"):
        start(session, id)
    session.receive(cancel("b"))
    session.refuse("c", REFUSED)
    assert session.close() == [CancelRequest("a")]
    assert session.close() == []
    assert session.receive(infer_req("d")) == []
    accept(session, "a")
    session.done("a", Terminal(finish_reason="cancelled"), 0)


EXAMPLES: dict[type[Frame], ClientFrame] = {
    InferReq: InferReq(id="a", prompt="hi"),
    InputChunk: InputChunk(id="a", input_id=0, text="x"),
    Ack: Ack(id="a", seq=5),
    Resume: Resume(id="a", stream="t", last_seq=3),
    Cancel: Cancel(id="a"),
    Ping: Ping(ts=1),
    Pong: Pong(ts=1),
}
EMIT: dict[type[Frame], Callable[[Session], Any]] = {
    InferAck: lambda session: session.accept("a", stream="s", cache=MISS),
    InferChunk: lambda session: session.chunk("a", delta(0)),
    Anchor: lambda session: session.anchor("a", 0),
    InputState: lambda session: session._send(
        "a", InputState(id="a", buffered=0, capacity=1, level="ok")
    ),
    InferDone: lambda session: session.done("a", STOP, 0),
    ErrorFrame: lambda session: session.refuse("a", REFUSED),
}


def session_in(state: State) -> Session:
    """A session that is in this state, or whose request `a` is."""
    if state is ConnectionState.CONNECTING:
        return Session(SessionLimits(), FakeClock())
    session = open_session()
    if state is ConnectionState.DRAINING:
        session.drain(1.0)
    elif state is ConnectionState.CLOSED:
        session.close()
    if state is RequestState.RECEIVING:
        session.receive(infer_req("a", input="chunked"))
    if state in (RequestState.QUEUED, RequestState.STREAMING, RequestState.DONE):
        start(session, "a")
    if state is RequestState.STREAMING:
        accept(session, "a")
    elif state is RequestState.DONE:
        session.refuse("a", REFUSED)
    return session


def observed(session: Session, frame: ClientFrame) -> Action | str:
    """What the session did on a client frame, in the words of the table."""
    events = session.receive(encode(frame))
    if not events:
        return Action.IGNORE
    (event,) = events
    if isinstance(event, StartRequest | ResumeRequest):
        return Action.START
    if isinstance(event, CancelRequest):
        return Action.STOP
    if isinstance(event, InputArrived):
        return Action.TAKE_INPUT
    (seen,) = sent(events)
    if seen["type"] == "PONG":
        return Action.ANSWER_PING
    refusals = {
        "duplicate_id": Action.REFUSE_DUPLICATE,
        "unknown_id": Action.REFUSE_UNKNOWN,
        "overloaded": Action.REFUSE_DRAINING,
        # What is acknowledged in the examples was never sent.
        "invalid_request": Action.COUNT_CREDIT,
    }
    return refusals.get(seen["code"], seen["code"])


@pytest.mark.parametrize("state", [*ConnectionState, *RequestState])
@pytest.mark.parametrize("frame_type", [*CLIENT_FRAMES.values()])
def test_client_frames_do_what_the_table_says(state: State, frame_type: type[Frame]) -> None:
    if isinstance(state, RequestState) and frame_type in (Ping, Pong):
        assert (state, frame_type) not in TRANSITIONS
        return
    expected, _ = TRANSITIONS.get((state, frame_type), ("bad_state", None))
    if state is ConnectionState.CLOSED:
        assert (state, frame_type) not in TRANSITIONS
        expected = Action.IGNORE
    elif expected is Action.BY_REQUEST:
        expected, _ = TRANSITIONS[RequestState.ABSENT, frame_type]
    assert observed(session_in(state), EXAMPLES[frame_type]) == expected


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("frame_type", EMIT)
def test_an_own_frame_that_does_not_fit_is_a_programming_error(
    state: RequestState, frame_type: type[Frame]
) -> None:
    session = session_in(state)
    if (state, frame_type) not in TRANSITIONS:
        with pytest.raises(ValueError, match="'a' in the state"):
            EMIT[frame_type](session)
        return
    EMIT[frame_type](session)
    _, next_state = TRANSITIONS[state, frame_type]
    assert observed(session, Cancel(id="a")) == TRANSITIONS[next_state, Cancel][0]


def test_the_table_has_no_frame_and_no_state_that_nobody_uses() -> None:
    frames = {frame for _, frame in TRANSITIONS}
    ours = {Hello, InferAck, InferChunk, Anchor, InputState, InferDone, ErrorFrame, Drain}
    assert frames == {*CLIENT_FRAMES.values(), *ours}
    assert frames <= {*CLIENT_FRAMES.values(), *SERVER_FRAMES.values()}
    states = {state for state, _ in TRANSITIONS}
    assert states == {*ConnectionState, *RequestState} - {ConnectionState.CLOSED}


def test_every_close_code_says_whether_to_come_back() -> None:
    assert all(1000 <= code < 5000 and row.meaning for code, row in CLOSE_CODES.items())
    assert CLOSE_CODES[4408].should_reconnect
    assert not CLOSE_CODES[1009].should_reconnect


# Everything at once, against a reference

IDS = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("request", "request", "resume", "cancel", "accept", "chunk", "anchor"),
                *("receive", "receive", "piece", "piece", "last", "ack"),
                *("done", "refuse", "bad", "ping"),
            ]
        ),
        st.sampled_from(IDS),
        st.booleans(),
    ),
    max_size=60,
)


@given(STEPS)
def test_every_accepted_request_ends_once_whatever_is_interleaved(
    steps: list[tuple[str, str, bool]],
) -> None:
    session = open_session(max_live_requests=2)
    live: dict[str, str] = {}
    is_binary: dict[str, bool] = {}
    cancelled: set[str] = set()
    ended: set[str] = set()
    started = terminals = 0
    num_pieces: dict[str, int] = {}
    last_seq: dict[str, int] = {}

    for step, id, binary in steps:
        next_id = num_pieces.get(id, 0)
        if step in FROM_CLIENT:
            raw = {
                "request": infer_req(id),
                "receive": infer_req(id, input="chunked"),
                "piece": piece(id, next_id),
                "last": piece(id, next_id, is_last=True),
                "ack": ack(id, last_seq.get(id, -1)),
                "resume": resume(id),
                "cancel": cancel(id),
                "bad": infer_req(id, top_k="x"),
                "ping": '{"type":"PING","ts":4}',
            }[step]
            events = session.receive(framed(raw) if binary else raw)
            for event in events:
                if isinstance(event, Send):
                    assert isinstance(event.data, bytes) is binary
        if step in ("request", "resume", "receive"):
            if id in live:
                assert only_error(events)["code"] == "duplicate_id"
            elif len(live) == 2:
                assert only_error(events)["code"] == "rate_limited"
            else:
                begun = BEGUN_BY[step]
                assert [type(event) for event in events] == [begun]
                live[id], is_binary[id] = "queued", binary
                num_pieces[id], last_seq[id] = 0, -1
                if step == "receive":
                    live[id] = "receiving"
                started += 1
                cancelled.discard(id)
                ended.discard(id)
        elif step == "cancel":
            if id in live:
                assert events == ([] if id in cancelled else [CancelRequest(id)])
                cancelled.add(id)
            elif id in ended:
                assert events == []
            else:
                assert only_error(events)["code"] == "unknown_id"
        elif step in ("piece", "last"):
            if live.get(id) == "receiving":
                num_pieces[id] += 1
                taken = InputArrived if step == "piece" else StartRequest
                assert [type(event) for event in events] == [taken]
                live[id] = "receiving" if step == "piece" else "queued"
            else:
                code = "bad_state" if id in live or id in ended else "unknown_id"
                assert only_error(events)["code"] == code
        elif step == "ack":
            if id in live or id in ended:
                assert [type(event) for event in events] in ([], [GrantCredit])
            else:
                assert only_error(events)["code"] == "unknown_id"
        elif step == "bad":
            assert only_error(events).get("id") == (None if id in live else id)
        elif step == "ping":
            assert sent(events) == [{"type": "PONG", "ts": 4}]
        else:
            allowed = {
                "accept": ["queued"],
                "chunk": ["streaming"],
                "anchor": ["receiving", "streaming"],
                "refuse": ["receiving", "queued"],
            }
            emit = {
                "accept": EMIT_BY_ID[InferAck],
                "chunk": EMIT_BY_ID[InferChunk],
                "anchor": EMIT_BY_ID[Anchor],
                "done": EMIT_BY_ID[InferDone],
                "refuse": EMIT_BY_ID[ErrorFrame],
            }[step]
            if live.get(id) not in allowed.get(step, ["receiving", "queued", "streaming"]):
                with pytest.raises(ValueError, match="in the state"):
                    emit(session, id)
                continue
            data = emit(session, id)
            assert isinstance(data, bytes) is is_binary[id]
            assert read(data)["id"] == id
            if step == "chunk":
                last_seq[id] = 0
            if step == "accept":
                live[id] = "streaming"
            elif step in ("done", "refuse"):
                del live[id]
                ended.add(id)
                terminals += 1
        assert set(session.live_ids) == live.keys()
    assert started == terminals + len(live)


FROM_CLIENT = ("request", "receive", "piece", "last", "ack", "resume", "cancel", "bad", "ping")
BEGUN_BY = {"request": StartRequest, "receive": ReceiveRequest, "resume": ResumeRequest}
EMIT_BY_ID: dict[type[Frame], Callable[[Session, str], str | bytes]] = {
    InferAck: lambda session, id: session.accept(id, stream="s", cache=MISS),
    InferChunk: lambda session, id: session.chunk(id, delta(0)),
    Anchor: lambda session, id: session.anchor(id, 0),
    InferDone: lambda session, id: session.done(id, STOP, 1),
    ErrorFrame: lambda session, id: session.refuse(id, REFUSED),
}


@given(st.lists(st.text(max_size=30) | st.binary(max_size=30), max_size=5))
def test_no_message_makes_a_session_raise(messages: list[str | bytes]) -> None:
    session = open_session()
    for message in messages:
        assert only_error(session.receive(message))["code"] in (
            "invalid_frame",
            "invalid_request",
            "unsupported_version",
        )
