"""Which web pages, and which names of a host, may reach a port.

A browser lets any page send requests to servers on its user's machine. It names the page in ``Origin`` and
``Sec-Fetch-Site``, and whatever name it resolved in ``Host``. Programs send neither of the first two.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cog_triton.web import Refusal

ANY = "*"
# Only these change nothing on any port: there is no GET with an effect.
SAFE_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS"))
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[\w.-]+)(:(?P<port>\d{0,5}))?", re.ASCII)
_ORIGIN = re.compile(rf"(?P<scheme>[a-z][a-z0-9+.-]*)://{_HOST.pattern}/?", re.ASCII)
# Of a header, in the text of an error.
_SHOWN_CHARACTERS = 100
_JSON_TYPE = re.compile(r"application/([\w.!#$&^-]+\+)?json", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class AccessRule:
    """Who may reach one port."""

    # The port is bound to a loopback address.
    loopback: bool
    # As browsers write them, or ANY.
    allowed_origins: frozenset[str] = frozenset()
    # Names in lower case, "*.example.com", or ANY.
    allowed_hosts: frozenset[str] = frozenset()
    # The setting that has the allowed origins; empty if there is none.
    origins_setting: str = ""

    def refusal(self, method: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
        """Return why a request may not pass; None if it may. Names of headers are in lower case."""
        hosts: list[str] = []
        origins: list[str] = []
        sites: list[str] = []
        found = {b"host": hosts, b"origin": origins, b"sec-fetch-site": sites}
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1").strip())
        for host in hosts:
            if not self._allows_host(host):
                return Refusal(403, _host_text(host))
        if method in SAFE_METHODS or self._allows_page(hosts, origins, sites):
            return None
        return Refusal(403, self._origin_text(origins))

    def _allows_host(self, host: str) -> bool:
        """Return whether requests may call the server by this ``Host``.

        A page's name may have been bound to this server's address meanwhile (DNS rebinding). Loopback
        names are always allowed, and so are all names where nothing limits them.
        """
        if ANY in self.allowed_hosts or not (self.loopback or self.allowed_hosts):
            return True
        name = _host_name(host)
        address = _ip_address(name)
        if is_loopback(name):
            return True
        if address is not None and not self.loopback:
            # An orchestrator's probe; no name was resolved, so none was rebound.
            return True
        # Of a.b.c: *.b.c and *.c.
        patterns = {"*." + name[at + 1 :] for at, letter in enumerate(name) if letter == "."}
        return name in self.allowed_hosts or not patterns.isdisjoint(self.allowed_hosts)

    def _allows_page(self, hosts: list[str], origins: list[str], sites: list[str]) -> bool:
        """Return whether a request comes from no page, from one of this server, or from an allowed one."""
        if ANY in self.allowed_origins:
            return True
        if origins and all(_normal(origin) in self.allowed_origins for origin in origins):
            return True
        if sites == ["same-origin"]:
            # A page cannot write this header; a proxy may have changed the Host.
            return True
        if any(site.lower() != "none" for site in sites):
            return False
        return all(any(_is_origin_of(origin, host) for host in hosts) for origin in origins)

    def _origin_text(self, origins: list[str]) -> str:
        page = origins[0][:_SHOWN_CHARACTERS] if origins else "another site"
        if not self.origins_setting:
            return f"web pages from {page} may not send this request"
        return (
            f"web pages from {page} may not send this request: "
            f"{self.origins_setting} lists the origins that may"
        )


def access_rule(
    listener: socket.socket, *, hosts: str, origins: str = "", origins_setting: str = ""
) -> AccessRule:
    """Return the rule of a bound socket's port, from the texts of the settings."""
    return AccessRule(
        loopback=is_loopback(str(listener.getsockname()[0])),
        allowed_origins=frozenset(origins_of(origins)),
        # A pattern such as *.example.com is no name of a host, and stays as it is.
        allowed_hosts=frozenset(_host_name(entry) or entry.lower() for entry in _entries(hosts)),
        origins_setting=origins_setting,
    )


def origins_of(setting: str) -> list[str]:
    """Return the origins in a setting, as browsers write them."""
    return [_normal(entry) for entry in _entries(setting)]


def cors_options(origins: list[str]) -> dict[str, Any]:
    """Return the options of Starlette's CORSMiddleware that let pages of these origins read responses."""
    return {
        "allow_origins": origins,
        "allow_methods": [ANY],
        "allow_headers": [ANY],
        "expose_headers": [ANY],
    }


def is_json(content_type: str) -> bool:
    """Return whether a body of this type is JSON, which no page sends elsewhere without being allowed."""
    return _JSON_TYPE.fullmatch(content_type.partition(";")[0].strip()) is not None


def is_loopback(name: str) -> bool:
    """Return whether a host's name or address leads to its own machine wherever it is resolved."""
    address = _ip_address(name)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _entries(setting: str) -> list[str]:
    return setting.replace(",", " ").split()


def _host_name(host: str) -> str:
    """Return the name or address in a ``Host``, in lower case and without a port; empty if it has none."""
    found = _HOST.fullmatch(host.lower())
    return found["name"].strip("[]").removesuffix(".") if found else ""


def _normal(origin: str) -> str:
    """Return an origin as browsers write it: in lower case, without a default port or a slash."""
    found = _ORIGIN.fullmatch(origin.lower())
    if found is None or not found["port"]:
        return origin.lower().removesuffix("/")
    port = int(found["port"])
    shown_port = "" if port == _DEFAULT_PORTS.get(found["scheme"]) else f":{port}"
    return f"{found['scheme']}://{found['name']}{shown_port}"


def _is_origin_of(origin: str, host: str) -> bool:
    """Return whether a page of this origin came from this host; TLS may end in a proxy."""
    page = _ORIGIN.fullmatch(origin.lower())
    server = _HOST.fullmatch(host.lower())
    if page is None or server is None or page["scheme"] not in _DEFAULT_PORTS:
        return False
    default = _DEFAULT_PORTS[page["scheme"]]
    page_port = int(page["port"] or default)
    server_port = int(server["port"] or default)
    return page["name"] == server["name"] and page_port == server_port


def _host_text(host: str) -> str:
    return (
        f"Host {host[:_SHOWN_CHARACTERS]!r} is not a name of this server: "
        "add it to ALLOWED_HOSTS if clients or a proxy call the server by this name"
    )
