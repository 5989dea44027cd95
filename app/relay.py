"""Passes one stream on to its client: as far as credit and socket admit, cut where text may be cut."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque

from app.outbox import Outbox
from app.serving import Stream
from protocol.frames import AnchorKind, Boundary
from protocol.graphemes import GraphemeGate
from protocol.session import Session
from protocol.token_log import TokenDelta

BURST = 64
"""Chunks of one stream before another has its turn."""
ANCHOR_TOKENS = 32
"""An ANCHOR follows each chunk that reaches or passes a multiple of so many tokens."""
MAX_LAG_TOKENS = 512
"""What is computed and not sent: beyond that a stream rests, and its place is another's."""
GO_ON_LAG_TOKENS = 128
HOLD_S = 0.25
"""Text that ends inside a grapheme cluster is held back for no longer."""


class Relay:
    """One accepted request and the log of its stream.

    Args:
        next_seq: where it goes on: one above the number of the client's last token.

    Attributes:
        next_seq: one above the last token's number that was passed on.
    """

    def __init__(
        self,
        id: str,
        stream: Stream,
        session: Session,
        outbox: Outbox,
        *,
        next_seq: int = 0,
        boundary: Boundary = "grapheme",
        anchor: AnchorKind = "plain",
    ) -> None:
        self.next_seq = next_seq
        self._id = id
        self._stream = stream
        self._log = stream.log
        self._session = session
        self._outbox = outbox
        self._cursor = stream.log.cursor(next_seq)
        self._gate = GraphemeGate() if boundary == "grapheme" else None
        self._ready: deque[TokenDelta] = deque()
        self._has_anchors = anchor != "none"
        self._anchor_seq = _next_anchor(next_seq)
        self._digest = None
        if anchor == "sha256":
            self._digest = hashlib.sha256()
            for delta in stream.log.cursor().take():
                if delta.seq < next_seq:
                    self._digest.update(delta.text.encode())
        self._loop = asyncio.get_running_loop()
        self._held_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_waiting = False
        self._is_resting = False
        self._is_cut = False
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        """Passes everything on; returns after the last frame, INFER_DONE.

        News goes to the outbox within the call that brings it, with no task to wake between: at
        a frame a token that is much of what a token costs here.
        """
        unsubscribe = self._log.subscribe(self.pump)
        try:
            self.pump()
            await self._is_over.wait()
        finally:
            self._is_over.set()
            unsubscribe()
            if self._timer is not None:
                self._timer.cancel()
        terminal = self._log.terminal
        assert terminal is not None, "a cursor ends only with its log"
        seq = self.next_seq if self._is_cut else self._log.next_seq
        self._outbox.put(self._session.done(self._id, terminal, seq=seq, cache=self._stream.cache))

    def cut(self) -> None:
        """Passes nothing more on: the client does not want it. The end of the log is still to come."""
        self._is_cut = True
        self._ready.clear()
        self.pump()

    def stop(self) -> None:
        """Says nothing any more: somebody else ends this request."""
        self._is_over.set()

    def pump(self) -> None:
        """Sends what may be sent now; to be called whenever that may have become more."""
        if self._is_over.is_set():
            return
        if self._is_cut:
            if self._log.terminal is not None:
                self._is_over.set()
            return
        ready = self._ready
        if self._is_waiting or (ready and not self._send_ready()):
            self._pace()
            return
        while True:
            num_taken = self._fill()
            if ready and not self._send_ready():
                self._pace()
                return
            if num_taken == BURST:
                self._wait_for_turn()
                return
            if self._log.terminal is None:
                break
            if self._gate is None or not self._gate.is_holding:
                self._is_over.set()
                return
            ready.extend(self._gate.flush())
        if self._is_resting:
            self._pace()
        if self._timer is None and self._gate is not None and self._gate.is_holding:
            self._set_timer(HOLD_S)

    def _pace(self) -> None:
        """Has nothing more computed for a client that is far behind, until it catches up.

        Its log stays bounded, and whoever reads gets the rows of those who do not.
        """
        lag = self._log.next_seq - self.next_seq
        if self._is_resting:
            if lag <= GO_ON_LAG_TOKENS:
                self._is_resting = False
                self._stream.unpark()
        elif lag > MAX_LAG_TOKENS and self._log.terminal is None:
            self._is_resting = True
            self._stream.park()

    def _wait_for_turn(self) -> None:
        self._is_waiting = True
        self._outbox.when_room(self._go_on)

    def _go_on(self) -> None:
        self._is_waiting = False
        self.pump()

    def _fill(self) -> int:
        """Gets ready what is new in the log; returns how many deltas were taken from there."""
        taken = self._cursor.take(BURST)
        gate = self._gate
        if gate is None:
            self._ready.extend(taken)
        elif taken:
            is_held_anew = not gate.is_holding
            for delta in taken:
                if passed := gate.push(delta):
                    self._ready.extend(passed)
                    is_held_anew = True
            if is_held_anew:
                self._held_since = self._loop.time()
        return len(taken)

    def _send_ready(self) -> bool:
        """Sends what is ready; False when some of it may not go now."""
        ready, session, outbox, id = self._ready, self._session, self._outbox, self._id
        is_credited = session.has_credit(id)
        while ready:
            if not outbox.has_room:
                self._wait_for_turn()
                return False
            delta = ready[0]
            if is_credited and not session.admits(id, delta.seq):
                return False
            ready.popleft()
            outbox.put(session.chunk(id, delta))
            self.next_seq = delta.seq + 1
            if self._digest is not None:
                self._digest.update(delta.text.encode())
            if delta.seq >= self._anchor_seq:
                self._send_anchor()
        return True

    def _send_anchor(self) -> None:
        self._anchor_seq = _next_anchor(self.next_seq)
        if self._has_anchors:
            digest = None if self._digest is None else self._digest.hexdigest()
            self._outbox.put(self._session.anchor(self._id, self.next_seq, digest))

    def _set_timer(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._let_go)

    def _let_go(self) -> None:
        """Lets out what was held for too long. One timer a stream, which may find it was too early."""
        self._timer = None
        gate = self._gate
        if gate is None or not gate.is_holding or self._is_over.is_set():
            return
        left_s = self._held_since + HOLD_S - self._loop.time()
        if left_s > 0:
            self._set_timer(left_s)
            return
        self._ready.extend(gate.flush())
        self.pump()


def _next_anchor(next_seq: int) -> int:
    """Number of the token that completes the next full run of so many."""
    return (next_seq // ANCHOR_TOKENS + 1) * ANCHOR_TOKENS - 1
