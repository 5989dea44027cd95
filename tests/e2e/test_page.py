"""The demo page in Chromium, on the served model.

The picture for the README: SEEDANCE_SCREENSHOT=docs/page.png pytest tests/e2e/test_page.py -k picture
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.e2e.asking import nonce
from tests.e2e.browser import open_browser, open_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.serve,
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="module"),
]
GENERATION_MS = 60_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, server_url: str) -> AsyncIterator[Page]:
    async with open_page(browser) as page:
        await page.goto(server_url)
        await expect(page.get_by_test_id("connection-state")).to_have_attribute(
            "data-state", "open"
        )
        yield page


async def ask(page: Page, question: str) -> None:
    await page.get_by_test_id("prompt").fill(question)
    await page.get_by_test_id("prompt").press("Enter")


async def set_max_tokens(page: Page, count: int) -> None:
    await page.get_by_test_id("settings-toggle").click()
    await page.get_by_test_id("max-tokens").fill(str(count))
    await page.get_by_test_id("settings-toggle").click()


async def test_a_repeated_question_is_answered_from_the_cache(page: Page) -> None:
    # The limit keeps the turns short, however much the model has to say.
    await set_max_tokens(page, 24)
    question = f"What is the capital of France? Ticket {nonce()}."
    for count in (1, 2):
        await ask(page, question)
        turns = page.get_by_test_id("turn")
        await expect(turns).to_have_count(count)
        await expect(turns.last).to_have_attribute("data-state", "done", timeout=GENERATION_MS)
    first, second = (
        page.get_by_test_id("reply-text").nth(0),
        page.get_by_test_id("reply-text").nth(1),
    )
    text = await first.text_content()
    assert text
    await expect(second).to_have_text(text)
    outcomes = page.get_by_test_id("chip-cache")
    await expect(outcomes.nth(0)).to_have_attribute("data-outcome", "miss")
    await expect(outcomes.nth(1)).to_have_attribute("data-outcome", "exact")
    await expect(outcomes.nth(1)).to_have_text(re.compile(r"^exact hit · L\d"))
    await expect(page.get_by_test_id("chip-ttft").nth(1)).to_have_text(re.compile(r"^TTFT [\d.]+"))
    await expect(page.get_by_test_id("chip-rate").nth(0)).to_have_text(re.compile(r"tokens/s$"))


async def test_a_long_reply_streams_and_stops_when_cancelled(page: Page) -> None:
    await set_max_tokens(page, 2000)
    await ask(page, f"Write a very long story about ship number {nonce()}.")
    turn = page.get_by_test_id("turn")
    await expect(turn).to_have_attribute("data-state", "streaming", timeout=GENERATION_MS)
    await expect(page.get_by_test_id("reply-text")).not_to_be_empty()
    await page.get_by_test_id("cancel").click()
    await expect(page.get_by_test_id("chip-finish")).to_have_text("cancelled")


async def test_a_refused_setting_is_explained_and_the_next_prompt_works(page: Page) -> None:
    await set_max_tokens(page, 0)
    await ask(page, "Say hi.")
    await expect(page.get_by_test_id("error")).to_contain_text("max_tokens", ignore_case=True)
    await set_max_tokens(page, 5)
    await ask(page, f"Say hi, number {nonce()}.")
    await expect(page.get_by_test_id("chip-tokens")).to_be_visible(timeout=GENERATION_MS)


@pytest.mark.skipif("SEEDANCE_SCREENSHOT" not in os.environ, reason="SEEDANCE_SCREENSHOT not set")
async def test_the_picture_for_the_readme_is_taken(browser: Browser, server_url: str) -> None:
    async with open_page(browser, width=1100, height=900, scale=2) as page:
        await page.goto(server_url)
        for question in (
            "What is the capital of France?",
            "What is the capital of France?",
            "What's the capital of France?",
            "Which city is the capital of France?",
        ):
            await ask(page, question)
            turn = page.get_by_test_id("turn").last
            await expect(turn).to_have_attribute("data-state", "done", timeout=GENERATION_MS)
        await page.screenshot(path=os.environ["SEEDANCE_SCREENSHOT"])
