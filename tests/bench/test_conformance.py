"""The parts of `bench.conformance` that need neither a cluster nor CPython 2.7."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.conformance import (
    AGENT,
    REQUIREMENTS,
    Case,
    SuiteMissing,
    find_python2,
    read_report,
    summary,
)

OK = Case("1.1", "OK", "OK")
LOOSE = Case("6.4.1", "NON-STRICT", "OK")
NOT_SPOKEN = Case("12.1", "UNIMPLEMENTED", "OK")
FAILED = Case("7.1.5", "FAILED", "WRONG CODE", "closes early.", "the code should be 1000")


@pytest.mark.parametrize("case", [OK, LOOSE, Case("7.1.6", "INFORMATIONAL", "INFORMATIONAL")])
def test_a_case_that_the_suite_lets_pass_has_passed(case: Case) -> None:
    assert case.has_passed


@pytest.mark.parametrize("verdicts", [("FAILED", "OK"), ("OK", "WRONG CODE"), ("OK", "UNCLEAN")])
def test_a_case_passes_by_its_messages_and_its_close(verdicts: tuple[str, str]) -> None:
    assert not Case("1.1", *verdicts).has_passed


def test_the_summary_counts_verdicts_and_names_what_failed() -> None:
    text = summary([OK, LOOSE, FAILED, NOT_SPOKEN])
    lines = text.splitlines()
    assert lines[0].startswith("3 cases run, 1 not")
    assert "| OK | 1 | 2 |" in lines
    assert "| NON-STRICT | 1 | 0 |" in lines
    assert "| FAILED | 1 | 0 |" in lines
    assert "| WRONG CODE | 0 | 1 |" in lines
    assert lines[-1] == ("7.1.5: FAILED, close WRONG CODE. closes early.: the code should be 1000")


def test_a_report_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    index = {}
    for id in ("10.1.1", "2.1", "9.1.1"):
        file = f"{id}.json"
        index[id] = {"behavior": "OK", "behaviorClose": "OK", "reportfile": file}
        detail = {"description": "Sends\n  something.", "result": "Fine.", "resultClose": "Clean."}
        (tmp_path / file).write_text(json.dumps(detail))
    (tmp_path / "index.json").write_text(json.dumps({AGENT: index}))
    cases = read_report(tmp_path)
    assert [case.id for case in cases] == ["2.1", "9.1.1", "10.1.1"]
    assert cases[0].description == "Sends something."
    assert cases[0].result == "Fine. Clean."


def test_a_python_that_is_not_2_7_is_refused() -> None:
    with pytest.raises(SuiteMissing, match=r"is not a CPython 2\.7"):
        find_python2(sys.executable)


def test_without_a_python_2_7_the_way_to_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SuiteMissing, match=r"pyenv install 2\.7"):
        find_python2(None)


def test_every_requirement_is_pinned() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(line.count("==") == 1 for line in lines)
