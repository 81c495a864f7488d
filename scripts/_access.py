"""The access table of docs/operations.md: who may use which routes, made from the routes in the code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from starlette.routing import Route

from cog_triton.api.cog.front import Front
from cog_triton.api.cog.replicate.replies import FILES_PATH
from cog_triton.api.cog.replicate.routes import Replicate
from cog_triton.api.openai import app, middleware, pages
from cog_triton.api.openai.routes import messages, operation
from cog_triton.api.openai.server import FORM_BYTES
from cog_triton.web.origin import SAFE_METHODS

HEADER = (
    "Port",
    "Routes",
    "Who can use it",
    "Request body",
    "Time limit",
    "Web pages of other origins",
)
COG = "`PORT` of `make serve`"
OPENAI = "`PORT` of `make openai`; `OPENAI_PORT`"
METRICS_PORT = "`PREDICTOR_METRICS_PORT`"
# What the front passes on to Cog's server. Any other path is passed on too, and gets 404 there.
PASSED_ON = (
    *("GET /", "GET /health-check", "GET /openapi.json", "POST /predictions"),
    *("PUT /predictions/{id}", "POST /predictions/{id}/cancel", "POST /trainings"),
    *("PUT /trainings/{id}", "POST /trainings/{id}/cancel"),
)
LISTS = ("GET /v1/predictions", f"GET {FILES_PATH}")
ROUTERS = (*app.OPENAI_ROUTERS, messages.router)
# The pages, and FastAPI's description of the API.
OPENAI_PAGES = (
    "/",
    pages.FORMULAS_PATH,
    pages.DOCS_PATH,
    pages.SCRIPT_PATH,
    pages.STYLE_PATH,
    "/openapi.json",
)
ANYBODY = "anyone who can reach the port"
WITH_KEY = "clients with an API key; anyone if no keys are configured"
WITH_LIST_TOKEN = "clients with `REPLICATE_LIST_TOKEN`; nobody if it is not set"
# Ports of NVIDIA's and Cog's servers, whose checks are theirs.
ALL_OF_TRITON = "all of Triton's, except `TRITON_CLOSED_APIS`"
OTHERS = (
    (
        "`TRITON_HTTP_PORT`",
        ALL_OF_TRITON,
        ANYBODY,
        "limited by Triton",
        "none",
        "can send requests",
    ),
    ("`TRITON_GRPC_PORT`", ALL_OF_TRITON, ANYBODY, "limited by Triton", "none", "blocked"),
    (
        "`TRITON_METRICS_PORT`",
        "`GET /metrics`",
        ANYBODY,
        "limited by Triton",
        "none",
        "can send requests",
    ),
    (
        "a free port of 127.0.0.1",
        "Cog's server itself, to which `PORT` of `make serve` passes requests on",
        "only the process that serves that `PORT`",
        "",
        "",
        "blocked",
    ),
    (
        "`PORT` of `make scale`",
        "all of Dynamo's frontend",
        ANYBODY,
        "Dynamo's",
        "none",
        "Dynamo's",
    ),
    ("free ports, for Dynamo", "between its frontend and workers", ANYBODY, "", "", "blocked"),
)


@dataclass(frozen=True)
class Access:
    """What one route asks of its callers."""

    port: str
    who: str
    body: str
    time: str
    pages: str


def table_rows() -> list[tuple[str, ...]]:
    """Return the rows: the routes of a port that ask the same are in one."""
    routes: dict[Access, list[str]] = {}
    for route, access in (*cog_routes(), *openai_routes(), metrics_route()):
        routes.setdefault(access, []).append(f"`{route}`")
    rows = [
        (access.port, ", ".join(names), access.who, access.body, access.time, access.pages)
        for access, names in routes.items()
    ]
    return [*rows, *OTHERS]


def cog_routes() -> Iterator[tuple[str, Access]]:
    # Neither needs anything else to name its routes.
    front = Front.__new__(Front)
    replicate = Replicate(cast(Any, None), cast(Any, None), None)
    for route in (*names(front.front_routes()), *names(replicate.routes), *PASSED_ON):
        who = WITH_LIST_TOKEN if route in LISTS else ANYBODY
        body = "a form" if route == f"POST {FILES_PATH}" else "JSON"
        yield route, access_of(route, COG, who, f"{body}, up to `MAX_REQUEST_BYTES`", "COG")


def openai_routes() -> Iterator[tuple[str, Access]]:
    open_pages = [f"GET {path}" for path in OPENAI_PAGES]
    routes = [name for router in ROUTERS for name in names(router.routes)]
    for route in (*open_pages, *routes):
        path = route.partition(" ")[2]
        who = ANYBODY if path in middleware.OPEN_PATHS else WITH_KEY
        if path == operation.METRICS:
            who = f"{WITH_KEY} or `OPENAI_OPEN_METRICS` is set"
        body = "JSON, up to `MAX_REQUEST_BYTES`"
        if route == "POST /v1/files":
            body = f"a form, up to `MAX_FILE_BYTES` plus {FORM_BYTES >> 10} KiB"
        yield route, access_of(route, OPENAI, who, body, "OPENAI")


def metrics_route() -> tuple[str, Access]:
    return "GET /metrics", Access(METRICS_PORT, ANYBODY, "none", "10 s", "can send requests")


def access_of(route: str, port: str, who: str, body: str, setting: str) -> Access:
    origins = f"`{setting}_ALLOWED_ORIGINS`"
    time = "`RECEIVE_TIMEOUT`"
    if "MAX_FILE_BYTES" in body:
        time += " × `MAX_FILE_BYTES` / `MAX_REQUEST_BYTES`"
    method = route.partition(" ")[0]
    if method.encode() in SAFE_METHODS:
        return Access(
            port, who, "ignored", time, f"can send requests; those in {origins} can read answers"
        )
    if method == "DELETE" or route.endswith("/cancel") or route == "POST /shutdown":
        body = "ignored, up to `MAX_REQUEST_BYTES`"
    return Access(port, who, body, time, f"blocked with 403, except those in {origins}")


def names(routes: Iterable[Any]) -> list[str]:
    """Return each method and path of routes; HEAD goes with GET."""
    found = []
    for route in routes:
        for method in sorted(cast(Route, route).methods or ()):
            if method != "HEAD":
                found.append(f"{method} {short(route.path)}")
    return found


def short(path: str) -> str:
    """Return a path without the converters of its parameters."""
    return path.replace(":path}", "}")
