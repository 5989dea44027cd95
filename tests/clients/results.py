"""What became of each client, one JSON file a client, and the table of them in docs/openai.md.

`python -m tests.clients.results` writes the table from what the runs on this machine left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.clients.environments import cache_folder

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"
SECTION = re.compile(r"(?<=<!-- clients -->\n).*?(?=<!-- /clients -->)", re.DOTALL)


@dataclass(frozen=True)
class ClientResult:
    """One client's last run.

    Attributes:
        client: its name as its users know it; one result is kept for each.
        versions: of the client and what it stands on: {"openai": "3.57.0"}.
        exercised: what was tried, in a few words each.
        result: in words: "passed", "64 requests, none failed", "failed: …".
        date: of the run, as 2026-01-31.
    """

    client: str
    versions: dict[str, str]
    exercised: Sequence[str]
    result: str
    date: str


def keep(result: ClientResult) -> None:
    """Replaces the client's former result."""
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(result), indent=1, ensure_ascii=False)
    (folder / f"{re.sub(r'[^a-z0-9]+', '-', result.client.lower())}.json").write_text(text)


def kept() -> list[ClientResult]:
    """The last result of each client, by name."""
    files = results_folder().glob("*.json")
    results = [ClientResult(**json.loads(file.read_text())) for file in files]
    return sorted(results, key=lambda result: result.client.lower())


def results_folder() -> Path:
    return cache_folder() / "results"


def table(results: Sequence[ClientResult]) -> str:
    """A Markdown table, a line each."""
    lines = ["| client | versions | exercised | result | on |", "|---|---|---|---|---|"]
    for result in results:
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        cells = (result.client, versions, "; ".join(result.exercised), result.result, result.date)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_page(page: Path, results: Sequence[ClientResult]) -> None:
    """Puts the table between the page's marks.

    Raises:
        ValueError: the page has no such marks.
    """
    text, count = SECTION.subn(lambda _: table(results), page.read_text())
    if count != 1:
        raise ValueError(f"{page} has no <!-- clients --> … <!-- /clients -->")
    page.write_text(text)


if __name__ == "__main__":
    write_page(PAGE, kept())
