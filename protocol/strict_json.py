"""Strict JSON from clients: what may come in, and what is wrong with what may not.

Reading is msgspec's job. This is the slower second look, for when it refuses:
NaN and infinities, lone surrogates, bytes that are not UTF-8, integers beyond 64
bits, nesting without end. A fault is named by the field it is in
(`messages[0].content`), in words that hold nothing that JSON cannot carry. No
input makes it recurse or take more than a few passes.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

import msgspec

from protocol.errors import InvalidRequest

MAX_NESTING = 100
"""Depth of lists and objects in each other. Kept far below the interpreter's recursion limit,
because tools and schemas are walked recursively by template engines and hashers later."""
MAX_CONTAINERS = 20_000
"""Lists and objects in one JSON: the collector walks them all, again and again while they are made."""
_MAX_INT_DIGITS = 400
_MAX_SHOWN_CHARS = 60


class MalformedJson(InvalidRequest):
    """The text is not JSON, or not a JSON object."""


def decode_body(raw: bytes | str) -> dict[str, Any]:
    """Decodes a JSON object strictly, into plain dicts, lists and scalars.

    Slower than `decode_struct`: it is the second pass, and for bodies without a struct.

    Raises:
        MalformedJson: not JSON, or not an object.
        InvalidRequest: a value is not allowed in strict JSON; `param` names its field.
    """
    data = decode_leniently(raw)
    check_values(data)
    return data


def decode_leniently(raw: bytes | str) -> dict[str, Any]:
    """Decodes a JSON object that may hold NaN, infinities and lone surrogates.

    Bytes that are not UTF-8 come out as lone surrogates (U+DC80 to U+DCFF).

    Raises:
        MalformedJson: not JSON, or not an object.
        InvalidRequest: nested too deep, when `param` names the outermost field, or too many lists.
    """
    _check_nesting(raw)
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")
    try:
        data = _loads(text)
    except json.JSONDecodeError as exc:
        reason = exc.msg.lower().removesuffix(" at")
        raise MalformedJson(f"not valid JSON: {reason} at character {exc.pos}") from None
    except RecursionError:
        # Only the caller's own stack can be that deep.
        raise MalformedJson("not readable: nested too deep") from None
    if not isinstance(data, dict):
        raise MalformedJson(f"not a JSON object but {show(data)}")
    return data


def scan_string(raw: bytes | str, field: str) -> str | None:
    """A top-level string field, found without parsing: also in JSON that is broken or too deep."""
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")
    depth = 0
    previous = name = ""
    found = None
    for token in _tokens(text):
        if token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
        elif depth == 1 and token == ":":
            name = previous
        elif depth == 1 and previous == ":" and name == f'"{field}"':
            found = token
        previous = token
    try:
        value = json.loads(found or "null")
    except ValueError:
        return None
    return value if isinstance(value, str) and _is_unicode(value) else None


def check_values(data: Any, at: str = "") -> None:
    """Checks that decoded JSON can be encoded again, by any strict encoder.

    Raises:
        InvalidRequest: a value or name that JSON cannot carry everywhere; `param` names its field.
    """
    try:
        msgspec.msgpack.encode(data)
        json.dumps(data, allow_nan=False)
    except (ValueError, OverflowError):
        place, reason = _first_fault(data)
        path = join_path(at, _path(place))
        raise InvalidRequest(f"{path or 'the JSON'} {reason}", param=path or None) from None


def check_text(raw: bytes | str) -> None:
    """Checks what msgspec leaves unchecked in fields that it skips: UTF-8 and depth.

    Raises:
        UnicodeDecodeError: `raw` is not UTF-8.
        InvalidRequest: nested too deep, or too many lists and objects.
    """
    if not isinstance(raw, str):
        raw.decode()
    _check_nesting(raw)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=float)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python refuses integers of over 4,300 digits. A hook of ours for all integers is slow.
        return json.loads(text, parse_constant=float, parse_int=_parse_int)


def _parse_int(digits: str) -> int:
    # What is left of very many digits is still too large for any field, so it is never used.
    return int(digits[:_MAX_INT_DIGITS])


# A string that is not closed reaches to the end. Nothing is tried twice (`*+`), so both are linear.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}:,]', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_MAX_SCANNED_TOKENS = 10_000


def _tokens(text: str) -> Iterator[str]:
    """Strings and punctuation, of broken JSON too; a bounded number, for error messages only."""
    return (match[0] for match in islice(_TOKEN.finditer(text), _MAX_SCANNED_TOKENS))


def _check_nesting(raw: bytes | str) -> None:
    """Refuses JSON that is nested too deep or has too many parts, before any decoder makes them."""
    openings = ("[", "{") if isinstance(raw, str) else (b"[", b"{")
    if sum(map(raw.count, openings)) <= MAX_NESTING:  # type: ignore[arg-type]
        return
    steps = _steps(raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw)
    # Deeper than this it gets in the first steps, or there are too many of them.
    first = islice(steps, 2 * MAX_CONTAINERS)
    if max(accumulate(first), default=0) > MAX_NESTING:
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")
        param = _deep_field(text)
        raise InvalidRequest(
            f"{param or 'the JSON'} is nested deeper than {MAX_NESTING} levels",
            param=param,
            limit=MAX_NESTING,
        )
    if steps.count(1) > MAX_CONTAINERS:
        raise InvalidRequest(
            f"the JSON has {steps.count(1)} lists and objects, the limit is {MAX_CONTAINERS}",
            limit=MAX_CONTAINERS,
        )


_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _steps(raw: bytes) -> array[int]:
    """Openings (+1) and closings (-1) outside of strings, in order."""
    return array("b", _STRING.sub(b"", raw).translate(_STEPS, _NO_BRACKETS))


def _deep_field(text: str) -> str | None:
    """Name of the top-level field that is nested too deep, if it is found early."""
    depth = 0
    previous = field = ""
    for token in _tokens(text):
        if token in "[{":
            depth += 1
            if depth > MAX_NESTING:
                return show(field.strip('"')).strip('"') or None
        elif token in "]}":
            depth -= 1
        elif depth == 1 and token == ":":
            field = previous
        previous = token
    return None


_Place = tuple[Any, str | int] | None
"""Where a value stands: the place of what holds it, and its name or index there. Linked
rather than spelled out, since a long name with many values would be copied for each."""
_MAX_SEARCHED_VALUES = 20_000


def _first_fault(data: Any) -> tuple[_Place, str]:
    """Place and description of the first value that strict JSON cannot hold.

    A fault in a name is reported at the object that holds it, a fault far behind at no place.
    """
    for place, value in islice(_values(data), _MAX_SEARCHED_VALUES):
        if isinstance(value, str) and not _is_unicode(value):
            return place, "is not valid Unicode: it holds a lone surrogate or bytes outside UTF-8"
        if isinstance(value, float) and not math.isfinite(value):
            return place, "must be a finite number"
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return place, "must be an integer of at most 64 bits"
        if isinstance(value, dict) and not all(map(_is_unicode, value)):
            return place, "holds a name that is not valid Unicode"
    return None, "holds a value that strict JSON cannot carry"


def _values(data: Any) -> Iterator[tuple[_Place, Any]]:
    """Every value with its place, depth first, in the order of the text."""
    yield None, data
    open_values = [_items(None, data)]
    while open_values:
        for place, value in open_values[-1]:
            yield place, value
            if isinstance(value, dict | list):
                open_values.append(_items(place, value))
                break
        else:
            open_values.pop()


def _items(place: _Place, value: Any) -> Iterator[tuple[_Place, Any]]:
    if isinstance(value, dict):
        return (((place, name), item) for name, item in value.items())
    return (((place, index), item) for index, item in enumerate(value))


def _path(place: _Place) -> str:
    """The place as clients write it: `messages[0].content`; long names are cut."""
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_SHOWN_CHARS]}")
    return "".join(reversed(steps)).removeprefix(".")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def join_path(at: str, path: str) -> str:
    """`path` inside of `at`; either may be empty."""
    return f"{at}{path}" if path.startswith("[") else f"{at}.{path}".strip(".")


def show(value: Any) -> str:
    """The value as a short piece of JSON, for a message."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if isinstance(value, msgspec.Struct):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool):
        shown = str(value) if abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"
    else:
        shown = json.dumps(value, ensure_ascii=True, default=lambda _: None)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[: _MAX_SHOWN_CHARS - 1]}…"
