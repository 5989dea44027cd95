"""Which sequences a step computes, and how many tokens of each.

The whole policy: `max_num_seqs` places, filled from a queue that is fair between tenants; a
step has a token budget; decodes go first, prompts fill the rest in pieces. Knows nothing of
models, text or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from deployments.engine.admission import FairQueue
from deployments.engine.config import EngineConfig
from deployments.engine.sequence import Sequence, SequenceState


@dataclass(frozen=True)
class ScheduledRow:
    """Tokens `start` to `end` of a sequence, to be computed in one step."""

    seq: Sequence
    start: int
    end: int

    @property
    def is_sampled(self) -> bool:
        """Whether logits behind its last token are wanted.

        So where a new token follows. A warm-up gets none: its logits only tell whether what was
        computed is sound.
        """
        return self.seq.is_warm_up or self.end == self.seq.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step: the rows in the order in which their tokens are packed, a warm-up's the last."""

    rows: tuple[ScheduledRow, ...]

    @cached_property
    def sampled_rows(self) -> tuple[ScheduledRow, ...]:
        """The rows whose logits are wanted: the runner's come in this order."""
        return tuple(row for row in self.rows if row.is_sampled)

    @cached_property
    def warm_up(self) -> ScheduledRow | None:
        """The row that computes ahead of a request, if any."""
        return self.rows[-1] if self.rows and self.rows[-1].seq.is_warm_up else None

    @property
    def num_tokens(self) -> int:
        return sum(row.end - row.start for row in self.rows)


class Scheduler:
    """Holds the queue and the running sequences, and plans steps.

    Args:
        place: gives a sequence its place when it leaves the queue, and tells how many of its
            first tokens need not be computed.
    """

    def __init__(
        self, config: EngineConfig, place: Callable[[Sequence], int] = lambda seq: 0
    ) -> None:
        self._config = config
        self._place = place
        self.waiting = FairQueue()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.push(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, queued or running; its place is free for the next plan."""
        (self.waiting if seq.state is SequenceState.WAITING else self.running).remove(seq)
        seq.state = SequenceState.FINISHED

    def schedule(self) -> StepPlan:
        """Plans one step within the token budget, admitting from the queue while both last."""
        budget = self._config.max_num_batched_tokens
        rows: list[ScheduledRow] = []

        def take(seq: Sequence) -> bool:
            nonlocal budget
            end = self._piece_end(seq, budget)
            if end is None:
                return False
            rows.append(ScheduledRow(seq, seq.num_computed_tokens, end))
            budget -= end - seq.num_computed_tokens
            return True

        for seq in self.running:
            if _is_decode(seq):
                take(seq)
        for seq in self.running:
            if not _is_decode(seq):
                take(seq)
        while len(self.running) < self._config.max_num_seqs:
            head = self.waiting.head
            # What fits whole fits without its first tokens too.
            if head is None or self._piece_end(head, budget) is None:
                break
            self.waiting.remove(head)
            head.state = SequenceState.RUNNING
            self.running.append(head)
            head.num_computed_tokens = head.num_cached_tokens = self._place(head)
            take(head)
        return StepPlan(tuple(rows))

    def _piece_end(self, seq: Sequence, budget: int) -> int | None:
        """Where the longest piece within the budget ends: at the last token or on the chunk grid."""
        if seq.num_tokens - seq.num_computed_tokens <= budget:
            return seq.num_tokens
        chunk = self._config.prefill_chunk_tokens
        end = (seq.num_computed_tokens + budget) // chunk * chunk
        return end if end > seq.num_computed_tokens else None


def _is_decode(seq: Sequence) -> bool:
    return seq.num_tokens - seq.num_computed_tokens == 1
