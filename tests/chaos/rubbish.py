"""What a cache can answer instead of an answer, and how it is told to."""

from __future__ import annotations

import msgspec

RUBBISH_SWITCH = "SEEDANCE_CHAOS_RUBBISH"
"""Environment variable with a file that, while it exists, says what look-ups return."""
RUBBISH = {
    "noise": b"\xc1\xff\x00\x9f\x92\x96" * 20,
    "nothing": b"",
    "another type": msgspec.msgpack.encode([1, "two", {"three": 3}]),
    "a hit without an answer": msgspec.msgpack.encode(
        {"outcome": {"outcome": "exact"}, "stored": b"\x00\x01 no answer"}
    ),
    "half an answer": msgspec.msgpack.encode({"outcome": {"outcome": "exact"}})[:-4],
}
RAISE = "raise"
KINDS = (*RUBBISH, RAISE)
