"""Official data: data/GraphemeBreakTest-17.0.0.txt, the Unicode Consortium's, under UNICODE-LICENSE.txt."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from protocol.graphemes import MAX_OPEN_CODE_POINTS, GraphemeGate
from protocol.token_log import TokenDelta, TokenLogprob

OFFICIAL = Path(__file__).parent / "data" / "GraphemeBreakTest-17.0.0.txt"

JOINED_SINCE_18 = {
    "÷ 094D ÷ 0915 ÷",
    "÷ 094D × 0308 ÷ 0915 ÷",
    "÷ 0061 × 094D ÷ 0924 ÷",
    "÷ 003F × 094D ÷ 0924 ÷",
}
"""Where Unicode 18.0, which `regex` follows, joins what 17.0 parts: by its rule GB9c an Indic
linker joins a consonant behind it also when no consonant stands before it."""


def official_lines() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in OFFICIAL.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def clusters_of(line: str) -> list[str]:
    """The clusters of a line such as `÷ 0061 × 0308 ÷ 0062 ÷`."""
    clusters = line.strip("÷ ").split("÷")
    return [
        "".join(chr(int(point, 16)) for point in each.replace("×", "").split()) for each in clusters
    ]


def deltas_of(pieces: Iterable[str]) -> list[TokenDelta]:
    """A delta of one token for each piece."""
    return [TokenDelta(seq, text, (seq,)) for seq, text in enumerate(pieces)]


def through(deltas: Iterable[TokenDelta]) -> Iterator[TokenDelta]:
    """What leaves a gate, with the rest flushed."""
    gate = GraphemeGate()
    for delta in deltas:
        yield from gate.push(delta)
    yield from gate.flush()
    assert not gate.is_holding
    assert gate.flush() == []


def texts(deltas: Iterable[TokenDelta]) -> list[str]:
    return [delta.text for delta in deltas]


def ends(pieces: Iterable[str]) -> set[int]:
    """Where pieces end, in code points from the start of the whole."""
    return set(accumulate(len(piece) for piece in pieces))


def test_the_official_file_is_complete() -> None:
    assert len(official_lines()) == 766
    assert set(official_lines()) >= JOINED_SINCE_18


def test_no_delta_of_the_official_test_ends_inside_a_cluster() -> None:
    for line in official_lines():
        clusters = clusters_of(line)
        left = texts(through(deltas_of("".join(clusters))))
        assert "".join(left) == "".join(clusters), line
        assert ends(left) <= ends(clusters), line


def test_every_cluster_of_the_official_test_leaves_by_itself() -> None:
    held_longer = {
        line
        for line in official_lines()
        if texts(through(deltas_of("".join(clusters_of(line))))) != clusters_of(line)
    }
    assert held_longer <= JOINED_SINCE_18


@pytest.mark.parametrize(
    ("pieces", "left"),
    [
        (["He", "llo", " world"], ["He", "llo", " world"]),
        (["cafe", "\u0301", "s"], ["cafe\u0301", "s"]),
        (["👩", "\u200d", "💻", "!"], ["👩\u200d💻", "!"]),
        (["👍", "🏽", " ", "ok"], ["👍🏽", " ", "ok"]),
        (["🇩", "🇪", "🇫", "🇷"], ["🇩🇪", "🇫🇷"]),
        (["a🇩", "🇪🇫", "🇷"], ["a🇩🇪🇫🇷"]),
        (["1", "\ufe0f", "\u20e3", "2"], ["1\ufe0f\u20e3", "2"]),
        (["\u1112", "\u1161", "\u11ab", "\u1100"], ["\u1112\u1161\u11ab", "\u1100"]),
        (["क", "\u094d", "ष", "\u093f", "त"], ["क\u094dष\u093f", "त"]),
        (["x", "\u0600", "1", "2"], ["x", "\u06001", "2"]),
        (["a", "\r", "\n", "b"], ["a", "\r\n", "b"]),
        (["\r", "\r", "\n"], ["\r", "\r\n"]),
    ],
)
def test_pieces_are_joined_where_a_cluster_spans_them_and_only_there(
    pieces: list[str], left: list[str]
) -> None:
    assert texts(through(deltas_of(pieces))) == left


def test_text_waits_for_the_next_code_point_and_a_line_for_nothing() -> None:
    gate = GraphemeGate()
    first, second, third = deltas_of(["Hi", " you", ".\n"])
    assert gate.push(first) == []
    assert gate.is_holding
    assert gate.push(second) == [first]
    assert gate.push(third) == [second, third]
    assert not gate.is_holding


def test_a_joined_delta_has_the_last_seq_and_all_tokens() -> None:
    def logprob(token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id, "t", -0.5)

    gate = GraphemeGate()
    assert gate.push(TokenDelta(1, "e", (7, 8), (logprob(7), logprob(8)))) == []
    assert gate.push(TokenDelta(4, "\u0301", (9,), (logprob(9),))) == []
    assert gate.flush() == [
        TokenDelta(4, "e\u0301", (7, 8, 9), (logprob(7), logprob(8), logprob(9)))
    ]


def test_a_delta_without_text_goes_with_the_next_that_has_some() -> None:
    a, nothing, b, last = deltas_of(["a", "", "b", ""])
    gate = GraphemeGate()
    assert gate.push(a) == []
    assert gate.push(nothing) == []
    assert gate.push(b) == [a]
    assert gate.push(last) == []
    assert gate.flush() == [TokenDelta(3, "b", (1, 2, 3))]
    assert gate.push(nothing) == []
    assert gate.is_holding
    assert gate.flush() == [nothing]


def test_after_a_flush_the_open_cluster_still_counts() -> None:
    gate = GraphemeGate()
    de_1, de_2, fr_1, fr_2, end = deltas_of("🇩🇪🇫🇷.")
    assert gate.push(de_1) == []
    assert gate.flush() == [de_1]
    assert gate.push(de_2) == []
    # The second half of a flag: the third letter begins a new one.
    assert gate.push(fr_1) == [de_2]
    assert gate.push(fr_2) == []
    assert texts(gate.push(end)) == ["🇫🇷"]


@pytest.mark.parametrize("mark", ["\u0301", "\u200d💻", "\u094dक", "\u1160"])
def test_a_cluster_that_does_not_end_is_let_go_in_bounded_pieces(mark: str) -> None:
    start = {"\u200d💻": "💻", "\u094dक": "क", "\u1160": "\u1100"}.get(mark, "a")
    gate = GraphemeGate()
    held = 0
    for delta in deltas_of([start, *mark * 5_000]):
        held += len(delta.text) - sum(map(len, texts(gate.push(delta))))
        assert held <= MAX_OPEN_CODE_POINTS
    gate.push(TokenDelta(100_000, "a"))
    assert texts(gate.push(TokenDelta(100_001, "b"))) == ["a"]


@pytest.mark.parametrize(
    "text", ["e" + "\u0301" * 40_000, "🇩" * 40_000, "💻\u200d" * 20_000, "क\u094d" * 20_000]
)
def test_forty_thousand_code_points_take_linear_time(text: str) -> None:
    for pieces in ([text], text):
        started = time.process_time()
        left = texts(through(deltas_of(pieces)))
        assert time.process_time() - started < 2
        assert "".join(left) == text


NASTY = (
    *("a", "e", " ", "1", "#", "\r", "\n", "\r\n", "\t", "\x00", "\u0301", "\u0308", "\u200c"),
    *(
        "👩",
        "👩\u200d💻",
        "👨\u200d👩\u200d👧",
        "👍🏽",
        "🏽",
        "\u200d",
        "©",
        "❤",
        "\ufe0f",
        "\u20e3",
    ),
    *("🇩", "🇪", "🇫🇷", "🏴", "\U000e0067", "\U000e007f"),
    *("\u1100", "\u1161", "\u11a8", "가", "각", "한"),
    *("क", "\u094d", "ष", "\u093c", "\u0903", "\u093f", "\u0d4e", "ക", "\u17d2", "ស"),
    *("\u0600", "\u06dd", "\u0e33", "日", "\u3099", "か", "\u2028", "\u00ad", "\u0378", "\ue000"),
)
nasty_text = st.lists(st.sampled_from(NASTY) | st.characters(codec="utf-8")).map("".join)


def split(text: str, cuts: list[int]) -> list[str]:
    """`text` as its bytes cut at random would come out of an incremental decoder."""
    data = text.encode()
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    decode = codecs.getincrementaldecoder("utf-8")().decode
    return [decode(data[start:end]) for start, end in pairwise(places)]


@given(nasty_text, st.lists(st.integers(0, 400)))
def test_joined_deltas_are_the_text_and_each_ends_where_a_cluster_does(
    text: str, cuts: list[int]
) -> None:
    pieces = split(text, cuts)
    deltas = deltas_of(pieces)
    left = list(through(deltas))
    assert "".join(texts(left)) == text
    assert ends(texts(left)) <= ends(regex.findall(r"\X", text)) | {0}
    seqs = [delta.seq for delta in left]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == deltas[-1].seq
    assert [id for delta in left for id in delta.token_ids] == list(range(len(deltas)))


@given(nasty_text, st.lists(st.integers(0, 400)))
def test_whatever_ends_with_a_cluster_is_gone_when_the_next_text_comes(
    text: str, cuts: list[int]
) -> None:
    gate = GraphemeGate()
    came, gone = "", 0
    borders: list[int] = []
    for delta in deltas_of(split(text, cuts)):
        if delta.text:
            borders.append(len(came))
        came += delta.text
        gone += sum(map(len, texts(gate.push(delta))))
        whole = ends(regex.findall(r"\X", came)) | {0}
        assert gone >= max((border for border in borders if border in whole), default=0)


@given(st.lists(st.none() | st.sampled_from(("", *NASTY))))
def test_a_flush_at_any_time_loses_and_doubles_nothing(steps: list[str | None]) -> None:
    gate = GraphemeGate()
    left: list[TokenDelta] = []
    deltas = deltas_of(step or "" for step in steps)
    for step, delta in zip(steps, deltas, strict=True):
        left += gate.flush() if step is None else gate.push(delta)
    left += gate.flush()
    kept = [delta for step, delta in zip(steps, deltas, strict=True) if step is not None]
    assert "".join(texts(left)) == "".join(texts(kept))
    assert [id for delta in left for id in delta.token_ids] == [delta.seq for delta in kept]
    assert all(delta.seq == delta.token_ids[-1] for delta in left)
