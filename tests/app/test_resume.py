"""Resume tokens, and the streams that wait for their client."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from app.resume import MAX_TOKEN_CHARS, ResumableStreams, ResumeTokens, is_replaced, resume_expired
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

    def __init__(
        self, token: str = "t", tenant: str = "red", num_tokens: int = 1, prompt: str = "p" * 1000
    ) -> None:
        self.owner = Owner()
        self.num_cancelled = 0
        log = TokenLog()
        log.append(*(TokenDelta(seq, "x", (seq,)) for seq in range(num_tokens)))
        request = InferenceRequest(request_id=token, tenant=tenant, model="m", prompt=prompt)
        self.stream = Stream(request=request, log=log, cancel=self._cancel, token=token)

    @property
    def has_moved(self) -> bool:
        return is_replaced(self.stream)

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


def test_what_a_stream_still_grows_by_counts_too() -> None:
    waiting = Waiting(max_bytes=1_000_000)
    growing, other = Held("growing"), Held("other")
    waiting.hold(growing, other)
    waiting.detach(growing)
    growing.stream.log.append(*(TokenDelta(seq, "x", (seq,)) for seq in range(1, 5000)))
    assert waiting.knows(growing)
    waiting.detach(other)
    assert [waiting.knows(one) for one in (growing, other)] == [False, True]
    assert growing.num_cancelled == 1


def test_the_prompt_of_a_stream_that_runs_counts_until_its_end() -> None:
    waiting = Waiting(max_bytes=1_000_000)
    held = [Held(f"t{i}", prompt="p" * 400_000) for i in range(3)]
    waiting.hold(*held)
    waiting.detach(*held)
    assert [waiting.knows(one) for one in held] == [False, True, True]
    held[1].stream.log.finish(STOP)
    again = Held("again", prompt="p" * 400_000)
    waiting.hold(again)
    waiting.detach(again)
    assert all(map(waiting.knows, [*held[1:], again]))


def test_streams_with_one_log_may_be_let_go_as_it_ends() -> None:
    waiting = Waiting(max_bytes=1_000_000)
    first = Held("first", num_tokens=1000)
    second = Held("second")
    second.stream.log = first.stream.log
    waiting.hold(first, second)
    waiting.detach(first, second)
    log = first.stream.log
    log.append(*(TokenDelta(seq, "x", (seq,)) for seq in range(1000, 3000)))
    log.finish(STOP)
    assert [waiting.knows(one) for one in (first, second)] == [True, False]
    waiting.pass_time(30)
    assert len(waiting.streams) == 0


WINDOW_S, MAX_STREAMS = 30.0, 3


@dataclasses.dataclass
class Known:
    """What the reference knows of a stream."""

    owner: Owner | None
    due: float = 0.0
    is_spent: bool = False


class Reference:
    """What `ResumableStreams` has to do, put down without care for speed."""

    def __init__(self) -> None:
        self.known: dict[Held, Known] = {}
        self.cancelled: set[Held] = set()

    def keep(self, held: Held, now: float, *, is_spent: bool) -> None:
        self.known.pop(held, None)
        if not held.has_moved:
            self.known[held] = Known(None, now + WINDOW_S, is_spent)
        while len(waiting := self.waiting()) > MAX_STREAMS:
            spent = [each for each in waiting if self.known[each].is_spent]
            self.let_go((spent or waiting)[0])

    def let_go(self, held: Held) -> None:
        del self.known[held]
        if held.stream.log.terminal is None:
            self.cancelled.add(held)

    def waiting(self) -> list[Held]:
        """In the order in which they began to."""
        return [held for held, known in self.known.items() if known.owner is None]


class ResumeMachine(RuleBasedStateMachine):
    """Streams, their owners and time, in any order; `held` has every stream there was."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting(WINDOW_S, max_streams=MAX_STREAMS)
        self.reference = Reference()
        self.all_held: list[Held] = []
        self.owners: list[Owner] = []
        self.num_replaced: Counter[Owner] = Counter()

    @rule(target=held, has_owner=st.booleans(), tenant=st.sampled_from(["red", "blue"]))
    def add(self, has_owner: bool, tenant: str) -> Held:
        held = Held(f"t{len(self.all_held)}", tenant)
        self.all_held.append(held)
        self.owners.append(held.owner)
        if has_owner:
            self.reference.known[held] = Known(held.owner)
        else:
            self.reference.keep(held, self.waiting.clock.now, is_spent=False)
        self.waiting.streams.add(held.stream, held.owner if has_owner else None)
        return held

    @rule(held=held)
    def append(self, held: Held) -> None:
        log = held.stream.log
        if log.terminal is None:
            log.append(TokenDelta(log.next_seq, "x", (log.next_seq,)))

    @rule(held=held, is_moved=st.booleans())
    def finish(self, held: Held, is_moved: bool) -> None:
        if held.stream.log.terminal is not None:
            return
        known = self.reference.known.get(held)
        error = Replaced("elsewhere").info
        terminal = Terminal(finish_reason="error", error=error) if is_moved else STOP
        held.stream.log.finish(terminal)
        if known is not None and known.owner is None:
            self.reference.keep(held, self.waiting.clock.now, is_spent=known.is_spent)

    @rule(held=held, is_spent=st.booleans(), owner=st.integers(0))
    def detach(self, held: Held, is_spent: bool, owner: int) -> None:
        by = self._owner(held, owner)
        known = self.reference.known.get(held)
        if known is not None and known.owner is by:
            self.reference.keep(held, self.waiting.clock.now, is_spent=is_spent)
        self.waiting.streams.detach(held.stream, by, has_all=is_spent)

    @rule(held=held, owner=st.integers(0))
    def drop(self, held: Held, owner: int) -> None:
        by = self._owner(held, owner)
        known = self.reference.known.get(held)
        if known is not None and known.owner in (by, None):
            self.reference.let_go(held)
        self.waiting.streams.drop(held.stream, by)

    @rule(held=held, tenant=st.sampled_from(["red", "blue"]))
    def take(self, held: Held, tenant: str) -> None:
        known, owner = self.reference.known.get(held), Owner()
        if known is not None and tenant == held.stream.request.tenant and not held.has_moved:
            if known.owner is not None:
                self.num_replaced[known.owner] += 1
            self.reference.known[held] = Known(owner)
            self.owners.append(owner)
            taken = self.waiting.streams.take(held.stream.token, tenant, owner)
            assert taken.log is held.stream.log
        else:
            with pytest.raises(ResumeExpired):
                self.waiting.streams.take(held.stream.token, tenant, owner)

    @rule(seconds=st.sampled_from([0.0, 10.0, 15.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        now = self.waiting.clock.now + seconds
        for held in self.reference.waiting():
            if self.reference.known[held].due <= now:
                self.reference.let_go(held)
        self.waiting.pass_time(seconds)

    @rule()
    def clear(self) -> None:
        for held in self.reference.waiting():
            self.reference.let_go(held)
        self.waiting.streams.clear()

    def _owner(self, held: Held, number: int) -> Owner:
        """Its owner as often as not, else one that has or had another stream, or this one before."""
        known = self.reference.known.get(held)
        if number % 2 and known is not None and known.owner is not None:
            return known.owner
        return self.owners[number // 2 % len(self.owners)]

    @invariant()
    def it_does_what_the_reference_does(self) -> None:
        streams, known = self.waiting.streams, self.reference.known
        for held in self.all_held:
            assert self.waiting.knows(held) is (held in known and not held.has_moved)
            assert held.num_cancelled == (held in self.reference.cancelled)
        for owner in self.owners:
            assert owner.num_replaced == self.num_replaced[owner]
        waiting = self.reference.waiting()
        assert len(streams) == len(waiting)
        assert streams.next_tick_at == min((known[held].due for held in waiting), default=None)

    def teardown(self) -> None:
        for held, known in list(self.reference.known.items()):
            if known.owner is not None:
                self.waiting.streams.detach(held.stream, known.owner)
        self.waiting.pass_time(WINDOW_S)
        assert not self.waiting.streams._entries
        assert self.waiting.streams._unowned_bytes == 0
        for held in self.all_held:
            assert not held.stream.log._listeners


def test_streams_wait_for_their_clients_as_the_reference_says_in_every_interleaving() -> None:
    run_state_machine_as_test(
        ResumeMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )
