"""What the bench of chunked input makes of its prompts and times."""

from __future__ import annotations

import pytest

from bench.chunked import (
    CHARS_PER_TOKEN,
    Asked,
    Round,
    cut,
    gaps_within,
    make_prompt,
    parse_options,
    report,
)


def test_prompts_begin_differently_and_have_about_the_length_asked_for() -> None:
    prompts = [make_prompt(number, 1, 1000) for number in range(20)]
    assert len({prompt[:30] for prompt in prompts}) == 20
    assert make_prompt(3, 1, 1000) == prompts[3]
    assert make_prompt(3, 2, 1000) != prompts[3]
    for prompt in prompts:
        assert len(prompt) == pytest.approx(1000 * CHARS_PER_TOKEN, rel=0.05)


def test_pieces_are_of_one_length_and_lose_nothing() -> None:
    text = make_prompt(0, 1, 200)
    pieces = cut(text, 7)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_only_gaps_that_end_within_count() -> None:
    assert gaps_within([0.0, 1.0, 3.0, 6.0, 10.0], 2.0, 6.0) == [2.0, 3.0]


def test_the_ratio_is_of_the_medians() -> None:
    asked = [Asked("whole", 2.0, 100, 0)] * 2 + [Asked("whole", 9.0, 100, 0)]
    asked += [Asked("pieces", 0.5, 100, 80)] * 3
    assert Round(asked).ratio == 0.25


def test_the_report_has_every_round_and_the_gaps_of_the_stream_beside() -> None:
    asked = [Asked("whole", 2.0, 100, 0), Asked("pieces", 0.5, 100, 80)]
    gaps_s = {"alone": [0.07], "whole": [0.07, 0.5], "pieces": [0.07, 0.1]}
    text = report({"nothing else": Round(asked), "a stream beside": Round(asked, gaps_s)})
    assert "| nothing else | 100 | 2000 (2000 to 2000) | 500 (500 to 500) | 80% | 0.25 |" in text
    assert "| whole | 285 | 496 | 500 |" in text


@pytest.mark.parametrize("option", ["--pieces", "--repeats", "--prompt-tokens"])
def test_a_value_out_of_range_is_refused_by_name(option: str) -> None:
    with pytest.raises(SystemExit, match=option[2:].replace("-", "_")):
        parse_options([option, "0"])
