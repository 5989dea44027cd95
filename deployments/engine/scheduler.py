"""Which sequences a step computes, and how many tokens of each.

The whole policy: `max_num_seqs` places, filled from a queue that is fair between tenants, and
taken from a lower priority where none is free; a step has a token budget; decodes go first,
prompts fill the rest in pieces, the one with the least left first. Knows nothing of models, text
or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from deployments.engine.admission import FairQueue
from deployments.engine.config import EngineConfig
from deployments.engine.pacing import PrefillPace
from deployments.engine.sequence import Sequence, SequenceState

OLDEST_FIRST_EVERY = 4
"""Of so many steps with prompts one begins with the oldest, which others would overtake for ever."""
LEAST_TOKENS_BETWEEN_PREEMPTIONS = 16
"""Tokens that a sequence gives before it loses its place again: what it loses is computed anew."""


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

    @property
    def num_decodes(self) -> int:
        """Rows of one token, most of which follow one sampled last."""
        return sum(row.end - row.start == 1 for row in self.rows)


class Scheduler:
    """Holds the queue and the running sequences, and plans steps.

    Args:
        place: gives a sequence its slot before it is first computed, and tells how many of its
            first tokens need not be computed.
        displace: takes the slot back from a sequence that is to wait again.
        pace: bounds the prompt tokens of steps in which others decode; None bounds nothing.
        block_tokens: such a piece of a prompt may end at a multiple of this; None is
            `prefill_chunk_tokens`.
    """

    def __init__(
        self,
        config: EngineConfig,
        place: Callable[[Sequence], int] = lambda seq: 0,
        displace: Callable[[Sequence], None] = lambda seq: None,
        *,
        pace: PrefillPace | None = None,
        block_tokens: int | None = None,
    ) -> None:
        self._config = config
        self._place = place
        self._displace = displace
        self._pace = pace
        self._chunk = config.prefill_chunk_tokens
        self._block = min(block_tokens or self._chunk, self._chunk)
        self._num_prefill_steps = 0
        # Those that left the queue and wait for a first piece. They get their slots only then, so
        # that the first of several that begin alike has computed the beginning for the others.
        self._unplaced: set[Sequence] = set()
        self.waiting = FairQueue()
        # Those with a place, in the order in which they left the queue.
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_running(self) -> int:
        return len(self.running) - len(self._unplaced)

    @property
    def num_waiting(self) -> int:
        """Those of which nothing is computed, queued or with a place."""
        return len(self.waiting) + len(self._unplaced)

    def add(self, seq: Sequence) -> None:
        self.waiting.push(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, queued or running; its place is free for the next plan."""
        is_queued = seq.state is SequenceState.WAITING and seq not in self._unplaced
        (self.waiting if is_queued else self.running).remove(seq)
        self._unplaced.discard(seq)
        seq.state = SequenceState.FINISHED

    def schedule(self) -> StepPlan:
        """Plans one step within the token budget."""
        self._admit()
        rows = [_row(seq, seq.num_tokens) for seq in self.running if self._is_decode(seq)]
        prefills = self._prefills()
        if not prefills:
            return StepPlan(tuple(rows))
        budget = self._config.max_num_batched_tokens - len(rows)
        limit = self._pace.limit(len(rows)) if self._pace else None
        grid = self._chunk
        if limit is not None and limit < budget:
            budget, grid = limit, self._block
        for seq in prefills:
            if seq in self._unplaced:
                # What fits whole fits without its first tokens too.
                if self._piece_end(seq, budget, grid) is None:
                    break
                self._give_slot(seq)
            end = self._piece_end(seq, budget, grid)
            if end is None:
                break
            rows.append(_row(seq, end))
            budget -= rows[-1].end - rows[-1].start
        return StepPlan(tuple(rows))

    def _admit(self) -> None:
        """Gives the free places to the queue, and then those of lower priority."""
        while len(self.running) < self._config.max_num_seqs:
            head = self.waiting.head
            if head is None:
                return
            self._take(head)
        while (pair := self._find_preemption()) is not None:
            newcomer, victim = pair
            self._preempt(victim)
            self._take(newcomer)

    def _take(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.running.append(seq)
        self._unplaced.add(seq)

    def _give_slot(self, seq: Sequence) -> None:
        self._unplaced.remove(seq)
        seq.state = SequenceState.RUNNING
        seq.num_computed_tokens = self._place(seq)
        if seq.first_scheduled_s is None:
            seq.num_cached_tokens = seq.num_computed_tokens

    def _find_preemption(self) -> tuple[Sequence, Sequence] | None:
        """The next in the queue that may take a place, and whose: of the lowest priority the last.

        A sequence makes another wait at most once, so that there are no more preemptions than
        requests.
        """
        if not self.waiting:
            return None
        lowest = min(seq.priority for seq in self.running)
        for newcomer in self.waiting.heads:
            if newcomer.priority <= lowest or newcomer.num_preemptions:
                continue
            yielding = [
                seq
                for seq in reversed(self.running)
                if _outranks(newcomer, seq) and _may_yield(seq)
            ]
            if yielding:
                return newcomer, min(yielding, key=lambda seq: seq.priority)
        return None

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue; what was answered stays, and is computed again with the prompt."""
        self.running.remove(seq)
        if seq not in self._unplaced:
            self._displace(seq)
        self._unplaced.discard(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.num_tokens_at_preemption = seq.num_tokens
        seq.state = SequenceState.WAITING
        self.waiting.push(seq)

    def _prefills(self) -> list[Sequence]:
        """Those with more than a token to compute, in the order in which they are served."""
        seqs = [seq for seq in self.running if not self._is_decode(seq)]
        if len(seqs) < 2:
            return seqs
        self._num_prefill_steps += 1
        by_rest = sorted(seqs, key=lambda seq: seq.num_tokens - seq.num_computed_tokens)
        if self._num_prefill_steps % OLDEST_FIRST_EVERY == 0:
            by_rest.remove(seqs[0])
            by_rest.insert(0, seqs[0])
        return by_rest

    def _is_decode(self, seq: Sequence) -> bool:
        return seq.num_tokens - seq.num_computed_tokens == 1 and seq not in self._unplaced

    def _piece_end(self, seq: Sequence, budget: int, grid: int) -> int | None:
        """Where the longest piece within the budget ends: at the last token or on the grid."""
        if seq.num_tokens - seq.num_computed_tokens <= budget:
            return seq.num_tokens
        end = (seq.num_computed_tokens + budget) // grid * grid
        return end if end > seq.num_computed_tokens else None


def _row(seq: Sequence, end: int) -> ScheduledRow:
    return ScheduledRow(seq, seq.num_computed_tokens, end)


def _outranks(newcomer: Sequence, seq: Sequence) -> bool:
    """Whether one goes before the other.

    Among different tenants nobody gains by asking for more than the usual priority, 0, but who
    asked for less yields to all.
    """
    if newcomer.share == seq.share:
        return newcomer.priority > seq.priority
    return min(newcomer.priority, 0) > min(seq.priority, 0)


def _may_yield(seq: Sequence) -> bool:
    num_tokens = seq.num_tokens - seq.num_tokens_at_preemption
    return seq.num_preemptions == 0 or num_tokens >= LEAST_TOKENS_BETWEEN_PREEMPTIONS
