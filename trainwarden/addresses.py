"""Addresses that people and browsers give: whose they are, and what of them may be shown."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def host_of(header: str) -> str:
    """The name in a ``Host`` header, without its port.

    Examples
    --------
    >>> host_of("[::1]:9480"), host_of("localhost")
    ('[::1]', 'localhost')
    """
    return header.rsplit(":", 1)[0] if ":" in header and not header.endswith("]") else header


def is_address(host: str) -> bool:
    """Whether `host` is a number: only a name can be made to resolve to something else."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def hide_password(url: str) -> str:
    """`url` fit for a log or a message.

    Examples
    --------
    >>> hide_password("clickhouse://me:secret@h:8123/x")
    'clickhouse://me:***@h:8123/x'
    """
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}").geturl()


def hide_path(url: str) -> str:
    """`url` without what is secret in a webhook's address: scheme and host stay.

    Examples
    --------
    >>> hide_path("https://hooks.example/T0KEN?a=b")
    'https://hooks.example/***'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/***" if parts.netloc else url
