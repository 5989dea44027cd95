"""Resume tokens, and the streams that wait for their client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.resume import MAX_TOKEN_CHARS, ResumableStreams, ResumeTokens, resume_expired
from app.serving import Stream
from protocol.errors import Replaced, ResumeExpired
from protocol.request import InferenceRequest
from protocol.token_log import Terminal, TokenDelta, TokenLog
from tests.protocol.fakes import STOP, FakeClock

TOKENS = ResumeTokens(b"key")
NAMES = st.text(max_size=40)

# Tokens


@given(NAMES, NAMES, NAMES)
def test_a_token_names_its_stream_for_its_tenant_alone(
    stream: str, replica: str, tenant: str
) -> None:
    token = TOKENS.sign(stream, replica, tenant)
    assert TOKENS.open(token, tenant) == (stream, replica)
    assert token == TOKENS.sign(stream, replica, tenant)
    assert len(token) <= MAX_TOKEN_CHARS
    assert token.replace("-", "a").replace("_", "a").isalnum()
    for other, opener in ((tenant + "x", TOKENS), (tenant, ResumeTokens(b"another key"))):
        with pytest.raises(ResumeExpired):
            opener.open(token, other)


@given(st.data())
def test_a_token_that_was_changed_anywhere_is_refused(data: st.DataObject) -> None:
    token = TOKENS.sign("stream-1", "replica-1", "red")
    at = data.draw(st.integers(0, len(token)))
    forged = (
        token[:at] + data.draw(st.text(max_size=3)) + token[at + data.draw(st.integers(0, 2)) :]
    )
    if forged != token:
        with pytest.raises(ResumeExpired) as caught:
            TOKENS.open(forged, "red")
        assert caught.value.info == resume_expired().info


@pytest.mark.parametrize("token", ["", "=", "A", "é", "\ud800", "A" * 10_000, "A" * 22, "A" * 30])
def test_what_is_no_token_is_refused_in_the_same_words(token: str) -> None:
    with pytest.raises(ResumeExpired) as caught:
        TOKENS.open(token, "red")
    assert caught.value.info == resume_expired().info


def test_names_that_do_not_fit_a_token_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="the limit is 256"):
        TOKENS.sign("s" * 200, "r" * 100, "red")


# Streams that wait


class Owner:
    def __init__(self) -> None:
        self.num_replaced = 0

    def replace(self) -> None:
        self.num_replaced += 1


class Held:
    """A stream, its owner, and how often it was cancelled."""

    def __init__(self, token: str = "t", tenant: str = "red", num_tokens: int = 1) -> None:
        self.owner = Owner()
        self.num_cancelled = 0
        log = TokenLog()
        log.append(*(TokenDelta(seq, "x", (seq,)) for seq in range(num_tokens)))
        request = InferenceRequest(request_id=token, tenant=tenant, model="m", prompt="p" * 1000)
        self.stream = Stream(request=request, log=log, cancel=self._cancel, token=token)

    def _cancel(self) -> None:
        self.num_cancelled += 1
        self.stream.log.finish(Terminal(finish_reason="cancelled"))


class Waiting:
    """`ResumableStreams` on a clock that the test moves."""

    def __init__(self, window_s: float = 30.0, **options: int) -> None:
        self.clock = FakeClock()
        self.streams = ResumableStreams(window_s, clock=self.clock, **options)

    def hold(self, *held: Held) -> None:
        for one in held:
            self.streams.add(one.stream, one.owner)

    def detach(self, *held: Held) -> None:
        for one in held:
            self.streams.detach(one.stream, one.owner)

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.streams.tick()

    def knows(self, held: Held) -> bool:
        return self.streams.find(held.stream.token, held.stream.request.tenant) is not None


def test_a_stream_that_nobody_comes_for_is_cancelled_when_the_window_ends() -> None:
    waiting, held = Waiting(), Held()
    waiting.hold(held)
    waiting.pass_time(1000)
    waiting.detach(held)
    assert waiting.streams.next_tick_at == waiting.clock.now + 30
    waiting.pass_time(29.9)
    assert waiting.knows(held)
    assert held.num_cancelled == 0
    waiting.pass_time(0.1)
    assert not waiting.knows(held)
    assert held.num_cancelled == 1
    assert waiting.streams.next_tick_at is None
    waiting.pass_time(100)
    assert held.num_cancelled == 1


def test_a_stream_that_is_taken_in_time_runs_on() -> None:
    waiting, held, later = Waiting(), Held(), Owner()
    waiting.hold(held)
    waiting.detach(held)
    waiting.pass_time(29)
    assert waiting.streams.take("t", "red", later) is held.stream
    waiting.pass_time(1000)
    assert held.num_cancelled == held.owner.num_replaced == 0
    waiting.streams.detach(held.stream, later)
    waiting.pass_time(29)
    assert waiting.knows(held)


def test_a_finished_stream_is_kept_for_the_window_after_its_end() -> None:
    waiting, held = Waiting(), Held()
    waiting.hold(held)
    held.stream.log.finish(STOP)
    waiting.detach(held)
    waiting.pass_time(29)
    found = waiting.streams.take("t", "red", Owner())
    assert found.log is held.stream.log
    assert found.request.tenant == "red"


def test_the_end_of_a_stream_that_waits_starts_the_window_again() -> None:
    waiting, held = Waiting(), Held()
    waiting.hold(held)
    waiting.detach(held)
    waiting.pass_time(20)
    held.stream.log.append(TokenDelta(1, "y", (1,)))
    held.stream.log.finish(STOP)
    waiting.pass_time(29)
    assert waiting.knows(held)
    waiting.pass_time(1)
    assert not waiting.knows(held)
    assert held.num_cancelled == 0


def test_who_takes_a_stream_replaces_its_owner_once() -> None:
    waiting, held, later = Waiting(), Held(), Owner()
    waiting.hold(held)
    waiting.streams.take("t", "red", later)
    assert held.owner.num_replaced == 1
    # What the former owner does with it from now on is of no account.
    waiting.detach(held)
    waiting.streams.drop(held.stream, held.owner)
    assert len(waiting.streams) == held.num_cancelled == 0
    waiting.streams.take("t", "red", Owner())
    assert (held.owner.num_replaced, later.num_replaced) == (1, 1)


def test_a_stream_that_is_not_wanted_any_more_is_cancelled_at_once() -> None:
    waiting, held, left = Waiting(), Held(), Held("left")
    waiting.hold(held, left)
    waiting.streams.drop(held.stream, held.owner)
    waiting.detach(left)
    waiting.streams.drop(left.stream, left.owner)
    assert held.num_cancelled == left.num_cancelled == 1
    assert not waiting.knows(held)
    assert not waiting.knows(left)
    assert len(waiting.streams) == 0


def test_another_tenants_stream_is_not_there() -> None:
    waiting, held = Waiting(), Held(tenant="red")
    waiting.hold(held)
    waiting.detach(held)
    for token, tenant in (("t", "blue"), ("u", "red"), ("", "red")):
        with pytest.raises(ResumeExpired) as caught:
            waiting.streams.take(token, tenant, Owner())
        assert caught.value.info == resume_expired().info
    assert waiting.knows(held)


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_stream_that_goes_on_elsewhere_is_not_ours_any_more(is_detached: bool) -> None:
    waiting, held = Waiting(), Held()
    waiting.hold(held)
    if is_detached:
        waiting.detach(held)
    moved = Terminal(finish_reason="error", error=Replaced("elsewhere").info)
    held.stream.log.finish(moved)
    assert not waiting.knows(held)
    waiting.detach(held)
    assert len(waiting.streams) == 0


def test_without_a_window_a_stream_ends_with_its_owner() -> None:
    waiting, held, found = Waiting(window_s=0.0), Held(), Held("found")
    waiting.hold(held)
    assert not waiting.knows(held)
    waiting.detach(held)
    waiting.streams.add(found.stream)
    assert held.num_cancelled == found.num_cancelled == 1


def test_a_stream_without_a_token_ends_with_its_owner() -> None:
    waiting, held = Waiting(), Held(token="")
    waiting.hold(held)
    waiting.detach(held)
    assert held.num_cancelled == 1
    assert not waiting.knows(held)


def test_only_so_many_wait_and_the_oldest_go_first() -> None:
    waiting = Waiting(max_streams=2)
    held = [Held(f"t{i}") for i in range(4)]
    waiting.hold(*held)
    assert all(map(waiting.knows, held)), "who has an owner does not count"
    held[1].stream.log.finish(STOP)
    waiting.detach(*held)
    assert [waiting.knows(one) for one in held] == [False, False, True, True]
    assert [one.num_cancelled for one in held] == [1, 0, 0, 0]


def test_what_was_sent_whole_makes_room_for_what_was_lost() -> None:
    waiting = Waiting(max_streams=2)
    lost, others = Held("lost"), [Held(f"t{i}") for i in range(10)]
    waiting.hold(lost, *others)
    waiting.detach(lost)
    for other in others:
        other.stream.log.finish(STOP)
        waiting.streams.detach(other.stream, other.owner, has_all=True)
    assert waiting.knows(lost)
    assert [waiting.knows(other) for other in others] == [False] * 9 + [True]
    waiting.pass_time(15)
    lost.stream.log.finish(STOP)
    waiting.pass_time(15)
    assert waiting.knows(lost)
    assert len(waiting.streams) == 1
    waiting.pass_time(15)
    assert len(waiting.streams) == 0


def test_only_so_much_memory_waits() -> None:
    waiting = Waiting(max_bytes=1_000_000)
    held = [Held(f"t{i}", num_tokens=1000) for i in range(5)]
    waiting.hold(*held)
    waiting.detach(*held)
    assert [waiting.knows(one) for one in held] == [False, False, True, True, True]
    large = Held("large", num_tokens=8000)
    waiting.hold(large)
    waiting.detach(large)
    assert len(waiting.streams) == 0
    assert large.num_cancelled == 1


def test_a_finished_stream_does_not_hold_on_to_its_prompt() -> None:
    waiting, held = Waiting(), Held()
    waiting.hold(held)
    held.stream.log.finish(STOP)
    waiting.detach(held)
    assert waiting.streams.take("t", "red", Owner()).request.prompt is None


def test_clearing_cancels_what_waits_and_leaves_what_is_owned() -> None:
    waiting, held, owned = Waiting(), Held(), Held("owned")
    waiting.hold(held, owned)
    waiting.detach(held)
    waiting.streams.clear()
    assert (held.num_cancelled, owned.num_cancelled) == (1, 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "detach", "spend", "drop", "take", "finish", "move", "wait"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(STEPS)
def test_whatever_happens_every_stream_has_one_owner_and_none_is_left(
    steps: list[tuple[str, int]],
) -> None:
    waiting = Waiting(max_streams=3)
    all_held = [Held(f"t{i}") for i in range(4)]
    owner_of: dict[int, Owner | None] = {}
    for step, i in steps:
        held = all_held[i]
        if step == "add" and i not in owner_of:
            waiting.hold(held)
            owner_of[i] = held.owner
        elif step == "take" and i in owner_of:
            former, owner = owner_of[i], Owner()
            try:
                waiting.streams.take(held.stream.token, "red", owner)
            except ResumeExpired:
                assert held.stream.log.terminal is not None
                continue
            owner_of[i] = owner
            if former is not None:
                assert former.num_replaced == 1
        elif step in ("detach", "drop") and (owner := owner_of.get(i)) is not None:
            getattr(waiting.streams, step)(held.stream, owner)
            owner_of[i] = None
        elif step == "spend" and (owner := owner_of.get(i)) is not None:
            held.stream.log.finish(STOP)
            waiting.streams.detach(held.stream, owner, has_all=True)
            owner_of[i] = None
        elif step == "finish":
            held.stream.log.finish(STOP)
        elif step == "move":
            error = Replaced("elsewhere").info
            held.stream.log.finish(Terminal(finish_reason="error", error=error))
        elif step == "wait":
            waiting.pass_time(12.0)
        assert len(waiting.streams) <= 3
    for i, owner in owner_of.items():
        if owner is not None:
            waiting.streams.detach(all_held[i].stream, owner)
    waiting.pass_time(30)
    waiting.pass_time(30)
    assert len(waiting.streams) == 0
    assert not waiting.streams._entries
    assert waiting.streams._unowned_bytes == 0
    for i in owner_of:
        assert all_held[i].stream.log.terminal is not None
        assert all_held[i].num_cancelled <= 1
        assert not all_held[i].stream.log._listeners
