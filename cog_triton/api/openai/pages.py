"""The pages for browsers: the chat page at /, and the API's reference at /docs, by Swagger UI.

Neither loads anything from elsewhere, so that both work without a network: Swagger UI's files come with the
package fastapi-offline. The policy of each page allows its parts and nothing else.
"""

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse

FORMULAS_FILE = Path(__file__).parent / "vendor" / "temml-0.13.5.min.js"  # LaTeX to MathML
FORMULAS_PATH = "/page/temml.js"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ISOLATION = ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")

DOCS_PATH = "/docs"
SCRIPT_PATH = f"{DOCS_PATH}/swagger-ui-bundle.js"
STYLE_PATH = f"{DOCS_PATH}/swagger-ui.css"
# The addresses are relative, so that they hold behind a proxy's path, too.
DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cog-triton: API reference</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<main id="reference"></main>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
"use strict";
const KEY = "key"; // where the chat page keeps it, too: in this tab, until it is closed
const withKey = (headers) => {
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  return headers;
};
async function start() {
  let reply = await fetch("openapi.json", { headers: withKey({}) });
  if (reply.status === 401) {
    sessionStorage.setItem(KEY, prompt("API key") ?? "");
    reply = await fetch("openapi.json", { headers: withKey({}) });
  }
  if (!reply.ok) {
    document.querySelector("#reference").textContent = `The server answered ${reply.status}.`;
    return;
  }
  SwaggerUIBundle({
    spec: await reply.json(), dom_id: "#reference", deepLinking: true, validatorUrl: null,
    requestInterceptor: (request) => { withKey(request.headers); return request; },
  });
}
start();
</script>
</body>
</html>
"""


def integrity(content: bytes) -> str:
    """Return the hash of a script, as a page's policy and the attribute ``integrity`` have it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()


PAGE = (
    Path(__file__)
    .with_name("page.html")
    .read_text(encoding="utf-8")
    .replace("TEMML_INTEGRITY", integrity(FORMULAS_FILE.read_bytes()))
)


def _source_of_inline(tag: str, page: str) -> str:
    """Return the source, for a policy, of the one element with this tag that has a text."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'{integrity(content.encode())}'"


def page_policy(page: str) -> str:
    """Return the policy that lets the chat page run its own scripts and style, and ask its own server."""
    rules = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        f"script-src {_source_of_inline('script', page)} '{integrity(FORMULAS_FILE.read_bytes())}'",
        f"style-src {_source_of_inline('style', page)}",
        *_ISOLATION,
        # No text becomes HTML: what could make it so is refused.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return "; ".join(rules)


def docs_policy(page: str) -> str:
    """Return the policy of the reference, whose script and style are files of this server."""
    rules = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src 'self' data:",
        f"script-src 'self' {_source_of_inline('script', page)}",
        "style-src 'self'",
        *_ISOLATION,
    ]
    return "; ".join(rules)


PAGE_HEADERS = {**_HEADERS, "Content-Security-Policy": page_policy(PAGE)}
DOCS_HEADERS = {**_HEADERS, "Content-Security-Policy": docs_policy(DOCS_PAGE)}


def add_docs(app: FastAPI) -> None:
    app.add_route(DOCS_PATH, docs_page, include_in_schema=False)
    app.add_route(SCRIPT_PATH, docs_script, include_in_schema=False)
    app.add_route(STYLE_PATH, docs_style, include_in_schema=False)


def add_chat(app: FastAPI) -> None:
    app.add_route("/", chat_page, include_in_schema=False)
    app.add_route(FORMULAS_PATH, formulas, include_in_schema=False)


async def chat_page(_: Request) -> HTMLResponse:
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


async def formulas(_: Request) -> FileResponse:
    return FileResponse(str(FORMULAS_FILE), media_type="text/javascript", headers=_HEADERS)


async def docs_page(_: Request) -> HTMLResponse:
    return HTMLResponse(DOCS_PAGE, headers=DOCS_HEADERS)


async def docs_script(_: Request) -> FileResponse:
    return _file("swagger-ui-bundle.js", "text/javascript")


async def docs_style(_: Request) -> FileResponse:
    return _file("swagger-ui.css", "text/css")


def _file(name: str, media_type: str) -> FileResponse:
    path = resources.files("fastapi_offline") / "static" / name
    return FileResponse(str(path), media_type=media_type, headers=_HEADERS)
