from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from app import cli
from app.accounts import Accounts, hash_key
from app.key_commands import is_auth_off
from app.settings import AuthSettings, Settings, SettingsError, parse_settings


@pytest.mark.parametrize("tenant", ["red", "team:eu/1", "it's", 'a "b"', "a\\b", "größe 🙂", "{x}"])
def test_a_made_key_lets_its_tenant_in(tenant: str) -> None:
    result = CliRunner().invoke(cli.cli, ["keys", "hash", tenant])
    assert result.exit_code == 0, result.output
    key = re.search(r"key \(shown once\): +(\S+)", result.output)
    line = re.search(r"serve_config.yaml: (- .*)", result.output)
    assert key is not None
    assert line is not None
    settings = parse_settings({"auth": {"keys": yaml.safe_load(line[1])}})
    assert key[1] not in line[1]
    assert Accounts(settings.auth).tenant_of(f"Bearer {key[1]}") == tenant


def test_two_keys_differ() -> None:
    runs = [CliRunner().invoke(cli.cli, ["keys", "hash", "red"]).output for _ in range(2)]
    assert runs[0] != runs[1]


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["seedance", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code, capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["models", "pull", "--config"]])
def test_a_fault_in_the_settings_is_one_clear_line(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("applications: [{args: {cache: {ttl_s: -5}}}]")
    code, err = run_main(monkeypatch, capsys, *command, str(file))
    assert code == 1
    (line,) = err.strip().splitlines()
    assert line.startswith(f"seedance: {file}: ")
    assert "cache.ttl_s" in line
    assert "-5" in line


def test_a_missing_config_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run_main(monkeypatch, capsys, "serve", str(tmp_path / "nowhere.yaml"))
    assert code == 1
    assert "nowhere.yaml" in err
    assert "Traceback" not in err


def test_a_nameless_tenant_gets_no_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run_main(monkeypatch, capsys, "keys", "hash", "")
    assert code == 1
    assert "tenant" in err


@pytest.mark.parametrize("arguments", [[], ["models"], ["keys"], ["chat", "--help"]])
def test_help_is_there(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.cli, arguments)
    assert "Usage" in result.output


# ------------------------------------------------------------------ keys in the store


def config_in(home: Path, **args: object) -> str:
    file = home / "config.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": {"home": str(home), **args}}]}))
    return str(file)


def keys(*arguments: str) -> str:
    result = CliRunner().invoke(cli.cli, ["keys", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def created(output: str) -> tuple[str, str]:
    """The id and the key."""
    told = re.search(r"id: +(\S+)\nkey \(shown once\): +(\S+)", output)
    assert told is not None, output
    return told[1], told[2]


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first = keys("create", "red", "--config", config)
    assert "This is the first key" in first
    red_id, red_key = created(first)
    options = ["--limit", "requests=60", "--limit", "concurrent=4", "--admin"]
    second = keys("create", "größe 🙂", *options, "--config", config)
    assert "first key" not in second
    other_id, other_key = created(second)
    assert red_key != other_key
    shown = keys("list", "--config", config)
    assert red_key not in shown
    assert other_key not in shown
    rows = {line.split()[0]: line for line in shown.splitlines()}
    assert red_key[-4:] in rows[red_id]
    assert "good" in rows[red_id]
    assert "admin" in rows[other_id]
    assert "requests=60 concurrent=4" in rows[other_id]
    assert keys("list", "--tenant", "red", "--config", config).count("key_") == 1
    assert "revoked" in keys("revoke", red_id, "--config", config)
    assert "revoked" in keys("list", "--tenant", "red", "--config", config)


def test_a_made_key_is_in_the_store_as_its_digest_only(tmp_path: Path) -> None:
    _, key = created(keys("create", "red", "--config", config_in(tmp_path)))
    held = b"".join(file.read_bytes() for file in tmp_path.glob("accounts.sqlite3*"))
    assert hash_key(key).encode() in held
    assert key.encode() not in held


def test_limits_are_set_and_taken_away(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    keys("create", "red", "--config", config)
    assert "tokens=5" in keys("limit", "red", "--limit", "tokens=5", "--config", config)
    assert "tokens=5" in keys("list", "--config", config)
    assert "no limits" in keys("limit", "red", "--config", config)
    assert "tokens=5" not in keys("list", "--config", config)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["create", ""], "tenant"),
        (["create", "a\nb"], "tenant"),
        (["create", "red", "--limit", "requests"], "NAME=NUMBER"),
        (["create", "red", "--limit", "requests=0"], "requests=0"),
        (["create", "red", "--limit", "speed=9"], "speed=9"),
        (["limit", "red", "--limit", "tokens=-1"], "tokens=-1"),
        (["revoke", "key_nowhere"], "no key has the id 'key_nowhere'"),
    ],
)
def test_what_cannot_be_done_to_keys_is_one_clear_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ["--config", config_in(tmp_path)]
    code, err = run_main(monkeypatch, capsys, "keys", *arguments, *config)
    assert code == 1
    (line,) = err.strip().splitlines()
    assert told in line


def test_a_store_that_does_not_answer_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("asyncpg")
    url = "postgresql://u:secret@127.0.0.1:1/d"
    config = config_in(tmp_path, accounts={"url": url})
    code, err = run_main(monkeypatch, capsys, "keys", "list", "--config", config)
    assert code == 1
    (line,) = err.strip().splitlines()
    assert "does not answer" in line
    assert "secret" not in line


# ------------------------------------------------------------------ who is let in


def test_a_server_that_others_reach_does_not_start_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run_main(monkeypatch, capsys, "serve", config_in(tmp_path))
    assert code == 1
    assert "seedance keys create TENANT" in err
    assert "auth.allow_open" in err


def test_auth_is_off_on_loopback_until_there_is_a_key(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    settings = Settings(home=tmp_path)
    open_to_all = Settings(home=tmp_path, auth=AuthSettings(allow_open=True))
    assert is_auth_off(settings, is_on_loopback=True)
    assert is_auth_off(open_to_all, is_on_loopback=False)
    with pytest.raises(SettingsError):
        is_auth_off(settings, is_on_loopback=False)
    id, _ = created(keys("create", "red", "--config", config))
    keys("revoke", id, "--config", config)
    for each in (settings, open_to_all):
        assert not is_auth_off(each, is_on_loopback=False)


def test_the_greeting_says_when_auth_is_off() -> None:
    assert "Auth:   off" in cli._greeting("http://127.0.0.1:8000", is_open=True)
    assert "Auth" not in cli._greeting("http://127.0.0.1:8000", is_open=False)
