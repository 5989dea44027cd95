"""One real server with the real default model for all clients, and their table at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.results import ClientResult, table
from tests.clients.results import keep as keep_result
from tests.e2e.cluster import Server, running_server

RESULTS = pytest.StashKey[list[ClientResult]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """They install other people's software: they run only when named, whatever else `-m` selects."""
    named = [item for item in items if item.get_closest_marker("clients")]
    for item in named:
        item.add_marker(pytest.mark.timeout(3600))
    if "clients" not in config.option.markexpr:
        config.hook.pytest_deselected(items=named)
        items[:] = [item for item in items if item not in named]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.stash[RESULTS]:
        terminalreporter.section("clients")
        terminalreporter.write_line(table(config.stash[RESULTS]))


class Results:
    """Where a test tells what became of its client."""

    def __init__(self, told: list[ClientResult]) -> None:
        self._told = told

    def keep(self, result: ClientResult) -> None:
        """For the table in docs/openai.md, and for the one at the end of this run."""
        keep_result(result)
        self._told.append(result)


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    return Results(pytestconfig.stash[RESULTS])


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running
