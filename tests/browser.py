"""Headless Chromium, for the tests of the chat page and its picture."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

QUESTION = "What is machine learning?"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# It resolves no name and reaches no other address, as on a machine without a network. Names under .example
# are this machine's, as those of a site that rebinds its name.
OFFLINE = (
    "--host-resolver-rules=MAP *.example 127.0.0.1, MAP * ~NOTFOUND, "
    "EXCLUDE 127.0.0.1, EXCLUDE localhost"
)

# What a page would suffer from that took it for HTML; window.hit says so.
HOSTILE = Path(__file__).with_name("hostile.txt").read_text()


@contextmanager
def chromium() -> Iterator["Browser"]:
    """The machine's own; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is in PATH")
    with playwright.sync_playwright() as driver:
        browser: Browser = driver.chromium.launch(executable_path=path, args=[OFFLINE])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A tab with the chat page."""

    page: "Page"
    urls: list[str] = field(default_factory=list)  # what it asked for
    bodies: list[dict[str, Any]] = field(default_factory=list)  # what it sent
    complaints: list[str] = field(default_factory=list)  # errors, and what the policy refused

    def open(self, url: str) -> None:
        self.watch()
        self.goto(url)

    def watch(self) -> None:
        """Notes from now on what the page asks for, and what is wrong with it."""
        self.page.on("request", lambda request: self._note(request))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self._hear(message))

    def goto(self, url: str) -> None:
        self.page.goto(url)
        self.page.get_by_role("heading", name="Ask demo").wait_for()

    def ask(self, text: str = QUESTION) -> None:
        """Sends a message, and waits for the end of its answer."""
        self.send(text)
        self.ended()

    def send(self, text: str = QUESTION) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_label("Message").press("Enter")

    def ended(self) -> None:
        """Waits for the end of the answer."""
        self.page.locator("article:last-of-type footer .actions").wait_for()

    def facts(self) -> list[str]:
        """What is said below the last answer."""
        return self.page.locator("article footer").last.locator("> span").all_inner_texts()

    def text(self) -> str:
        return self.page.locator("article .text").last.inner_text()

    def set(self, **fields: object) -> None:
        """Fills in settings, by their labels."""
        for name, value in fields.items():
            label = self.page.get_by_label(name.replace("_", " "))
            label.fill(value if isinstance(value, str) else json.dumps(value))

    def _note(self, request: Any) -> None:
        self.urls.append(request.url)
        if request.method == "POST":
            self.bodies.append(request.post_data_json)

    def _hear(self, message: Any) -> None:
        # An answer other than 200 is no fault of the page.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)
