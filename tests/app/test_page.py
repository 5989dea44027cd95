"""The demo page in Chromium, against a server that does what each test says."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from app.accounts import hash_key
from tests.app.fake_server import HELLO, Peer, answering, fake_server
from tests.app.stack import eventually, on_air, running_stack
from tests.e2e.browser import open_browser, open_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with open_page(browser) as page:
        yield page


async def listen(peer: Peer) -> None:
    while True:
        await peer.receive()


async def ask(page: Page, question: str) -> None:
    await page.get_by_test_id("prompt").fill(question)
    await page.get_by_test_id("prompt").press("Enter")


async def test_a_reply_streams_in_and_shows_how_it_was_made(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await expect(page.get_by_test_id("connection-state")).to_have_attribute(
            "data-state", "open"
        )
        await expect(page.get_by_test_id("model")).to_have_text("fake-1")
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("question")).to_have_text(QUESTION)
        await expect(page.get_by_test_id("reply-text")).to_have_text(ANSWER)
        await expect(page.get_by_test_id("chip-cache")).to_have_text("miss · nothing similar")
        await expect(page.get_by_test_id("chip-ttft")).to_have_text(
            re.compile(r"^TTFT [\d.]+ m?s$")
        )
        await expect(page.get_by_test_id("chip-rate")).to_have_text(
            re.compile(r"^[\d.]+ tokens/s$")
        )
        await expect(page.get_by_test_id("chip-tokens")).to_have_text("4 tokens")
        await expect(page.get_by_test_id("chip-finish")).to_have_text("stop")
        request = server.peers[0].received[0]
        assert request["messages"] == [{"role": "user", "content": QUESTION}]
        assert request["temperature"] == 0


async def test_a_repeated_question_is_shown_as_an_exact_hit(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("chip-finish")).to_have_count(1)
        await ask(page, QUESTION)
        chip = page.get_by_test_id("chip-cache").nth(1)
        await expect(chip).to_have_text("exact hit · L2 · similarity 1.00 · 3 s old")
        await expect(chip).to_have_attribute("data-outcome", "exact")
        await expect(page.get_by_test_id("reply-text").nth(1)).to_have_text(ANSWER)


async def test_ask_again_repeats_the_same_messages(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await page.get_by_test_id("mode-chat").check(force=True)
        await ask(page, "Who wrote Faust?")
        await expect(page.get_by_test_id("chip-finish")).to_have_count(1)
        await page.get_by_test_id("ask-again").first.click()
        await expect(page.get_by_test_id("chip-cache").nth(1)).to_have_attribute(
            "data-outcome", "exact"
        )


async def test_a_miss_says_what_came_near_without_rounding_it_up(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await ask(page, "Reworded: which city is the capital of France?")
        await expect(page.get_by_test_id("chip-cache")).to_have_text(
            "miss · best candidate 0.94: below threshold"
        )


async def test_a_conversation_sends_its_earlier_turns(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await page.get_by_test_id("settings-toggle").click()
        await page.get_by_test_id("system-prompt").fill("Be brief.")
        await page.keyboard.press("Escape")
        await page.get_by_test_id("mode-chat").check(force=True)
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("chip-finish")).to_have_count(1)
        await ask(page, "And of Spain?")
        await expect(page.get_by_test_id("chip-finish")).to_have_count(2)
        assert server.peers[0].received[1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "And of Spain?"},
        ]


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_a_running_reply_is_cancelled_by(page: Page, way: str) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await ask(page, "A long story")
        await expect(page.get_by_test_id("reply-text")).to_contain_text("Paris")
        if way == "button":
            await page.get_by_test_id("cancel").click()
        else:
            await page.keyboard.press("Escape")
        await expect(page.get_by_test_id("chip-finish")).to_have_text("cancelled")
        await expect(page.get_by_test_id("cancel")).to_be_hidden()
        assert {"type": "CANCEL", "id": "r1"} in server.peers[0].received


async def test_a_second_prompt_runs_while_the_first_still_streams(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await ask(page, "A long story")
        await expect(page.get_by_test_id("reply-text").first).to_contain_text("Paris")
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("reply-text").nth(1)).to_have_text(ANSWER)
        turns = page.get_by_test_id("turn")
        await expect(turns.first).to_have_attribute("data-state", "streaming")
        await page.get_by_test_id("new-chat").click()
        await expect(turns).to_have_count(0)
        await server.peers[0].until("CANCEL")


async def test_a_refused_setting_is_explained_and_the_next_prompt_works(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await page.get_by_test_id("settings-toggle").click()
        await page.get_by_test_id("temperature").fill("3")
        await ask(page, QUESTION)
        error = page.get_by_test_id("error")
        await expect(error).to_contain_text("The server refused this request")
        await expect(error).to_contain_text("Temperature is 3, the limit is 2.")
        await page.get_by_test_id("temperature").fill("0")
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("reply-text").nth(1)).to_have_text(ANSWER)


async def test_settings_outlive_a_reload_but_the_key_does_not(page: Page) -> None:
    async with fake_server(answering) as server:
        await page.goto(server.http_url)
        await page.get_by_test_id("settings-toggle").click()
        await page.get_by_test_id("max-tokens").fill("7")
        await page.get_by_test_id("cache-policy").select_option("bypass")
        await page.get_by_test_id("api-key").fill("secret")
        await page.get_by_test_id("api-key").blur()
        await page.reload()
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("chip-finish")).to_have_count(1)
        request = server.peers[-1].received[0]
        assert (request["max_tokens"], request["cache"]) == (7, "bypass")
        await expect(page.get_by_test_id("api-key")).to_have_value("")


async def test_markup_in_questions_and_replies_stays_text(page: Page) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, "<img src=x onerror=document.title='taken'>")
        await peer.done(request["id"], 1)
        await peer.receive()

    async with fake_server(script) as server:
        await page.goto(server.http_url)
        await ask(page, "<b>bold</b>")
        await expect(page.get_by_test_id("reply-text")).to_have_text(re.compile("^<img"))
        await expect(page.get_by_test_id("question")).to_have_text("<b>bold</b>")
        assert await page.title() == "Seedance"


async def test_pings_are_answered_and_a_repeated_seq_is_dropped(page: Page) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, "one ")
        await peer.chunk(request["id"], 0, "one ")
        await peer.send("PING", ts=12.5)
        assert await peer.expect("PONG") == {"type": "PONG", "ts": 12.5}
        await peer.chunk(request["id"], 2, "two")
        await peer.chunk(request["id"], 1, "late")
        await peer.done(request["id"], 3)
        await peer.receive()

    async with fake_server(script) as server:
        await page.goto(server.http_url)
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("chip-finish")).to_have_text("stop")
        await expect(page.get_by_test_id("reply-text")).to_have_text("one two")


@pytest.mark.parametrize("how", ["cut", "drain"])
async def test_a_reply_goes_on_over_another_connection(page: Page, how: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        if len(server.peers) == 1:
            request = await peer.expect("INFER_REQ")
            await peer.ack(request["id"])
            await peer.chunk(request["id"], 0, "The capi")
            if how == "cut":
                return peer.abort()
            await peer.send("DRAIN", deadline_s=60.0)
            await eventually(lambda: len(server.peers) == 2)
            return await peer.connection.close(1001)
        resume = await peer.expect("RESUME")
        assert (resume["stream"], resume["last_seq"]) == (f"token-{resume['id']}", 0)
        if len(server.peers) == 2:
            busy = {"code": "overloaded", "message": "busy", "retryable": True}
            await peer.send("ERROR", id=resume["id"], **busy)
            resume = await peer.expect("RESUME")
            return peer.abort()
        await peer.ack(resume["id"])
        await peer.chunk(resume["id"], 0, "The capi")
        await peer.chunk(resume["id"], 1, "tal")
        await peer.done(resume["id"], 2)
        return await listen(peer)

    async with fake_server(script) as server:
        await page.goto(server.http_url)
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("chip-finish")).to_have_text("stop")
        await expect(page.get_by_test_id("reply-text")).to_have_text("The capital")
        assert len(server.peers) == 3


async def test_a_lost_connection_is_shown_and_the_next_prompt_connects_again(page: Page) -> None:
    async def script(peer: Peer) -> None:
        if len(server.peers) > 1:
            return await answering(peer)
        await peer.send(**{**HELLO, "resume_window_s": 0})
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, "The capi")
        return peer.abort()

    async with fake_server(script) as server:
        await page.goto(server.http_url)
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("error")).to_contain_text("Connection lost")
        await expect(page.get_by_test_id("reply-text")).to_have_text("The capi")
        await expect(page.get_by_test_id("connection-state")).to_have_attribute(
            "data-state", "closed"
        )
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("reply-text").nth(1)).to_have_text(ANSWER)


async def test_a_failure_during_a_reply_keeps_what_was_said(page: Page) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(**HELLO)
        request = await peer.expect("INFER_REQ")
        await peer.ack(request["id"])
        await peer.chunk(request["id"], 0, "The capi")
        failure = {"code": "internal", "message": "incident 42", "retryable": True}
        await peer.done(request["id"], 1, "error", error=failure)
        await peer.receive()

    async with fake_server(script) as server:
        await page.goto(server.http_url)
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("error")).to_contain_text("Incident 42.")
        await expect(page.get_by_test_id("reply-text")).to_have_text("The capi")
        await expect(page.get_by_test_id("chip-finish")).to_have_text("error")


async def test_a_server_that_wants_a_key_gets_it(page: Page) -> None:
    keys = [{"tenant": "red", "sha256": hash_key("sk-right")}]
    async with running_stack() as stack, on_air(stack.graph, auth={"keys": keys}) as site:
        await page.goto(str(site.http.base_url))
        notice = page.get_by_test_id("notice")
        await expect(notice).to_contain_text("wants an API key (401)")
        await page.get_by_test_id("settings-toggle").click()
        await page.get_by_test_id("api-key").fill("sk-wrong")
        await page.get_by_test_id("connection-state").click()
        await expect(notice).to_contain_text("refuses this API key (401)")
        await page.get_by_test_id("api-key").fill("sk-right")
        await page.get_by_test_id("connection-state").click()
        await expect(page.get_by_test_id("connection-state")).to_have_attribute(
            "data-state", "open"
        )
        await expect(notice).to_be_hidden()
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("reply-text")).to_contain_text(QUESTION)
        await expect(page.get_by_test_id("chip-finish")).to_have_text("stop")


async def test_a_server_that_is_gone_is_told_apart_from_one_that_refuses(page: Page) -> None:
    async with fake_server(answering) as server:
        server.refuse_with = 503
        await page.goto(server.http_url)
        notice = page.get_by_test_id("notice")
        await expect(notice).to_contain_text("refused the WebSocket")
    await page.get_by_test_id("connection-state").click()
    await expect(notice).to_contain_text("cannot be reached")


@pytest.mark.parametrize("ending", ["", "/"])
async def test_the_page_works_under_a_path_prefix(page: Page, ending: str) -> None:
    async with fake_server(answering, prefix="/apps/seedance") as server:
        await page.goto(server.http_url + ending)
        await ask(page, QUESTION)
        await expect(page.get_by_test_id("reply-text")).to_have_text(ANSWER)
