"""The comparison of engines: what is asked and when, the figures, the tables, and the workers."""

from __future__ import annotations

import asyncio
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine import MAX_SEQS, Plan, engine_spec, measure_all, report
from bench.engine_loads import (
    Figures,
    Load,
    Run,
    agreement,
    figures,
    make_loads,
    make_warm_up,
    percentile_ms,
    read_prompts,
    run_load,
)
from bench.engine_tables import TARGETS, Result, Target, limits_table, ratio_of, targets_table
from bench.limits import Limits, ModelSize, size_of
from bench.peers.batches import BatchPeer
from bench.peers.process import EngineSpec, Fleet, Sample, Used, Worker, WorkerFailed
from bench.peers.stdio import Replies, Request, serve

PROMPTS = [[number, number + 1] for number in range(50)]
MODEL = Path("/models/chat")


def loads(**changes: int) -> list[Load]:
    options = {"seed": 1, "min_tokens": 8, "max_tokens": 120} | changes
    return make_loads(PROMPTS, {1: 4, 8: 16}, [8], **options)


class Echo:
    """Answers at once, as long as asked."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.is_closed = False

    def submit(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise ValueError("an empty prompt")
        self.replies.tokens(request.id, [7] * request.max_tokens)
        self.replies.end(request.id)

    def close(self) -> None:
        self.is_closed = True


class Answering:
    """A fleet that answers on the loop, one token each time it is asked, and counts."""

    def __init__(self) -> None:
        self.most = self.now = 0
        self.asked: list[tuple[Request, float]] = []

    async def ask(self, request: Request, begun_s: float) -> Sample:
        self.asked.append((request, begun_s))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return sample(request, begun_s=begun_s, gaps=(1.0,) * request.max_tokens)

    def used(self) -> Used:
        return Used(cpu_s=0.0, peak_rss=0, pss=2**30)


def sample(request: Request, *, begun_s: float = 0.0, gaps: tuple[float, ...]) -> Sample:
    at_s, pieces = begun_s, []
    for gap in gaps:
        at_s += gap
        pieces.append((at_s, 1))
    return Sample(request, begun_s, pieces, [7] * len(gaps), ended_s=at_s)


def some_figures(**changes: object) -> Figures:
    request = Request(1, [1, 2], 4)
    run = Run([sample(request, gaps=(0.5, 0.1, 0.1, 0.3))], 1.0, 2.0, 2**29, 0.0)
    return replace(figures(run), **changes)  # type: ignore[arg-type]


def fake_peer(tmp_path: Path, body: str) -> list[str]:
    """The command of a worker that is a few lines of Python."""
    file = tmp_path / "peer.py"
    file.write_text(f"import json, sys, time\n{body}")
    return [sys.executable, str(file)]


# What is asked


def test_the_same_seed_asks_the_same_and_another_one_asks_other_things() -> None:
    assert loads() == loads()
    assert loads() != loads(seed=2)


def test_no_prompt_comes_twice_before_all_were_asked() -> None:
    requests = [request for load in loads() for request in load.requests]
    first = [tuple(request.prompt_token_ids) for request in requests[: len(PROMPTS)]]
    assert len(set(first)) == len(PROMPTS)
    assert len({request.id for request in requests}) == len(requests)


def test_both_loops_ask_for_the_same_ragged_lengths() -> None:
    lengths = {
        (load.clients, load.mode): [request.max_tokens for request in load.requests]
        for load in loads()
    }
    assert lengths[8, "closed"] == lengths[8, "poisson"] == lengths[8, "top_p"]
    assert len(set(lengths[8, "closed"])) > 8
    assert all(8 <= length <= 120 for each in lengths.values() for length in each)


def test_only_the_top_p_load_samples() -> None:
    for load in loads():
        assert all((request.temperature > 0) == (load.mode == "top_p") for request in load.requests)


def test_the_warm_up_asks_what_the_loads_ask_last() -> None:
    few = [load for load in loads() if load.clients == 1]
    asked = {tuple(request.prompt_token_ids) for load in few for request in load.requests}
    warm_up = make_warm_up(PROMPTS, 20, 8, seed=1)
    assert asked.isdisjoint(tuple(request.prompt_token_ids) for request in warm_up)


def test_without_shared_data_the_repositorys_own_conversations_are_asked(tmp_path: Path) -> None:
    prompts = read_prompts(tmp_path)
    assert len(prompts.conversations) > 200
    assert all(conversation[-1]["role"] == "user" for conversation in prompts.conversations)
    assert "conversations.jsonl" in prompts.source


# When it is asked


async def test_a_closed_loop_keeps_as_many_in_flight_as_there_are_clients() -> None:
    fleet = Answering()
    load = loads()[2]
    run = await run_load(fleet, load, None, seed=1, patience_s=10)
    assert fleet.most == load.clients == 8
    assert [request for request, _ in fleet.asked] == list(load.requests)
    assert len(run.samples) == len(load.requests)


async def test_poisson_arrivals_count_from_their_planned_moment_and_repeat_with_the_seed() -> None:
    load = next(load for load in loads() if load.mode == "poisson" and load.clients == 8)
    gaps = []
    for _ in range(2):
        fleet = Answering()
        await run_load(fleet, load, 10_000.0, seed=1, patience_s=10)
        begun = sorted(begun_s for _, begun_s in fleet.asked)
        gaps.append([round(at_s - begun[0], 6) for at_s in begun])
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-5)


async def test_a_load_that_takes_too_long_is_given_up() -> None:
    class Silent(Answering):
        async def ask(self, request: Request, begun_s: float) -> Sample:
            await asyncio.Event().wait()
            raise AssertionError("never")

    with pytest.raises(TimeoutError):
        await run_load(Silent(), loads()[0], None, seed=1, patience_s=0.05)


# Figures


def test_figures_count_tokens_gaps_and_time_from_the_beginning() -> None:
    seen = some_figures()
    assert seen.tokens_per_s == 4
    assert seen.tokens_per_cpu_s == 2
    assert seen.requests_per_s == 1
    assert seen.prompt_tokens == 2
    assert seen.ttft_ms_p50 == pytest.approx(500)
    assert seen.itl_ms_p50 == pytest.approx(100)
    assert seen.latency_ms_p99 == pytest.approx(1000)
    assert seen.in_flight == pytest.approx(1)
    assert seen.pss_gib == 0.5


def test_a_failed_request_counts_as_an_error_and_nothing_else() -> None:
    failed = Sample(Request(1, [1], 4), 0.0, error="no room")
    seen = figures(Run([failed], 1.0, 1.0, 0, 0.0))
    assert seen.errors == {"no room": 1}
    assert seen.tokens_per_s == 0
    assert math.isnan(seen.latency_ms_p50)


def test_percentiles_interpolate() -> None:
    assert percentile_ms([0.001, 0.002], 50) == pytest.approx(1.5)
    assert math.isnan(percentile_ms([], 99))


def test_agreement_is_the_share_before_the_first_difference() -> None:
    assert agreement({1: [1, 2, 3, 4]}, {1: [1, 2, 9, 4]}) == 0.5
    assert agreement({1: [1, 2], 2: [5]}, {1: [1, 2]}) == 1
    assert math.isnan(agreement({1: [1]}, {}))


# Limits and tables


def test_bounds_follow_from_bytes_and_operations() -> None:
    limits = Limits(1, read_gib_per_s=10, bf16_gflops=100, int8_gflops=200)
    size = ModelSize(weights=2**30, embeddings=2**29)
    assert size.bound_alone(limits, "bf16") == 5
    assert size.bound_alone(limits, "int8") == 10
    alone = size.bound_in_batches(limits, "bf16", 0.0)
    assert alone == pytest.approx(100e9 / 2**31)
    assert size.bound_in_batches(limits, "bf16", 2.0) == pytest.approx(alone / 2)


def test_the_size_of_a_model_is_read_from_the_heads_of_its_files(tmp_path: Path) -> None:
    head = json.dumps(
        {
            "__metadata__": {},
            "model.embed_tokens.weight": {"shape": [10, 4]},
            "model.norm.weight": {"shape": [4]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    assert size_of(tmp_path) == ModelSize(weights=44, embeddings=40)


def test_a_ratio_is_ours_to_theirs_and_a_start_how_many_times_faster() -> None:
    ours = Result("seedance", "seedance", "bf16", starts_s=[9.0, 4.0])
    theirs = Result("vllm", "vllm", "bf16", starts_s=[90.0, 60.0])
    ours.loads[8, "closed"] = some_figures(tokens_per_s=30.0)
    theirs.loads[8, "closed"] = some_figures(tokens_per_s=20.0)
    assert ratio_of(Target("vllm", None, "starts_s", 10), ours, theirs) == 15
    assert ratio_of(Target("vllm", (8, "closed"), "tokens_per_s", 1), ours, theirs) == 1.5
    assert ratio_of(Target("vllm", (1, "closed"), "tokens_per_s", 1), ours, theirs) is None


def test_the_targets_table_says_met_not_met_and_not_measured_for_each_of_our_variants() -> None:
    fast = Result("seedance", "seedance", "bf16")
    slow = Result("seedance+1x1", "seedance", "bf16")
    peer = Result("vllm", "vllm", "bf16")
    for result, tokens_per_s in ((fast, 26.0), (slow, 19.0), (peer, 20.0)):
        result.loads[8, "closed"] = some_figures(tokens_per_s=tokens_per_s)
    lines = targets_table([fast, slow, peer]).splitlines()
    assert lines[0].endswith("| seedance | seedance+1x1 |")
    (line,) = [line for line in lines if "vllm | tokens_per_s, 8 clients, closed" in line]
    assert "1.30 met" in line
    assert "0.95 **not met**" in line
    assert len(lines) == 2 + len(TARGETS)
    assert sum("| — | — |" in line for line in lines) == len(TARGETS) - 1


def test_times_have_targets_that_must_not_be_exceeded() -> None:
    target = Target("static", (8, "closed"), "latency_ms_p99", 0.4, at_most=True)
    assert target.is_met(0.3)
    assert not target.is_met(0.5)


def test_the_limits_table_tells_what_part_of_the_best_bound_is_reached() -> None:
    result = Result("seedance", "seedance", "bf16")
    result.loads[1, "closed"] = some_figures(tokens_per_s=4.0)
    limits = [Limits(1, 10, 1, 1), Limits(2, 8, 1, 1)]
    text = limits_table([result], limits, ModelSize(2**30, 0), [1])
    assert "| 1 | seedance | memory | 5 | 4.0 | 80% |" in text


# Which engine


def test_options_behind_an_engines_name_choose_weights_and_processes() -> None:
    spec = engine_spec("seedance+int8+2x1", model=MODEL, models=None, venvs={}, cores=2)
    assert (spec.precision, spec.processes, spec.threads) == ("int8", 2, 1)
    spec = engine_spec("static", model=MODEL, models=None, venvs={}, cores=2)
    assert (spec.precision, spec.processes, spec.threads) == ("bf16", 1, 2)
    assert (spec.max_seqs, spec.model) == (MAX_SEQS, str(MODEL))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama", "engine is llama"),
        ("static+int8", "option of static is int8"),
        ("seedance+0x1", "the least is 1x1"),
        ("vllm", "--venv vllm="),
    ],
)
def test_what_cannot_be_started_says_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_spec(text, model=MODEL, models=None, venvs={}, cores=2)


def test_an_engine_with_a_format_of_its_own_needs_a_converted_model(tmp_path: Path) -> None:
    venvs = {"openvino": tmp_path}
    with pytest.raises(ValueError, match="--models"):
        engine_spec("openvino", model=MODEL, models=None, venvs=venvs, cores=2)
    with pytest.raises(ValueError, match="no converted model in"):
        engine_spec("openvino", model=MODEL, models=tmp_path, venvs=venvs, cores=2)
    (tmp_path / "openvino").mkdir()
    spec = engine_spec("openvino", model=MODEL, models=tmp_path, venvs=venvs, cores=2)
    assert spec.model == str(tmp_path / "openvino")
    assert spec.python == str(tmp_path / "bin" / "python")


# The workers


def test_a_request_survives_its_line_and_what_is_none_is_refused() -> None:
    request = Request(3, [1, 2], 40, temperature=0.8, top_p=0.9, seed=4)
    assert Request.from_line(request.to_line()) == request
    for line in ("[]", "{}", '{"id": 1, "prompt_token_ids": [], "beams": 4}'):
        with pytest.raises(ValueError):
            Request.from_line(line)


def test_a_worker_says_that_it_is_ready_answers_and_closes_with_its_input() -> None:
    stream = io.StringIO()
    peer = Echo(replies := Replies(stream, clock=lambda: 5.0))
    lines = [Request(1, [9], 2).to_line(), Request(2, [], 2).to_line()]
    serve(peer, replies, lines, echo="1.0")
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"ready": {"echo": "1.0"}},
        {"id": 1, "n": 2, "t": 5.0, "token_ids": [7, 7]},
        {"id": 1, "end": True, "t": 5.0},
        {"id": 2, "error": "ValueError: an empty prompt"},
    ]
    assert peer.is_closed


def test_who_waits_while_a_batch_runs_is_in_the_next_one() -> None:
    batches: list[list[int]] = []
    replies = Replies(io.StringIO())

    def run(batch: list[Request]) -> None:
        batches.append([request.id for request in batch])
        if len(batches) == 1:
            for request_id in range(1, 6):
                peer.submit(Request(request_id, [1], 1))
            peer.close()

    peer = BatchPeer(run, replies, max_batch_size=3)
    peer.submit(Request(0, [1], 1))
    peer.join()
    assert batches == [[0], [1, 2, 3], [4, 5]]


def test_a_batch_that_fails_fails_its_requests_alone() -> None:
    stream = io.StringIO()

    def run(batch: list[Request]) -> None:
        raise MemoryError("too long")

    peer = BatchPeer(run, Replies(stream), max_batch_size=3)
    peer.submit(Request(4, [1], 1))
    peer.close()
    peer.join()
    assert json.loads(stream.getvalue()) == {"id": 4, "error": "MemoryError: too long"}


async def test_a_worker_that_dies_ends_what_it_was_asked_and_tells_its_last_words(
    tmp_path: Path,
) -> None:
    command = fake_peer(
        tmp_path,
        'print(json.dumps({"ready": {}}), flush=True)\n'
        'sys.stdin.readline()\nprint("out of memory", file=sys.stderr)\nsys.exit(9)',
    )
    worker = await Worker.start(command)
    seen = await worker.ask(Request(1, [1], 3), 0.0)
    assert seen.error is not None
    assert "status 9" in seen.error
    assert "out of memory" in seen.error
    again = await worker.ask(Request(2, [1], 3), 0.0)
    assert again.error == seen.error
    await worker.stop()


async def test_a_worker_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="no module"):
        await Worker.start(fake_peer(tmp_path, 'sys.exit("no module")'))
    with pytest.raises(WorkerFailed, match="does not start"):
        await Worker.start([str(tmp_path / "none")])
    with pytest.raises(WorkerFailed, match="not ready within"):
        await Worker.start(fake_peer(tmp_path, "time.sleep(60)"), ready_within_s=0.3)


async def test_an_answer_of_another_length_is_an_error(tmp_path: Path) -> None:
    command = fake_peer(
        tmp_path,
        'print(json.dumps({"ready": {}}), flush=True)\n'
        "for line in sys.stdin:\n"
        '    id = json.loads(line)["id"]\n'
        '    print(json.dumps({"id": id, "n": 1, "t": 1.0, "token_ids": [5]}))\n'
        '    print(json.dumps({"id": id, "end": True, "t": 2.0}), flush=True)',
    )
    worker = await Worker.start(command)
    good = await worker.ask(Request(1, [1], 1), 0.0)
    assert (good.error, good.pieces, good.ended_s) == (None, [(1.0, 1)], 2.0)
    short = await worker.ask(Request(2, [1], 2), 0.0)
    assert short.error == "1 tokens came, 2 were asked for"
    assert worker.used().pss > 0
    await worker.stop()


async def test_the_scripted_engine_goes_through_the_whole_comparison_beside_one_that_fails() -> (
    None
):
    options = {"model": "mock", "precision": "bf16", "processes": 1, "threads": 1}
    good = EngineSpec("seedance", "seedance", sys.executable, **options)  # type: ignore[arg-type]
    bad = replace(good, name="bad", module="none")
    plan = Plan(
        loads=make_loads(PROMPTS, {1: 2, 2: 4}, [2], seed=1, min_tokens=1, max_tokens=9),
        warm_up=tuple(make_warm_up(PROMPTS, 3, 2, seed=1)),
        seed=1,
        load_factor=1.0,
        patience_s=60.0,
        starts=1,
    )
    rates: dict[int, float] = {}
    failed, seen = await measure_all([bad, good], plan, rates)
    assert failed.failure is not None
    assert "bench.peers.none" in failed.failure
    assert seen.failure is None
    assert set(rates) == {1, 2}
    assert seen.starts_s[0] > 0
    assert seen.peak_rss_gib > 0
    assert set(seen.loads) == {
        (1, "closed"), (1, "poisson"), (2, "closed"), (2, "poisson"), (2, "top_p"),
    }  # fmt: skip
    for load in plan.loads:
        measured = seen.loads[load.clients, load.mode]
        assert measured.errors == {}
        assert measured.completion_tokens == sum(r.max_tokens for r in load.requests)
    text = report([failed, seen], plan, {"processor": "some"}, [], Path())
    assert "**bad failed**" in text
    assert "| seedance |" in text


async def test_a_fleet_asks_who_has_least_to_do() -> None:
    class Counting:
        def __init__(self, num_asked: int) -> None:
            self.num_asked = num_asked
            self.asked: list[int] = []

        async def ask(self, request: Request, begun_s: float) -> Sample:
            self.asked.append(request.id)
            self.num_asked += 1
            return Sample(request, begun_s)

    few, many = Counting(0), Counting(2)
    fleet = Fleet([many, few])  # type: ignore[list-item]
    for request_id in range(4):
        await fleet.ask(Request(request_id, [1], 1), 0.0)
    assert (few.asked, many.asked) == ([0, 1, 3], [2])
