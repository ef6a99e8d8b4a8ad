"""Where a notice may be sent. Configuration, or worse an API, names URLs; a URL must not become a way into the network.

A name is resolved once and the connection goes to exactly that address, so a name that changes its mind between check and use gains
nothing; redirects are not followed. Link-local addresses (the metadata services of clouds live there) are refused always.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from trainwarden.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Refused(ConfigError):
    """The address may not be spoken to; trying again does not help."""


@dataclass(frozen=True)
class Target:
    """A checked destination: connect to `address`, speak to `host`."""

    scheme: str
    host: str
    port: int
    address: str
    path: str


def resolve_name(host: str, port: int) -> list[str]:
    """Addresses of `host`, in the system's order; raises `OSError` when there is none now."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def check_target(url: str, allow_private: bool, allow_http: bool, resolve: Resolve = resolve_name) -> Target:
    """The destination of `url`.

    Raises
    ------
    Refused
        Not http(s), no host, a forbidden address, or no TLS where it is needed. The message never holds path, query or user.
    OSError
        The name does not resolve now.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise Refused("the receiver's url has a port that is no number from 0 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused(f"the receiver's url has scheme {parts.scheme!r}, expected https://host/...")
    if parts.username or parts.password:
        raise Refused("the receiver's url holds a user or password: use a secret file, urls end up in logs")
    where = f"{parts.scheme}://{parts.hostname}:{port}"
    address = resolve(parts.hostname, port)[0]
    private = _check_address(_embedded(ipaddress.ip_address(address.partition("%")[0])), allow_private, where)
    if parts.scheme == "http" and not (private or allow_http):
        raise Refused(f"{where} is public and speaks no TLS: use https, or set allow_http = true")
    path = parts.path or "/"
    return Target(parts.scheme, parts.hostname, port, address, f"{path}?{parts.query}" if parts.query else path)


def _check_address(address: Address, allow_private: bool, where: str) -> bool:
    """Whether `address` is a private one that is allowed; raises for every one that is not allowed."""
    if (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or (address.is_reserved and not address.is_loopback)
    ):
        raise Refused(f"{where} leads to {address}, an address that no receiver has")
    if address.is_global:
        return False
    if not allow_private:
        raise Refused(f"{where} leads to {address}, which is private: set allow_private = true if that is meant")
    return True


def _embedded(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one that only wraps it."""
    if not isinstance(address, ipaddress.IPv6Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def redact(url: str) -> str:
    """`url` without what may be secret: scheme, host and port only."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ":?"
    return f"{parts.scheme}://{parts.hostname or '?'}{port}/..."
