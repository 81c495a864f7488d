"""GET /: a page to chat with the model. All of it is page.html, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def policy(page: str) -> str:
    """What a browser lets a page do: run its own script and style, and ask the server that it came from."""
    allowed = {tag: _hash(page, tag) for tag in ("script", "style")}
    return "; ".join(
        (
            "default-src 'none'",
            *(f"{tag}-src '{digest}'" for tag, digest in allowed.items()),
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # No text becomes HTML: what could make it so is refused.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(page: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


HEADERS = {
    "Content-Security-Policy": policy(PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def chat_page() -> HTMLResponse:
    """The page."""
    return HTMLResponse(PAGE, headers=HEADERS)
