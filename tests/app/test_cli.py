from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from app import cli
from app.accounts import Accounts
from app.settings import parse_settings


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
