"""A real local Serve cluster, started as users start it: `seedance serve CONFIG`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from app.accounts import hash_key
from bench.cluster import free_port, serving

ROOT = Path(__file__).resolve().parents[2]
KEY_A, KEY_B = "sk-test-a", "sk-test-b"


@dataclass(frozen=True)
class Server:
    """A running server; `process` is the root of all processes of its cluster."""

    url: str
    log: Path
    process: psutil.Process

    @property
    def ws_url(self) -> str:
        return f"{self.url.replace('http', 'ws', 1)}/v1/infer"

    def replica_pids(self, deployment: str) -> list[int]:
        """Processes of a deployment's replicas."""
        title = f"ServeReplica:seedance:{deployment}"
        pids = []
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(title in part for part in child.cmdline()):
                    pids.append(child.pid)
        return pids


def config_for(port: int, folder: Path, **args: Any) -> dict[str, Any]:
    """serve_config.yaml on another port, with the keys of two tenants."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    keys = [{"tenant": name, "sha256": hash_key(key)} for name, key in (("a", KEY_A), ("b", KEY_B))]
    application = config["applications"][0]
    accounts = {"url": f"sqlite:///{folder / 'accounts.sqlite3'}"}
    auth = {"keys": keys, "allow_anonymous": True}
    application["args"] |= {"auth": auth, "accounts": accounts} | args
    # What one test has stored is no business of the next.
    cache = application["args"].get("cache", {}) | {"store": {"kind": "memory"}}
    application["args"]["cache"] = cache | args.get("cache", {})
    return config


@contextlib.contextmanager
def running_server(**args: Any) -> Iterator[Server]:
    """A server whose model is ready; nothing of it is left afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve_config.yaml"
        config.write_text(yaml.safe_dump(config_for(port, Path(folder), **args)))
        command = [str(Path(sys.executable).with_name("seedance")), "serve", str(config)]
        url = f"http://127.0.0.1:{port}"
        with serving(command, url) as cluster:
            yield Server(url=url, log=cluster.log, process=cluster.process)
