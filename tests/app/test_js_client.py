"""The JavaScript client: its own tests, and in Node against the whole of one process."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from app.accounts import hash_key
from deployments.engine.sequence import Sequence
from tests.app.js_client import FOLDER, ask_in_node, relay_to, run_node
from tests.app.stack import on_air, running_stack, talks_on

BYPASS = {"cache": "bypass", "temperature": 0}


def counts(seq: Sequence) -> list[int]:
    return [*" ".join(map(str, range(1000))).encode()]


TRUTH = " ".join(map(str, range(1000)))


async def test_its_own_tests_pass() -> None:
    told = await run_node("--test", *map(str, sorted(FOLDER.glob("test/*.test.js"))))
    assert "# fail 0" in told or "ℹ fail 0" in told


def test_its_types_are_what_a_program_may_do() -> None:
    tsc = shutil.which("tsc")
    if tsc is None:
        pytest.skip("no tsc on the PATH")
    options = ["--strict", "--noEmit", "--module", "nodenext", "--target", "es2022"]
    libraries = ["--lib", "es2022,dom,dom.iterable"]
    checked = subprocess.run(
        [tsc, *options, *libraries, str(FOLDER / "test" / "types.ts")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


async def test_a_stream_that_is_cut_again_and_again_is_whole() -> None:
    async with (
        running_stack(counts, token_interval_s=0.001) as stack,
        on_air(stack.graph) as site,
        relay_to(*site.address, 1_000, 1_200, 1_500, 800) as relay,
    ):
        answer = await ask_in_node(relay.url, "Count.", params={**BYPASS, "max_tokens": 600})
        assert relay.num_cut == 4
        assert relay.num_sockets == 5
        assert answer["text"] == TRUTH[:600]
        assert answer["seqs"] == sorted(set(answer["seqs"]))
        assert answer["done"]["usage"]["completion_tokens"] == 600
        assert answer["done"]["finishReason"] == "length"
        await stack.until_idle()


async def test_a_reader_that_is_slow_holds_its_stream_back_and_loses_nothing() -> None:
    async with running_stack(counts) as stack, on_air(stack.graph) as site:
        answer = await ask_in_node(
            f"http://{site.address[0]}:{site.address[1]}",
            "Count.",
            options={"window": 4},
            params={**BYPASS, "max_tokens": 150},
            pauseMs=2,
        )
        assert answer["text"] == TRUTH[:150]


async def test_leaving_the_loop_stops_the_model() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.001) as stack,
        on_air(stack.graph) as site,
    ):
        url = f"http://{site.address[0]}:{site.address[1]}"
        answer = await ask_in_node(url, "Go on.", params=BYPASS, leaveAfter=5)
        assert len(answer["seqs"]) == 5
        await stack.until_idle()


@pytest.mark.parametrize("cuts", [(), (700,)], ids=["unbroken", "cut"])
async def test_a_prompt_in_pieces_is_the_same_as_the_whole(cuts: tuple[int, ...]) -> None:
    async with (
        running_stack() as stack,
        on_air(stack.graph) as site,
        relay_to(*site.address, *cuts) as relay,
    ):
        text = "The capital of a 👩‍👩‍👧 is ü. " * 40
        pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
        messages = [{"role": "user", "content": ""}]
        answer = await ask_in_node(relay.url, messages, params=BYPASS, pieces=pieces, pauseMs=1)
        whole = await ask_in_node(relay.url, text, params=BYPASS)
        assert answer["text"] == whole["text"]
        assert text in answer["text"]
        assert answer["done"]["usage"] | {"cached_tokens": 0} == whole["done"]["usage"] | {
            "cached_tokens": 0
        }


async def test_a_key_opens_every_connection_and_a_wrong_one_none() -> None:
    keys = [{"tenant": "red", "sha256": hash_key("sk-right")}]
    async with (
        running_stack(counts, token_interval_s=0.001) as stack,
        on_air(stack.graph, auth={"keys": keys}) as site,
        relay_to(*site.address) as relay,
    ):
        question = {"params": {**BYPASS, "max_tokens": 200}}
        refused = await ask_in_node(relay.url, "Count.", options={"apiKey": "sk-wrong"}, **question)
        assert refused["error"]["code"] == "unauthorized"
        refused = await ask_in_node(relay.url, "Count.", **question)
        assert refused["error"]["name"] == "ConnectionLost"
        relay.cuts = (0, 1_000)
        answer = await ask_in_node(relay.url, "Count.", options={"apiKey": "sk-right"}, **question)
        assert answer["text"] == TRUTH[:200]
        assert relay.num_cut == 1


async def test_a_refused_field_is_a_typed_error() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        url = f"http://{site.address[0]}:{site.address[1]}"
        answer = await ask_in_node(url, "hi", params={"temperature": 3})
        assert answer["error"]["name"] == "SeedanceError"
        assert (answer["error"]["code"], answer["error"]["param"]) == (
            "invalid_request",
            "temperature",
        )
