from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.engine.stop import StopStrings


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    stop_strings = StopStrings(stops)
    text = "".join(stop_strings.push(piece)[0] for piece in pieces)
    return text + stop_strings.flush(), stop_strings.matched


def cut_at_once(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """The reference: search the whole text."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


letters = st.text(alphabet="ab", max_size=30)
stop_sets = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4).map(tuple)


@given(stop_sets, st.lists(letters, max_size=12))
@example(("bc", "abcd"), ["a", "b", "c", "d"])
@example(("bc", "abcd"), ["abc", "e"])
@example(("bc", "abcd"), ["abc"])
@example(("aab", "ab"), ["aa", "ab"])
def test_the_cut_does_not_depend_on_how_the_text_arrives(stops, pieces):
    assert feed(stops, pieces) == cut_at_once(stops, "".join(pieces))


@given(stop_sets, st.lists(letters, max_size=12))
def test_only_the_longest_end_that_may_become_a_stop_string_is_held_back(stops, pieces):
    stop_strings = StopStrings(stops)
    received = emitted = ""
    for piece in pieces:
        text, matched = stop_strings.push(piece)
        received, emitted = received + piece, emitted + text
        if matched or any(stop in received for stop in stops):
            return
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((len(b) for b in beginnings if received.endswith(b)), default=0)
        assert emitted == received[: len(received) - held]


@pytest.mark.parametrize(
    ("stops", "expected", "matched"),
    [
        (("F G H A",), "E ", True),
        (("F G Z",), "E F G H A B", False),
        (("E F", "E F G"), "", True),
        (("E F G", "E F"), "", True),
        ((), "E F G H A B", False),
        (("😀",), "E F G H A B", False),
    ],
)
def test_the_stop_string_and_all_after_it_are_left_out(stops, expected, matched):
    assert feed(stops, list("E F G H A B")) == (expected, matched)


def test_a_match_is_reported_by_the_push_that_completes_it():
    stop_strings = StopStrings(("END",))
    assert stop_strings.push("one E") == ("one ", False)
    assert stop_strings.push("N") == ("", False)
    assert stop_strings.push("D two") == ("", True)
    assert stop_strings.push("three") == ("", True)
    assert stop_strings.flush() == ""


def test_what_was_held_for_nothing_comes_out_in_full():
    stop_strings = StopStrings(("F G Z",))
    assert stop_strings.push("F G") == ("", False)
    assert stop_strings.push(" H") == ("F G H", False)


def test_a_match_waits_for_one_that_began_earlier_and_flush_settles_it():
    stop_strings = StopStrings(("bc", "abcd"))
    assert stop_strings.push("xabc") == ("x", False)
    assert stop_strings.flush() == "a"
    assert stop_strings.matched


def test_long_and_repetitive_stop_strings_cost_linear_time():
    num_steps = 0

    class Counted(str):
        def __getitem__(self, key):
            nonlocal num_steps
            num_steps += 1
            return str.__getitem__(self, key)

    stop_strings = StopStrings(tuple(Counted("a" * 2_000 + chr(98 + i)) for i in range(4)))
    text = ("a" * 1_999 + "z") * 5
    assert "".join(stop_strings.push(c)[0] for c in text) == text
    assert num_steps < 4 * len(text) * 8


def test_an_enormous_stop_string_costs_nothing_until_the_text_follows_it():
    stop_strings = StopStrings(("q" + "x" * 1_000_000,))
    assert stop_strings.push("hello q") == ("hello ", False)
    assert stop_strings.push("!") == ("q!", False)
