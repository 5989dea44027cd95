"""`seedance`: prepare models, serve, chat, make keys."""

from __future__ import annotations

import json
import logging
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from app.settings import Settings, SettingsError, parse_settings
from protocol.errors import ServingError

cli = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
models = typer.Typer(no_args_is_help=True, help="Prepare model weights.")
keys = typer.Typer(no_args_is_help=True, help="API keys of tenants.")
cli.add_typer(models, name="models")
cli.add_typer(keys, name="keys")

DEFAULT_CONFIG = Path("serve_config.yaml")


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    try:
        cli()
    except (SettingsError, ServingError) as error:
        print(f"seedance: {error}", file=sys.stderr)
        sys.exit(1)


@models.command("pull")
def pull_models(
    names: Annotated[
        list[str] | None, typer.Argument(help="Hugging Face ids or folders; none: the defaults")
    ] = None,
    config: Annotated[
        Path, typer.Option(help="Takes the cache folder from here.")
    ] = DEFAULT_CONFIG,
) -> None:
    """Download, convert and verify models, once."""
    from app.launcher import read_config
    from deployments.engine.weights import pull

    settings = read_config(config)[1] if config.exists() else Settings()
    for name in names or [settings.model.name, settings.cache.embedder]:
        folder = pull(name, settings.home.expanduser())
        print(f"{name}: ready in {folder.path}")


@cli.command("serve")
def serve_config(
    config: Annotated[Path, typer.Argument(help="Serve config file.")] = DEFAULT_CONFIG,
) -> None:
    """Prepare what is missing, then `serve run CONFIG`."""
    from app.launcher import base_url, read_config, run_serve

    document, settings = read_config(config)
    _prepare(settings)
    url = base_url(document)
    sys.exit(run_serve([str(config)], url, _greeting(url, settings)))


@cli.command()
def dev() -> None:
    """Serve the page and the APIs on the mock model; reload when a file changes."""
    from app.launcher import HAPROXY_SWITCHES, run_serve

    url = "http://127.0.0.1:8000"
    greeting = f"Mock model. Page: {url}/"
    # Without a config file HAProxy would listen on all interfaces; the Python proxy does not.
    overrides = dict.fromkeys(HAPROXY_SWITCHES, "0")
    sys.exit(run_serve(["--reload", "app.main:dev"], url, greeting, overrides=overrides))


@cli.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; none: a conversation.")
    ] = None,
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="API key.")] = None,
    model: Annotated[str | None, typer.Option(help="Model id.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy, and cacheable.")] = 0.0,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    cache: Annotated[str, typer.Option(help="auto, bypass, only, refresh or sampled.")] = "auto",
) -> None:
    """Ask the served model; the answer streams, with its figures below."""
    from app.chat import ChatOptions, run_chat

    options = ChatOptions(
        api_key=key,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        system=system,
        cache=cache,
    )
    sys.exit(run_chat(url, prompt, options))


@keys.command("hash")
def hash_new_key(
    tenant: Annotated[str, typer.Argument(help="Who will use it.")],
) -> None:
    """Make a key, and the entry for `auth.keys` that lets it in."""
    from app.accounts import hash_key

    key = f"sk-seedance-{secrets.token_urlsafe(32)}"
    entry = {"tenant": tenant, "sha256": hash_key(key)}
    parse_settings({"auth": {"keys": [entry]}})
    print(f"key (shown once):  {key}")
    # JSON is YAML, whatever the name holds.
    print(f"serve_config.yaml: - {json.dumps(entry, ensure_ascii=False)}")


def _prepare(settings: Settings) -> None:
    from deployments.engine.weights import pull, resolve

    home = settings.home.expanduser()
    wanted = [settings.model.name] if settings.model.backend == "transformers" else []
    if settings.cache.enabled and settings.cache.semantic:
        wanted.append(settings.cache.embedder)
    for name in wanted:
        if resolve(name, home) is None:
            pull(name, home)


def _greeting(url: str, settings: Settings) -> str:
    lines = [
        f"Page:   {url}/",
        f'Try:    .venv/bin/seedance chat "What is the capital of France?" --url {url}',
        f"OpenAI: {url}/v1",
    ]
    if not settings.auth.keys:
        lines.append("Auth:   off, no keys are configured (`seedance keys hash TENANT` makes one)")
    return "\n".join(lines)
