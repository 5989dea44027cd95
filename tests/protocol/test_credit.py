"""Credit: what may run ahead of the client's acknowledgements."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.credit import Credit
from protocol.errors import InvalidRequest
from protocol.events import GrantCredit
from protocol.session import HIGH_WINDOW, Session
from protocol.token_log import TokenDelta
from tests.protocol.fakes import (
    MISS,
    STOP,
    ack,
    delta,
    infer_req,
    only_error,
    open_session,
    piece,
    resume,
    sent,
)

WIDE = 65_536


def streaming(session: Session, id: str = "a", **fields: object) -> None:
    session.receive(infer_req(id, **fields))
    session.accept(id, stream="s", cache=MISS)


def send_all(session: Session, id: str = "a", *, upto: int = 1000) -> int:
    """Sends one token after the other as far as credit goes; the number of the last one."""
    seq = -1
    while seq < upto and session.admits(id, seq + 1):
        seq += 1
        session.chunk(id, delta(seq))
    return seq


def test_a_window_is_counted_from_the_last_acknowledged_token() -> None:
    credit = Credit(4)
    assert [credit.admits(seq, WIDE) for seq in (0, 3, 1000)] == [True] * 3
    credit.sent_seq = 0
    assert [credit.admits(seq, WIDE) for seq in (1, 3, 4)] == [True, True, False]
    assert credit.acknowledge(0, 256)
    credit.sent_seq = 3
    assert [credit.admits(seq, WIDE) for seq in (4, 5)] == [True, False]


def test_an_old_acknowledgement_changes_nothing() -> None:
    credit = Credit(4)
    credit.sent_seq = 3
    assert credit.acknowledge(2, 256)
    assert not credit.acknowledge(2, 256)
    assert not credit.acknowledge(1, 256)
    assert not credit.acknowledge(-1, 256)
    assert credit.acked_seq == 2


def test_what_was_not_sent_cannot_be_acknowledged() -> None:
    credit = Credit(None, last_seq=6)
    with pytest.raises(InvalidRequest, match="seq is 7, the last token that was sent is 6") as no:
        credit.acknowledge(7, 256)
    assert (no.value.param, no.value.limit) == ("seq", 6)
    assert credit.window is None


@given(
    window=st.integers(1, 40),
    widths=st.lists(st.integers(1, 60), max_size=60),
    acks=st.lists(st.integers(0, 200), max_size=200),
    caps=st.lists(st.sampled_from([64, WIDE]), min_size=1, max_size=5),
)
def test_credit_is_never_exceeded_and_never_a_deadlock(
    window: int, widths: list[int], acks: list[int], caps: list[int]
) -> None:
    """Whatever is acknowledged and when; the last acknowledgement is that of a client that shows all."""
    credit = Credit(window)
    ends = [total - 1 for total in accumulate(widths)]
    steps = iter(acks)
    turn = 0
    while ends:
        cap = caps[turn % len(caps)]
        turn += 1
        while ends and credit.admits(ends[0], cap):
            ahead = ends[0] - credit.acked_seq
            assert ahead <= min(window, cap) or credit.sent_seq == credit.acked_seq
            credit.sent_seq = ends.pop(0)
        step = next(steps, None)
        seq = credit.sent_seq if step is None else min(step, credit.sent_seq)
        before = credit.acked_seq
        assert credit.acknowledge(seq, 256) == (seq > before)
        assert credit.acked_seq == max(seq, before)


def test_a_request_without_a_window_is_not_held() -> None:
    session = open_session()
    streaming(session)
    assert not session.has_credit("a")
    assert send_all(session, upto=2000) == 2000


def test_a_request_with_a_window_is_held_until_it_acknowledges() -> None:
    session = open_session()
    streaming(session, window=10)
    assert session.has_credit("a")
    assert send_all(session) == 9
    assert session.receive(ack("a", 4)) == [GrantCredit("a")]
    assert session.admits("a", 14)
    assert not session.admits("a", 15)
    assert session.receive(ack("a", 4)) == []
    assert session.receive(ack("a", 2)) == []
    assert not session.admits("a", 15)


def test_a_chunk_counts_all_its_tokens_and_one_always_may_go() -> None:
    session = open_session()
    streaming(session, window=4)
    session.chunk("a", TokenDelta(2, "xyz", (1, 2, 3)))
    assert session.admits("a", 3)
    assert not session.admits("a", 4)
    session.receive(ack("a", 2))
    assert session.admits("a", 100)
    session.chunk("a", TokenDelta(100, "a long one"))
    assert not session.admits("a", 101)


def test_the_first_ack_switches_credit_on() -> None:
    session = open_session(window_tokens=20)
    streaming(session)
    send_all(session, upto=99)
    assert session.receive(ack("a", 49)) == [GrantCredit("a")]
    assert session.has_credit("a")
    assert not session.admits("a", 100)
    session.receive(ack("a", 90))
    assert session.admits("a", 110)
    assert not session.admits("a", 111)


def test_an_ack_of_nothing_switches_credit_on_too() -> None:
    session = open_session(window_tokens=20)
    streaming(session)
    assert session.receive(ack("a", -1)) == []
    assert send_all(session) == 19


def test_a_resumed_stream_has_the_credit_that_it_asks_for_behind_what_the_client_has() -> None:
    session = open_session()
    session.receive(resume("a", last_seq=9, window=5))
    assert session.receive(ack("a", 9)) == []
    session.accept("a", stream="s", cache=MISS)
    session.chunk("a", delta(10))
    assert session.admits("a", 14)
    assert not session.admits("a", 15)
    error = only_error(session.receive(ack("a", 11)))
    assert (error["param"], error["limit"]) == ("seq", 10)


def test_an_ack_of_more_than_was_sent_is_refused_and_the_stream_goes_on() -> None:
    session = open_session()
    streaming(session, window=5)
    session.chunk("a", delta(0))
    error = only_error(session.receive(ack("a", 1)))
    assert (error["code"], error["param"], error["limit"]) == ("invalid_request", "seq", 0)
    assert "id" not in error
    assert '"a"' in error["message"]
    session.chunk("a", delta(1))


def test_an_ack_after_the_end_is_ignored_and_one_of_a_stranger_answered() -> None:
    session = open_session()
    streaming(session, window=5)
    session.done("a", STOP, 0)
    assert session.receive(ack("a", 7)) == []
    error = only_error(session.receive(ack("b", 7)))
    assert (error["code"], error["id"]) == ("unknown_id", "b")


def test_a_full_input_buffer_narrows_the_window_of_the_other_streams() -> None:
    session = open_session(input_buffer_bytes=100)
    streaming(session, "a", window=256)
    streaming(session, "b", window=16)
    streaming(session, "free")
    session.receive(infer_req("in", input="chunked"))
    assert session.admits("a", 200)
    events = session.receive(piece("in", 0, "x" * 80))
    assert [frame["level"] for frame in sent(events)] == ["high"]
    assert send_all(session, "a") == HIGH_WINDOW - 1
    assert send_all(session, "b") == 15
    assert send_all(session, "free", upto=500) == 500
    events = session.take_input("in", 0)
    assert [frame["type"] for frame in sent(events)] == ["ANCHOR", "INPUT_STATE"]
    assert [event.id for event in events if isinstance(event, GrantCredit)] == ["a", "b"]
    assert session.admits("a", 255)
    assert not session.admits("a", 256)


@pytest.mark.parametrize("how", ["done", "refuse"])
def test_the_window_is_wide_again_when_the_input_is_given_up(how: str) -> None:
    session = open_session(input_buffer_bytes=100)
    streaming(session, "a", window=256)
    session.receive(infer_req("in", input="chunked"))
    session.receive(piece("in", 0, "x" * 80))
    send_all(session, "a")
    assert session.relax() == []
    if how == "done":
        session.done("in", STOP, 0)
    else:
        session.refuse("in", InvalidRequest("no").info)
    assert session.relax() == [GrantCredit("a")]
    assert session.admits("a", 255)
