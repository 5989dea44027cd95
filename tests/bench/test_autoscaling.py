"""The trace simulator: it models replicas soundly, and shows what the policy is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.autoscaling import (
    Arrival,
    ByWork,
    Fixed,
    Scaler,
    ServeDefault,
    ServiceModel,
    Simulation,
    compare,
    main,
    make_rush,
    quantile,
    read_trace,
    table,
)
from deployments.scaling import ReplicaLoad, ScalingRules

MODEL = ServiceModel(
    max_num_seqs=4, answer_tokens_per_s=100, row_tokens_per_s=50, prompt_speedup=10, startup_s=20
)
RULES = ScalingRules(target_tokens_per_replica=2000, upscale_cooldown_s=10, downscale_cooldown_s=60)


def simulate(trace: list[Arrival], scaler: Scaler, replicas: int = 1):
    return Simulation(trace, MODEL, scaler, replicas=replicas).run("it")


def burst(count: int, *, at_s: float = 0.0, answer: int = 100) -> list[Arrival]:
    return [Arrival(at_s, 100, answer) for _ in range(count)]


def test_one_request_takes_its_prompt_and_its_answer() -> None:
    result = simulate(burst(1, answer=101), Fixed())
    assert result.waits_s == [0]
    assert result.ttfts_s == [0.25], "100 prompt tokens at 1000 a second, in whole steps"
    assert result.replica_seconds == pytest.approx(0.25 + 2.0), "then 100 tokens at 50 a second"


def test_full_replicas_make_the_others_wait() -> None:
    result = simulate(burst(8), Fixed())
    assert sorted(result.waits_s)[:4] == [0] * 4
    assert min(sorted(result.waits_s)[4:]) >= 4.0, "400 tokens at 100 a second come first"


def test_a_second_replica_halves_the_work() -> None:
    one, two = (simulate(burst(64), Fixed(), replicas) for replicas in (1, 2))
    assert max(two.waits_s) == pytest.approx(max(one.waits_s) / 2, rel=0.1)
    assert two.replica_seconds == pytest.approx(one.replica_seconds, rel=0.1)


def test_a_burst_is_answered_with_replicas_that_leave_afterwards() -> None:
    trace = burst(100) + [Arrival(float(second), 10, 10) for second in range(1, 1000, 10)]
    result = simulate(sorted(trace, key=lambda one: one.at_s), ByWork(RULES, 4, 4.0))
    assert max(result.counts) == 4
    assert result.counts[-1] == 1
    falls = [a - b for a, b in zip(result.counts, result.counts[1:], strict=False) if a > b]
    assert falls == [1, 1, 1]


def test_every_request_is_served_whatever_the_scaler_does() -> None:
    trace = make_rush(duration_s=120)
    for scaler in (Fixed(), ByWork(RULES, 4, 4.0), ServeDefault(4)):
        result = simulate(trace, scaler)
        assert len(result.waits_s) == len(result.ttfts_s) == len(trace)


def test_serves_default_waits_for_its_delays() -> None:
    scaler = ServeDefault(8)
    busy: dict[str, ReplicaLoad | None] = {"r0": ReplicaLoad(running=10)}
    asked = [scaler.decide(float(now), 1, busy) for now in range(0, 40, 2)]
    assert asked[:15] == [1] * 15
    assert asked[15] == 5


def test_the_policy_costs_less_than_the_peak_and_waits_less_than_the_mean() -> None:
    by_name = {
        result.name: result
        for result in compare(make_rush(duration_s=600), MODEL, RULES, max_replicas=30)
    }
    work, peak, small = by_name["work"], by_name["fixed at 30"], by_name["fixed at 1"]
    assert work.replica_seconds < 0.9 * peak.replica_seconds
    assert quantile(work.waits_s, 0.95) < 0.1 * quantile(small.waits_s, 0.95)


def test_the_same_trace_gives_the_same_table() -> None:
    tables = {
        table(compare(make_rush(7, duration_s=60), MODEL, RULES, max_replicas=3)) for _ in range(2)
    }
    assert len(tables) == 1
    lines = tables.pop().splitlines()
    assert len(lines) == 8
    assert "replicas over time" in lines[0]


def test_both_kinds_of_trace_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9305900,396,109\n"
    )
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 1000, "input_length": 374, "output_length": 44, "hash_ids": [1]}\n'
        '{"timestamp": 5250, "input_length": 396, "output_length": 109, "hash_ids": [2]}\n'
    )
    for path in (azure, mooncake):
        first, second = read_trace(path)
        assert (first.at_s, first.prompt_tokens, first.answer_tokens) == (0, 374, 44)
        assert second.at_s == pytest.approx(4.25)


def test_a_trace_of_another_kind_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("when,what\n1,2\n")
    with pytest.raises(ValueError, match="TIMESTAMP"):
        read_trace(other)


def test_it_runs_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 20}\n')
    assert main(["--trace", str(trace), "--max-replicas", "2"]) == 0
    assert "Serve default (2 a replica)" in capsys.readouterr().out
    assert main(["--trace", str(trace), "--minutes", "0"]) == 1
