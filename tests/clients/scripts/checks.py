"""What the Python scripts here share. They run in a client's own environment, without pytest."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

URL = os.environ["SEEDANCE_URL"]
"""With /v1, as clients take it."""
KEY = os.environ["SEEDANCE_KEY"]
MODEL = os.environ["SEEDANCE_MODEL"]
EMBEDDER = os.environ["SEEDANCE_EMBEDDER"]
PATIENCE_S = 120.0

FRESH = {"cache": "bypass"}
"""In the body: the answer is computed, whatever is stored."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def expect(is_right: object, what: str, got: object = None) -> None:
    """Ends the script unless the server did what the words say."""
    if not is_right:
        raise AssertionError(f"expected {what}, got {got!r}")


def refusal(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error of this kind that a call raises."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got {answer!r}")


def run(packages: Sequence[str], parts: Sequence[tuple[str, Callable[[], Any]]]) -> None:
    """Runs the parts in order; prints one line of JSON, or says what was wrong and exits with 1.

    Args:
        packages: whose versions the line tells.
        parts: what each exercises, and how.
    """
    for name, part in parts:
        try:
            result = part()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:
            if not isinstance(error, AssertionError):
                sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(f"{name}: {type(error).__name__}: {error}")
    told = {
        "versions": {package: version(package) for package in packages},
        "exercised": [name for name, _ in parts],
    }
    print(json.dumps(told))
