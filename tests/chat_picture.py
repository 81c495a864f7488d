#!/usr/bin/env python3
"""Takes the picture of the chat page that README.md shows, of real answers of the demo model.

Run it from the checkout, after a change of the page: ``python -m tests.chat_picture``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.browser import Tab, chromium
from tests.openai_server import OpenAIServer
from tests.support import ROOT
from tools.demo_model import DIRECTORY

PICTURE = ROOT / "docs" / "images" / "chat.png"
SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"enum": ["training", "inference"]},
        "for_beginners": {"type": "boolean"},
    },
    "required": ["topic", "for_beginners"],
    "additionalProperties": False,
}


def main() -> None:
    """Starts a server and a browser, asks twice, and writes the picture."""
    with (
        tempfile.TemporaryDirectory() as directory,
        OpenAIServer({"MODEL": str(DIRECTORY)}, Path(directory) / "log") as server,
        chromium() as browser,
    ):
        server.chat(max_tokens=20)  # the first answer is slower than those after it
        server.chat(response_format={"type": "json_object"}, max_tokens=5)
        page = browser.new_page(viewport={"width": 1160, "height": 750}, device_scale_factor=2)
        tab = Tab(page)
        tab.open(server.url)
        tab.set(Temperature=0)
        tab.ask("What is a KV cache?")
        tab.set(JSON_schema=json.dumps(SCHEMA, indent=2))
        tab.ask("Which topic is that, and is it for beginners?")
        page.locator("#schema").evaluate("box => { box.scrollTop = 0; }")
        page.get_by_label("Message").focus()
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
