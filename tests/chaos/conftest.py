"""One cluster for all faults on the scripted engine, and the table at the end of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.chaos.house import House, running_house
from tests.chaos.ledger import Ledger

LEDGER = pytest.StashKey[Ledger]()
MODEL_REPLICAS = INGRESS_REPLICAS = 2
TOKEN_INTERVAL_S = 0.05


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeats", type=int, default=10, help="faults of each class")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chaos takes an hour: it runs only when it is named, whatever else `-m` selects."""
    chaotic = [item for item in items if item.get_closest_marker("chaos")]
    for item in chaotic:
        item.add_marker(pytest.mark.timeout(7200))
    if "chaos" not in config.option.markexpr:
        config.hook.pytest_deselected(items=chaotic)
        items[:] = [item for item in items if item not in chaotic]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    ledger = config.stash[LEDGER]
    if ledger.rows:
        terminalreporter.section("faults and streams")
        terminalreporter.write_line(ledger.table())


@pytest.fixture(scope="session")
def repeats(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--repeats", 10))


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    return pytestconfig.stash[LEDGER]


@pytest.fixture(scope="session")
def running_mock_house() -> Iterator[House]:
    with running_house(
        "tests.chaos.app:build",
        model={
            "backend": "mock",
            "num_replicas": MODEL_REPLICAS,
            "max_num_seqs": 64,
            "mock_token_interval_s": TOKEN_INTERVAL_S,
            "num_cpus": 0.1,
        },
        ingress={"num_replicas": INGRESS_REPLICAS},
        # What the ingresses hold themselves would hide what becomes of the cache.
        cache={"semantic": False, "ttl_s": 86_400, "front_bytes": 0},
    ) as house:
        yield house


@pytest.fixture
def house(running_mock_house: House) -> House:
    """Whole again, whatever the last test broke."""
    running_mock_house.rubbish.unlink(missing_ok=True)
    running_mock_house.until_whole()
    return running_mock_house


def at_least_99_percent(count: int) -> int:
    return math.floor(0.99 * count)
