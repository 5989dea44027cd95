"""The JavaScript client against the real server, in Node and in Chromium, with connections that are cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.app.js_client import ASK, Relay, ask_in_node, relay_to
from tests.e2e.asking import Asker, nonce
from tests.e2e.browser import open_browser, open_page
from tests.e2e.cluster import KEY_A

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

CUTS = (2_500, 4_000)
"""Bytes after which the first two connections are cut: some tens of tokens."""
NUM_TOKENS = 120
PARAMS = {"cache": "bypass", "temperature": 0, "max_tokens": NUM_TOKENS}
GENERATION_MS = 120_000

Ask = Callable[..., Awaitable[dict[str, Any]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def relay(server_url: str) -> AsyncIterator[Relay]:
    address = urlsplit(server_url)
    assert address.hostname is not None
    assert address.port is not None
    async with relay_to(address.hostname, address.port, *CUTS) as relay:
        yield relay


@pytest.fixture(params=["node", "chromium"])
def ask(request: pytest.FixtureRequest, browser: Browser) -> Ask:
    """Asks by the client in one of its homes; the browser loads it from the server that is asked."""

    async def ask_in_chromium(url: str, messages: Any = None, **question: Any) -> dict[str, Any]:
        given = json.dumps({"url": url, "messages": messages, **question})
        async with open_page(browser) as page:
            await page.goto(f"{url}/static/seedance.js")
            answer: dict[str, Any] = await page.evaluate(
                f"import('/static/seedance.js').then((client) => ({ASK})(client, {given}))"
            )
            return answer

    return ask_in_node if request.param == "node" else ask_in_chromium


async def test_a_stream_that_is_cut_in_the_middle_is_that_of_an_unbroken_one(
    ask: Ask, relay: Relay, asker: Asker
) -> None:
    question = f"Write a very long story about ship number {nonce()}."
    answer = await ask(relay.url, question, params=PARAMS)
    assert answer["text"] == asker.truth(question, max_tokens=NUM_TOKENS)
    assert answer["done"]["usage"]["completion_tokens"] == NUM_TOKENS
    assert answer["seqs"] == sorted(set(answer["seqs"]))
    assert relay.num_cut == len(CUTS)
    assert relay.num_sockets == len(CUTS) + 1


async def test_a_key_opens_the_connection_by_a_ticket(
    ask: Ask, server_url: str, asker: Asker
) -> None:
    question = f"What is the capital of France? Ticket {nonce()}."
    params = {"temperature": 0, "max_tokens": 8}
    truth = asker.plain(question, **params)
    answer = await ask(server_url, question, params=params, options={"apiKey": KEY_A})
    assert answer["text"] == truth.text
    assert answer["cache"]["outcome"] == "exact", "it is the tenant of the key"
    refused = await ask(server_url, question, params=params, options={"apiKey": "sk-wrong"})
    assert refused["error"]["code"] == "unauthorized"


async def test_a_prompt_in_pieces_has_the_answer_of_the_whole(
    ask: Ask, server_url: str, asker: Asker
) -> None:
    whole = f"Count to ten, in words, and say nothing else but {nonce()}. "
    pieces = [whole[at : at + 9] for at in range(0, len(whole), 9)]
    params = {**PARAMS, "max_tokens": 24}
    answer = await ask(server_url, params=params, pieces=pieces, pauseMs=5)
    assert answer["text"] == asker.truth(whole, max_tokens=24)


async def test_the_page_goes_on_after_a_cut(browser: Browser, relay: Relay, asker: Asker) -> None:
    relay.cuts = ()
    question = f"Write a very long story about ship number {nonce()}."
    async with open_page(browser) as page:
        await page.goto(relay.url)
        await page.get_by_test_id("settings-toggle").click()
        await page.get_by_test_id("max-tokens").fill(str(NUM_TOKENS))
        await page.get_by_test_id("cache-policy").select_option("bypass")
        await page.keyboard.press("Escape")
        await page.get_by_test_id("prompt").fill(question)
        await page.get_by_test_id("prompt").press("Enter")
        reply = page.get_by_test_id("reply-text")
        await expect(reply).not_to_be_empty(timeout=GENERATION_MS)
        relay.cut_all()
        await expect(page.get_by_test_id("chip-finish")).to_have_text(
            "length", timeout=GENERATION_MS
        )
        assert await reply.text_content() == asker.truth(question, max_tokens=NUM_TOKENS)
        assert relay.num_sockets == 2
