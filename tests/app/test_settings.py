"""The settings: what is refused, and that every refusal names its key."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from app.accounts import hash_key
from app.settings import Settings, SettingsError, parse_settings, settings_table

CONFIG = Path(__file__).parents[2] / "serve_config.yaml"
DIGEST = hash_key("key")


def at(key: str, value: Any) -> dict[str, Any]:
    """The settings in which only `key` is given."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def refusal(key: str, value: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_settings(at(key, value))
    assert f"{key}: " in str(caught.value)
    return str(caught.value)


def test_the_shipped_file_parses_and_names_only_known_keys() -> None:
    (application,) = yaml.safe_load(CONFIG.read_text())["applications"]
    settings = parse_settings(application["args"])
    assert settings.model.name == Settings().model.name
    assert settings.auth.keys == ()


def test_nothing_at_all_is_the_defaults() -> None:
    assert parse_settings({}) == Settings()


def leaves(section: BaseModel, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        is_section = isinstance(value, BaseModel)
        found += leaves(value, f"{prefix}{name}.") if is_section else [(prefix + name, value)]
    return found


@pytest.mark.parametrize(("key", "default"), leaves(Settings()))
def test_every_default_is_one_that_may_be_written_down(key: str, default: Any) -> None:
    plain = str(default) if isinstance(default, Path) else default
    assert parse_settings(at(key, plain)) == Settings()


@pytest.mark.parametrize(
    "key", ["modle", "model.nmae", "cache.ttl", "limits.max", "auth.key", "ingress.replicas"]
)
def test_an_unknown_key_is_named(key: str) -> None:
    assert "unknown key" in refusal(key, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.max_num_seqs", 0),
        ("model.max_num_seqs", 1025),
        ("model.max_model_len", 1),
        ("model.max_num_batched_tokens", 256),
        ("model.mock_token_interval_s", -0.1),
        ("model.num_gpus", 65),
        ("model.backend", "llama.cpp"),
        ("model.device", "tpu"),
        ("model.dtype", "int8"),
        ("cache.semantic_threshold", 1.01),
        ("cache.semantic_threshold", 0),
        ("cache.ttl_s", 0),
        ("cache.ttl_s", float("nan")),
        ("cache.ttl_s", float("inf")),
        ("cache.max_bytes", float("nan")),
        ("cache.epoch", -1),
        ("limits.heartbeat_s", 0),
        ("limits.max_body_bytes", 1),
        ("log_level", "verbose"),
        ("auth.keys", [{"tenant": "", "sha256": DIGEST}]),
        ("auth.keys", [{"tenant": "a" * 129, "sha256": DIGEST}]),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any) -> None:
    message = refusal(key, value) if key != "auth.keys" else nested_refusal(key, value)
    assert len(message) < 300


def nested_refusal(key: str, value: Any) -> str:
    with pytest.raises(SettingsError, match=rf"{key}\.0\.") as caught:
        parse_settings(at(key, value))
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.max_num_seqs", "16"),
        ("model.max_num_seqs", 16.5),
        ("model.max_num_seqs", True),
        ("model.name", 5),
        ("model.name", None),
        ("model", "SmolLM2"),
        ("model", [1]),
        ("cache.enabled", "yes"),
        ("cache.enabled", 1),
        ("cache.ttl_s", "900"),
        ("cache.ttl_s", datetime.date(2026, 1, 1)),
        ("limits.max_connections", {"a": 1}),
        ("auth.keys", "a"),
        ("home", 5),
    ],
)
def test_a_value_of_the_wrong_type_is_named(key: str, value: Any) -> None:
    refusal(key, value)


def test_a_refusal_shows_the_value_and_the_limit() -> None:
    message = refusal("model.max_num_seqs", 5000)
    assert "5000" in message
    assert "1024" in message


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings({"model": {"nmae": "x", "max_num_seqs": 0}, "cashe": {}})
    for key in ("model.nmae", "model.max_num_seqs", "cashe"):
        assert f"{key}: " in str(caught.value)


def test_lists_of_yaml_are_taken() -> None:
    text = f"auth: {{keys: [{{tenant: 'team:eu/1', sha256: {DIGEST}}}], allowed_origins: ['*']}}"
    auth = parse_settings(yaml.safe_load(text)).auth
    assert auth.keys[0].tenant == "team:eu/1"
    assert auth.allowed_origins == ("*",)


def test_integers_stand_for_floats() -> None:
    assert parse_settings({"cache": {"ttl_s": 60}}).cache.ttl_s == 60


def test_a_key_in_the_place_of_its_digest_is_refused_and_not_shown() -> None:
    entry = {"tenant": "a", "sha256": "sk-seedance-precious"}
    message = nested_refusal("auth.keys", [entry])
    assert "auth.keys.0.sha256" in message
    assert "precious" not in message


def test_one_key_cannot_be_two_tenants() -> None:
    entries = [{"tenant": name, "sha256": DIGEST} for name in ("a", "b")]
    assert "entries 0 and 1" in refusal("auth.keys", entries)


def test_what_is_no_mapping_or_has_no_end_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["model"] = circle
    for args in (circle, [], "text", 5):
        with pytest.raises(SettingsError):
            parse_settings(args)  # type: ignore[arg-type]


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.log_level = "DEBUG"


def test_every_key_is_described_in_the_operations_page() -> None:
    table = settings_table()
    page = CONFIG.with_name("docs").joinpath("operations.md").read_text()
    assert table in page, "python -m app.settings prints the table"
    assert "|  |" not in table, "a key has no description"


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ({"kind": "redis"}, "kind redis needs a url"),
        ({"kind": "memory", "url": "redis://h"}, "kind memory takes no url"),
        ({"url": "redis://h"}, "kind sqlite takes no url"),
        ({"kind": "redis", "url": "redis://h", "path": "f"}, "kind redis takes no path"),
    ],
)
def test_a_store_takes_what_its_kind_needs(store: dict[str, str], named: str) -> None:
    assert named in refusal("cache.store", store)


def test_a_password_in_the_stores_url_is_not_shown() -> None:
    assert "secret" not in refusal("cache.store.url", "http://:secret@host")
    assert "secret" not in refusal("cache.store", {"url": "redis://:secret@host"})


def test_several_cache_replicas_need_a_store_to_share() -> None:
    for cache in ({"store": {"kind": "memory"}}, {"cold_bytes": 0}):
        assert "num_replicas is 2" in refusal("cache", {"num_replicas": 2, **cache})
    assert parse_settings({"cache": {"num_replicas": 2}}).cache.num_replicas == 2


@pytest.mark.parametrize(("key", "value"), [("device", "cpu"), ("quantization", "int8")])
def test_what_vllm_decides_itself_is_not_set(key: str, value: str) -> None:
    named = refusal("model", {"backend": "vllm", key: value})
    assert f"{key} is {value}, backend vllm takes" in named
    assert parse_settings({"model": {key: value}}).model.backend == "transformers"
