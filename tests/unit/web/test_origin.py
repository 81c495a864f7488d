"""Which web pages may send requests to a port, and by which names it may be called."""

import socket
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.web.origin import AccessRule, access_rule, is_json, is_loopback, origins_of
from cog_triton.web.server import bound

LOOPBACK = AccessRule(loopback=True, origins_setting="THE_ORIGINS")
PUBLIC = AccessRule(loopback=False)
HOST = "127.0.0.1:3000"
CHAT = "https://chat.example.com"
EVIL = "https://evil.example"


def status(
    rule: AccessRule, *, method: str = "POST", host: str | None = HOST, **named: str | None
) -> int:
    """The status of a request with these headers: ``sec_fetch_site`` is Sec-Fetch-Site."""
    headers = {"host": host, **{name.replace("_", "-"): value for name, value in named.items()}}
    pairs = [
        (name.encode(), value.encode()) for name, value in headers.items() if value is not None
    ]
    refusal = rule.refusal(method.encode(), pairs)
    return 200 if refusal is None else refusal.status


FOREIGN = {
    "another site": {"origin": EVIL},
    "another port": {"origin": "http://127.0.0.1:3001"},
    "another name of this machine": {"origin": "http://localhost:3000"},
    "another scheme's port": {"origin": "http://127.0.0.1"},
    "a name that begins alike": {"origin": "http://127.0.0.1:3000.evil.example"},
    "a user's name": {"origin": "http://127.0.0.1:3000@evil.example"},
    "null": {"origin": "null"},
    "nothing": {"origin": ""},
    "no URL": {"origin": "http://[::1"},
    "a file": {"origin": "file://"},
    "an extension": {"origin": "chrome-extension://abcdef", "sec_fetch_site": "none"},
    "cross-site": {"sec_fetch_site": "cross-site"},
    "same-site": {"sec_fetch_site": "same-site"},
    "same-site in capitals": {"sec_fetch_site": "SAME-SITE"},
    "cross-site with an Origin": {"sec_fetch_site": "cross-site", "origin": EVIL},
    "same-site with an Origin": {"sec_fetch_site": "same-site", "origin": "http://127.0.0.1:1"},
    "same-site that claims the host": {"sec_fetch_site": "same-site", "origin": f"http://{HOST}"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_another_origins_page_changes_nothing(headers: dict[str, str]) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"):
        assert status(LOOPBACK, method=method, **headers) == 403
        assert status(PUBLIC, method=method, **headers) == 403
    for method in ("GET", "HEAD", "OPTIONS"):
        assert status(LOOPBACK, method=method, **headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": f"http://{HOST}"},
        {"origin": f"https://{HOST}"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "same-origin", "origin": f"http://{HOST}"},
        # A proxy has put its own address for the Host.
        {"sec_fetch_site": "same-origin", "origin": "https://api.example.com"},
    ],
    ids=["a program", "this server's page", "behind TLS", "the address bar", "attested", "proxied"],
)
def test_programs_and_this_servers_pages_pass(headers: dict[str, str]) -> None:
    assert status(LOOPBACK, **headers) == 200


def test_one_foreign_origin_of_two_is_enough() -> None:
    for origins in ([f"http://{HOST}", EVIL], [EVIL, f"http://{HOST}"]):
        headers = [(b"host", HOST.encode())] + [(b"origin", value.encode()) for value in origins]
        assert LOOPBACK.refusal(b"POST", headers) is not None


@pytest.mark.parametrize(
    "setting", [CHAT, f"http://a.example, {CHAT}", "HTTPS://Chat.example.com:443/"]
)
def test_an_origin_that_is_allowed(setting: str) -> None:
    rule = AccessRule(loopback=True, allowed_origins=frozenset(origins_of(setting)))
    assert status(rule, origin=CHAT, sec_fetch_site="cross-site") == 200
    assert status(rule, origin=EVIL, sec_fetch_site="cross-site") == 403
    assert status(rule, origin="http://chat.example.com") == 403
    assert status(rule, origin="null") == 403
    assert status(rule, sec_fetch_site="cross-site") == 403


def test_all_origins_may_be_allowed() -> None:
    rule = AccessRule(loopback=True, allowed_origins=frozenset(origins_of("*")))
    assert status(rule, origin=EVIL, sec_fetch_site="cross-site") == 200
    assert status(rule, origin=EVIL, host="evil.example") == 403


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LOCALHOST:80",
            "localhost.",
            "a.localhost:3000",
            "127.0.0.1",
            "127.9.8.7:1",
        ),
        *("[::1]", "[::1]:3000", "[::ffff:127.0.0.1]:3000"),
    ],
)
def test_names_of_loopback(host: str) -> None:
    assert status(LOOPBACK, method="GET", host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:3000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *(
            "evillocalhost",
            "10.0.0.1",
            "[fe80::1]",
            "0.0.0.0",
            "",
            ":3000",
            "localhost@evil.example",
        ),
        *("evil.example@localhost", "localhost/evil.example", "localhost#", "[::1", "x"),
    ],
)
def test_other_names_are_refused_where_the_port_is_bound_to_loopback(host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        assert status(LOOPBACK, method=method, host=host) == 403
        # A page of a name that was rebound is this server's, for the browser.
        page = f"http://{host}"
        assert status(LOOPBACK, host=host, origin=page, sec_fetch_site="same-origin") == 403
    assert status(PUBLIC, host=host) == 200
    assert status(PUBLIC, host=None) == status(LOOPBACK, host=None) == 200  # HTTP/1.0


@pytest.mark.parametrize(
    ("setting", "allowed", "refused"),
    [
        ("api.example.com", "API.example.com:443", "example.com"),
        ("a.example,b.example:8443", "b.example", "c.example"),
        ("*.example.com", "a.b.example.com", "notexample.com"),
    ],
)
def test_allowed_hosts(setting: str, allowed: str, refused: str) -> None:
    for address, ip_status in (("127.0.0.1", 403), ("0.0.0.0", 200)):
        with closing(bound(address, 0)) as listener:
            rule = access_rule(listener, hosts=setting)
        assert status(rule, host=allowed) == 200
        assert status(rule, host=refused) == 403
        assert status(rule, host="localhost") == 200
        assert status(rule, host="10.1.2.3:5000") == ip_status  # an orchestrator's probe


def test_all_hosts_may_be_allowed() -> None:
    with closing(bound("127.0.0.1", 0)) as listener:
        assert status(access_rule(listener, hosts="*"), host="evil.example") == 200


@pytest.mark.parametrize(
    ("address", "loopback"), [("127.0.0.1", True), ("127.0.0.2", True), ("0.0.0.0", False)]
)
def test_the_rule_knows_where_its_port_is_bound(address: str, loopback: bool) -> None:
    with closing(bound(address, 0)) as listener:
        assert access_rule(listener, hosts="").loopback is loopback


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_the_rule_knows_loopback_of_ipv6() -> None:
    assert is_loopback("::1")
    assert not is_loopback("::")


def test_refusals_name_the_setting_that_allows() -> None:
    origin = LOOPBACK.refusal(b"POST", [(b"origin", EVIL.encode())])
    host = LOOPBACK.refusal(b"GET", [(b"host", b"api.example.com")])
    assert origin is not None
    assert host is not None
    assert EVIL in origin.detail
    assert "THE_ORIGINS" in origin.detail
    assert "'api.example.com'" in host.detail
    assert "ALLOWED_HOSTS" in host.detail
    long = LOOPBACK.refusal(b"GET", [(b"host", b"x" * 10_000)])
    assert long is not None
    assert len(long.detail) < 300


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=12))
def test_any_bytes_get_an_answer(host: bytes, origin: bytes, site: bytes) -> None:
    headers = [(b"host", host), (b"origin", origin), (b"sec-fetch-site", site)]
    for rule in (LOOPBACK, PUBLIC):
        refusal = rule.refusal(b"POST", headers)
        assert refusal is None or refusal.status == 403


@pytest.mark.parametrize(
    ("kind", "json"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("application/json-seq", False),
        ("application/x-www-form-urlencoded", False),
        ("text/plain", False),
        ("text/plain; application/json", False),
        ("text/plain, application/json", False),
        ("multipart/form-data; boundary=application/json", False),
        ("", False),
    ],
)
def test_what_is_json(kind: str, json: bool) -> None:
    assert is_json(kind) is json


@pytest.mark.parametrize("value", ["chat.example.com", "https://a/b", "https://a b", "https://x@y"])
def test_what_is_no_origin_is_refused_at_the_start(value: str) -> None:
    for name in ("OPENAI_ALLOWED_ORIGINS", "COG_ALLOWED_ORIGINS"):
        with pytest.raises(ConfigurationError, match=name):
            read_settings({name: value})


@pytest.mark.parametrize(
    "value", ["*", "https://a.example", " https://a:1/ ,\nnull, http://[::1]:3"]
)
def test_what_may_be_an_origin(value: str) -> None:
    assert read_settings({"COG_ALLOWED_ORIGINS": value}).cog_allowed_origins == value
