"""`seedance`: prepare models, serve, chat, make keys, look after the cache."""

from __future__ import annotations

import json
import logging
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
cache = typer.Typer(no_args_is_help=True, help="The prompt cache of a running server.")
cli.add_typer(cache, name="cache")

DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="Server.")]
AdminKey = Annotated[str | None, typer.Option(help="API key of an admin.")]

DEFAULT_CONFIG = Path("serve_config.yaml")
AUTH_IS_OFF = "Auth:   off, there are no keys (`seedance keys create TENANT` makes one)"
StoreConfig = Annotated[
    Path, typer.Option(help="Takes the store of accounts from here; the defaults where it is not.")
]
LimitOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="Of the tenant: requests=60 and tokens=10000 a minute, concurrent=4 at a time.",
    ),
]


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    try:
        cli()
    except (SettingsError, ServingError, OSError) as error:
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
    from deployments.engine.weights import pull

    settings = _settings_of(config)
    for name in names or [settings.model.name, settings.cache.embedder]:
        folder = pull(name, settings.home.expanduser())
        print(f"{name}: ready in {folder.path}")


@cli.command("serve")
def serve_config(
    config: Annotated[Path, typer.Argument(help="Serve config file.")] = DEFAULT_CONFIG,
) -> None:
    """Prepare what is missing, then `serve run CONFIG`."""
    from app.key_commands import is_auth_off
    from app.launcher import base_url, is_on_loopback, read_config, run_serve

    document, settings = read_config(config)
    is_open = is_auth_off(settings, is_on_loopback=is_on_loopback(document))
    _prepare(settings)
    url = base_url(document)
    sys.exit(run_serve([str(config)], url, _greeting(url, is_open=is_open)))


@cli.command()
def dev() -> None:
    """Serve the page and the APIs on the mock model; reload when a file changes."""
    from app.key_commands import is_auth_off
    from app.launcher import HAPROXY_SWITCHES, run_serve

    url = DEFAULT_URL
    greeting = f"Mock model. Page: {url}/"
    if is_auth_off(Settings(), is_on_loopback=True):
        greeting += f"\n{AUTH_IS_OFF}"
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
    from app.accounts import hash_key, new_key

    key = new_key()
    entry = {"tenant": tenant, "sha256": hash_key(key)}
    parse_settings({"auth": {"keys": [entry]}})
    print(f"key (shown once):  {key}")
    # JSON is YAML, whatever the name holds.
    print(f"serve_config.yaml: - {json.dumps(entry, ensure_ascii=False)}")


@keys.command("create")
def create_key(
    tenant: Annotated[str, typer.Argument(help="Who will use it.")],
    limit: LimitOptions = None,
    admin: Annotated[bool, typer.Option(help="May see and change what is all tenants'.")] = False,
    config: StoreConfig = DEFAULT_CONFIG,
) -> None:
    """Make a key in the store of accounts; running servers take it within seconds."""
    from app.key_commands import KeyCommands

    KeyCommands(_settings_of(config)).create(tenant, limit or [], is_admin=admin)


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    config: StoreConfig = DEFAULT_CONFIG,
) -> None:
    """List the keys of the store and the limits of their tenants."""
    from app.key_commands import KeyCommands

    KeyCommands(_settings_of(config)).show(tenant)


@keys.command("revoke")
def revoke_key(
    id: Annotated[str, typer.Argument(help="As `seedance keys list` tells it.")],
    config: StoreConfig = DEFAULT_CONFIG,
) -> None:
    """Make a key of the store worthless; running servers refuse it within seconds."""
    from app.key_commands import KeyCommands

    KeyCommands(_settings_of(config)).revoke(id)


@keys.command("limit")
def limit_tenant(
    tenant: Annotated[str, typer.Argument(help="Whose requests.")],
    limit: LimitOptions = None,
    config: StoreConfig = DEFAULT_CONFIG,
) -> None:
    """Set the limits of a tenant, in place of all it had; without --limit it has none of its own."""
    from app.key_commands import KeyCommands

    KeyCommands(_settings_of(config)).limit(tenant, limit or [])


@cache.command("export")
def export_cache(
    file: Annotated[Path, typer.Argument(help="Where to write, a JSON object a line.")],
    url: Url = DEFAULT_URL,
    key: AdminKey = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    tag: Annotated[str | None, typer.Option(help="With this tag only.")] = None,
) -> None:
    """Write what the cache holds to a file."""
    from app.cache_files import Server, export_entries

    number = export_entries(Server(url, key), file, {"tenant": tenant, "tag": tag})
    print(f"{file}: {number} entries")


@cache.command("import")
def import_cache(
    file: Annotated[Path, typer.Argument(help="What was exported.")],
    url: Url = DEFAULT_URL,
    key: AdminKey = None,
) -> None:
    """Take exported entries in again, with the ages that they had."""
    from app.cache_files import Server, import_entries

    num_read, num_kept = import_entries(Server(url, key), file)
    print(f"{file}: {num_kept} of {num_read} entries kept")


@cache.command("warm")
def warm_cache(
    file: Annotated[Path, typer.Argument(help="A prompt, or the JSON body of a chat, a line.")],
    url: Url = DEFAULT_URL,
    key: Annotated[str | None, typer.Option(help="API key of the tenant.")] = None,
    parallel: Annotated[int, typer.Option(help="Prompts at a time.", min=1, max=256)] = 4,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
) -> None:
    """Ask every prompt of a file, so that its answer is in the cache."""
    from app import cache_files

    server = cache_files.Server(url, key)
    told = cache_files.warm_cache(server, file, num_parallel=parallel, max_tokens=max_tokens)
    print(f"{file}: " + ", ".join(f"{count} {name}" for name, count in told.most_common()))


def _prepare(settings: Settings) -> None:
    from deployments.engine.weights import pull, resolve

    home = settings.home.expanduser()
    wanted = [settings.model.name] if settings.model.backend != "mock" else []
    if settings.cache.enabled and settings.cache.semantic:
        wanted.append(settings.cache.embedder)
    for name in wanted:
        if resolve(name, home) is None:
            pull(name, home)


def _settings_of(config: Path) -> Settings:
    """Those of the file, or the defaults where there is none."""
    from app.launcher import read_config

    return read_config(config)[1] if config.exists() else Settings()


def _greeting(url: str, *, is_open: bool) -> str:
    lines = [
        f"Page:   {url}/",
        f'Try:    .venv/bin/seedance chat "What is the capital of France?" --url {url}',
        f"OpenAI: {url}/v1",
    ]
    if is_open:
        lines.append(AUTH_IS_OFF)
    return "\n".join(lines)
