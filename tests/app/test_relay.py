"""One stream on its way to its client: credit, room in the socket, whole characters, anchors."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import outbox as outbox_module
from app import relay as relay_module
from app.outbox import Outbox
from app.relay import BURST, GO_ON_LAG_TOKENS, MAX_LAG_TOKENS, Relay
from app.serving import Stream
from protocol.graphemes import GraphemeGate
from protocol.session import Session
from protocol.token_log import Terminal, TokenDelta, TokenLog
from tests.app.fake_model import deltas
from tests.app.stack import PATIENCE_S, ask, eventually
from tests.protocol.fakes import MISS, STOP, FakeClock, ack, infer_req, open_session, resume

Frame = dict[str, Any]
WAVE = "\U0001f44b\U0001f3fd"
FAMILY = "\U0001f468‍\U0001f469‍\U0001f467"
TEXTS = st.lists(
    st.sampled_from(
        ["a", " ", "e", "́", "🇩", "🇪", "한", "ᄒ", "ᅡ", "‍", WAVE, FAMILY, "क्", "ष", "\r", "\n"]
    ),
    max_size=40,
)


class Wire:
    """A socket that takes as many messages as a test lets it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.outbox = Outbox(self._send, FakeClock())
        self._writer = asyncio.create_task(self.outbox.run())

    async def _send(self, data: str | bytes) -> None:
        await self.is_open.wait()
        self.frames.append(json.loads(data))

    async def close(self) -> None:
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    def chunks(self, id: str = "a") -> list[tuple[int, str]]:
        return [
            (frame["seq"], frame["text"])
            for frame in self.frames
            if frame["type"] == "INFER_CHUNK" and frame["id"] == id
        ]

    def of(self, type: str) -> list[Frame]:
        return [frame for frame in self.frames if frame["type"] == type]


class Room:
    """A session with one request `a` whose log a test writes, and the relay between."""

    def __init__(self, wire: Wire, log: TokenLog | None = None, **fields: Any) -> None:
        self.wire = wire
        self.pauses: list[str] = []
        self.session: Session = open_session()
        self.log = log or TokenLog()
        last_seq = fields.pop("last_seq", None)
        raw = infer_req("a", **fields)
        if last_seq is not None:
            raw = resume("a", last_seq=last_seq, **fields)
        self.session.receive(raw)
        self.session.accept("a", stream="s", cache=MISS)
        self.relay = Relay(
            "a",
            Stream(
                request=ask(),
                log=self.log,
                park=lambda: self.pauses.append("park"),
                unpark=lambda: self.pauses.append("unpark"),
            ),
            self.session,
            wire.outbox,
            next_seq=0 if last_seq is None else last_seq + 1,
            boundary=fields.get("boundary") or "grapheme",
            anchor=fields.get("anchor") or "plain",
        )
        self.task = asyncio.create_task(self.relay.run())

    def say(self, *pieces: str) -> None:
        for piece in pieces:
            seq = self.log.next_seq
            self.log.append(TokenDelta(seq, piece, (seq,)))

    def ack(self, seq: int) -> None:
        if self.session.receive(ack("a", seq)):
            self.relay.pump()

    async def end(self, terminal: Terminal = STOP) -> Frame:
        """The last frame, which comes when everything was sent."""
        self.log.finish(terminal)
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        await eventually(lambda: self.wire.of("INFER_DONE"))
        return self.wire.of("INFER_DONE")[0]


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def with_room(
    check: Callable[[Room], Any], log: TokenLog | None = None, **fields: Any
) -> None:
    wire = Wire()
    room = Room(wire, log, **fields)
    try:
        await check(room)
    finally:
        room.task.cancel()
        await asyncio.gather(room.task, return_exceptions=True)
        await wire.close()


# ------------------------------------------------------------------ whole characters


@given(TEXTS)
@settings(deadline=None)
async def test_every_chunk_ends_between_two_characters_and_the_text_is_whole(
    pieces: list[str],
) -> None:
    async def check(room: Room) -> None:
        room.say(*pieces)
        done = await room.end()
        assert "".join(text for _, text in room.wire.chunks()) == "".join(pieces)
        assert done["seq"] == len(pieces)
        gate = GraphemeGate()
        expected = [out for delta in deltas(pieces) for out in gate.push(delta)] + gate.flush()
        assert room.wire.chunks() == [(delta.seq, delta.text) for delta in expected]
        assert room.wire.of("INFER_DONE") == room.wire.frames[-1:]

    await with_room(check)


async def test_a_character_that_tokens_share_comes_in_one_chunk_with_all_of_them() -> None:
    async def check(room: Room) -> None:
        room.say("Hi ", "\U0001f44b", "\U0001f3fd", "!")
        await settle()
        assert room.wire.chunks() == [(0, "Hi "), (2, WAVE)]
        assert room.wire.of("INFER_CHUNK")[1]["token_ids"] == [1, 2]
        await room.end()
        assert room.wire.chunks()[2:] == [(3, "!")]

    await with_room(check, return_token_ids=True)


