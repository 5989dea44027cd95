"""One engine, stepped by hand: how answers end, what they carry, and who fails alone."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.engine import Engine
from deployments.engine.preparation import prepare
from deployments.engine.sampler import Sampler
from deployments.engine.sequence import Sequence, SequenceState
from protocol.errors import ContextLengthExceeded, DuplicateId, InvalidRequest, Overloaded
from protocol.request import InferenceRequest, Message, SamplingParams
from tests.engine.fakes import (
    SMALL,
    TOKENIZER,
    Collector,
    FakeClock,
    run_to_end,
    scripted_engine,
    sequence,
)

(EOS,) = TOKENIZER.eos_token_ids


def answer(text: str, **given: Any) -> tuple[Sequence, Any]:
    """Runs one sequence whose model says `text`."""
    engine, _ = scripted_engine(text)
    seq = sequence(**given)
    return seq, run_to_end(engine, seq)[seq]


# How answers end


def test_an_end_token_is_counted_but_is_neither_text_nor_a_token_of_a_delta() -> None:
    seq, got = answer("hello")
    assert got.text == "hello"
    assert got.token_ids == TOKENIZER.encode_prompt("hello")
    assert got.terminal.finish_reason == "stop"
    assert got.terminal.usage.completion_tokens == 6
    assert got.terminal.usage.prompt_tokens == len(seq.prompt_token_ids)


def test_the_token_limit_ends_with_length_and_counts_exactly() -> None:
    _, got = answer("hello", max_tokens=3)
    assert (got.text, got.terminal.finish_reason) == ("hel", "length")
    assert got.terminal.usage.completion_tokens == 3


def test_an_answer_of_one_token_has_its_delta() -> None:
    _, got = answer("hello", max_tokens=1)
    assert [(delta.seq, delta.text) for delta in got.deltas] == [(0, "h")]


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    _, got = answer("hi", max_tokens=3)
    assert (got.text, got.terminal.finish_reason) == ("hi", "stop")


def test_ignore_eos_goes_on_to_the_limit() -> None:
    _, got = answer("hi", max_tokens=5, ignore_eos=True)
    assert (got.text, got.terminal.finish_reason) == ("hi", "length")
    assert got.token_ids == [*TOKENIZER.encode_prompt("hi"), EOS, EOS, EOS]


def test_min_tokens_holds_back_the_end_token() -> None:
    _, got = answer("hi", min_tokens=4, max_tokens=8)
    assert got.terminal.finish_reason == "stop"
    assert got.terminal.usage.completion_tokens == 5


def test_a_stop_token_ends_like_an_end_token() -> None:
    (l_token,) = TOKENIZER.encode_prompt("l")
    _, got = answer("hello", stop_token_ids=(l_token,))
    assert (got.text, got.terminal.finish_reason) == ("he", "stop")
    assert got.terminal.usage.completion_tokens == 3


def test_a_stop_string_is_cut_and_nothing_of_it_is_sent() -> None:
    _, got = answer("A B C D E F G H A B", stop=("F G H A",))
    assert got.text == "A B C D E "
    assert got.terminal.finish_reason == "stop"
    assert TOKENIZER.decode(got.token_ids) == got.text
    assert got.terminal.usage.completion_tokens == len("A B C D E F G H A")


def test_a_prefix_of_a_stop_string_is_delivered_when_the_rest_does_not_come() -> None:
    _, got = answer("x F G y", stop=("F G Z",))
    assert got.text == "x F G y"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    engine, _ = scripted_engine("abXYc")
    seq = sequence(stop=("XYZ",))
    engine.add(seq)
    steps = [engine.step() for _ in range(5)]
    assert [[d.text for e in step for d in e.deltas] for step in steps] == [
        ["a"],
        ["b"],
        [],
        [],
        ["XYc"],
    ]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 4}], ids=["stop", "length"])
def test_held_text_is_flushed_before_the_terminal(limit: dict[str, int]) -> None:
    _, got = answer("abXY", stop=("XYZ",), **limit)
    assert got.text == "abXY"
    assert got.deltas[-1].text == "XY"


def test_a_stop_string_found_only_at_the_end_of_the_answer_is_a_stop() -> None:
    _, got = answer("abc", stop=("bc", "abcd"), max_tokens=3)
    assert (got.text, got.terminal.finish_reason) == ("a", "stop")


def test_stop_strings_begin_to_count_after_min_tokens() -> None:
    _, got = answer("a.b.c.d", stop=(".",), min_tokens=3)
    assert got.text == "a.b"


def test_a_character_of_several_tokens_is_one_delta() -> None:
    _, got = answer("né🙂")
    assert [delta.text for delta in got.deltas] == ["n", "é", "🙂"]
    assert [delta.seq for delta in got.deltas] == [0, 2, 6]
    assert [len(delta.token_ids) for delta in got.deltas] == [1, 2, 4]


def test_a_character_cut_by_the_limit_becomes_a_replacement_character() -> None:
    _, got = answer("a🙂", max_tokens=3)
    assert got.text == "a\ufffd"
    assert len(got.token_ids) == 3


# What deltas carry


def test_logprobs_have_one_entry_for_each_token_of_a_delta() -> None:
    _, got = answer("é!", logprobs=2, max_tokens=3)
    for delta in got.deltas:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
        assert all(len(entry.top) == 2 for entry in delta.logprobs)


def test_logprobs_are_cut_with_the_stop_string() -> None:
    _, got = answer("ab--", stop=("--",), logprobs=0)
    assert got.token_ids == TOKENIZER.encode_prompt("ab")
    assert [e.token for d in got.deltas for e in d.logprobs] == ["a", "b"]


def test_no_logprobs_unless_asked() -> None:
    _, got = answer("ab")
    assert all(delta.logprobs is None for delta in got.deltas)


def test_timing_tells_the_queue_and_the_first_token_apart() -> None:
    clock = FakeClock()
    engine, _ = scripted_engine("hello", clock=clock)
    seq = sequence(list(range(40)), max_tokens=2, arrival_s=clock())
    engine.add(seq)
    collector = Collector()
    while engine.has_work:
        clock.advance(0.5)
        collector.take(engine.step())
    timing = collector[seq].terminal.timing
    # Queued for one half second, then three chunks of prompt, then one more token.
    assert (timing.queue_ms, timing.ttft_ms, timing.total_ms) == (500.0, 1500.0, 2000.0)


# Many at a time


def test_requests_join_and_leave_the_running_batch_at_every_step() -> None:
    engine, _ = scripted_engine(lambda seq: "x" * len(seq.prompt_token_ids))
    rng = random.Random(3)
    seqs = [sequence("p" * rng.randint(1, 30)) for _ in range(12)]
    collector, left = Collector(), list(seqs)
    while left or engine.has_work:
        if left and rng.random() < 0.5:
            engine.add(left.pop())
        collector.take(engine.step())
    for seq in seqs:
        assert collector[seq].text == "x" * len(seq.prompt_token_ids)


def test_a_running_stream_gets_a_token_in_every_step_while_long_prompts_arrive() -> None:
    engine, _ = scripted_engine("y" * 20, config=replace(SMALL, speculative_tokens=0))
    stream = sequence()
    engine.add(stream)
    for _ in range(20):
        if engine.stats().waiting < 4:
            engine.add(sequence("long prompt " * 8, max_tokens=1))
        emissions = engine.step()
        assert [d.text for e in emissions if e.seq is stream for d in e.deltas] == ["y"]


def test_a_steady_arrival_of_long_prompts_neither_stops_a_stream_nor_piles_up() -> None:
    config = replace(SMALL, max_waiting=6, max_waiting_tokens=300, speculative_tokens=0)
    engine, _ = scripted_engine("y" * 90, config=config)
    stream = sequence(max_tokens=90)
    engine.add(stream)
    numbers, refused, ended = itertools.count(), 0, 0
    for _ in range(90):
        for _ in range(2):
            prompt = [next(numbers) % 250 for _ in range(100)]
            try:
                engine.add(sequence(prompt, max_tokens=1))
            except Overloaded:
                refused += 1
        emissions = engine.step()
        assert [d.text for e in emissions if e.seq is stream for d in e.deltas] == ["y"]
        ended += sum(e.terminal is not None for e in emissions)
        assert engine.stats().waiting <= 6
        assert engine.stats().waiting_tokens <= 300
    assert stream.state is SequenceState.FINISHED
    assert ended > 5, "the newcomers are served too"
    assert refused > 100


def test_of_thirty_at_the_same_moment_two_run_and_two_wait() -> None:
    engine, _ = scripted_engine("ok", config=replace(SMALL, max_num_seqs=2, max_waiting=2))
    accepted = []
    for _ in range(30):
        seq = sequence()
        with contextlib.suppress(Overloaded):
            engine.add(seq)
            accepted.append(seq)
    assert len(accepted) == 4
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 2)
    collector = run_to_end(engine)
    assert [collector[seq].terminal.finish_reason for seq in accepted] == ["stop"] * 4


def test_a_tenants_backlog_does_not_hold_up_anothers_first_request() -> None:
    config = replace(SMALL, max_num_seqs=1, max_waiting=20)
    engine, _ = scripted_engine("ok", config=config)
    backlog = [sequence() for _ in range(8)]
    for seq in backlog:
        engine.add(seq)
    engine.step()
    other = sequence()
    other.tenant = other.share = "b"
    engine.add(other)
    ended = [e.seq for _ in range(30) for e in engine.step() if e.terminal is not None]
    assert ended.index(other) <= 2


def test_the_queue_is_bounded_and_a_refusal_leaves_the_others_alone() -> None:
    config = replace(SMALL, max_num_seqs=2, max_waiting=2)
    engine, _ = scripted_engine("ok", config=config)
    seqs = [sequence() for _ in range(4)]
    for seq in seqs:
        engine.add(seq)
    with pytest.raises(Overloaded, match="limit is 4") as refusal:
        engine.add(sequence())
    assert refusal.value.retry_after_s
    collector = run_to_end(engine)
    assert [collector[seq].text for seq in seqs] == ["ok"] * 4
    engine.add(sequence())


def test_a_live_request_id_is_refused_and_may_be_used_again_after_the_end() -> None:
    engine, _ = scripted_engine("ok")
    first = sequence(request_id="x")
    engine.add(first)
    with pytest.raises(DuplicateId):
        engine.add(sequence(request_id="x"))
    assert run_to_end(engine)[first].text == "ok"
    again = sequence(request_id="x")
    assert run_to_end(engine, again)[again].text == "ok"


# Cancels and deadlines


def test_an_aborted_stream_ends_before_the_next_step_is_planned() -> None:
    engine, runner = scripted_engine("hello")
    seq = sequence()
    engine.add(seq)
    engine.step()
    assert engine.abort(seq.request_id)
    (emission,) = engine.step()
    assert emission.deltas == []
    assert emission.terminal is not None
    assert emission.terminal.finish_reason == "cancelled"
    assert emission.terminal.usage.completion_tokens == 1
    assert runner.held == set()
    assert not engine.has_work


def test_a_queued_request_is_dropped_without_being_computed() -> None:
    engine, _ = scripted_engine("hello", config=replace(SMALL, max_num_seqs=1))
    running, queued = sequence(), sequence()
    engine.add(running)
    engine.step()
    engine.add(queued)
    queued.is_abandoned = True
    collector = run_to_end(engine)
    assert collector[queued].terminal.finish_reason == "cancelled"
    assert queued.first_scheduled_s is None
    assert collector[running].terminal.finish_reason == "stop"


def test_a_cancel_in_the_middle_of_a_long_prompt_frees_its_place() -> None:
    engine, runner = scripted_engine("hello")
    seq = sequence("p" * 60)
    engine.add(seq)
    engine.step()
    assert runner.held == {seq}
    seq.is_abandoned = True
    engine.step()
    assert runner.held == set()


def test_a_late_cancel_is_harmless() -> None:
    engine, _ = scripted_engine("hi")
    seq = sequence()
    collector = run_to_end(engine, seq)
    seq.is_abandoned = True
    assert not engine.abort(seq.request_id)
    assert engine.step() == []
    assert collector[seq].terminal.finish_reason == "stop"


@pytest.mark.parametrize("places", [4, 1], ids=["running", "queued"])
def test_a_deadline_ends_the_request_with_a_timeout(places: int) -> None:
    clock = FakeClock()
    engine, _ = scripted_engine(
        "hello world", config=replace(SMALL, max_num_seqs=places), clock=clock
    )
    other = sequence()
    late = sequence(deadline_s=clock() + 1.0, arrival_s=clock())
    engine.add(other)
    engine.step()
    engine.add(late)
    engine.step()
    clock.advance(1.5)
    collector = run_to_end(engine)
    error = collector[late].terminal.error
    assert collector[late].terminal.finish_reason == "error"
    assert error is not None
    assert (error.code, error.param, error.limit) == ("timeout", "timeout_s", 1.0)
    assert "1.5 s" in error.message
    assert collector[other].terminal.finish_reason == "stop"


# Failures


@pytest.mark.parametrize("at", [0, 9], ids=["at the first token", "at the tenth"])
def test_a_poisoned_row_ends_with_its_own_error_and_its_neighbours_go_on(at: int) -> None:
    bad, good = sequence(), sequence()
    engine, runner = scripted_engine(
        "twelve chars",
        fault=lambda seq: "nan" if seq is bad and len(seq.output_token_ids) == at else None,
    )
    collector = run_to_end(engine, bad, good)
    assert collector[bad].text == "twelve chars"[:at]
    error = collector[bad].terminal.error
    assert error is not None
    assert error.code == "internal"
    assert "incident" in error.message
    assert collector[good].text == "twelve chars"
    assert runner.held == set()


def test_an_exception_in_the_runner_ends_that_steps_rows_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, mate, queued = sequence(), sequence(), sequence()
    engine, runner = scripted_engine(
        "hello",
        config=replace(SMALL, max_num_seqs=2),
        fault=lambda seq: "raise" if seq is bad and len(seq.output_token_ids) == 2 else None,
    )
    collector = run_to_end(engine, bad, mate, queued)
    for seq in (bad, mate):
        error = collector[seq].terminal.error
        assert error is not None
        assert error.message.startswith("internal error, incident ")
        # The client gets the number, the log gets the rest.
        assert error.message.rpartition(" ")[2] in caplog.text
    assert "scripted fault" in caplog.text
    assert collector[queued].text == "hello"
    assert runner.held == set()


def test_an_exception_in_the_sampler_ends_that_steps_rows_only() -> None:
    class Flaky(Sampler):
        calls = 0

        def sample(self, *args: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("out of memory")
            return super().sample(*args)

    _, runner = scripted_engine("hello")
    engine = Engine(runner, TOKENIZER, SMALL, clock=FakeClock(), sampler=Flaky())
    first, second = sequence(), sequence()
    collector = run_to_end(engine, first)
    assert collector[first].terminal.finish_reason == "error"
    assert run_to_end(engine, second)[second].text == "hello"


def test_everything_can_be_ended_at_once() -> None:
    engine, runner = scripted_engine("hello", config=replace(SMALL, max_num_seqs=1))
    seqs = [sequence() for _ in range(3)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    ended = engine.fail_all(Overloaded("going down"))
    assert [emission.seq for emission in ended] == seqs
    assert runner.held == set()
    assert not engine.has_work
    after = sequence()
    assert run_to_end(engine, after)[after].text == "hello"


# Numbers


def test_stats_count_each_request_once_and_agree_with_usage() -> None:
    clock = FakeClock()
    engine, _ = scripted_engine("hello", clock=clock)
    cancelled = sequence()
    seqs = [
        sequence(),
        sequence(max_tokens=2),
        cancelled,
        sequence(deadline_s=clock() - 1),
    ]
    for seq in seqs:
        engine.add(seq)
    assert (engine.stats().running, engine.stats().waiting) == (0, 4)
    collector = Collector()
    collector.take(engine.step())
    assert engine.stats().running == 3
    cancelled.is_abandoned = True
    while engine.has_work:
        collector.take(engine.step())
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.finished_total == {"stop": 1, "length": 1, "cancelled": 1, "timeout": 1}
    usage = [collector[seq].terminal.usage for seq in seqs]
    assert stats.generated_tokens_total == sum(u.completion_tokens for u in usage)
    assert stats.prompt_tokens_total == sum(u.prompt_tokens for u in usage[:3])
    assert stats.steps_total > 0
    assert stats.last_step_monotonic_s == clock()


@given(
    moves=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 9), st.sampled_from("addssssc")), max_size=40
    )
)
def test_the_work_that_is_left_is_always_the_sum_over_all_live_requests(
    moves: list[tuple[int, int, str]],
) -> None:
    clock = FakeClock()
    engine, _ = scripted_engine("hello", config=replace(SMALL, prefix_block_tokens=4), clock=clock)
    seqs: list[Sequence] = []

    def check() -> None:
        stats = engine.stats()
        live = [seq for seq in seqs if seq.state is not SequenceState.FINISHED]
        assert stats.tokens == sum(seq.num_tokens_left for seq in live)
        assert stats.waiting_tokens == sum(
            len(seq.prompt_token_ids) for seq in live if seq.state is SequenceState.WAITING
        )
        assert stats.running + stats.waiting == len(live)

    for length, limit, move in moves:
        if move in "ad":
            deadline_s = clock() + limit / 2 if move == "d" else None
            seq = sequence([length % 3] * length, max_tokens=limit, deadline_s=deadline_s)
            with contextlib.suppress(Overloaded):
                engine.add(seq)
                seqs.append(seq)
        elif move == "c" and seqs:
            seqs[length % len(seqs)].is_abandoned = True
        clock.advance(0.5)
        engine.step()
        check()
    for seq in seqs:
        seq.is_abandoned = True
    engine.step()
    check()
    assert engine.stats().tokens == 0
    assert engine.admission.num_held == 0


# From a request to a sequence


def request(**given: Any) -> InferenceRequest:
    return InferenceRequest(**({"request_id": "r", "tenant": "t", "model": "m"} | given))


def prepared(**given: Any) -> Sequence:
    return prepare(request(**given), TOKENIZER, SMALL, FakeClock(), random.Random(1))


def test_a_chat_is_prepared_by_the_template() -> None:
    messages = (Message(role="user", content="hi"),)
    seq = prepared(messages=messages, priority=3, timeout_s=5.0)
    assert seq.prompt_token_ids == TOKENIZER.encode_chat(messages)
    assert (seq.priority, seq.arrival_s, seq.deadline_s) == (3, 100.0, 105.0)
    assert seq.eos_token_ids == TOKENIZER.eos_token_ids


def test_max_tokens_defaults_to_what_the_context_holds() -> None:
    assert prepared(prompt="x" * 28).max_tokens == 100


def test_max_tokens_is_lowered_to_what_the_context_holds() -> None:
    sampling = SamplingParams(max_tokens=110, min_tokens=105)
    seq = prepared(prompt="x" * 28, sampling=sampling)
    assert (seq.max_tokens, seq.sampling.min_tokens) == (100, 100)


def test_an_answer_that_fills_the_context_ends_with_length() -> None:
    seq = prepared(prompt="x" * 120, sampling=SamplingParams(max_tokens=50, temperature=0.0))
    engine, _ = scripted_engine("y" * 100)
    collector = run_to_end(engine, seq)
    assert collector[seq].terminal.finish_reason == "length"
    assert seq.num_tokens == SMALL.max_model_len


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    ids = tuple(range(200))
    # Clients of the OpenAI API know the case by these words.
    words = "this model's maximum context length is 128 tokens, the prompt has 200 tokens"
    with pytest.raises(ContextLengthExceeded, match=words) as refusal:
        prepared(prompt=ids)
    assert (refusal.value.limit, refusal.value.param) == (128, "prompt")


def test_a_prompt_that_only_just_fills_the_context_leaves_no_room() -> None:
    with pytest.raises(ContextLengthExceeded):
        prepared(prompt=tuple([5] * 128))
    assert prepared(prompt=tuple([5] * 127)).max_tokens == 1


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(TOKENIZER, "encode_prompt", encode)
    monkeypatch.setattr(TOKENIZER, "encode_chat", encode)
    text = "🙂" * 500_000
    given = text if field == "prompt" else (Message(role="user", content=text),)
    words = r"is 128 tokens, the prompt has at least [0-9]+ tokens"
    with pytest.raises(ContextLengthExceeded, match=words) as refusal:
        prepared(**{field: given})
    assert refusal.value.param == field


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ()}, "prompt"),
        ({"messages": ()}, "messages"),
        ({"prompt": (1, -1)}, "prompt"),
        ({"prompt": (1, 999_999)}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": "a", "sampling": SamplingParams(logit_bias={999_999: 5.0})}, "logit_bias"),
        ({"prompt": "a", "sampling": SamplingParams(logit_bias={-1: 5.0})}, "logit_bias"),
        ({"prompt": "a", "sampling": SamplingParams(stop_token_ids=(999_999,))}, "stop_token_ids"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    given: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        prepared(**given)
    assert refusal.value.param == param


def test_unseeded_requests_get_seeds_of_their_own() -> None:
    rng = random.Random(1)
    seqs = [prepare(request(prompt="a"), TOKENIZER, SMALL, FakeClock(), rng) for _ in range(2)]
    assert seqs[0].seed != seqs[1].seed
    assert prepared(prompt="a", sampling=SamplingParams(seed=-7)).seed == -7
