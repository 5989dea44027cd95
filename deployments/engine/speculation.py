"""Drafts: tokens that probably come next, which a step checks while it computes the next one.

An answer often repeats what its prompt or itself says elsewhere. Prompt look-up (Saxena 2023) needs
no second model: the draft is what followed where the text last read as it ends now. The engine
computes the draft's tokens in the row of the token before them and samples at each, so that a wrong
draft costs rows of a step and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.engine.config import EngineConfig
from deployments.engine.sequence import Sequence

LEAST_MATCH = 2
"""Last tokens that must have stood elsewhere for a draft."""
MOST_MATCH = 8
"""Tokens beyond which a longer match says no more."""
MOST_CANDIDATES = 16
"""Earlier places that are compared, the latest first."""

PATIENCE = 4
"""Drafts without a right token, one after the other, before a pause."""
LONGEST_PAUSE = 64
"""Most tokens that go without a draft then."""


class PromptLookup:
    """The text of one sequence, in which the places that read as its end are found at once.

    Every place is in a chain with the earlier ones behind the same two tokens, so that a token
    costs one entry of a dictionary.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}
        # By place: the one before it behind the same two tokens; 0 is none.
        self._earlier: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the tokens that follow."""
        tokens, latest, earlier = self._token_ids, self._latest, self._earlier
        for token_id in token_ids:
            at = len(tokens)
            if at >= LEAST_MATCH:
                pair = (tokens[at - 2], tokens[at - 1])
                earlier.append(latest.get(pair, 0))
                latest[pair] = at
            else:
                earlier.append(0)
            tokens.append(token_id)

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that followed where the text last read as it ends now.

        Of several such places the one that reads alike the longest counts, among equals the latest.
        A text that repeats itself right up to its end is taken to go on doing so.
        """
        start = self._best_place()
        if start == 0 or most <= 0:
            return []
        period = len(self._token_ids) - start
        return [self._token_ids[start + i % period] for i in range(most)]

    def _best_place(self) -> int:
        """The place to go on from; 0 where there is none."""
        tokens = self._token_ids
        if len(tokens) < LEAST_MATCH:
            return 0
        best, longest = 0, 0
        at = self._latest.get((tokens[-2], tokens[-1]), 0)
        for _ in range(MOST_CANDIDATES):
            if at == 0 or longest == MOST_MATCH:
                break
            length = self._num_alike(at)
            if length > longest:
                best, longest = at, length
            at = self._earlier[at]
        return best

    def _num_alike(self, at: int) -> int:
        """How many tokens before a place are those at the end, up to `MOST_MATCH`."""
        tokens = self._token_ids
        length = LEAST_MATCH
        most = min(MOST_MATCH, at)
        while length < most and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


@dataclass
class Drafter:
    """Drafts for one sequence: long while they are right, and none while they are not.

    The next draft has `most` tokens after one that was right, half as many after one without a
    right token, and else one more than were right. After several without a right token there is
    none for 2, 4, 8 ... tokens, so that a text whose repetitions go on otherwise each time costs next
    to nothing; one without repetitions gets no drafts anyway.
    """

    most: int
    _lookup: PromptLookup = field(default_factory=PromptLookup)
    _length: int = 0
    _num_misses: int = 0
    # Tokens of the text up to which there is no draft.
    _silent_until: int = 0

    def __post_init__(self) -> None:
        self._length = self.most

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow those of the sequence."""
        if seq.num_tokens < self._silent_until:
            return ()
        self._lookup.extend(seq.token_ids(len(self._lookup), seq.num_tokens))
        return tuple(self._lookup.propose(min(self._length, most)))

    def observe(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Notes how much of a draft was right, after its tokens were appended."""
        if num_accepted > 0:
            self._num_misses = 0
            is_right = num_accepted == num_drafted
            self._length = self.most if is_right else num_accepted + 1
            return
        self._num_misses += 1
        self._length = max(1, self._length // 2)
        if self._num_misses >= PATIENCE:
            pause = min(LONGEST_PAUSE, 2 ** (self._num_misses - PATIENCE + 1))
            self._silent_until = seq.num_tokens + pause


class Speculation:
    """Which sequences of a step get drafts, and how long ones.

    A step computes few rows in hardly more time than one, so that drafts fill it up to
    `max_speculative_rows` and no further: beside many streams there are none.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._most = config.speculative_tokens
        self._max_rows = config.max_speculative_rows
        self._max_model_len = config.max_model_len

    def propose(self, seqs: list[Sequence], room: int) -> list[tuple[int, ...]]:
        """A draft for each of the sequences that decode in a step, for most an empty one.

        Where they do not all fit, the longest are cut: each token of a draft is less likely to be
        right than the one before it.

        Args:
            seqs: they take a row each.
            room: further rows that the step's budget allows.
        """
        left = min(room, self._max_rows - len(seqs))
        if self._most == 0 or left <= 0:
            return [()] * len(seqs)
        drafts = [self._draft(seq, left) for seq in seqs]
        lengths = [len(draft) for draft in drafts]
        while sum(lengths) > left:
            lengths[lengths.index(max(lengths))] -= 1
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def observe(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Notes how much of a draft was right, after its tokens were appended."""
        self._drafter(seq).observe(seq, num_drafted, num_accepted)

    def _draft(self, seq: Sequence, most: int) -> tuple[int, ...]:
        # The token behind a draft is still one of the answer.
        num_left = seq.max_tokens - len(seq.output_token_ids) - 1
        most = min(most, num_left, self._max_model_len - seq.num_tokens)
        if most <= 0 or not is_predictable(seq):
            return ()
        return self._drafter(seq).propose(seq, most)

    def _drafter(self, seq: Sequence) -> Drafter:
        if seq.drafter is None:
            seq.drafter = Drafter(self._most)
        return seq.drafter


def is_predictable(seq: Sequence) -> bool:
    """Whether a token is sampled alike whichever tokens of the draft come before it.

    Penalties, a grammar and the least length of an answer change the logits by the tokens
    answered, of which a draft's are not known to be any.
    """
    sampling = seq.sampling
    return (
        seq.grammar is None
        and sampling.repetition_penalty == 1.0
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
        and len(seq.output_token_ids) >= sampling.min_tokens
    )
