"""When entries end: a heap of deadlines. Who leaves for lack of space is the policy's matter."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

COMPACT_SLACK = 64


class ExpiryQueue:
    """Deadlines by key; a deadline is fixed when it is set, no access moves it."""

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, key: str, deadline: float) -> None:
        """Sets the deadline of `key`, in place of one it may have."""
        self._deadlines[key] = deadline
        heappush(self._heap, (deadline, key))

    def remove(self, key: str) -> None:
        """Forgets `key`; KeyError when it has no deadline."""
        del self._deadlines[key]
        if len(self._heap) > 2 * len(self._deadlines) + COMPACT_SLACK:
            self._heap = [(deadline, key) for key, deadline in self._deadlines.items()]
            heapify(self._heap)

    def take_due(self, now: float) -> list[str]:
        """Removes and returns the keys whose deadline is `now` or earlier, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heappop(self._heap)
            # A record that does not match was replaced or removed since.
            if self._deadlines.get(key) == deadline:
                del self._deadlines[key]
                due.append(key)
        return due
