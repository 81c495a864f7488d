"""GET /, the chat page: all of it is page.html, which loads nothing from elsewhere."""

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
    """Return the policy that lets a page run its own script and style, and ask its own server."""
    rules = []
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    # No text becomes HTML: what could make it so is refused.
    trusted = "require-trusted-types-for 'script'; trusted-types 'none'"
    others = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {'; '.join(rules)}; connect-src 'self'; img-src data:; {others}; {trusted}"


HEADERS = {
    "Content-Security-Policy": policy(PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def chat_page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers=HEADERS)
