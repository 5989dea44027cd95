"""What several tests of the cache share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cache.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server listens that nobody stops before the end."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A soak takes minutes: it runs only when it is named, whatever else `-m` selects."""
    soaks = [item for item in items if item.get_closest_marker("soak")]
    for item in soaks:
        item.add_marker(pytest.mark.timeout(1200))
    if "soak" not in config.option.markexpr:
        config.hook.pytest_deselected(items=soaks)
        items[:] = [item for item in items if item not in soaks]
