"""How much of a prompt a step may hold beside running streams, so that these hardly notice.

A step's time is taken as that of its decoding rows alone plus a cost for each prompt token. Both
are measured: the first in steps that held nothing else, the second in the latest ones that did,
because a token costs more the further it stands in its prompt. Reads no clock: durations are given.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

NUM_DECODE_STEPS = 128
NUM_MIXED_STEPS = 8
HEADROOM = 0.9
"""Of the target is planned for: half of the steps take longer than their median."""
MOST_GROWTH = 2
"""A step holds at most so many times what was measured: the cost is not linear far from there."""


class PrefillPace:
    """Limits the prompt tokens of the steps in which sequences decode.

    Args:
        target: longest step, as a multiple of one that only decodes; 0 limits nothing.
        block_tokens: least tokens that a prompt gets, whatever they take.
    """

    def __init__(self, target: float, block_tokens: int) -> None:
        self._target = target
        self._block = block_tokens
        # (rows, seconds)
        self._decode_steps: deque[tuple[int, float]] = deque(maxlen=NUM_DECODE_STEPS)
        # (prompt tokens, seconds for each of them)
        self._mixed_steps: deque[tuple[int, float]] = deque(maxlen=NUM_MIXED_STEPS)

    def limit(self, num_decodes: int) -> int | None:
        """Most prompt tokens of a step with so many decoding rows; None where all may be taken."""
        if self._target == 0 or num_decodes == 0:
            return None
        if not (self._decode_steps and self._mixed_steps):
            return self._block
        room_s = (HEADROOM * self._target - 1) * self._decode_s(num_decodes)
        most = MOST_GROWTH * max(num_tokens for num_tokens, _ in self._mixed_steps)
        token_s = median(token_s for _, token_s in self._mixed_steps)
        # A clock that is coarse, or stands still, may say that a token costs nothing.
        fitting = int(room_s / token_s) if token_s > 0 and token_s * most > room_s else most
        return max(self._block, fitting)

    def observe(self, num_decodes: int, num_prefill_tokens: int, duration_s: float) -> None:
        """Notes how long a step took."""
        if num_decodes == 0:
            return
        if num_prefill_tokens == 0:
            self._decode_steps.append((num_decodes, duration_s))
        elif self._decode_steps:
            rest_s = max(0.0, duration_s - self._decode_s(num_decodes))
            self._mixed_steps.append((num_prefill_tokens, rest_s / num_prefill_tokens))

    def _decode_s(self, num_decodes: int) -> float:
        """Time of a step that only decodes: the median for as many rows, or between the nearest."""
        by_rows: dict[int, list[float]] = {}
        for num_rows, duration_s in self._decode_steps:
            by_rows.setdefault(num_rows, []).append(duration_s)
        known = sorted(by_rows)
        return float(np.interp(num_decodes, known, [median(by_rows[n]) for n in known]))
