"""Which sequences a step computes, and how many tokens of each.

The whole policy: `max_num_seqs` places, filled from a queue that is fair between tenants, and
taken from a lower priority where none is free; memory for those that have begun, of whom the last
makes way where it is short; a step has a token budget; decodes go first, prompts fill the rest in
pieces, the one with the least left first. Knows nothing of models, text or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from deployments.engine.admission import FairQueue
from deployments.engine.config import EngineConfig
from deployments.engine.pacing import PrefillPace
from deployments.engine.sequence import Sequence, SequenceState
from deployments.engine.speculation import Speculation

OLDEST_FIRST_EVERY = 4
"""Of so many steps with prompts one begins with the oldest, which others would overtake for ever."""
LEAST_TOKENS_BETWEEN_PREEMPTIONS = 16
"""Tokens that a sequence gives before it loses its place again: what it loses is computed anew."""


@dataclass(frozen=True)
class ScheduledRow:
    """Tokens `start` to `end` of a sequence, to be computed in one step.

    The last of them are `drafts`, where there are any: tokens that the sequence does not have
    yet, and may never have.
    """

    seq: Sequence
    start: int
    end: int
    drafts: tuple[int, ...] = ()

    @property
    def is_sampled(self) -> bool:
        """Whether logits behind its last token are wanted.

        So where a new token follows. A warm-up gets none: its logits only tell whether what was
        computed is sound.
        """
        return self.seq.is_warm_up or self.end >= self.seq.num_tokens

    @property
    def token_ids(self) -> list[int]:
        num_drafts = len(self.drafts)
        return [*self.seq.token_ids(self.start, self.end - num_drafts), *self.drafts]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_sampled(self) -> int:
        """How many of its tokens, the last ones, are followed by one that is sampled: each draft too."""
        return 1 + len(self.drafts) if self.is_sampled else 0

    @property
    def num_scored(self) -> int:
        """How many of its tokens, the first ones, are followed by one whose probability is wanted."""
        if not self.seq.is_scored:
            return 0
        return max(0, min(self.end, len(self.seq.prompt_token_ids) - 1) - self.start)

    @property
    def num_logits(self) -> int:
        """How many of its tokens, the last ones, logits are wanted behind."""
        return self.num_scored + self.num_sampled

    @property
    def is_decode(self) -> bool:
        """Whether it computes one token of the sequence, in most cases the one sampled last."""
        return self.num_tokens - len(self.drafts) == 1


@dataclass(frozen=True)
class StepPlan:
    """One step: the rows in the order in which their tokens are packed, a warm-up's the last."""

    rows: tuple[ScheduledRow, ...]

    @cached_property
    def sampled_rows(self) -> tuple[ScheduledRow, ...]:
        """The rows that a token is sampled for."""
        return tuple(row for row in self.rows if row.is_sampled)

    @cached_property
    def sampled_at(self) -> list[int]:
        """The tokens behind which logits are wanted, by their places in the packed step."""
        places: list[int] = []
        num_packed = 0
        for row in self.rows:
            num_packed += row.num_tokens
            places += range(num_packed - row.num_logits, num_packed)
        return places

    @cached_property
    def warm_up(self) -> ScheduledRow | None:
        """The row that computes ahead of a request, if any."""
        return self.rows[-1] if self.rows and self.rows[-1].seq.is_warm_up else None

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_decodes(self) -> int:
        """Tokens of the rows that decode, drafts included."""
        return sum(row.num_tokens for row in self.rows if row.is_decode)


