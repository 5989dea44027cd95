"""One real cluster for the whole suite: starting one takes longer than most tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.e2e.asking import Asker
from tests.e2e.cluster import KEY_A, KEY_B, Server, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def server_url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="session")
def asker(server: Server) -> Iterator[Asker]:
    """Asks as tenant a."""
    with contextlib.closing(Asker(server, KEY_A)) as asker:
        yield asker


@pytest.fixture(scope="session")
def other_tenant(server: Server) -> Iterator[Asker]:
    """Asks as tenant b."""
    with contextlib.closing(Asker(server, KEY_B)) as asker:
        yield asker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the cluster and the prepared models."""
    for item in items:
        if "tests/e2e/" in item.path.as_posix():
            item.add_marker(pytest.mark.serve)
            item.add_marker(pytest.mark.model)
            item.add_marker(pytest.mark.timeout(600))
