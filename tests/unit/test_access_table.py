"""The table of routes in docs/operations.md: it has all of them, and says truly who may ask."""

import _access  # type: ignore[import-not-found, unused-ignore]
import httpx
import pytest
from starlette.routing import Route

from cog_triton.api.cog.front import Front
from cog_triton.api.cog.messages import VARIABLE
from cog_triton.api.openai.app import create_app
from cog_triton.settings import read_settings
from cog_triton.web.origin import SAFE_METHODS, AccessRule
from cog_triton.web.server import bound
from tests.unit.api.openai.support import Backend, ask, described_paths, served

OPENAI_ROUTES = dict(_access.openai_routes())
COG_ROUTES = dict(_access.cog_routes())
RULE = AccessRule(loopback=False)
FOREIGN = [(b"origin", b"https://evil.example")]


def test_every_route_of_openais_api_is_in_the_table() -> None:
    app = create_app(served(Backend()))
    documented = described_paths()
    found = {f"{method.upper()} {path}" for path in documented for method in documented[path]}
    found |= set(_access.names(route for route in app.routes if isinstance(route, Route)))
    found |= {"GET /", "GET /metrics"}
    assert found == set(OPENAI_ROUTES)


def test_every_route_of_cogs_port_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    front = Front(bound("127.0.0.1", 0), read_settings({}))
    front.predictions.files.remove_all()
    assert {*_access.names(front._router.routes), *_access.PASSED_ON} == set(COG_ROUTES)


@pytest.mark.parametrize("route", OPENAI_ROUTES)
def test_who_has_no_key_reaches_what_the_table_says_is_open(route: str) -> None:
    method, path = route.split(" ")
    reply = ask(Backend(OPENAI_API_KEYS="sk-1"), method, path)
    is_open = OPENAI_ROUTES[route].who == _access.ANYBODY
    assert (reply.status_code != 401) == is_open


@pytest.mark.anyio
async def test_lists_need_the_token_that_the_table_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    for token in (None, "a-long-token"):
        environment = {"REPLICATE_LIST_TOKEN": token} if token else {}
        front = Front(bound("127.0.0.1", 0), read_settings(environment))
        front.predictions.files.remove_all()
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for route, access in COG_ROUTES.items():
                if route.startswith("GET /v1/") and "models" not in route:  # which ask Cog's server
                    reply = await client.get(route.split(" ")[1])
                    assert (reply.status_code == 403) == (access.who == _access.WITH_LIST_TOKEN)


@pytest.mark.parametrize("routes", [OPENAI_ROUTES, COG_ROUTES], ids=["openai", "cog"])
def test_pages_may_send_what_the_table_says(routes: dict[str, "_access.Access"]) -> None:
    for route, access in routes.items():
        method = route.split(" ")[0].encode()
        refused = RULE.refusal(method, FOREIGN) is not None
        assert (
            access.pages.startswith("blocked with 403") == refused == (method not in SAFE_METHODS)
        )