class Scheduler:
    """Holds the queue and the running sequences, and plans steps.

    Args:
        place: gives a sequence memory for all tokens it has, before it is first computed, and
            tells how many of the first need not be computed; None where memory is short.
        reserve: gives one that has begun memory for so many tokens; False where it is short.
        displace: takes the memory back from a sequence that is to wait again.
        awaited: who, having begun, is about to compute what another one would begin with; None
            where nobody is.
        pace: bounds the prompt tokens of steps in which others decode; None bounds nothing.
        block_tokens: such a piece of a prompt may end at a multiple of this; None is
            `prefill_chunk_tokens`.
        speculation: gives drafts to those that decode; None gives none.
    """

    def __init__(
        self,
        config: EngineConfig,
        place: Callable[[Sequence], int | None] = lambda seq: 0,
        displace: Callable[[Sequence], None] = lambda seq: None,
        *,
        reserve: Callable[[Sequence, int], bool] = lambda seq, num_tokens: True,
        awaited: Callable[[Sequence], Sequence | None] = lambda seq: None,
        pace: PrefillPace | None = None,
        block_tokens: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._config = config
        self._speculation = speculation
        self._place = place
        self._reserve = reserve
        self._awaited = awaited
        self._displace = displace
        self._pace = pace
        self._chunk = config.prefill_chunk_tokens
        self._block = min(block_tokens or self._chunk, self._chunk)
        self._num_prefill_steps = 0
        # Those that left the queue and wait for a first piece. They get memory only then, so that
        # the first of several that begin alike has computed the beginning for the others.
        self._unplaced: set[Sequence] = set()
        # One of them that found no memory: none begins before it, or it might wait for ever.
        self._starved: Sequence | None = None
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
        rows = self._secured(self._decodes())
        prefills = self._prefills()
        if not prefills:
            return StepPlan(tuple(rows))
        num_decodes = sum(row.num_tokens for row in rows)
        budget = self._config.max_num_batched_tokens - num_decodes
        limit = self._pace.limit(num_decodes) if self._pace else None
        grid = self._chunk
        if limit is not None and limit < budget:
            budget, grid = limit, self._block
        # Where the piece of each one ends that has any.
        ends: dict[Sequence, int] = {}
        # Logits behind every token take memory: so many of a step's at most.
        scored_left = self._chunk
        for seq in prefills:
            served, target = self._turn_of(seq)
            start = ends.get(served, served.num_computed_tokens)
            if self._is_decode(served) or start >= target:
                continue
            room = min(budget, scored_left) if served.is_scored else budget
            end = self._piece_end(start, target, room, grid)
            if end is None and room < budget:
                continue
            if served in self._unplaced:
                # What fits whole fits without its first tokens too.
                if end is None:
                    break
                if not self._begin(served):
                    continue
                start = served.num_computed_tokens
                end = self._piece_end(start, target, room, grid)
            elif served.state is SequenceState.WAITING:
                continue  # it made way for one that began
            if end is None:
                break
            ends[served] = end
            budget -= end - start
            scored_left -= end - start if served.is_scored else 0
        rows += [ScheduledRow(seq, seq.num_computed_tokens, end) for seq, end in ends.items()]
        return StepPlan(tuple(row for row in rows if row.seq.state is SequenceState.RUNNING))

    def _turn_of(self, seq: Sequence) -> tuple[Sequence, int]:
        """Who is served when it is a sequence's turn, and how far at most.

        One that would begin with what another one is about to compute waits for that, and lends
        its turn: so equal beginnings are computed once, no later than it would have done it, and
        for no more of the step.
        """
        other = self._awaited(seq) if seq in self._unplaced else None
        if other is None:
            return seq, seq.num_tokens
        # Its last token it computes itself; what it waits for ends on the grid before.
        return other, min(other.num_tokens, (seq.num_tokens - 1) // self._block * self._block)

    def _decodes(self) -> list[ScheduledRow]:
        """A row for each sequence that has a token, with a draft where that seems to pay."""
        seqs = [seq for seq in self.running if self._is_decode(seq)]
        drafts: list[tuple[int, ...]] = [()] * len(seqs)
        if self._speculation is not None:
            # One piece of a prompt fits beside them, see `EngineConfig`.
            room = self._config.max_num_batched_tokens - self._chunk - len(seqs)
            drafts = self._speculation.propose(seqs, room)
        return [
            ScheduledRow(seq, seq.num_computed_tokens, seq.num_tokens + len(draft), draft)
            for seq, draft in zip(seqs, drafts, strict=True)
        ]

    def _secured(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """The rows for which there is memory. Where it is short drafts are dropped first, then who
        makes way for those above waits again.

        Who makes way for a row loses less than its answer gains, a token at least, so that there
        are no more such preemptions than tokens.
        """
        if all(self._reserve(row.seq, row.end) for row in rows):
            return rows
        secured = []
        for row in sorted(rows, key=lambda row: -row.seq.priority):
            while row.seq.state is SequenceState.RUNNING:
                if self._reserve(row.seq, row.end):
                    secured.append(row)
                    break
                if row.drafts:
                    row = replace(row, end=row.end - len(row.drafts), drafts=())
                else:
                    self._preempt(self._last())
        return [row for row in secured if row.seq.state is SequenceState.RUNNING]

    def _last(self) -> Sequence:
        """Who makes way where memory is short: of the lowest priority the last that came.

        As among tenants nobody gains by asking for more than the usual priority, it is the lowest
        one of the tenant whose turn it is.

        Raises:
            RuntimeError: there is but one.
        """
        placed = [seq for seq in reversed(self.running) if seq not in self._unplaced]
        if len(placed) == 1:
            raise RuntimeError(f"the memory does not hold {placed[0].num_tokens} tokens")
        last = min(placed, key=lambda seq: min(seq.priority, 0))
        return min((seq for seq in placed if seq.share == last.share), key=lambda seq: seq.priority)

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

    def _begin(self, seq: Sequence) -> bool:
        """Gives a sequence memory; False where it has to wait for that."""
        if not self._may_begin(seq):
            return False
        while (num_computed := self._place(seq)) is None:
            self._starved = seq
            placed = [other for other in self.running if other not in self._unplaced]
            yielding = self._yielding_to(seq, placed)
            if not yielding:
                if self.num_running == 0:
                    raise RuntimeError(f"the memory does not hold {seq.num_tokens} tokens")
                return False
            self._preempt(yielding[0])
        self._unplaced.remove(seq)
        seq.state = SequenceState.RUNNING
        seq.num_computed_tokens = num_computed
        if seq.first_scheduled_s is None:
            seq.num_cached_tokens = min(num_computed, len(seq.prompt_token_ids))
        return True

    def _may_begin(self, seq: Sequence) -> bool:
        """Whether no other one waits for memory that goes before it."""
        starved = self._starved
        if starved is None or starved is seq or starved not in self._unplaced:
            return True
        goes_on = seq.num_preemptions > 0 and seq.priority >= starved.priority
        return _outranks(seq, starved) or (goes_on and starved.num_preemptions == 0)

    def _find_preemption(self) -> tuple[Sequence, Sequence] | None:
        """The next in the queue that may take a place, and whose: of the lowest priority the last.

        A sequence makes another wait at most once, so that there are no more preemptions than
        requests.
        """
        if not self.waiting:
            return None
        lowest = min(seq.priority for seq in self.running)
        for newcomer in self.waiting.heads:
            if newcomer.priority > lowest and (
                yielding := self._yielding_to(newcomer, self.running)
            ):
                return newcomer, yielding[0]
        return None

    def _yielding_to(self, newcomer: Sequence, seqs: list[Sequence]) -> list[Sequence]:
        """Who would make way for a newcomer, of the lowest priority the last that came first."""
        if newcomer.num_preemptions:
            return []
        yielding = [seq for seq in reversed(seqs) if _outranks(newcomer, seq) and _may_yield(seq)]
        return sorted(yielding, key=lambda seq: seq.priority)

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

    def _piece_end(self, start: int, target: int, budget: int, grid: int) -> int | None:
        """Where the longest piece within the budget ends: at its target or on the grid."""
        if target - start <= budget:
            return target
        end = (start + budget) // grid * grid
        return end if end > start else None


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
