"""A real browser for tests: Debian's chromium, driven by Playwright, which downloads nothing.

The page's own policy forbids code from strings, so tests look at it through locators, and wait for facts by themselves.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, ViewportSize, async_playwright, expect

from tests.absent import absent

CHROMIUM = Path("/usr/bin/chromium")
SHOTS = Path(__file__).parents[1] / "test-results"
"""Where pictures go: not part of the repository. `scripts/page_pictures` brings some of them to docs/."""
WAIT_MS = 60_000
"""For a fact to show: only a hang or a starved machine meets it."""
WIDE: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 390, "height": 844}


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser for the length of the block; without a sandbox, which root may not have, and it sees this host only."""
    if not CHROMIUM.exists():  # noqa: ASYNC240 - one look, before anything runs
        absent(f"no browser at {CHROMIUM}: apt-get install chromium")
    expect.set_options(timeout=WAIT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


class Complaints:
    """What a page complains of: scripts that failed, and what its policy kept out."""

    def __init__(self, page: Page) -> None:
        self.heard: list[str] = []
        page.on("pageerror", lambda error: self.heard.append(str(error)))
        page.on("console", self._on_console)

    def _on_console(self, message: Any) -> None:  # noqa: ANN401 - Playwright's event has no one type
        # That a gateway or a story is away is told on the page; the browser adds a line of its own.
        if message.type in {"error", "warning"} and "Failed to load resource" not in message.text:
            self.heard.append(message.text)


async def shot(page: Page, name: str) -> Path:
    """Keep a picture of what is on the screen."""
    SHOTS.mkdir(exist_ok=True)
    path = SHOTS / f"{name}.png"
    await page.screenshot(path=path)
    return path
