from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.token_log import Cursor, Terminal, TokenDelta, TokenLog
from tests.protocol.fakes import STOP, delta


def test_a_live_reader_gets_deltas_as_they_come_and_then_the_end() -> None:
    log = TokenLog()
    cursor = log.cursor()
    assert cursor.take() == []
    log.append(delta(0, "a"), delta(1, "b"))
    assert [each.text for each in cursor.take()] == ["a", "b"]
    assert not cursor.is_at_end
    log.append(delta(2, "c"))
    log.finish(STOP)
    assert not cursor.is_at_end
    assert cursor.take() == [delta(2, "c")]
    assert cursor.is_at_end
    assert (log.text, log.next_seq, log.terminal) == ("abc", 3, STOP)


def test_a_finished_log_is_replayed_from_any_place() -> None:
    log = TokenLog()
    log.append(TokenDelta(1, "ab"), TokenDelta(4, "cde"))
    log.finish(STOP)
    assert [each.seq for each in log.cursor().take()] == [1, 4]
    assert [each.seq for each in log.cursor(2).take()] == [4]
    assert [each.seq for each in log.cursor(4).take()] == [4]
    assert log.cursor(5).is_at_end


def test_the_first_end_stays() -> None:
    log = TokenLog()
    assert log.finish(STOP)
    assert not log.finish(Terminal(finish_reason="cancelled"))
    assert log.terminal == STOP
    with pytest.raises(ValueError, match="finished"):
        log.append(delta(0))


@pytest.mark.parametrize("seqs", [[1, 1], [2, 1], [0, 3, 2]])
def test_a_seq_that_does_not_rise_is_refused_and_nothing_of_it_is_kept(seqs: list[int]) -> None:
    log = TokenLog()
    with pytest.raises(ValueError, match="seq"):
        log.append(*map(delta, seqs))
    assert log.deltas == ()
    log.append(delta(5))
    with pytest.raises(ValueError, match="seq 5 after 5"):
        log.append(delta(5))
    assert log.deltas == (delta(5),)


def test_a_subscriber_is_called_once_a_change_until_it_leaves() -> None:
    log = TokenLog()
    calls: list[int] = []
    leave = log.subscribe(lambda: calls.append(log.next_seq))
    log.append(delta(0), delta(1))
    log.append(delta(2))
    leave()
    leave()
    log.finish(STOP)
    assert calls == [2, 3]


async def test_waiting_ends_with_new_deltas_or_with_the_log() -> None:
    log = TokenLog()

    async def follow(cursor: Cursor) -> list[int]:
        seqs: list[int] = []
        while taken := await cursor.wait():
            seqs += [each.seq for each in taken]
        assert cursor.is_at_end
        return seqs

    readers = [asyncio.create_task(follow(log.cursor(first))) for first in (0, 0, 2)]
    for seq in range(4):
        await asyncio.sleep(0)
        log.append(delta(seq))
    await asyncio.sleep(0)
    log.finish(STOP)
    assert await asyncio.gather(*readers) == [[0, 1, 2, 3], [0, 1, 2, 3], [2, 3]]
    assert await log.cursor(4).wait() == []


async def test_a_reader_that_stops_waiting_leaves_nothing_behind() -> None:
    log = TokenLog()
    waiting = asyncio.create_task(log.cursor().wait())
    await asyncio.sleep(0)
    assert log._listeners
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert log._listeners == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.lists(st.integers(1, 3), max_size=3)),
            st.tuples(st.just("attach"), st.integers(0, 12)),
            st.tuples(st.just("take"), st.integers(0, 5), st.none() | st.integers(0, 3)),
            st.tuples(st.just("finish")),
        ),
        max_size=30,
    )
)
def test_every_reader_gets_every_delta_from_its_place_once_and_in_order(
    steps: list[tuple[Any, ...]],
) -> None:
    log = TokenLog()
    written: list[int] = []
    readers: list[tuple[int, Cursor, list[int]]] = []
    for step in steps:
        match step:
            case ("append", gaps) if log.terminal is None:
                seqs = [(written or [-1])[-1] + end for end in accumulate(gaps)]
                log.append(*map(delta, seqs))
                written += seqs
            case ("attach", first):
                readers.append((first, log.cursor(first), []))
            case ("take", index, limit) if readers:
                _, cursor, got = readers[index % len(readers)]
                taken = cursor.take(limit)
                assert limit is None or len(taken) <= limit
                got += [each.seq for each in taken]
            case ("finish",):
                log.finish(STOP)
    log.finish(STOP)
    for first, cursor, got in readers:
        got += [each.seq for each in cursor.take()]
        assert got == [seq for seq in written if seq >= first]
        assert cursor.is_at_end
