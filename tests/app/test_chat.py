"""The terminal chat, with a scripted server and scripted typing."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from rich.console import Console

from app.chat import ChatOptions, describe_cache, run_chat
from protocol.token_log import CacheOutcome
from tests.app.fake_server import HELLO, REPLY, Peer, answering, fake_server

ANSWER = "".join(REPLY)
FIGURES = r"TTFT [\d.]+ ms · [\d.]+ tokens/s · 4 tokens · cache: "


@dataclass
class Outcome:
    code: int
    out: str
    err: str


async def chat(
    url: str,
    prompt: str | None = None,
    options: ChatOptions | None = None,
    *,
    lines: Iterable[str] = (),
    is_terminal: bool = False,
) -> Outcome:
    """Runs the chat on a thread, as it has its own loop, with `lines` typed one after the other."""
    typed = iter(lines)

    def read_line() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    out, err = io.StringIO(), io.StringIO()
    code = await asyncio.to_thread(
        run_chat,
        url,
        prompt,
        options or ChatOptions(),
        console=Console(file=out, width=40, force_terminal=is_terminal),
        errors=Console(file=err, width=40),
        read_line=read_line,
    )
    return Outcome(code, out.getvalue(), err.getvalue())


async def test_one_question_prints_its_answer_and_one_line_of_figures() -> None:
    async with fake_server(answering) as server:
        outcome = await chat(server.http_url, "What is the capital of France?")
    answer, figures = outcome.out.splitlines()
    assert answer == ANSWER
    assert re.fullmatch(FIGURES + r"miss \(nothing similar\)", figures)
    assert (outcome.code, outcome.err) == (0, "")


async def test_options_travel_with_the_question() -> None:
    options = ChatOptions(
        api_key="sk-right", model="m", max_tokens=9, system="Be brief.", cache="bypass"
    )
    async with fake_server(answering, api_key="sk-right") as server:
        assert (await chat(server.url, "hi", options)).code == 0
        assert server.peers[0].received == [
            {
                "type": "INFER_REQ",
                "id": "r1",
                "model": "m",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "hi"},
                ],
                "max_tokens": 9,
                "temperature": 0.0,
                "cache": "bypass",
                "window": 256,
            }
        ]


async def test_a_conversation_sends_its_earlier_turns_until_it_starts_over() -> None:
    async with fake_server(answering) as server:
        outcome = await chat(server.url, lines=["one", "", "two", "/new", "three", "/exit", "four"])
        asked = [peer.received[0]["messages"] for peer in server.peers if peer.received]
    assert [[turn["content"] for turn in messages] for messages in asked] == [
        ["one"],
        ["one", ANSWER, "two"],
        ["three"],
    ]
    assert "fake-1" in outcome.out
    assert outcome.out.count(ANSWER) == 3
    assert outcome.code == 0


async def test_a_refused_question_is_explained_and_exits_with_1() -> None:
    async with fake_server(answering) as server:
        outcome = await chat(server.url, "hi", ChatOptions(temperature=3.0))
    assert outcome.code == 1
    assert outcome.err == "error: temperature is 3.0, the limit is 2\n"
    assert outcome.out == ""


async def test_a_refused_question_does_not_join_the_conversation() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        request = await peer.expect("INFER_REQ")
        if request["messages"][-1]["content"] == "bad":
            refusal = {"code": "overloaded", "retryable": True, "retry_after_s": 1.5}
            await peer.send("ERROR", id=request["id"], message="too many requests", **refusal)
        else:
            await peer.ack(request["id"])
            await peer.done(request["id"], 0)
        await peer.receive()

    async with fake_server(script) as server:
        outcome = await chat(server.url, lines=["bad", "good"])
        assert len(server.peers[-1].received[0]["messages"]) == 1
    assert outcome.err == "error: too many requests (try again in 2 s)\n"
    assert outcome.code == 0


async def test_a_missing_server_is_named_and_exits_with_1() -> None:
    async with fake_server(answering) as server:
        gone = server.url
    for lines in ([], ["hi"]):
        outcome = await chat(gone, None if lines else "hi", lines=lines)
        assert outcome.code == 1
        assert f"cannot connect to {gone}" in outcome.err


async def test_a_missing_key_says_which_option_gives_one() -> None:
    async with fake_server(answering, api_key="sk-right") as server:
        outcome = await chat(server.url, "hi")
    assert outcome.code == 1
    assert "(give a key with --key)" in outcome.err


async def test_a_connection_lost_for_good_in_mid_reply_keeps_the_text_and_exits_with_1() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**{**HELLO, "resume_window_s": 0})
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, "The capi")
        await peer.connection.close(1001, "going away")

    async with fake_server(script) as server:
        outcome = await chat(server.url, "hi")
    assert (outcome.code, outcome.out) == (1, "The capi\n")
    assert outcome.err == "error: connection closed with code 1001: going away\n"


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_a_model_cannot_drive_the_terminal_but_a_pipe_gets_its_exact_text(
    is_terminal: bool,
) -> None:
    text = "\x1b[2Jgone [bold]not markup[/bold]\x9b\tné\n" + "long " * 20

    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, text)
        await peer.done(request["id"], 1)
        await peer.receive()

    async with fake_server(script) as server:
        outcome = await chat(server.url, "hi", is_terminal=is_terminal)
    expected = text.replace("\x1b", "␛").replace("\x9b", "\ufffd") if is_terminal else text
    assert outcome.out.startswith(expected + "\n")


async def test_ctrl_c_cancels_the_reply_and_still_shows_its_figures() -> None:
    async with fake_server(answering) as server:
        process = await start_chat(server.url)
        assert process.stdout is not None
        seen = await process.stdout.readuntil(b"Paris")
        process.send_signal(signal.SIGINT)
        rest, errors = await process.communicate()
        await server.peers[0].until("CANCEL")
    assert re.search(r"\nTTFT .* tokens · cache: miss .* · cancelled\n$", (seen + rest).decode())
    assert errors == b""
    assert process.returncode == 130


async def test_a_second_ctrl_c_leaves_a_server_that_does_not_stop() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, "Paris")
        while True:
            await peer.receive()

    async with fake_server(script) as server:
        process = await start_chat(server.url)
        assert process.stdout is not None
        await process.stdout.readuntil(b"Paris")
        process.send_signal(signal.SIGINT)
        await server.peers[0].until("CANCEL")
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert errors == b""
    assert process.returncode == 130


async def test_what_is_piped_in_is_the_question() -> None:
    async with fake_server(answering) as server:
        process = await start_chat(server.url, prompt=None)
        out, _ = await process.communicate(b"Two\nlines?\n")
        messages = server.peers[0].received[0]["messages"]
    assert messages == [{"role": "user", "content": "Two\nlines?"}]
    assert out.decode().startswith(ANSWER + "\n")
    assert process.returncode == 0


async def start_chat(url: str, prompt: str | None = "a long story") -> asyncio.subprocess.Process:
    code = (
        "import sys; from app.chat import ChatOptions, run_chat; "
        f"sys.exit(run_chat({url!r}, {prompt!r}, ChatOptions()))"
    )
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=pipe, stdout=pipe, stderr=pipe
    )


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (
            CacheOutcome(outcome="exact", tier="L2", similarity=1.0, age_s=3.2),
            "exact (L2, similarity 1.00, 3 s old)",
        ),
        (
            CacheOutcome(outcome="semantic", tier="L2", similarity=0.999, age_s=300),
            "semantic (L2, similarity 0.99, 5 min old)",
        ),
        (
            CacheOutcome(outcome="miss", similarity=0.83, reason="below threshold"),
            "miss (best candidate 0.83: below threshold)",
        ),
        # A score just under the threshold must not be rounded up to it.
        (CacheOutcome(outcome="miss", similarity=0.9499), "miss (best candidate 0.94)"),
        (CacheOutcome(outcome="miss", reason="cache timed out"), "miss (cache timed out)"),
        (CacheOutcome(outcome="coalesced"), "coalesced"),
        (CacheOutcome(outcome="miss"), "miss"),
    ],
)
def test_the_cache_is_described_in_words(cache: CacheOutcome, words: str) -> None:
    assert describe_cache(cache) == words