async def test_utf8_boundaries_hold_nothing_back() -> None:
    async def check(room: Room) -> None:
        room.say("\U0001f44b")
        await settle()
        assert room.wire.chunks() == [(0, "\U0001f44b")]

    await with_room(check, boundary="utf8")


async def test_what_is_held_for_too_long_goes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "HOLD_S", 0.01)

    async def check(room: Room) -> None:
        for seq, text in enumerate("\U0001f44b\U0001f3fdé"):
            room.say(text)
            due = [(seq, text)]
            await eventually(lambda due=due: room.wire.chunks()[-1:] == due)  # type: ignore[misc]
        assert (await room.end())["seq"] == 3

    await with_room(check)


async def test_nothing_is_left_of_a_relay_that_was_cancelled_with_text_held() -> None:
    async def check(room: Room) -> None:
        room.say("x")
        await settle()
        assert room.relay._timer is not None
        room.task.cancel()
        await asyncio.gather(room.task, return_exceptions=True)
        assert room.relay._timer.cancelled()
        room.say("y", "z")
        await settle()
        assert room.wire.chunks() == []

    await with_room(check)


# ------------------------------------------------------------------ credit


@given(
    window=st.integers(1, 20),
    widths=st.lists(st.integers(1, 12), min_size=1, max_size=50),
    acks=st.lists(st.integers(0, 60), max_size=50),
    boundary=st.sampled_from(["utf8", "grapheme"]),
)
@settings(deadline=None, max_examples=60)
async def test_no_more_than_the_window_is_unacknowledged_and_all_of_it_comes(
    window: int, widths: list[int], acks: list[int], boundary: str
) -> None:
    async def check(room: Room) -> None:
        answer = deltas(["x"] * len(widths), widths)
        todo, acked, steps = list(answer), -1, iter(acks)
        while room.task.done() is False:
            if todo:
                room.log.append(todo.pop(0))
            else:
                room.log.finish(STOP)
            await settle()
            sent = [seq for seq, _ in room.wire.chunks()]
            for before, seq in zip([-1, *sent], sent, strict=False):
                if seq > acked:
                    assert seq - acked <= window or before <= acked
            last = sent[-1] if sent else -1
            step = next(steps, None)
            if last >= 0 and (step is None or step <= last):
                acked = max(acked, last if step is None else step)
                room.ack(acked)
        assert [seq for seq, _ in room.wire.chunks()] == [delta.seq for delta in answer]
        assert len(room.wire.of("INFER_DONE")) <= 1

    await with_room(check, window=window, boundary=boundary)


async def test_the_end_waits_for_the_text_before_it() -> None:
    async def check(room: Room) -> None:
        room.say(*"abcdef")
        room.log.finish(STOP)
        await settle()
        assert room.wire.chunks() == [(0, "a"), (1, "b")]
        assert not room.wire.of("INFER_DONE")
        room.ack(1)
        await settle()
        room.ack(3)
        assert (await room.end())["seq"] == 6
        assert [text for _, text in room.wire.chunks()] == [*"abcdef"]

    await with_room(check, window=2)


async def test_a_cancelled_stream_does_not_wait_for_credit() -> None:
    async def check(room: Room) -> None:
        room.say(*"abcdef")
        await settle()
        room.log.finish(Terminal(finish_reason="cancelled"))
        room.relay.cut()
        done = await room.end()
        assert (done["finish_reason"], done["seq"]) == ("cancelled", 2)
        assert room.wire.chunks() == [(0, "a"), (1, "b")]

    await with_room(check, window=2)


async def test_a_stream_that_is_cancelled_elsewhere_ends_when_that_is_known() -> None:
    async def check(room: Room) -> None:
        room.say(*"abcdef")
        room.relay.cut()
        room.say("g")
        await settle()
        assert not room.wire.of("INFER_DONE")
        await room.end(Terminal(finish_reason="cancelled"))

    await with_room(check, window=2)


# ------------------------------------------------------------------ room


async def test_a_stuck_socket_pauses_the_stream_and_loses_nothing() -> None:
    pieces = [f"w{i} " for i in range(3 * outbox_module.MAX_FRAMES)]

    async def check(room: Room) -> None:
        await settle()
        room.wire.is_open.clear()
        for piece in pieces:
            room.say(piece)
        await settle()
        # One is on its way already.
        assert len(room.wire.outbox._frames) == outbox_module.MAX_FRAMES - 1
        room.wire.is_open.set()
        await room.end()
        assert room.wire.chunks() == [*enumerate(pieces)]

    await with_room(check, anchor="none", boundary="utf8")


