"""A hostile client's messages played against a `Session`, for fuzzers: what must hold of every answer.

A case is bytes, so that any fuzzer can make one: messages with `SEPARATOR` between them, each a
`T` (text) or anything else (binary) and then its content.
"""

from __future__ import annotations

import contextlib
import time

from protocol.codec import decode_server
from protocol.errors import InvalidFrame, ResumeExpired, ServingError
from protocol.events import (
    CLOSE_CODES,
    CancelRequest,
    Close,
    EndRequest,
    Event,
    GrantCredit,
    InputArrived,
    ReceiveRequest,
    ResumeRequest,
    Send,
    StartRequest,
)
from protocol.frames import Anchor, ErrorFrame, Frame, InferAck, InferChunk, InferDone, InputState
from protocol.graphemes import GraphemeGate
from protocol.parse import inference_request
from protocol.session import Session, SessionLimits
from protocol.token_log import TokenDelta
from tests.protocol.fakes import MISS, STOP, FakeClock, hello

SEPARATOR = b"\x1e"
MAX_SECONDS = 0.05
"""What one case may take, of the processor's time."""
LIMITS = SessionLimits(
    max_message_bytes=16 * 1024,
    max_live_requests=4,
    max_remembered_ids=4,
    window_tokens=4,
    input_buffer_bytes=256,
    max_input_bytes=1024,
)
"""Small, so that a short case reaches them."""
MAX_LAST_SEQ = 100
OF_A_REQUEST = (InferAck, InferChunk, Anchor, InputState, InferDone, ErrorFrame)


def case_of(messages: list[str | bytes]) -> bytes:
    return SEPARATOR.join(
        b"T" + each.encode() if isinstance(each, str) else b"B" + each for each in messages
    )


def messages_of(case: bytes) -> list[str | bytes]:
    """A text message is always UTF-8: what is not never comes this far."""
    return [
        part[1:].decode(errors="replace") if part[:1] == b"T" else part[1:]
        for part in case.split(SEPARATOR)
    ]


class Exchange:
    """The server's side of one connection, with a model that answers as the case goes on."""

    def __init__(self) -> None:
        self._clock = FakeClock()
        self._session = Session(LIMITS, self._clock)
        self._next_seq: dict[str, int] = {}
        self._accepted: set[str] = set()
        self._num_events = 0
        self._session.open(hello(LIMITS))

    def play(self, message: str | bytes) -> None:
        """Takes one message and does what it asks for.

        Raises:
            AssertionError: an answer is not as it must be.
            Exception: whatever escaped; nothing may.
        """
        with contextlib.suppress(InvalidFrame):
            decode_server(message)
        self._clock.now += 1.0
        for event in self._session.receive(message):
            self._num_events += 1
            self._follow(event)
        live = self._session.live_ids
        assert len(live) <= LIMITS.max_live_requests
        assert self._next_seq.keys() == set(live), "one last frame for each request"
        for event in self._session.tick(self._clock()):
            self._follow(event)

    def _follow(self, event: Event) -> None:
        session, choice = self._session, self._num_events % 5
        match event:
            case Send(data):
                self._check(data)
            case StartRequest(id, req):
                self._next_seq.setdefault(id, 0)
                try:
                    inference_request(req, request_id="r-1", tenant="t", model="m")
                except ServingError as error:
                    self._check(session.refuse(id, error.info))
                    return
                if choice:
                    self._accept(id, choice)
                if choice == 4:
                    self._check(session.done(id, STOP, self._next_seq[id]))
            case ReceiveRequest(id, req):
                assert id not in self._next_seq
                self._next_seq[id] = 0
            case InputArrived(id):
                so_far, last_id = session.input_so_far(id)
                with contextlib.suppress(ServingError):
                    inference_request(so_far, request_id="r-1", tenant="t", model="m")
                if choice:
                    for told in session.take_input(id, last_id - choice % 2):
                        self._follow(told)
            case ResumeRequest(id, req):
                assert id not in self._next_seq
                self._next_seq[id] = req.last_seq + 1
                if req.last_seq > MAX_LAST_SEQ:
                    self._check(session.refuse(id, ResumeExpired("gone").info))
                elif choice:
                    self._accept(id, choice)
            case GrantCredit(id):
                self._talk(id, choice)
            case CancelRequest(id):
                if choice != 1:
                    self._check(session.done(id, STOP, self._next_seq[id]))
            case EndRequest(id):
                assert id not in session.live_ids
            case Close(code, reason):
                assert code in CLOSE_CODES
                assert len(reason.encode()) <= 123

    def _accept(self, id: str, num_chunks: int) -> None:
        self._accepted.add(id)
        self._check(self._session.accept(id, stream="s", cache=MISS))
        self._talk(id, num_chunks)

    def _talk(self, id: str, num_chunks: int) -> None:
        for _ in range(num_chunks):
            seq = self._next_seq[id]
            if id not in self._accepted or not self._session.admits(id, seq):
                return
            self._check(self._session.chunk(id, TokenDelta(seq, "é", (seq,))))
            self._next_seq[id] = seq + 1

    def _check(self, data: str | bytes) -> None:
        """What a client can read, of the kind that fits, is all that may be sent."""
        frame: Frame = decode_server(data)
        if isinstance(frame, ErrorFrame):
            assert len(frame.message) < 1000
        if isinstance(frame, OF_A_REQUEST) and frame.id is not None:
            is_live = frame.id in self._next_seq
            assert is_live or isinstance(frame, ErrorFrame)
            if isinstance(frame, InferDone | ErrorFrame) and frame.id not in self._session.live_ids:
                self._next_seq.pop(frame.id, None)
                self._accepted.discard(frame.id)


def play(case: bytes) -> None:
    """Plays a case from the first message to the last."""
    exchange = Exchange()
    gate = GraphemeGate()
    left = ""
    texts: list[str] = []
    for number, message in enumerate(messages_of(case)):
        exchange.play(message)
        if isinstance(message, str):
            texts.append(message)
            left += "".join(each.text for each in gate.push(TokenDelta(number, message)))
    assert left + "".join(each.text for each in gate.flush()) == "".join(texts)


def seconds_of(case: bytes) -> float:
    """Processor time that a case takes; the least of three tries when the first was long."""
    taken = []
    for _ in range(3):
        started = time.thread_time()
        play(case)
        taken.append(time.thread_time() - started)
        if taken[-1] < MAX_SECONDS:
            break
    return min(taken)
