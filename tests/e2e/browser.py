"""A headless Chromium for page tests; every error that a page logs fails the test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Page, async_playwright

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
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
async def open_page(
    *,
    width: int = 1180,
    height: int = 860,
    scale: float = 1,
    scheme: Literal["light", "dark"] = "light",
) -> AsyncIterator[Page]:
    """An empty page; skips the test when there is no Chromium (`CHROMIUM` says where)."""
    if not os.path.exists(CHROMIUM):  # noqa: ASYNC240, one look before anything runs
        pytest.skip(f"no Chromium at {CHROMIUM}")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=list(ARGUMENTS)
        )
        page = await browser.new_page(
            viewport={"width": width, "height": height},
            device_scale_factor=scale,
            color_scheme=scheme,
        )
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        yield page
        await browser.close()
        assert problems == []
