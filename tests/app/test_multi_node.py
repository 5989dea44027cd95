"""The config for several machines, as operators copy it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.launcher import ENV_FILE, read_config

CONFIG = ENV_FILE.parent / "multi_node" / "serve_config.yaml"

# Importing Serve is not free of warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


def resume_key(home: Path) -> bytes:
    from app.main import _resume_key

    return _resume_key(home)


def test_every_machine_gets_a_proxy_that_reaches_all_ingresses() -> None:
    config, settings = read_config(CONFIG)
    assert config["proxy_location"] == "EveryNode"
    assert config["http_options"]["host"] == "0.0.0.0"
    assert settings.ingress.num_replicas == settings.model.num_replicas == 2


def test_a_rollout_has_room_on_every_machine() -> None:
    config, _ = read_config(CONFIG)
    limits = {
        each["name"]: each["max_replicas_per_node"]
        for each in config["applications"][0]["deployments"]
    }
    assert limits == {"Ingress": 2, "Model": 2}


def test_the_resume_key_is_made_once_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    key = resume_key(tmp_path)
    assert resume_key(tmp_path) == key
    assert (tmp_path / "resume.key").stat().st_mode & 0o077 == 0


def test_the_resume_key_is_the_first_that_the_cluster_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.experimental import internal_kv

    cluster: dict[str, bytes] = {}

    def put(name: str, value: bytes, overwrite: bool, namespace: str) -> None:
        assert not overwrite
        cluster.setdefault(f"{namespace} {name}", value)

    def get(name: str, namespace: str) -> bytes:
        return cluster[f"{namespace} {name}"]

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", get)
    home = Path("~/seedance")
    keys = []
    for machine in ("one", "other"):
        monkeypatch.setenv("HOME", str(tmp_path / machine))
        keys.append(resume_key(home))
    assert keys[0] == keys[1] == (tmp_path / "one" / "seedance" / "resume.key").read_bytes()
    assert keys[0] != (tmp_path / "other" / "seedance" / "resume.key").read_bytes()
