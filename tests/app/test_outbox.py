"""What waits for a socket is bounded, and whoever waits for room has it in turn."""

from __future__ import annotations

import asyncio

from app.outbox import MAX_BYTES, MAX_FRAMES, MAX_REPLY_BYTES, MAX_UNSENT_REPLIES, Outbox
from tests.app.stack import eventually
from tests.protocol.fakes import FakeClock


class Socket:
    """Takes what it is given while it is open."""

    def __init__(self) -> None:
        self.taken: list[str | bytes] = []
        self.is_open = asyncio.Event()

    async def send(self, data: str | bytes) -> None:
        await self.is_open.wait()
        self.taken.append(data)


async def test_frames_leave_in_the_order_in_which_they_came() -> None:
    socket = Socket()
    outbox = Outbox(socket.send, FakeClock())
    socket.is_open.set()
    writer = asyncio.create_task(outbox.run())
    for number in range(500):
        outbox.put(str(number))
    await eventually(lambda: len(socket.taken) == 500)
    assert socket.taken == [str(number) for number in range(500)]
    writer.cancel()


def test_room_is_counted_in_frames_and_in_bytes() -> None:
    small = Outbox(Socket().send, FakeClock())
    had_room, was_flooded = [], []
    for _ in range(MAX_FRAMES + MAX_UNSENT_REPLIES + 1):
        had_room.append(small.has_room)
        was_flooded.append(small.is_flooded)
        small.put("x")
    assert had_room == [True] * MAX_FRAMES + [False] * (MAX_UNSENT_REPLIES + 1)
    assert was_flooded == [False] * (MAX_FRAMES + MAX_UNSENT_REPLIES) + [True]

    large = Outbox(Socket().send, FakeClock())
    large.put(b"x" * (MAX_BYTES - 1))
    states = [(large.has_room, large.is_flooded)]
    # A character has at most four bytes, and its text may not be encoded twice to count them.
    for data in ("é", "x" * MAX_REPLY_BYTES):
        large.put(data)
        states.append((large.has_room, large.is_flooded))
    assert states == [(True, False), (False, False), (False, True)]


async def test_a_peer_is_stuck_for_as_long_as_one_frame_is_not_taken() -> None:
    socket, clock = Socket(), FakeClock()
    outbox = Outbox(socket.send, clock)
    writer = asyncio.create_task(outbox.run())
    await asyncio.sleep(0)
    clock.now += 100
    assert outbox.stuck_s(clock.now) == 0
    outbox.put("a")
    outbox.put("b")
    await asyncio.sleep(0)
    clock.now += 7
    assert outbox.stuck_s(clock.now) == 7
    socket.is_open.set()
    for _ in range(5):
        await asyncio.sleep(0)
    clock.now += 7
    assert outbox.stuck_s(clock.now) == 0
    assert socket.taken == ["a", "b"]
    writer.cancel()


async def test_those_who_wait_are_called_in_turn_and_only_while_there_is_room() -> None:
    socket = Socket()
    outbox = Outbox(socket.send, FakeClock())
    turns: list[str] = []

    def filler(name: str) -> None:
        turns.append(name)
        for _ in range(MAX_FRAMES // 2 + 1):
            outbox.put(name)
        if turns.count(name) < 3:
            outbox.when_room(lambda: filler(name))

    for name in "abc":
        outbox.when_room(lambda name=name: filler(name))  # type: ignore[misc]
    writer = asyncio.create_task(outbox.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert turns == ["a", "b"]
    socket.is_open.set()
    await eventually(lambda: len(socket.taken) == 9 * (MAX_FRAMES // 2 + 1))
    assert turns == [*"abcabcabc"]
    writer.cancel()
