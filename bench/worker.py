"""Contenders in processes of their own, which do a round whenever they are asked.

Runs in any interpreter: needs none of our packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

MARK = "\x1e"
"""Begins the lines that are ours: libraries print what they like beside them."""


class Worker:
    """A process that tells something once it is ready, and something after each round.

    Args:
        name: for the error.
        options: of `subprocess.Popen`.
    """

    def __init__(self, name: str, command: list[str], **options: Any) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        self.greeting = self._hear()

    def run(self) -> Any:
        """What it tells of one round.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        """Has it end, and waits."""
        self._process.communicate()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise RuntimeError(f"{self._name} ended with {self._process.wait()}")


def tell(answer: object) -> None:
    """Called in the worker: its greeting, or what a round brought."""
    print(MARK + json.dumps(answer), flush=True)


def rounds(greeting: object = None) -> Iterator[None]:
    """Called in the worker once it is ready: a turn for each round that is asked for."""
    tell(greeting)
    for _ in sys.stdin:
        yield
