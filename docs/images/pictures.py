#!/usr/bin/env python3
"""Takes the pictures of the docs: ``python -m docs.images.pictures terminal chat benchmark``.

The terminal shows ``make predict``, the chat page real answers of the demo model, and the benchmark's page
the report that ``make bench`` left in ``artifacts/``.
"""

import html
import json
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from tests.browser import Tab, chromium
from tests.openai_server import OpenAIServer
from tests.support import ROOT
from tools.demo_model import DIRECTORY

PICTURES = Path(__file__).parent
PROPERTIES = {"topic": {"enum": ["training", "inference"]}, "for_beginners": {"type": "boolean"}}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [*PROPERTIES],
    "additionalProperties": False,
}
# A terminal of 100 columns; what is dim there is dim here.
TERMINAL = """<style>
body { margin: 0 } i { font-style: normal; opacity: .6 }
pre { background: #1b1e24; color: #e6e6e6; font: 14px/1.5 monospace; padding: 16px; margin: 0;
      width: 100ch; white-space: pre-wrap; word-break: break-all }
</style>"""
_REPLACED = re.compile(r"[^\n]*\r\x1b\[K")  # a line of progress, up to the next one
_DIM = re.compile(r"\x1b\[2m(.*?)\x1b\[0m", re.DOTALL)


def terminal(browser: Browser) -> None:
    """Take what stays on a terminal after ``make predict``."""
    written = bytearray()

    def read(descriptor: int) -> bytes:
        written.extend(data := os.read(descriptor, 4096))
        return data

    pty.spawn(["make", "predict"], read)
    shown = _REPLACED.sub("", written.decode().replace("\r\n", "\n"))
    lines = _DIM.sub(r"<i>\1</i>", "$ make predict\n" + html.escape(shown)).rstrip()
    page = browser.new_page(device_scale_factor=2)
    page.set_content(f"{TERMINAL}<pre>{lines}</pre>")
    page.locator("pre").screenshot(path=PICTURES / "predict.png")


def chat(browser: Browser) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        OpenAIServer({"MODEL": str(DIRECTORY)}, Path(directory) / "log") as server,
    ):
        server.chat(response_format={"type": "json_object"})  # the first is slower than later ones
        page = browser.new_page(viewport={"width": 1160, "height": 750}, device_scale_factor=2)
        tab = Tab(page)
        tab.open(server.url)
        tab.set(Temperature=0)
        tab.ask("What is a KV cache?")
        tab.set(JSON_schema=json.dumps(SCHEMA, indent=2))
        tab.ask("Which topic is that, and is it for beginners?")
        page.locator("#schema").evaluate("box => { box.scrollTop = 0; }")
        page.get_by_label("Message").focus()
        page.screenshot(path=PICTURES / "chat.png")


def benchmark(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1160, "height": 750})
    page.goto((ROOT / "artifacts" / "benchmark.html").as_uri())
    page.screenshot(path=PICTURES / "benchmark.png", full_page=True)


def main(names: list[str]) -> None:
    known = {take.__name__: take for take in (terminal, chat, benchmark)}
    with chromium() as browser:
        for name in names:
            known[name](browser)


if __name__ == "__main__":
    main(sys.argv[1:])
