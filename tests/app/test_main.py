"""The application's builder; no cluster is needed to build it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.settings import SettingsError

# Importing Serve is not free of warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

MOCK: dict[str, Any] = {"model": {"backend": "mock"}, "cache": {"semantic": False}}


def build(args: dict[str, Any]) -> Any:
    from app.main import app

    return app(args)


def test_the_mock_needs_no_prepared_model(tmp_path: Path) -> None:
    assert build({"home": str(tmp_path), **MOCK}) is not None


def test_a_model_that_is_not_prepared_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    for args in ({}, {**MOCK, "cache": {"semantic": True}}):
        with pytest.raises(SettingsError, match="run `seedance models pull"):
            build({"home": str(tmp_path), **args})


def test_values_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    model = {"backend": "mock", "max_num_seqs": 600}
    with pytest.raises(SettingsError, match=r"model: max_num_batched_tokens is 512.*856"):
        build({"home": str(tmp_path), **MOCK, "model": model})


def test_an_unknown_key_stops_the_build() -> None:
    with pytest.raises(SettingsError, match="cashe: unknown key"):
        build({**MOCK, "cashe": {}})
