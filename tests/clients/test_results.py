"""The table of clients, and the folders that they are installed in, without any client."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clients.environments import NotInstallable, python_environment
from tests.clients.results import ClientResult, keep, kept, table, write_page


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEEDANCE_CLIENTS", str(tmp_path))
    return tmp_path


def result(client: str, words: str = "passed") -> ClientResult:
    return ClientResult(client, {"pack": "1.2"}, ["chat", "tools"], words, "2026-01-31")


def test_a_client_has_one_row_that_its_last_run_wrote() -> None:
    for one in (result("Beta"), result("alpha"), result("Beta", "failed: a | b\nc")):
        keep(one)
    assert table(kept()).splitlines()[2:] == [
        "| alpha | pack 1.2 | chat; tools | passed | 2026-01-31 |",
        "| Beta | pack 1.2 | chat; tools | failed: a \\| b c | 2026-01-31 |",
    ]


def test_the_table_stands_between_its_marks_and_nowhere_else(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("before\n<!-- clients -->\nold\n<!-- /clients -->\nafter\n")
    write_page(page, [result("alpha")])
    written = page.read_text()
    assert written.startswith("before\n<!-- clients -->\n| client |")
    assert written.endswith("2026-01-31 |\n<!-- /clients -->\nafter\n")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no <!-- clients -->"):
        write_page(page, [])


def test_an_environment_is_kept_until_other_packages_are_asked_for(folder: Path) -> None:
    # There already: nothing is fetched.
    python = python_environment("one", ["--no-index", "pip"])
    assert python.resolve() == Path(sys.executable).resolve()
    mark = folder / "one" / "mark"
    mark.touch()
    assert python_environment("one", ["--no-index", "pip"]) == python
    assert mark.exists()
    missing = ["--no-index", "no-such-package-of-ours==1"]
    with pytest.raises(NotInstallable, match="no-such-package-of-ours"):
        python_environment("one", missing)
    assert not mark.exists()
    assert not (folder / "one.json").exists()
