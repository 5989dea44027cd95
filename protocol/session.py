"""One connection as a state machine without IO: messages in, events out.

The connection goes CONNECTING → OPEN → DRAINING → CLOSED, each of its requests
RECEIVING (chunked input only) → QUEUED → STREAMING → DONE. `states.TRANSITIONS` says
what every frame does in every state; a pair that is not there is impossible. A client
that sends an impossible frame gets an `ERROR` with code `bad_state`; when we would send
one ourselves, that is a programming error and raises `ValueError`.

Knows nothing of sockets, tasks or models. The clock is an argument.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from protocol.codec import decode, encode
from protocol.credit import Credit
from protocol.errors import (
    BadState,
    DuplicateId,
    ErrorInfo,
    InputTooLarge,
    Overloaded,
    RateLimited,
    ServingError,
    UnknownId,
)
from protocol.events import (
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
from protocol.frames import (
    MAX_ID_CHARS,
    MAX_WINDOW,
    Ack,
    Anchor,
    AnchorKind,
    ClientFrame,
    Drain,
    ErrorFrame,
    FinalUsage,
    Frame,
    Hello,
    InferAck,
    InferChunk,
    InferDone,
    InferReq,
    InputChunk,
    InputState,
    Ping,
    Pong,
    Resume,
    type_of,
)
from protocol.input_buffer import InputBuffer, InputExceeded
from protocol.states import TRANSITIONS, Action, ConnectionState, RequestState, State
from protocol.strict_json import show
from protocol.token_log import CacheOutcome, Terminal, TokenDelta

HIGH_WINDOW = 64
"""The widest window of a stream while an input buffer of its connection is high."""
MAX_INPUTS = 4
"""How many of the longest inputs one connection may have here at a time."""
_NO_TEXT = hashlib.sha256().hexdigest()


@dataclass(frozen=True)
class SessionLimits:
    """Bounds on one connection.

    `max_remembered_ids` is how many ended requests a late CANCEL is still known for;
    `window_tokens` the credit of a stream that acknowledges and named none;
    `input_buffer_bytes` and `max_input_bytes` bound what waits of a chunked prompt, and all of it.
    """

    max_message_bytes: int = 1024 * 1024
    max_live_requests: int = 64
    heartbeat_s: float = 15.0
    max_remembered_ids: int = 1024
    window_tokens: int = 256
    input_buffer_bytes: int = 256 * 1024
    max_input_bytes: int = 4 * 1024 * 1024

    @property
    def announced(self) -> dict[str, int | float]:
        """The limits that HELLO tells."""
        return {
            "max_message_bytes": self.max_message_bytes,
            "max_live_requests": self.max_live_requests,
            "max_id_chars": MAX_ID_CHARS,
            "window_tokens": self.window_tokens,
            "input_buffer_bytes": self.input_buffer_bytes,
            "max_input_bytes": self.max_input_bytes,
        }


@dataclass
class _Request:
    state: RequestState
    binary: bool
    wants_token_ids: bool
    anchor: AnchorKind
    credit: Credit
    input: InputBuffer | None = None
    taken_id: int = -1
    is_cancelled: bool = False


class Session:
    """The server's side of one connection.

    Args:
        clock: seconds that never go back.
        binary: the form of frames that answer no frame of the client (HELLO, PING).
    """

    def __init__(
        self, limits: SessionLimits, clock: Callable[[], float], *, binary: bool = False
    ) -> None:
        self.state = ConnectionState.CONNECTING
        self._limits = limits
        self._clock = clock
        self._binary = binary
        self._buffer = bytearray()
        self._live: dict[str, _Request] = {}
        self._ended: dict[str, None] = {}
        self._high_ids: set[str] = set()
        self._heard_at = self._pinged_at = self._ticked_at = clock()

    @property
    def live_ids(self) -> tuple[str, ...]:
        return tuple(self._live)

    def open(self, hello: Hello) -> list[Event]:
        """Greets the client; the first call."""
        if (self.state, Hello) not in TRANSITIONS:
            raise ValueError(f"HELLO in the state {self.state}")
        self.state = ConnectionState.OPEN
        self._heard_at = self._pinged_at = self._ticked_at = self._clock()
        return [Send(self._encode(hello, self._binary))]

    def receive(self, data: str | bytes) -> list[Event]:
        """Takes one WebSocket message. Raises nothing, whatever the client sent."""
        if self.state is ConnectionState.CLOSED:
            return []
        self._heard_at = self._clock()
        binary = isinstance(data, bytes)
        if self._is_too_large(data):
            limit = self._limits.max_message_bytes
            error = InputTooLarge(f"a message is over {limit} bytes, the limit", limit=limit)
            return [self._error(error, binary), *self._close(1009, error.message)]
        try:
            return self._dispatch(decode(data), binary)
        except ServingError as refusal:
            return [self._error(refusal, binary)]

    def tick(self, now: float) -> list[Event]:
        """Keeps the heartbeat; to be called at `next_tick_at`, or more often."""
        if self.state not in (ConnectionState.OPEN, ConnectionState.DRAINING):
            return []
        heartbeat_s = self._limits.heartbeat_s
        # A late tick means that we were stopped, so nothing we did not hear counts against the peer.
        is_late = now - self._ticked_at > 1.5 * heartbeat_s
        self._ticked_at = now
        if now - self._pinged_at < heartbeat_s:
            return []
        silent_s = now - self._heard_at
        if self._heard_at < self._pinged_at and silent_s >= 2 * heartbeat_s and not is_late:
            return self._close(4408, f"nothing was heard for {silent_s:.0f} s")
        self._pinged_at = now
        return [Send(self._encode(Ping(ts=round(now * 1000)), self._binary))]

    @property
    def next_tick_at(self) -> float:
        """When `tick` has something to do next, on the session's clock."""
        return self._pinged_at + self._limits.heartbeat_s

    def drain(self, deadline_s: float) -> list[Event]:
        """DRAIN, once: refuses new requests from now on. Once `live_ids` is empty, close with 1001."""
        if self.state is not ConnectionState.OPEN:
            return []
        self.state = ConnectionState.DRAINING
        return [Send(self._encode(Drain(deadline_s=deadline_s), self._binary))]

    def close(self) -> list[CancelRequest]:
        """Ends the session when the connection is gone: what is still live is to be stopped."""
        self.state = ConnectionState.CLOSED
        return [event for id in self._live for event in self._cancel(id)]

    def accept(
        self, id: str, *, stream: str, cache: CacheOutcome, queue_position: int | None = None
    ) -> str | bytes:
        """INFER_ACK: the request is queued, answered from the cache, or goes on after a RESUME."""
        return self._send(
            id, InferAck(id=id, stream=stream, cache=cache, queue_position=queue_position)
        )

    def has_credit(self, id: str) -> bool:
        """Whether a live request counts credit, so that `admits` may say no."""
        return self._live[id].credit.window is not None

    def admits(self, id: str, seq: int) -> bool:
        """Whether its client lets a chunk that ends with token `seq` be sent now."""
        return self._live[id].credit.admits(seq, HIGH_WINDOW if self._high_ids else MAX_WINDOW)

    def chunk(self, id: str, delta: TokenDelta) -> str | bytes:
        """INFER_CHUNK: the next piece of an accepted request's text."""
        request = self._live.get(id)
        with_token_ids = False
        if request is not None:
            with_token_ids = request.wants_token_ids
            request.credit.sent_seq = delta.seq
        return self._send(id, InferChunk.of(id, delta, with_token_ids=with_token_ids))

    def anchor(self, id: str, offset: int, sha256: str | None = None) -> str | bytes:
        """ANCHOR: so many tokens of the answer were sent, and what its text so far digests to."""
        request = self._live.get(id)
        taken_id = -1 if request is None else request.taken_id
        now_ns = round(self._clock() * 1e9)
        return self._send(
            id, Anchor(id=id, input_id=taken_id, offset=offset, ts=now_ns, sha256=sha256)
        )

    def input_so_far(self, id: str) -> tuple[InferReq, int]:
        """A request whose input is still to come, as if it ended here, and its last piece's number."""
        buffer = self._live[id].input
        assert buffer is not None, "only a request with chunked input has one"
        return buffer.so_far, buffer.next_id - 1

    def take_input(self, id: str, input_id: int | None = None) -> list[Event]:
        """The model has the pieces of a request up to that one, or all: tells the client."""
        request = self._live.get(id)
        if request is None or request.input is None or request.state is RequestState.QUEUED:
            # Ended meanwhile, or about to be accepted, which takes everything.
            return []
        buffer = request.input
        if not buffer.take(buffer.next_id - 1 if input_id is None else input_id):
            return []
        request.taken_id = buffer.taken_id
        events: list[Event] = []
        if request.anchor != "none":
            digest = _NO_TEXT if request.anchor == "sha256" else None
            events.append(Send(self.anchor(id, 0, digest)))
        return events + self._tell_level(id, buffer)

    def relax(self) -> list[Event]:
        """The streams that may go on now that no input buffer is high; to be asked when a request ended."""
        if self._high_ids:
            return []
        return [
            GrantCredit(id)
            for id, request in self._live.items()
            if request.credit.window is not None
        ]

    def done(
        self, id: str, terminal: Terminal, seq: int, cache: CacheOutcome | None = None
    ) -> str | bytes:
        """INFER_DONE, the one last frame of a request; a cancelled one may end before INFER_ACK.

        Args:
            seq: one above the last token's number (`TokenLog.next_seq`).
        """
        usage = terminal.usage
        frame = InferDone(
            id=id,
            seq=seq,
            is_final=True,
            finish_reason="error" if terminal.error is not None else terminal.finish_reason,
            usage=FinalUsage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                total_tokens=usage.prompt_tokens + usage.completion_tokens,
            ),
            timing=terminal.timing,
            cache=cache or CacheOutcome(),
            error=terminal.error,
        )
        return self._send(id, frame)

    def refuse(self, id: str, error: ErrorInfo) -> str | bytes:
        """ERROR: the request could not start or go on; it was not accepted and gets no other frame."""
        return self._send(id, ErrorFrame.of(id, error))

    def _tell_level(self, id: str, buffer: InputBuffer) -> list[Event]:
        """INPUT_STATE when the level has changed, which changes the window of the streams too."""
        was_high = id in self._high_ids
        if was_high == (buffer.level == "high"):
            return []
        if was_high:
            self._high_ids.discard(id)
        else:
            self._high_ids.add(id)
        state = InputState(
            id=id, buffered=buffer.buffered, capacity=buffer.capacity, level=buffer.level
        )
        return [Send(self._send(id, state)), *self.relax()]

    def _dispatch(self, frame: ClientFrame, binary: bool) -> list[Event]:
        action = self._client_action(self.state, frame)
        if isinstance(frame, Ping):
            return [Send(self._encode(Pong(ts=frame.ts), binary))]
        if isinstance(frame, Pong):
            return []
        if action is Action.BY_REQUEST:
            action = self._client_action(self._state_of(frame.id), frame)
        if action is Action.START and isinstance(frame, InferReq | Resume):
            return [self._start(frame, binary)]
        if action is Action.TAKE_INPUT and isinstance(frame, InputChunk):
            return self._take_piece(frame, binary)
        if action is Action.COUNT_CREDIT and isinstance(frame, Ack):
            return self._count_credit(frame)
        if action is Action.STOP:
            return [*self._cancel(frame.id)]
        if action is Action.IGNORE:
            return []
        raise _refusal(action, frame.id)

    def _client_action(self, state: State, frame: ClientFrame) -> Action:
        try:
            return TRANSITIONS[state, type(frame)][0]
        except KeyError:
            error = BadState(f"{type_of(type(frame))} does not fit the state {state}")
            error.request_id = getattr(frame, "id", None)
            raise error from None

    def _start(self, frame: InferReq | Resume, binary: bool) -> Event:
        limit = self._limits.max_live_requests
        if len(self._live) >= limit:
            error = RateLimited(
                f"{limit} requests are live on this connection, the limit", limit=limit
            )
            error.request_id = frame.id
            raise error
        request = _Request(
            RequestState.QUEUED,
            binary,
            bool(frame.return_token_ids),
            frame.anchor or "plain",
            Credit(frame.window, frame.last_seq if isinstance(frame, Resume) else -1),
        )
        event: Event
        if isinstance(frame, Resume):
            event = ResumeRequest(frame.id, frame, binary)
        elif frame.input == "chunked":
            request.state = RequestState.RECEIVING
            request.input = self._input_buffer(frame)
            event = ReceiveRequest(frame.id, frame, binary)
        else:
            event = StartRequest(frame.id, frame, binary)
        self._ended.pop(frame.id, None)
        self._live[frame.id] = request
        return event

    def _input_buffer(self, frame: InferReq) -> InputBuffer:
        limits = self._limits
        try:
            return InputBuffer(
                frame, capacity=limits.input_buffer_bytes, max_bytes=limits.max_input_bytes
            )
        except ServingError as error:
            error.request_id = frame.id
            raise

    def _take_piece(self, frame: InputChunk, binary: bool) -> list[Event]:
        request = self._live[frame.id]
        buffer = request.input
        assert buffer is not None, "only a request with chunked input is receiving"
        try:
            self._check_inputs(frame)
            is_new = buffer.add(frame.input_id, frame.text)
        except (InputExceeded, RateLimited) as error:
            return [Send(self.refuse(frame.id, error.info)), EndRequest(frame.id, error)]
        except ServingError as error:
            error.message = f"input of {show(frame.id)}: {error.message}"
            return [self._error(error, binary), *self._tell_level(frame.id, buffer)]
        if not is_new:
            return []
        if frame.is_last:
            request.state = RequestState.QUEUED
            return [StartRequest(frame.id, buffer.so_far, request.binary)]
        return [InputArrived(frame.id), *self._tell_level(frame.id, buffer)]

    def _check_inputs(self, frame: InputChunk) -> None:
        """Bounds what the inputs of one connection take in memory together."""
        limit = MAX_INPUTS * self._limits.max_input_bytes
        inputs = (request.input for request in self._live.values())
        held = sum(buffer.num_bytes for buffer in inputs if buffer is not None)
        if held + len(frame.text) > limit:
            raise RateLimited(
                f"the inputs of this connection have over {limit} bytes, the limit", limit=limit
            )

    def _count_credit(self, frame: Ack) -> list[Event]:
        credit = self._live[frame.id].credit
        try:
            grows = credit.acknowledge(frame.seq, self._limits.window_tokens)
        except ServingError as error:
            error.message = f"ACK of {show(frame.id)}: {error.message}"
            raise
        return [GrantCredit(frame.id)] if grows else []

    def _cancel(self, id: str) -> list[CancelRequest]:
        request = self._live[id]
        if request.is_cancelled:
            return []
        request.is_cancelled = True
        return [CancelRequest(id)]

    def _send(
        self, id: str, frame: InferAck | InferChunk | Anchor | InferDone | InputState | ErrorFrame
    ) -> str | bytes:
        """Moves the request on and encodes the frame in the form that its first frame had."""
        state = self._state_of(id)
        if (state, type(frame)) not in TRANSITIONS:
            raise ValueError(f"{type_of(type(frame))} for request {id!r} in the state {state}")
        request = self._live[id]
        _, next_state = TRANSITIONS[state, type(frame)]
        assert isinstance(next_state, RequestState)
        request.state = next_state
        if next_state is RequestState.DONE:
            del self._live[id]
            self._high_ids.discard(id)
            self._ended[id] = None
            if len(self._ended) > self._limits.max_remembered_ids:
                del self._ended[next(iter(self._ended))]
        return self._encode(frame, request.binary)

    def _state_of(self, id: str) -> RequestState:
        request = self._live.get(id)
        if request is not None:
            return request.state
        return RequestState.DONE if id in self._ended else RequestState.ABSENT

    def _is_too_large(self, data: str | bytes) -> bool:
        size = len(data)
        if isinstance(data, str) and not data.isascii():
            size = len(data.encode("utf-8", "surrogatepass"))
        return size > self._limits.max_message_bytes

    def _close(self, code: int, reason: str) -> list[Event]:
        self.state = ConnectionState.CLOSED
        return [Close(code, reason)]

    def _error(self, error: ServingError, binary: bool) -> Event:
        id = error.request_id
        if id in self._live and not isinstance(error, DuplicateId):
            # The client would take the error for the end of the live request.
            id = None
        is_refusal = error.request_id is not None and not isinstance(error, UnknownId | BadState)
        refused = error.code if is_refusal else None
        return Send(self._encode(ErrorFrame.of(id, error.info), binary), refused)

    def _encode(self, frame: Frame, binary: bool) -> str | bytes:
        return encode(frame, binary=binary, buffer=self._buffer)


def _refusal(action: Action, id: str) -> ServingError:
    error: ServingError
    if action is Action.REFUSE_DUPLICATE:
        error = DuplicateId(f"a live request has the id {show(id)}", param="id")
    elif action is Action.REFUSE_UNKNOWN:
        error = UnknownId(f"no request has the id {show(id)}", param="id")
    else:
        assert action is Action.REFUSE_DRAINING
        error = Overloaded("this server is going away: connect again", retry_after_s=0)
    error.request_id = id
    return error
