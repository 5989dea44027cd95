"""The engine: schedule, run, sample, emit. One thread, no IO, no clock of its own.

Every sequence that is added ends in exactly one `Terminal`, whatever happens: a natural
stop, a limit, a cancel, a deadline, or an error of its own. What goes wrong with one row
ends that row; what goes wrong with a step ends that step's rows.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

from deployments.engine.admission import Admission
from deployments.engine.config import EngineConfig
from deployments.engine.output import AnswerText
from deployments.engine.pacing import PrefillPace
from deployments.engine.runner import Runner
from deployments.engine.sampler import SampledToken, Sampler
from deployments.engine.scheduler import ScheduledRow, Scheduler, StepPlan
from deployments.engine.scoring import divide, note_scores, with_prompt
from deployments.engine.sequence import Sequence, SequenceState
from deployments.engine.speculation import Speculation
from deployments.engine.tokenizer import ChatTokenizer
from deployments.engine.warming import Warming
from protocol.errors import DeadlineExceeded, DuplicateId, InternalError, ServingError
from protocol.token_log import FinishReason, Terminal, TokenDelta

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Emission:
    """What one step has for one sequence: new deltas, its end, or both."""

    seq: Sequence
    deltas: list[TokenDelta] = field(default_factory=list)
    terminal: Terminal | None = None


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Gauges and counters of one engine at one moment.

    `finished_total` counts ended requests by outcome: `stop`, `length`, `tool_calls`,
    `cancelled`, or an error's code (`timeout`, `internal`); `refused_total` those that were
    never accepted.

    `tokens` are still to be computed at the most, prompts and answers of all accepted requests;
    `waiting_tokens` are the prompts of those that no step has begun with.
    `prefix_query_tokens_total` counts the prompt tokens of all requests that were begun,
    `prefix_hit_tokens_total` those among them that an earlier sequence had left computed;
    `prompt_tokens_total` counts the others. `warm_up_tokens_total` counts what was computed ahead
    of requests, `preemptions_total` how often a running one had to wait again, for a higher
    priority or for memory. `draft_tokens_total` counts the tokens guessed and computed,
    `accepted_tokens_total` those among them that were right, each of which saved its sequence a
    step. Of the `kv_blocks_total` blocks of KV memory `kv_blocks_used` belong to sequences,
    warm-ups included, and `kv_blocks_cached` are free but hold what later ones may begin with.
    `stalled_s` is the time since the engine last moved while it had work. Warm-ups are in no other
    figure.
    """

    running: int = 0
    waiting: int = 0
    tokens: int = 0
    waiting_tokens: int = 0
    steps_total: int = 0
    generated_tokens_total: int = 0
    prompt_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    warm_up_tokens_total: int = 0
    preemptions_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    finished_total: dict[str, int] = field(default_factory=dict)
    refused_total: int = 0
    last_step_duration_s: float = 0.0
    last_step_monotonic_s: float | None = None
    stalled_s: float = 0.0


