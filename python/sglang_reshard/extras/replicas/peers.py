"""Which servers this one takes weights from: those of its own host, and those that its operator lists.

    SGLANG_RESHARD_PEERS="gpu7, *.train.example.com, 10.2.0.0/16"    # in the server's environment; "*" for all

Otherwise any client that may request a pull could choose the hosts that a server connects to. A name is compared as the
URL has it, and never resolved; an address is looked for in the listed addresses and networks.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import httpx

_MAX_PORT = 65535
PEERS = "SGLANG_RESHARD_PEERS"


def refusal(url: str) -> str:
    """Returns why this server takes no weights from the one at `url`; empty if it does."""
    try:
        parsed = httpx.URL(url)
        host, scheme, port = parsed.host.lower(), parsed.scheme, parsed.port or 1
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return f"{_shown(url)} is not a valid URL; pass http://host:port"
    # A path is appended to the URL: a query or a fragment would take it in, and what is before them be asked for.
    if scheme not in ("http", "https") or not host or port > _MAX_PORT or any(c in url for c in "?#@"):
        return f"{_shown(url)} is not the URL of a server; pass http://host:port"
    if is_peer(host, os.environ.get(PEERS, "")):
        return ""
    return (
        f"this server takes no weights from {_shown(host)}: it is another host, and {PEERS} in this server's "
        f"environment does not list it. Add it to {PEERS} and restart this server"
    )


def is_peer(host: str, listed: str) -> bool:
    """Returns whether `host`, a name in lower case or an address, is this host or among `listed`."""
    entries = listed.replace(",", " ").lower().split()
    if "*" in entries:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        own = ("localhost", socket.gethostname().lower())
        return host in own or any(host == e or (e.startswith("*.") and host.endswith(e[1:])) for e in entries)
    address = getattr(address, "ipv4_mapped", None) or address
    return _is_own(address) or any(_contains(entry, address) for entry in entries)


def _contains(entry: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # a name
        return False


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))  # only an address of this host can be bound
    except OSError:
        return False
    return True


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
