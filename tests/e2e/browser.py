"""A headless Chromium for page tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Skips the test when there is no Chromium (the variable CHROMIUM says where it is)."""
    if not os.path.exists(CHROMIUM):  # noqa: ASYNC240, one look before anything runs
        pytest.skip(f"no Chromium at {CHROMIUM}")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        yield browser
        await browser.close()


@asynccontextmanager
async def open_page(
    browser: Browser,
    *,
    width: int = 1180,
    height: int = 860,
    scale: float = 1,
    scheme: Literal["light", "dark"] = "light",
) -> AsyncIterator[Page]:
    """A page with its own storage; it fails the test when its script threw."""
    page = await browser.new_page(
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme=scheme,
    )
    page.set_default_timeout(10_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    await page.close()
    assert problems == []