class Engine:
    """Continuous batching over one runner. Not thread-safe: one thread calls everything.

    `config` is lowered to what the runner can hold. `admission` is the one door to it, which
    any thread may use ahead of `add`.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: ChatTokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sampler: Sampler | None = None,
    ) -> None:
        self.config = replace(
            config,
            max_num_seqs=min(config.max_num_seqs, runner.max_num_seqs),
            max_model_len=min(config.max_model_len, runner.max_model_len),
        )
        self.tokenizer = tokenizer
        self.clock = clock
        self._runner = runner
        self._sampler = sampler or Sampler()
        self.admission = Admission(self.config, clock)
        self._pace = PrefillPace(self.config.prefill_slowdown, runner.piece_tokens)
        self._speculation = Speculation(self.config)
        self._scheduler = self._new_scheduler()
        self._warming = Warming(self.config, runner)
        self._answers: dict[str, tuple[Sequence, AnswerText]] = {}
        self._finished: Counter[str] = Counter()
        # Sequences that came with a complete answer: only their end is to be told.
        self._complete: list[Sequence] = []
        self._steps = self._generated_tokens = self._prompt_tokens = 0
        self._prefix_query_tokens = self._prefix_hit_tokens = self._tokens_left = 0
        self._warm_up_tokens = self._preemptions = 0
        self._draft_tokens = self._accepted_tokens = 0
        self._last_step_duration_s = 0.0
        self._last_step_s: float | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._complete) or self._warming.has_work

    @property
    def prefix_block_tokens(self) -> int:
        """Prompts share what was computed in multiples of this."""
        return self._runner.prefix_block_tokens

    def warm_up(self) -> None:
        """Prepares the runner; call it on the thread that will call `step`."""
        self._runner.warm_up()
        self._sampler.warm_up()

    def close(self) -> None:
        self._runner.close()

    def add(self, seq: Sequence) -> None:
        """Queues a sequence.

        Raises:
            Overloaded: see `Admission.take`, and `Warming.add`.
            DuplicateId: a live sequence has this request id.
        """
        if seq.is_warm_up:
            self._warming.add(seq)
            return
        if seq.request_id in self._answers:
            raise DuplicateId(f"request {seq.request_id} is already running")
        self.admission.take(seq)
        self._answers[seq.request_id] = (seq, seq.answer or AnswerText(seq, self.tokenizer))
        self._tokens_left += seq.num_tokens_left
        if seq.finish_reason is None:
            self._scheduler.add(seq)
        else:
            seq.state = SequenceState.FINISHED
            self._complete.append(seq)

    def abort(self, request_id: str) -> bool:
        """Drops a sequence before the next step is planned; False when there is none."""
        found = self._answers.get(request_id)
        if found is None:
            return False
        found[0].is_abandoned = True
        return True

    def step(self) -> list[Emission]:
        """Computes one step for every running sequence; returns what there is to tell."""
        emissions = self._drop_dead() + self._end_complete()
        plan = self._warming.fill(
            self._scheduler.schedule(),
            len(self._scheduler.running),
            is_anyone_waiting=self._scheduler.num_waiting > 0,
        )
        if plan.rows:
            started_s = self.clock()
            emissions += self._run(plan)
            self._steps += 1
            self._last_step_s = self.clock()
            self._last_step_duration_s = self._last_step_s - started_s
        return emissions + self._end_warm_ups()

    def fail_all(self, error: ServingError) -> list[Emission]:
        """Ends every sequence with an error: the way out of an exception in `step` itself."""
        # What the old scheduler holds is not to be trusted after that.
        self._scheduler = self._new_scheduler()
        self._complete.clear()
        seqs = [seq for seq, _ in self._answers.values()]
        for seq in seqs:
            seq.state = SequenceState.FINISHED
        emissions = [self._fail(seq, error) for seq in seqs]
        self._tokens_left = 0
        for seq in list(self._warming):
            self._warming.end(seq, is_sound=False)
        return emissions + self._end_warm_ups()

    def stats(self) -> EngineStats:
        pool = self._runner.pool
        return EngineStats(
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_kept,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            tokens=self._tokens_left,
            waiting_tokens=self.admission.num_waiting_tokens,
            steps_total=self._steps,
            generated_tokens_total=self._generated_tokens,
            prompt_tokens_total=self._prompt_tokens,
            prefix_query_tokens_total=self._prefix_query_tokens,
            prefix_hit_tokens_total=self._prefix_hit_tokens,
            warm_up_tokens_total=self._warm_up_tokens,
            preemptions_total=self._preemptions,
            draft_tokens_total=self._draft_tokens,
            accepted_tokens_total=self._accepted_tokens,
            finished_total=dict(self._finished),
            last_step_duration_s=self._last_step_duration_s,
            last_step_monotonic_s=self._last_step_s,
        )

    def _drop_dead(self) -> list[Emission]:
        """Ends what nobody waits for any more and what is too late, running or queued."""
        self._warming.drop_abandoned()
        now_s = self.clock()
        emissions = []
        for seq, _ in list(self._answers.values()):
            if seq.is_abandoned:
                emissions.append(self._end(seq, "cancelled"))
            elif seq.deadline_s is not None and now_s >= seq.deadline_s:
                emissions.append(self._fail(seq, deadline_exceeded(seq, now_s)))
        return emissions

    def _end_complete(self) -> list[Emission]:
        """Tells the end of what came complete and was not dropped."""
        complete, self._complete = self._complete, []
        return [
            self._end(seq, seq.finish_reason)
            for seq in complete
            if seq.finish_reason is not None and self._is_live(seq)
        ]

    def _is_live(self, seq: Sequence) -> bool:
        found = self._answers.get(seq.request_id)
        return found is not None and found[0] is seq

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self.config,
            self._place,
            self._displace,
            reserve=self._reserve,
            awaited=self._runner.pool.awaited,
            pace=self._pace,
            block_tokens=self._runner.piece_tokens,
            speculation=self._speculation,
        )

    def _place(self, seq: Sequence) -> int | None:
        self._warming.make_way(seq, len(self._scheduler.running))
        num_computed = self._runner.place(seq)
        if not self._reserve(seq, seq.num_tokens):
            self._runner.release(seq, is_sound=True)
            return None
        self._tokens_left -= min(num_computed, len(seq.prompt_token_ids))
        return num_computed

    def _reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Memory for a request; warm-ups make way for it."""
        while not self._runner.reserve(seq, num_tokens):
            if not self._warming.give_way():
                return False
        return True

    def _displace(self, seq: Sequence) -> None:
        """Takes the memory of a sequence that another one preempts."""
        self._preemptions += 1
        self._tokens_left += min(seq.num_computed_tokens, len(seq.prompt_token_ids))
        self._runner.release(seq, is_sound=seq.first_token_s is not None)
        logger.debug("request %s waits again, for another one", seq.request_id)

    def _run(self, plan: StepPlan) -> list[Emission]:
        """Computes a plan and moves all its sequences on."""
        requests = plan.rows if plan.warm_up is None else plan.rows[:-1]
        for row in requests:
            if row.seq.first_scheduled_s is None:
                self._start(row.seq)
        sampled_rows = [row for row in requests if row.is_sampled]
        started_s = self.clock()
        try:
            sampled, is_warm_up_sound, unsound = self._compute(plan, sampled_rows)
        except Exception as exc:
            if plan.warm_up is not None:
                logger.exception("a step with a warm-up failed, it is computed without")
                self._warming.advance(plan.warm_up, is_sound=False)
                return self._run(StepPlan(requests)) if requests else []
            error = internal_error("step failed", exc)
            return [self._fail(row.seq, error) for row in requests]
        if plan.warm_up is None:
            num_decodes = plan.num_decodes
            self._pace.observe(num_decodes, plan.num_tokens - num_decodes, self.clock() - started_s)
        for row in requests:
            self._advance(row)
        if plan.warm_up is not None:
            self._warm_up_tokens += plan.warm_up.end - plan.warm_up.start
            self._warming.advance(plan.warm_up, is_sound=is_warm_up_sound)
        cause = ValueError("logits behind the prompt are NaN or infinite")
        emissions = [self._fail(seq, internal_error(seq.request_id, cause)) for seq in unsound]
        for row, tokens in zip(sampled_rows, sampled, strict=True):
            if row.seq not in unsound and (emission := self._emit(row, tokens)) is not None:
                emissions.append(emission)
        return emissions

    def _compute(
        self, plan: StepPlan, rows: list[ScheduledRow]
    ) -> tuple[list[list[SampledToken | None]], bool, list[Sequence]]:
        """Runs a plan.

        Returns:
            For each of `rows` a token behind its last one and behind each of its drafts, as if
            these were right; whether the warm-up is sound; and the sequences whose prompts have
            no probability.
        """
        logits = self._runner.run(plan)
        assert logits.shape[0] == len(plan.sampled_at), "logits behind each token at `sampled_at`"
        # Its last token has attended to all that was computed of it, so none of that is NaN.
        is_warm_up_sound = plan.warm_up is None or not bool(logits[-1].isnan().any())
        # A model may have more logits than its tokenizer has tokens.
        seqs = [row.seq for row in rows for _ in range(row.num_sampled)]
        positions = [
            len(row.seq.output_token_ids) + i for row in rows for i in range(row.num_sampled)
        ]
        logits = logits[:, : self.tokenizer.vocab_size]
        unsound: list[Sequence] = []
        if any(row.seq.is_scored for row in plan.rows):
            parts = divide(plan.rows)
            unsound = note_scores(parts.scored, logits, self.tokenizer)
            logits = logits[parts.sampled]
        sampled = iter(self._sampler.sample(logits[: len(seqs)], seqs, positions) if seqs else ())
        return [list(islice(sampled, row.num_sampled)) for row in rows], is_warm_up_sound, unsound

    def _start(self, seq: Sequence) -> None:
        seq.first_scheduled_s = self.clock()
        self.admission.start(seq)
        self._prefix_query_tokens += len(seq.prompt_token_ids)
        self._prefix_hit_tokens += seq.num_cached_tokens

    def _advance(self, row: ScheduledRow) -> None:
        num_prompt = len(row.seq.prompt_token_ids)
        num_computed = min(row.end, num_prompt) - min(row.start, num_prompt)
        self._prompt_tokens += num_computed
        self._tokens_left -= num_computed
        row.seq.num_computed_tokens = row.end - len(row.drafts)

    def _emit(self, row: ScheduledRow, sampled: list[SampledToken | None]) -> Emission | None:
        """Takes what was sampled for a row; None while its text is held back."""
        deltas: list[TokenDelta] = []
        try:
            finish_reason = self._take(row, sampled, deltas)
        except Exception as exc:
            error = internal_error(f"request {row.seq.request_id} failed", exc)
            return self._fail(row.seq, error, deltas)
        deltas = with_prompt(row.seq, deltas, is_end=finish_reason is not None)
        if finish_reason is not None:
            return self._end(row.seq, finish_reason, deltas)
        return Emission(row.seq, deltas) if deltas else None

    def _take(
        self, row: ScheduledRow, sampled: list[SampledToken | None], deltas: list[TokenDelta]
    ) -> FinishReason | None:
        """Appends a row's next token, and the ones behind its drafts for as long as these are right:
        a draft is where the token sampled in its place is the same. Fills `deltas`. Where nothing is
        to be answered, that there is a next token tells that the prompt is sound.

        Raises:
            ValueError: the logits leave no token.
        """
        finish_reason = None
        num_accepted = 0
        for at, token in enumerate(sampled):
            if token is None:
                raise ValueError("logits leave no token: NaN, infinite, or all masked")
            if row.seq.max_tokens == 0:
                row.seq.first_token_s = self.clock()
                return "length"
            delta, finish_reason = self._append(row.seq, token)
            if delta is not None:
                deltas.append(delta)
            if finish_reason is not None or row.drafts[at : at + 1] != (token.token_id,):
                break
            num_accepted += 1
            row.seq.num_computed_tokens += 1
        if row.drafts:
            self._draft_tokens += len(row.drafts)
            self._accepted_tokens += num_accepted
            self._speculation.observe(row.seq, len(row.drafts), num_accepted)
        return finish_reason

    def _append(
        self, seq: Sequence, token: SampledToken
    ) -> tuple[TokenDelta | None, FinishReason | None]:
        seq.output_token_ids.append(token.token_id)
        self._generated_tokens += 1
        self._tokens_left -= 1
        if seq.first_token_s is None:
            seq.first_token_s = self.clock()
        if seq.grammar is not None:
            seq.grammar.accept(token.token_id)
        return self._answers[seq.request_id][1].push(token)

    def _end_warm_ups(self) -> list[Emission]:
        """Tells whoever waits for a warm-up that it is over."""
        emissions = []
        for seq in self._warming.take_ended():
            is_whole = seq.num_computed_tokens == seq.num_tokens
            terminal = Terminal(
                finish_reason="stop" if is_whole else "cancelled",
                usage=seq.usage(),
                timing=seq.timing(self.clock()),
            )
            emissions.append(Emission(seq, [], terminal))
        return emissions

    def _fail(
        self, seq: Sequence, error: ServingError, deltas: list[TokenDelta] | None = None
    ) -> Emission:
        return self._end(seq, "error", deltas, error)

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        deltas: list[TokenDelta] | None = None,
        error: ServingError | None = None,
    ) -> Emission:
        """Takes a sequence out for good; its memory is free when this returns."""
        del self._answers[seq.request_id]
        # Counted before the gauges fall: who sees them at 0 sees every outcome.
        self._finished[reason if error is None else error.code] += 1
        self._tokens_left -= seq.num_tokens_left
        if seq.state is not SequenceState.FINISHED:
            self._scheduler.remove(seq)
        try:
            # A row that gave a token attended to all that was computed of it, so none is NaN.
            is_sound = error is None and seq.first_token_s is not None
            self._runner.release(seq, is_sound=is_sound)
        except Exception:
            # The request still gets its end.
            logger.exception("runner did not release request %s", seq.request_id)
        self.admission.release(seq)
        terminal = Terminal(
            finish_reason=reason,
            usage=seq.usage(),
            timing=seq.timing(self.clock()),
            error=None if error is None else error.info,
        )
        logger.info(
            "request %s ended: %s, %d prompt and %d completion tokens, %.2f s",
            seq.request_id,
            reason if error is None else f"{error.code} ({error.message})",
            terminal.usage.prompt_tokens,
            terminal.usage.completion_tokens,
            terminal.timing.total_ms / 1000,
        )
        return Emission(seq, deltas or [], terminal)


def deadline_exceeded(seq: Sequence, now_s: float) -> DeadlineExceeded:
    """The end of a sequence whose `deadline_s` has passed."""
    assert seq.deadline_s is not None
    allowed_s = round(seq.deadline_s - seq.arrival_s, 6)
    return DeadlineExceeded(
        f"request took {now_s - seq.arrival_s:.1f} s, its timeout_s is {allowed_s:g}",
        param="timeout_s",
        limit=allowed_s,
    )


def internal_error(what: str, cause: BaseException) -> InternalError:
    """An error that tells a client an incident id, and the log the rest."""
    incident = uuid.uuid4().hex[:12]
    logger.error("incident %s: %s", incident, what, exc_info=cause)
    return InternalError(f"internal error, incident {incident}")
