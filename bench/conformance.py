"""Runs the Autobahn WebSocket test suite against the served stack, and sums its report up.

    python -m bench.conformance                 # through HAProxy
    python -m bench.conformance --python-proxy

The suite runs on CPython 2.7 only; it is installed, once, into a folder of the user's cache. The
server is a Serve cluster of its own whose ingress has one route more (`bench.echo_route`).
Prints Markdown, and ends with status 1 when a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from app.launcher import HAPROXY_SWITCHES
from bench.cluster import ROOT, ClusterFailed, free_port, serving
from bench.compare import conditions

REQUIREMENTS = ROOT / "bench" / "conformance.txt"
HOME = Path("~/.cache/seedance/autobahn").expanduser()
AGENT = "Seedance"
PASSED = ("OK", "NON-STRICT", "INFORMATIONAL")
NOT_SPOKEN = "UNIMPLEMENTED"


class SuiteMissing(Exception):
    """The test suite cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One case of a report.

    Args:
        behavior: what the suite says of the messages: `OK`, `NON-STRICT`, `FAILED`, …
        behavior_close: what it says of the end of the connection.
    """

    id: str
    behavior: str
    behavior_close: str
    description: str = ""
    result: str = ""

    @property
    def has_passed(self) -> bool:
        return self.behavior in PASSED and self.behavior_close in PASSED

    @property
    def is_spoken(self) -> bool:
        """Whether it was run; what both sides did not agree on is not."""
        return self.behavior != NOT_SPOKEN


def find_python2(named: str | None) -> Path:
    """A CPython 2.7: the one that was named, or of the PATH, or of pyenv.

    Raises:
        SuiteMissing: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [named, shutil.which("python2.7"), *sorted(pyenv.glob("2.7*/bin/python2.7"))]
    for candidate in candidates:
        if candidate and (found := shutil.which(candidate)) and _is_python2(found):
            return Path(found)
        if named:
            raise SuiteMissing(f"{named} is not a CPython 2.7")
    raise SuiteMissing(
        "the Autobahn test suite needs CPython 2.7: `pyenv install 2.7.18`, or name one with --python2"
    )


def _is_python2(path: str) -> bool:
    check = "import pip, sys; sys.exit(sys.version_info[:2] != (2, 7))"
    return subprocess.run([path, "-c", check], capture_output=True, check=False).returncode == 0


def install(python2: Path, home: Path) -> None:
    """Puts the suite and what it needs into `home`, unless just these are there.

    Raises:
        SuiteMissing: pip cannot.
    """
    wanted = REQUIREMENTS.read_text()
    stamp = home / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    command = [str(python2), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home)]
    done = subprocess.run(
        [*command, "-r", str(REQUIREMENTS)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SuiteMissing(f"pip of {python2} cannot install the suite:\n{done.stderr[-2000:]}")
    stamp.write_text(wanted)


def run_suite(
    python2: Path, home: Path, url: str, folder: Path, cases: Sequence[str]
) -> list[Case]:
    """Runs the cases against the server at `url`, and reads the report.

    Raises:
        SuiteMissing: the suite ended without one.
    """
    spec = folder / "spec.json"
    reports = folder / "reports"
    spec.write_text(
        json.dumps(
            {
                "outdir": str(reports),
                "servers": [{"agent": AGENT, "url": url}],
                "cases": list(cases),
                "exclude-cases": [],
                "exclude-agent-cases": {},
            }
        )
    )
    # As a site, for packages that share a namespace.
    start = f"import site; site.addsitedir({str(home)!r}); from autobahntestsuite.wstest import run; run()"
    command = [str(python2), "-c", start, "--mode", "fuzzingclient", "--spec", str(spec)]
    with (folder / "suite.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    try:
        return read_report(reports)
    except (OSError, ValueError, KeyError) as error:
        tail = (folder / "suite.log").read_text(errors="replace")[-2000:]
        raise SuiteMissing(f"no report ({error!r}):\n{tail}") from None


def read_report(folder: Path) -> list[Case]:
    """The cases of a report, in the order of their numbers."""
    index: Mapping[str, Mapping[str, Any]] = json.loads((folder / "index.json").read_text())[AGENT]
    cases = []
    for id, told in index.items():
        detail = json.loads((folder / told["reportfile"]).read_text())
        case = Case(
            id,
            told["behavior"],
            told["behaviorClose"],
            " ".join(str(detail.get("description", "")).split()),
            " ".join(f"{detail.get('result', '')} {detail.get('resultClose', '')}".split()),
        )
        cases.append(case)
    return sorted(cases, key=lambda case: [int(number) for number in case.id.split(".")])


@contextmanager
def serving_echo(*, python_proxy: bool) -> Iterator[str]:
    """The URL of the echo on a cluster that is gone afterwards."""
    port = free_port()
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "seedance",
                "route_prefix": "/",
                "import_path": "bench.echo_route:build",
                "args": {"model": {"backend": "mock"}, "cache": {"enabled": False}},
            }
        ],
    }
    environment = dict.fromkeys(HAPROXY_SWITCHES, "0") if python_proxy else {}
    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        url = f"http://127.0.0.1:{port}"
        with serving(command, url, environment=environment):
            yield f"ws://127.0.0.1:{port}/echo"


def summary(cases: Sequence[Case]) -> str:
    """How many cases behaved in which way, and each that did not pass, as Markdown."""
    run = [case for case in cases if case.is_spoken]
    behaviors = Counter(case.behavior for case in run)
    closes = Counter(case.behavior_close for case in run)
    lines = [
        f"{len(run)} cases run, {len(cases) - len(run)} not: what they test was not agreed on.",
        "",
        "| verdict | messages | close |",
        "|---|---|---|",
    ]
    names = sorted({*behaviors, *closes}, key=lambda name: (name not in PASSED, name))
    lines += [f"| {name} | {behaviors[name]} | {closes[name]} |" for name in names]
    for case in run:
        if not case.has_passed:
            lines.append(
                f"\n{case.id}: {case.behavior}, close {case.behavior_close}. {case.description}: "
                f"{case.result}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.conformance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python-proxy", action="store_true", help="without HAProxy")
    parser.add_argument("--url", help="an echo that runs already, such as ws://127.0.0.1:9000/")
    parser.add_argument("--cases", nargs="+", default=["*"], help='such as "7.*"')
    parser.add_argument("--python2", help="a CPython 2.7")
    parser.add_argument("--report", type=Path, help="folder that gets the suite's own report")
    options = parser.parse_args()
    # The servers are stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        python2 = find_python2(options.python2)
        install(python2, HOME)
        with tempfile.TemporaryDirectory(prefix="sdb-") as name:
            folder = Path(name)
            if options.url:
                cases = run_suite(python2, HOME, options.url, folder, options.cases)
            else:
                with serving_echo(python_proxy=options.python_proxy) as url:
                    cases = run_suite(python2, HOME, url, folder, options.cases)
            if options.report:
                shutil.copytree(folder / "reports", options.report, dirs_exist_ok=True)
    except (SuiteMissing, ClusterFailed, OSError) as error:
        raise SystemExit(f"bench: {error}") from None
    facts = conditions()
    proxy = "the Python proxy" if options.python_proxy else "HAProxy"
    print(f"Through {options.url or proxy}; {facts['versions']}; revision {facts['revision']}.\n")
    print(summary(cases))
    return 0 if all(case.has_passed or not case.is_spoken for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
