"""Paths, responses and errors in Replicate's form."""

import hmac
from typing import Any

import orjson
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response

from cog_triton.web import Refusal
from cog_triton.web.bodies import off_loop

# Takes forms; all other bodies are JSON.
FILES_PATH = "/v1/files"
# Items of a list, at most.
LISTED = 100
_TITLES = {
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    422: "Input validation failed",
}


def is_replicates(target: str) -> bool:
    """Tell whether a path, or a request's target, is one of this API's."""
    path = target.partition("?")[0]
    return path == "/v1" or path.startswith("/v1/")


def problem_of(refusal: Refusal) -> dict[str, Any]:
    """Return an error in Replicate's form."""
    detail = refusal.detail
    if isinstance(detail, list):
        detail = "; ".join(f"{'.'.join(one['loc'][1:])}: {one['msg']}" for one in detail)
    title = _TITLES.get(refusal.status, "Request failed")
    return {"title": title, "detail": detail, "status": refusal.status}


async def json_response(value: Any, size: int, *, status: int = 200) -> Response:
    """Return a response of JSON, whose text is made in a thread if it has about so many bytes."""
    text = await off_loop(size, orjson.dumps, value)
    return Response(text, status, media_type="application/json")


def page(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a list without other pages."""
    return {"previous": None, "next": None, "results": results}


def base_url(request: Request) -> str:
    """Return the beginning of addresses of this server, as the client or its proxy reaches it."""
    forwarded = request.headers.get("x-forwarded-proto", "").strip().lower()
    scheme = forwarded if forwarded in ("http", "https") else "http"
    return f"{scheme}://{request.headers.get('host', 'localhost')}"


def check_list_token(request: Request, expected: SecretStr | None) -> None:
    """Refuse to list what others have sent, unless the request has the token for it."""
    if expected is None:
        text = "listing is disabled: set REPLICATE_LIST_TOKEN, and send it as the API token"
        raise Refusal(403, text)
    _, _, presented = request.headers.get("authorization", "").partition(" ")
    token = expected.get_secret_value().encode()
    if not hmac.compare_digest(presented.strip().encode(), token):
        raise Refusal(403, "the API token does not match REPLICATE_LIST_TOKEN")
