"""A server to break: its processes by what they are, its config to change, its metrics to read."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import Cluster, free_port, serving
from bench.cpu import kind_of
from tests.chaos.rubbish import RUBBISH_SWITCH
from tests.e2e.cluster import KEY_A, config_for

WHOLE_WITHIN_S = 180.0
MODEL, INGRESS, CACHE = "replica Model", "replica Ingress", "replica PromptCache"
CONTROLLER, HAPROXY, PYTHON_PROXY = "controller", "HAProxy", "Python proxy"


@dataclass
class House:
    """A running server.

    Attributes:
        config: what it runs by, as last deployed.
        rubbish: while this file exists, the cache answers as its content says.
        whole: how many processes of each kind there are when nothing is broken.
    """

    url: str
    cluster: Cluster
    folder: Path
    config: dict[str, Any]
    rubbish: Path
    whole: dict[str, int] = field(default_factory=dict)

    @property
    def ws_url(self) -> str:
        return f"{self.url.replace('http', 'ws', 1)}/v1/infer"

    def pids(self, kind: str) -> list[int]:
        """Living processes of a kind; see `bench.cpu`."""
        found = []
        for process in self.cluster.processes():
            with contextlib.suppress(psutil.Error):
                if kind_of(" ".join(process.cmdline())) == kind:
                    found.append(process.pid)
        return sorted(found)

    def busiest_ingress(self) -> int:
        """The ingress that most clients are connected to: a fault there is felt."""

        def num_sockets(pid: int) -> int:
            sockets = psutil.Process(pid).net_connections(kind="tcp")
            return sum(
                each.status == psutil.CONN_ESTABLISHED
                and each.laddr.port in self.cluster.ingress_ports
                for each in sockets
            )

        return max(self.pids(INGRESS), key=num_sockets)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics, summed over their labels, and each again as `name{labels}`.

        Raises:
            httpx.HTTPError: no ingress answers.
        """
        reply = httpx.get(f"{self.url}/metrics", timeout=5)
        reply.raise_for_status()
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
                for label, value in sample.labels.items():
                    name = f"{sample.name}:{label}={value}"
                    samples[name] = samples.get(name, 0.0) + sample.value
        return samples

    def metric(self, name: str) -> float:
        """One of `metrics`; 0 where there is none yet."""
        return self.metrics().get(name, 0.0)

    def count(self) -> dict[str, int]:
        """Processes by kind."""
        return {kind: len(self.pids(kind)) for kind in (MODEL, INGRESS, CACHE, CONTROLLER, HAPROXY)}

    def is_whole(self) -> bool:
        """Whether every replica is there and answers."""
        try:
            answering = self.metrics().get("seedance_model_replicas")
        except httpx.HTTPError:
            return False
        count = self.count()
        # A reload of HAProxy keeps the old process for as long as it has sockets.
        count[HAPROXY] = min(count[HAPROXY], self.whole[HAPROXY])
        return answering == self.whole[MODEL] and count == self.whole

    def until_whole(self) -> None:
        """Waits until what was broken is replaced.

        Raises:
            AssertionError: it is not.
        """
        self.until(self.is_whole, WHOLE_WITHIN_S, lambda: f"{self.count()} is not {self.whole}")

    def until(
        self, is_so: Callable[[], bool], within_s: float, what: Callable[[], str] = lambda: ""
    ) -> float:
        """Waits for something; returns how many seconds it took.

        Raises:
            AssertionError: it took longer than `within_s`.
        """
        begun_s = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun_s < within_s, f"not within {within_s:g} s: {what()}"
            time.sleep(0.1)
        return time.monotonic() - begun_s

    def deploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        """`serve deploy` of the config with a change in its application."""
        config = copy.deepcopy(self.config)
        change(config["applications"][0])
        file = self.folder / "changed.yaml"
        file.write_text(yaml.safe_dump(config))
        # Ray 2.60 protects new local clusters with the token in ~/.ray; its CLI sends it only
        # when told that there is one.
        self._serve("deploy", "--address", self.cluster.dashboard_url(), str(file))
        self.config = config

    def deployment_statuses(self) -> dict[str, str]:
        """Serve's own word on each deployment: HEALTHY, UPDATING, UNHEALTHY, …"""
        status = yaml.safe_load(
            self._serve("status", "--address", self.cluster.dashboard_url(), "--name", "seedance")
        )
        return {name: each["status"] for name, each in status["deployments"].items()}

    def _serve(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("serve")), *arguments],
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextlib.contextmanager
def running_house(
    import_path: str, environment: Mapping[str, str] | None = None, **args: Any
) -> Iterator[House]:
    """A server on a cluster of its own; nothing of it is left afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        config = config_for(port, Path(folder), **args)
        config["applications"][0]["import_path"] = import_path
        file = Path(folder) / "serve_config.yaml"
        file.write_text(yaml.safe_dump(config))
        rubbish = Path(folder) / "rubbish"
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        url = f"http://127.0.0.1:{port}"
        own = {RUBBISH_SWITCH: str(rubbish), **(environment or {})}
        with serving(command, url, environment=own) as cluster:
            house = House(url, cluster, Path(folder), config, rubbish)
            model, ingress = args["model"]["num_replicas"], args["ingress"]["num_replicas"]
            house.until(
                lambda: len(house.pids(MODEL)) == model and len(house.pids(INGRESS)) == ingress,
                WHOLE_WITHIN_S,
                lambda: json.dumps(house.count()),
            )
            house.whole = house.count()
            yield house


KEY = KEY_A
