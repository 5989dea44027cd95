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


def test_a_backend_that_is_not_installed_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'seedance\[vllm\]'"):
        build({"home": str(tmp_path), "model": {"backend": "vllm"}})


def test_values_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    model = {"backend": "mock", "max_num_seqs": 600}
    with pytest.raises(SettingsError, match=r"model: max_num_batched_tokens is 384.*856"):
        build({"home": str(tmp_path), **MOCK, "model": model})


def test_an_unknown_key_stops_the_build() -> None:
    with pytest.raises(SettingsError, match="cashe: unknown key"):
        build({**MOCK, "cashe": {}})


def deployments_of(args: dict[str, Any], home: Path) -> dict[str, Any]:
    built = build({"home": str(home), **MOCK, **args})
    ingress = built._bound_deployment
    model = ingress.init_args[1]._bound_deployment
    return {"Ingress": ingress._deployment_config, "Model": model._deployment_config}


def test_replica_counts_are_fixed_as_shipped(tmp_path: Path) -> None:
    for config in deployments_of({}, tmp_path).values():
        assert config.autoscaling_config is None
        assert config.num_replicas == 1


def test_autoscaling_gives_the_model_bounds_and_the_work_policy(tmp_path: Path) -> None:
    scaling = {"enabled": True, "min_replicas": 2, "max_replicas": 5, "surge_waiting": 7.0}
    alert = {"alert_url": "http://alerts.example.org/hook"}
    configs = deployments_of({"autoscaling": scaling | alert}, tmp_path)
    assert configs["Ingress"].autoscaling_config is None
    config = configs["Model"].autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (2, 5, 16)
    kwargs = config.policy.policy_kwargs
    assert kwargs["rules"]["surge"]["waiting"] == 7
    assert kwargs["alert"]["url"] == alert["alert_url"]


def test_the_ingress_moves_only_where_it_is_asked_to(tmp_path: Path) -> None:
    configs = deployments_of({"ingress": {"max_replicas": 3}}, tmp_path)
    assert configs["Model"].autoscaling_config is None
    config = configs["Ingress"].autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (1, 3)
    assert config.policy.policy_kwargs["rules"]["target_tokens_per_replica"] is None


def test_bounds_out_of_order_are_named() -> None:
    for args, named in (
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "autoscaling.*max_replicas is 2"),
        ({"ingress": {"num_replicas": 3, "max_replicas": 2}}, "ingress.*max_replicas is 2"),
    ):
        with pytest.raises(SettingsError, match=named):
            build(args)
