"""The load generator, against servers that do what a test says."""

from __future__ import annotations

import asyncio

from bench.compare import HIGHER_IS_BETTER, LOWER_IS_BETTER, better_by
from bench.load import Load, Run, Sample, report, run_load
from bench.targets import Answered, target_at
from bench.workload import make_arrivals, make_asks
from tests.app.fake_server import HELLO, Peer, fake_server


async def echo_lengths(peer: Peer) -> None:
    """Answers with as many one-token pieces as were asked for."""
    await peer.send(**HELLO)
    while True:
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        for seq in range(request["max_tokens"]):
            await peer.chunk(request["id"], seq, "a ")
        await peer.done(request["id"], request["max_tokens"], "length")


async def refuse(peer: Peer) -> None:
    await peer.send(**HELLO)
    while True:
        request = await peer.expect("INFER_REQ")
        await peer.send("ERROR", id=request["id"], code="overloaded", message="no room")


async def hang_up(peer: Peer) -> None:
    await peer.send(**HELLO)
    await peer.expect("INFER_REQ")
    peer.abort()


async def test_a_closed_loop_asks_every_question_once_over_all_clients() -> None:
    load = Load(clients=3, requests=10, max_tokens=12)
    async with fake_server(echo_lengths) as server:
        run = await run_load(target_at(server.url), load)
    asked = [frame["messages"][0]["content"] for peer in server.peers for frame in peer.received]
    assert sorted(asked) == sorted(ask.prompt for ask in load.asks())
    assert len(server.peers) == 3
    figures = report([run])
    assert figures.errors == {}
    assert figures.completion_tokens == sum(ask.max_tokens for ask in load.asks())


async def test_requests_are_greedy_and_ask_for_no_stored_answer() -> None:
    async with fake_server(echo_lengths) as server:
        await run_load(target_at(server.url), Load(clients=1, requests=1))
    (request,) = server.peers[0].received
    assert request["temperature"] == 0
    assert request["cache"] == "bypass"
    assert request["ignore_eos"] is True


async def test_poisson_arrivals_share_the_sockets() -> None:
    async with fake_server(echo_lengths) as server:
        run = await run_load(target_at(server.url), Load(clients=2, requests=9, rate_per_s=1000))
    assert [len(peer.received) for peer in server.peers] == [5, 4]
    assert report([run]).errors == {}


async def test_refusals_are_errors_and_no_figures() -> None:
    async with fake_server(refuse) as server:
        run = await run_load(target_at(server.url), Load(clients=2, requests=4))
    figures = report([run])
    assert figures.errors == {"overloaded: no room": 4}
    assert figures.tokens_per_s == 0


async def test_a_lost_connection_ends_the_run_instead_of_hanging_it() -> None:
    async with fake_server(hang_up) as server:
        run = await run_load(target_at(server.url), Load(clients=1, requests=3))
    assert sum(report([run]).errors.values()) == 3


async def test_the_baselines_lines_are_read_however_they_are_cut_into_chunks() -> None:
    end = (
        b'{"text":"b","finish_reason":"length","usage":{"prompt_tokens":7,"completion_tokens":2}}\n'
    )
    body = b'{"text":"a"}\n' + end

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 9):
            piece = body[start : start + 9]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = target_at(f"http://127.0.0.1:{port}/generate")
        run = await run_load(target, Load(clients=1, requests=1))
    (sample,) = run.samples
    assert sample.answered == Answered("length", 7, 2)
    assert len(sample.pieces_s) == 2


def test_figures_are_the_ones_of_the_samples() -> None:
    answered = Answered("stop", 10, 3)
    run = Run(
        [
            Sample(0.0, [0.1, 0.2, 0.4], 0.5, answered),
            Sample(0.0, [0.3, 0.4, 0.5], 0.7, answered),
            Sample(0.0, [], 9.0, None, "timeout"),
        ],
        duration_s=2.0,
    )
    figures = report([run, run])
    assert figures.requests == 6
    assert figures.errors == {"timeout": 2}
    assert figures.requests_per_s == 1.0
    assert figures.tokens_per_s == 3.0
    assert round(figures.ttft_ms_p50) == 200
    assert round(figures.itl_ms_p50) == 100
    assert round(figures.latency_ms_p50) == 600


def test_more_throughput_and_less_waiting_both_read_as_better() -> None:
    answered = Answered("stop", 10, 2)
    fast = report([Run([Sample(0.0, [1.0, 2.0], 2.0, answered)], duration_s=2.0)])
    slow = report([Run([Sample(0.0, [3.0, 6.0], 6.0, answered)], duration_s=6.0)])
    for figure in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
        assert round(better_by(figure, fast, slow), 6) == 3.0


def test_one_seed_makes_one_workload() -> None:
    lengths = {"min_tokens": 8, "max_tokens": 128, "ignore_eos": True}
    asks = make_asks(64, 1, **lengths)
    assert asks == make_asks(64, 1, **lengths)
    assert asks != make_asks(64, 2, **lengths)
    assert len({ask.prompt for ask in asks}) == 64
    assert all(8 <= ask.max_tokens <= 128 for ask in asks)


def test_arrivals_come_at_the_asked_rate() -> None:
    arrivals = make_arrivals(10_000, 1, rate_per_s=20.0)
    assert arrivals == sorted(arrivals)
    assert abs(arrivals[-1] / 500 - 1) < 0.05
