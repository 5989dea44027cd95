"""What the tests of this room share: a clock to advance, and a session that was greeted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from protocol.events import Event, Send
from protocol.frames import Hello
from protocol.session import Session, SessionLimits
from protocol.token_log import CacheOutcome, Terminal, TokenDelta, Usage

MISS = CacheOutcome()
STOP = Terminal(
    finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
)


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def hello(limits: SessionLimits) -> Hello:
    return Hello(
        session="s-1",
        model="model-1",
        limits=limits.announced,
        heartbeat_s=limits.heartbeat_s,
        resume_window_s=0.0,
    )


def open_session(clock: FakeClock | None = None, *, binary: bool = False, **limits: Any) -> Session:
    bounds = SessionLimits(**limits)
    session = Session(bounds, clock or FakeClock(), binary=binary)
    session.open(hello(bounds))
    return session


def infer_req(id: Any, **fields: Any) -> str:
    return json.dumps({"type": "INFER_REQ", "id": id, "prompt": "hi", **fields})


def resume(id: Any, stream: str = "t-1", last_seq: int = -1, **fields: Any) -> str:
    return json.dumps(
        {"type": "RESUME", "id": id, "stream": stream, "last_seq": last_seq, **fields}
    )


def piece(id: Any, input_id: int, text: str = "x", **fields: Any) -> str:
    fields = {"id": id, "input_id": input_id, "text": text, **fields}
    return json.dumps({"type": "INPUT_CHUNK", **fields})


def ack(id: Any, seq: int) -> str:
    return json.dumps({"type": "ACK", "id": id, "seq": seq})


def cancel(id: Any) -> str:
    return json.dumps({"type": "CANCEL", "id": id})


def delta(seq: int, text: str = "x") -> TokenDelta:
    return TokenDelta(seq, text, (seq,))


def framed(payload: str | bytes, *, version: int = 1, flags: int = 0, seq: int = 0) -> bytes:
    """The binary form, spelled out by hand."""
    body = payload.encode() if isinstance(payload, str) else payload
    return bytes([version, flags]) + seq.to_bytes(4, "big") + body


def read(data: str | bytes) -> dict[str, Any]:
    """What a client sees of one message."""
    fields: dict[str, Any] = json.loads(data[6:] if isinstance(data, bytes) else data)
    return fields


def sent(events: Iterable[Event]) -> list[dict[str, Any]]:
    return [read(event.data) for event in events if isinstance(event, Send)]


def only_error(events: list[Event]) -> dict[str, Any]:
    """The one ERROR frame that is all of `events`."""
    assert len(events) == 1, events
    (frame,) = sent(events)
    assert frame["type"] == "ERROR"
    return frame