async def test_a_stream_far_ahead_of_its_reader_rests_until_he_has_caught_up() -> None:
    async def check(room: Room) -> None:
        room.say(*"a" * (8 + MAX_LAG_TOKENS))
        await settle()
        assert room.pauses == []
        room.say("b")
        assert room.pauses == ["park"]
        room.say(*"cd")
        assert room.pauses == ["park"], "what was on its way is kept"
        while room.pauses == ["park"]:
            room.ack(room.relay.next_seq - 1)
            await settle()
        assert room.pauses == ["park", "unpark"]
        assert 0 < room.log.next_seq - room.relay.next_seq <= GO_ON_LAG_TOKENS
        while room.log.next_seq > room.relay.next_seq:
            room.ack(room.relay.next_seq - 1)
            await settle()
        assert room.pauses == ["park", "unpark"]
        assert (await room.end())["seq"] == room.log.next_seq

    await with_room(check, window=8, boundary="utf8")


async def test_a_stream_whose_socket_is_stuck_rests_and_goes_on_with_it() -> None:
    async def check(room: Room) -> None:
        room.wire.is_open.clear()
        for _ in range(10):
            room.say(*"a" * 100)
            await settle()
        assert room.pauses == ["park"]
        room.wire.is_open.set()
        await eventually(lambda: room.pauses == ["park", "unpark"])
        await room.end()
        assert len(room.wire.chunks()) == 1000

    await with_room(check, boundary="utf8")


async def test_an_answer_that_has_ended_has_nothing_to_rest() -> None:
    async def check(room: Room) -> None:
        room.log.append(*deltas("a" * 2 * MAX_LAG_TOKENS))
        room.log.finish(STOP)
        await settle()
        assert room.pauses == []

    log = TokenLog()
    await with_room(check, log, window=8, boundary="utf8")


async def test_streams_of_a_slow_socket_have_their_turns() -> None:
    wire = Wire()
    session = open_session()
    log = TokenLog()
    log.append(*deltas(["x"] * 2000))
    log.finish(STOP)
    relays = []
    for id in ("a", "b", "c"):
        session.receive(infer_req(id))
        session.accept(id, stream="s", cache=MISS)
        stream = Stream(request=ask(), log=log)
        relays.append(Relay(id, stream, session, wire.outbox, anchor="none"))
    tasks = [asyncio.create_task(relay.run()) for relay in relays]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    await eventually(lambda: len(wire.of("INFER_DONE")) == 3)
    ids = [frame["id"] for frame in wire.frames]
    for id in ("a", "b", "c"):
        assert [seq for seq, _ in wire.chunks(id)] == [*range(2000)]
        gaps = [at for at, other in enumerate(ids) if other == id]
        farthest = max(b - a for a, b in itertools.pairwise(gaps))
        assert farthest <= 3 * (BURST + 2)
    await wire.close()


async def test_large_frames_are_counted_in_bytes() -> None:
    async def check(room: Room) -> None:
        room.wire.is_open.clear()
        for _ in range(100):
            room.say("x" * 10_000)
        await settle()
        assert len(room.wire.outbox._frames) <= outbox_module.MAX_BYTES // 10_000 + 2
        room.wire.is_open.set()
        await room.end()
        assert len(room.wire.chunks()) == 100

    await with_room(check)


# ------------------------------------------------------------------ anchors


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(0, 40))
@settings(deadline=None, max_examples=60)
async def test_an_anchor_follows_each_chunk_that_reaches_or_passes_a_multiple_of_32(
    widths: Sequence[int], resumed: int
) -> None:
    answer = deltas([f"w{i}" for i in range(len(widths))], widths)
    log = TokenLog()
    log.append(*answer)
    at = min(resumed, len(answer)) - 1
    last_seq = answer[at].seq if at >= 0 else -1

    async def check(room: Room) -> None:
        await room.end()
        offsets, before, text = [], last_seq + 1, "".join(d.text for d in answer[: at + 1])
        digests = []
        for delta in answer[at + 1 :]:
            text += delta.text
            if (delta.seq + 1) // 32 > before // 32:
                offsets.append(delta.seq + 1)
                digests.append(hashlib.sha256(text.encode()).hexdigest())
            before = delta.seq + 1
        anchors = room.wire.of("ANCHOR")
        assert [anchor["offset"] for anchor in anchors] == offsets
        assert [anchor["sha256"] for anchor in anchors] == digests
        for anchor in anchors:
            place = room.wire.frames.index(anchor)
            assert room.wire.frames[place - 1]["seq"] == anchor["offset"] - 1

    await with_room(check, log, anchor="sha256", last_seq=last_seq, boundary="utf8")


@pytest.mark.parametrize("anchor", [None, "plain", "none"])
async def test_anchors_are_sent_unless_declined(anchor: str | None) -> None:
    async def check(room: Room) -> None:
        room.say(*["x"] * 70)
        await room.end()
        anchors = [(one["offset"], one["input_id"]) for one in room.wire.of("ANCHOR")]
        assert anchors == ([] if anchor == "none" else [(32, -1), (64, -1)])
        assert not any("sha256" in one for one in room.wire.of("ANCHOR"))

    await with_room(check, anchor=anchor)
