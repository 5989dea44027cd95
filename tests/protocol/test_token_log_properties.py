"""A log and its readers against a model of what every client has to get."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import accumulate, islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol.token_log import Cursor, FinishReason, Terminal, TokenDelta, TokenLog


@dataclass
class Client:
    """The reference: it wants the answer from behind `after` on, whatever connections it has."""

    after: int
    got: list[TokenDelta] = field(default_factory=list)
    ends: list[Terminal] = field(default_factory=list)
    """What this connection was told; one that comes again is told the end again."""

    @property
    def next_seq(self) -> int:
        return (self.got[-1].seq if self.got else self.after) + 1

    def check(self, written: list[TokenDelta], end: Terminal | None, *, has_read_on: bool) -> None:
        wanted = [delta for delta in written if delta.seq > self.after]
        assert self.got == wanted[: len(self.got)]
        assert self.ends in ([], [end])
        if has_read_on or self.ends:
            assert self.got == wanted
        if has_read_on:
            assert self.ends == [end]


@dataclass
class Poller:
    """Reads when it likes, as much as it likes; until then it lags."""

    client: Client
    cursor: Cursor

    def read(self, limit: int | None) -> None:
        taken = self.cursor.take(limit)
        assert limit is None or len(taken) <= limit
        assert not (taken and self.client.ends)
        self.client.got += taken
        if self.cursor.is_at_end and not self.client.ends:
            assert self.cursor.log.terminal is not None
            self.client.ends.append(self.cursor.log.terminal)


@dataclass
class Follower:
    """Waits at the tail, as a task."""

    client: Client
    task: asyncio.Task[None]


async def follow(client: Client, cursor: Cursor) -> None:
    while taken := await cursor.wait():
        client.got += taken
    assert cursor.log.terminal is not None
    client.ends.append(cursor.log.terminal)


class LogMachine(RuleBasedStateMachine):
    """Appends, attaches, detaches, lags, resumes and ends in any order."""

    absent = Bundle("absent")
    pollers = Bundle("pollers")
    followers = Bundle("followers")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.log = TokenLog()
        self.written: list[TokenDelta] = []
        self.end: Terminal | None = None
        self.all_clients: list[Client] = []
        self.attached: list[Poller | Follower] = []

    @rule()
    def let_run(self) -> None:
        """Lets every task go on as far as it can."""
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    @precondition(lambda self: self.end is None)
    @rule(gaps=st.lists(st.integers(1, 3), max_size=3))
    def append(self, gaps: list[int]) -> None:
        seqs = accumulate(gaps, initial=self.log.next_seq - 1)
        deltas = [TokenDelta(seq, f"{seq} ", (seq,)) for seq in islice(seqs, 1, None)]
        self.log.append(*deltas)
        self.written += deltas

    @rule(reason=st.sampled_from(["stop", "length", "cancelled"]))
    def finish(self, reason: FinishReason) -> None:
        terminal = Terminal(finish_reason=reason)
        assert self.log.finish(terminal) is (self.end is None)
        self.end = self.end or terminal

    @rule(target=absent, place=st.integers(0, 9), is_ahead=st.booleans())
    def come(self, place: int, is_ahead: bool) -> Client:
        """A client that is new or has read a part elsewhere, perhaps what this log has not yet."""
        seqs = [-1, *(delta.seq for delta in self.written)]
        client = Client(seqs[-1] + place if is_ahead else seqs[place % len(seqs)])
        self.all_clients.append(client)
        return client

    @rule(target=pollers, client=consumes(absent))
    def attach(self, client: Client) -> Poller:
        return self._poll(client)

    def _poll(self, client: Client) -> Poller:
        client.ends = []
        poller = Poller(client, self.log.cursor(client.next_seq))
        self.attached.append(poller)
        return poller

    @rule(target=followers, client=consumes(absent))
    def attach_at_the_tail(self, client: Client) -> Follower:
        client.ends = []
        following = follow(client, self.log.cursor(client.next_seq))
        follower = Follower(client, self.loop.create_task(following))
        self.attached.append(follower)
        return follower

    @rule(poller=pollers, limit=st.none() | st.integers(0, 3))
    def read(self, poller: Poller, limit: int | None) -> None:
        poller.read(limit)

    @rule(target=absent, poller=consumes(pollers))
    def detach(self, poller: Poller) -> Client:
        self.attached.remove(poller)
        return poller.client

    @rule(target=absent, follower=consumes(followers), runs_before=st.booleans())
    def cut(self, follower: Follower, runs_before: bool) -> Client:
        """Ends a task at any place, also when it has been woken and has not run yet."""
        if runs_before:
            self.let_run()
        follower.task.cancel()
        self.let_run()
        self.attached.remove(follower)
        return follower.client

    @rule(target=pollers, poller=pollers)
    def come_twice(self, poller: Poller) -> Poller:
        """Another reads on from where this one is; neither knows of the other."""
        client = Client(poller.client.next_seq - 1)
        self.all_clients.append(client)
        return self._poll(client)

    @invariant()
    def no_client_has_a_gap_a_duplicate_or_a_second_end(self) -> None:
        assert self.log.deltas == tuple(self.written)
        assert self.log.terminal == self.end
        for client in self.all_clients:
            client.check(self.written, self.end, has_read_on=False)

    def teardown(self) -> None:
        self.finish("stop")
        self.let_run()
        for reader in self.attached:
            if isinstance(reader, Poller):
                reader.read(None)
                reader.read(None)
            else:
                reader.task.result()
            reader.client.check(self.written, self.end, has_read_on=True)
        assert not self.log._listeners
        self.loop.close()


def test_no_gap_no_duplicate_and_one_end_in_every_interleaving() -> None:
    run_state_machine_as_test(
        LogMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
