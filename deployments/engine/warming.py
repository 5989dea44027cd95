"""Warm-ups: the beginnings of prompts that are still being written, computed before the rest comes.

The whole policy of who computes ahead, and when. A warm-up takes only what requests leave: it
computes in steps that hold no other prompt while nobody waits, in pieces small enough that
neither the streams of such a step nor a newcomer behind it wait long; its place and its memory
are free for any request. What it has computed when it ends, or is ended, is found as the prefix of
a finished request would be.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

from deployments.engine.admission import FairQueue
from deployments.engine.config import EngineConfig
from deployments.engine.runner import Runner
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.sequence import Sequence, SequenceState
from protocol.errors import Overloaded

logger = logging.getLogger(__name__)

BLOCKS_ALONE = 4
"""Blocks in a step that computes nothing else. SmolLM2-135M on one EPYC core prefills 32, 64, 128
and 512 tokens a step in 3.3, 2.5, 2.2 and 2.3 ms a token, and a newcomer waits for one step."""
BLOCKS_BESIDE = 1
"""Blocks in a step with running streams."""


class Warming:
    """The warm-ups of one engine.

    Args:
        config: at most a quarter of its `max_num_seqs` compute by turns, and as many again as it
            has places wait for that.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._block = runner.prefix_block_tokens
        self._max_running = max(1, config.max_num_seqs // 4)
        self._waiting = FairQueue()
        # Those with a place, in the order of their turns.
        self._running: deque[Sequence] = deque()
        self._ended: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def add(self, seq: Sequence) -> None:
        """Queues a warm-up, in the place of those whose work it contains.

        Raises:
            Overloaded: too many wait.
        """
        self._end_covered_by(seq)
        if len(self._waiting) >= self._config.max_num_seqs:
            raise Overloaded(
                f"{len(self._waiting)} prompts wait to be computed ahead, the limit is "
                f"{self._config.max_num_seqs}",
                limit=self._config.max_num_seqs,
            )
        self._waiting.push(seq)

    def drop_abandoned(self) -> None:
        """Ends what nobody waits for any more; what was computed stays to be used."""
        for seq in list(self):
            if seq.is_abandoned:
                self.end(seq)

    def make_way(self, newcomer: Sequence, num_requests: int) -> None:
        """Leaves a request the place it needs, and its own beginning if that was being computed.

        Args:
            num_requests: that need a place, the newcomer among them.
        """
        self._end_covered_by(newcomer)
        if num_requests + len(self._running) > self._config.max_num_seqs:
            self.give_way()

    def give_way(self) -> bool:
        """Ends the one that loses least; False where there is none."""
        if not self._running:
            return False
        self.end(min(self._running, key=lambda seq: seq.num_computed_tokens))
        return True

    def fill(self, plan: StepPlan, num_requests: int, *, is_anyone_waiting: bool) -> StepPlan:
        """The plan with a piece of the next warm-up behind its rows, where that delays nobody."""
        if is_anyone_waiting or not (self._running or self._waiting):
            return plan
        if not all(row.is_decode for row in plan.rows):
            return plan
        self._start(num_requests)
        if not self._running:
            return plan
        seq = self._running[0]
        self._running.rotate(-1)
        end = self._piece_end(seq, plan)
        if not self._runner.reserve(seq, end):
            self.end(seq)
            return plan
        return StepPlan((*plan.rows, ScheduledRow(seq, seq.num_computed_tokens, end)))

    def advance(self, row: ScheduledRow, *, is_sound: bool) -> None:
        """Notes that a piece was computed, or that the step failed or gave NaN."""
        if not is_sound:
            self.end(row.seq, is_sound=False)
            return
        row.seq.num_computed_tokens = row.end
        if row.end == row.seq.num_tokens:
            self.end(row.seq)

    def end(self, seq: Sequence, *, is_sound: bool = True) -> None:
        """Takes a warm-up out; what was computed stays if it is sound."""
        if seq.state is SequenceState.WAITING:
            self._waiting.remove(seq)
        else:
            self._running.remove(seq)
            try:
                self._runner.release(seq, is_sound=is_sound)
            except Exception:
                # Whoever waits for it still gets its end.
                logger.exception("runner did not release warm-up %s", seq.request_id)
        self._finish(seq)

    def take_ended(self) -> list[Sequence]:
        """Those that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting

    def _start(self, num_requests: int) -> None:
        """Gives places to those that wait, as far as requests leave any."""
        while (
            (head := self._waiting.head) is not None
            and len(self._running) < self._max_running
            and num_requests + len(self._running) < self._config.max_num_seqs
        ):
            self._waiting.remove(head)
            if self._runner.holds(head):
                head.num_computed_tokens = head.num_cached_tokens = head.num_tokens
                self._finish(head)
                continue
            head.state = SequenceState.RUNNING
            self._running.append(head)
            head.num_computed_tokens = head.num_cached_tokens = self._runner.place(head)

    def _finish(self, seq: Sequence) -> None:
        seq.state = SequenceState.FINISHED
        self._ended.append(seq)

    def _piece_end(self, seq: Sequence, plan: StepPlan) -> int:
        """Where the next piece ends: on the grid of blocks, or on the one that cuts all prompts."""
        start = seq.num_computed_tokens
        room = self._config.max_num_batched_tokens - plan.num_tokens
        wanted = self._block * (BLOCKS_BESIDE if plan.rows else BLOCKS_ALONE)
        end = (start + min(wanted, room)) // self._block * self._block
        if end <= start:
            # A block does not fit; one piece of a prompt always does.
            chunk = self._config.prefill_chunk_tokens
            end = (start + room) // chunk * chunk
        return min(end, seq.num_tokens)

    def _end_covered_by(self, newcomer: Sequence) -> None:
        """Ends warm-ups that would compute what a newcomer is about to compute itself."""
        for seq in list(self):
            # Its last block may have been wrong about what comes: then the newcomer lacks that.
            num_certain = max(self._block, seq.num_tokens - self._block)
            if (
                seq.tenant == newcomer.tenant
                and seq.prompt_token_ids[:num_certain] == newcomer.prompt_token_ids[:num_certain]
            ):
                self.end(seq)
