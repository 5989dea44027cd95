"""Finds stop strings in a text that arrives in pieces.

Knows nothing of tokens. The result does not depend on how the text was cut into pieces: it is the
text before the earliest place at which any stop string occurs, as if the whole text had been
searched at once.
"""

from __future__ import annotations


class StopStrings:
    """Lets text through up to the first stop string.

    Holds back only the longest end of the text that may still become a stop string. When one stop
    string was found but another that began earlier may still complete, the decision waits for it:
    of `bc` and `abcd`, the text `abc` alone ends before `bc`, and `abcd` ends before `abcd`.

    Time is linear in the text for each stop string, whatever the strings are (Knuth, Morris, Pratt
    1977; the failure table is only built as far as a match has come, so a long stop string costs
    nothing until the text follows it).
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._first_characters = {stop[0] for stop in stops}
        self._alive = list(self._matchers)
        self._held = ""
        self._num_received = 0
        self._cut: int | None = None
        self.matched = False
        """Whether a stop string ended the text. Final after `flush`."""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns the text that is safe to emit, and whether a stop matched.

        After a match the rest of the text is dropped, and every further push returns nothing.
        """
        if self.matched:
            return "", True
        if not self._held and self._first_characters.isdisjoint(text):
            self._num_received += len(text)
            return text, False
        start_of_held = self._num_received - len(self._held)
        self._held += text
        for character in text:
            self._num_received += 1
            self._advance(character)
            if not self._alive:
                break
        self.matched = not self._alive
        return self._release(start_of_held), self.matched

    def flush(self) -> str:
        """The held text, at the end of the input; see `matched` for whether a stop string cut it."""
        held, self._held = self._held, ""
        if self._cut is None or self.matched:
            return held
        self.matched = True
        return held[: self._cut - (self._num_received - len(held))]

    def _advance(self, character: str) -> None:
        """Moves every matcher that can still decide the cut by one character."""
        for matcher in self._alive:
            if matcher.advance(character):
                start = self._num_received - len(matcher.stop)
                self._cut = start if self._cut is None else min(self._cut, start)
        if self._cut is not None:
            self._alive = [
                matcher
                for matcher in self._alive
                if self._num_received - matcher.num_matched < self._cut
            ]

    def _release(self, start_of_held: int) -> str:
        """Takes out of the held text what no stop string can reach any more."""
        if self._cut is not None and self.matched:
            safe, self._held = self._held[: self._cut - start_of_held], ""
            return safe
        longest = max(matcher.num_matched for matcher in self._alive)
        num_safe = len(self._held) - longest
        safe, self._held = self._held[:num_safe], self._held[num_safe:]
        return safe


class _Matcher:
    """How much of one stop string the end of the text spells so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = [0, 0]

    def advance(self, character: str) -> bool:
        """Takes one character; returns whether the stop string is now complete."""
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._border(matched)
        if self.stop[matched] == character:
            matched += 1
        self.num_matched = matched
        return matched == len(self.stop)

    def _border(self, length: int) -> int:
        """Length of the longest proper prefix of `stop[:length]` that is also its end."""
        borders, stop = self._borders, self.stop
        while len(borders) <= length:
            added = stop[len(borders) - 1]
            border = borders[-1]
            while border and stop[border] != added:
                border = borders[border]
            borders.append(border + 1 if stop[border] == added else 0)
        return borders[length]
