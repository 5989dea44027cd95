"""How far a stream may run ahead of what its client has acknowledged. Pure bookkeeping."""

from __future__ import annotations

from protocol.errors import InvalidRequest


class Credit:
    """The credit of one stream: `window` tokens beyond the last one acknowledged.

    A stream without a window has no such bound; its first acknowledgement gives it one.

    Args:
        last_seq: number of the last token that the client has, -1 for none.

    Attributes:
        sent_seq: number of the last token that was sent.
        acked_seq: number of the last token that was acknowledged.
    """

    __slots__ = ("acked_seq", "sent_seq", "window")

    def __init__(self, window: int | None, last_seq: int = -1) -> None:
        self.window = window
        self.sent_seq = self.acked_seq = last_seq

    def admits(self, seq: int, cap: int) -> bool:
        """Whether the next chunk, which ends with token `seq`, may be sent now.

        When nothing is outstanding it always may, however many tokens it has: else one that is
        longer than the window would never go.

        Args:
            cap: the widest window there is at the moment.
        """
        if self.window is None or self.sent_seq == self.acked_seq:
            return True
        return seq - self.acked_seq <= min(self.window, cap)

    def acknowledge(self, seq: int, default_window: int) -> bool:
        """The client has everything up to `seq`; returns whether more may be sent than before.

        Raises:
            InvalidRequest: so much was not sent.
        """
        if seq > self.sent_seq:
            raise InvalidRequest(
                f"seq is {seq}, the last token that was sent is {self.sent_seq}",
                param="seq",
                limit=self.sent_seq,
            )
        if self.window is None:
            self.window = default_window
        if seq <= self.acked_seq:
            return False
        self.acked_seq = seq
        return True
