"""Opening a store by its address: a ClickHouse server, the store process's HTTP form, or a chDB directory that nobody owns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from streams.store.chdb_engine import DirectoryLock, cannot_open
from trainwarden.addresses import hide_password
from trainwarden.errors import ConfigError, UnavailableError

DEFAULT_HTTP_PORT = 8123
_FORMS = "clickhouse://user:password@host:port/database, clickhouses://... for TLS, or chdb:///directory"
_CONNECT_TIMEOUT_S = 5


def connect(url: str, **options: Any) -> Any:
    """Open a clickhouse-connect client.

    Parameters
    ----------
    url
        ``clickhouse://user:password@host:port/database`` (a server, or the store process; ``clickhouses`` with TLS), or
        ``chdb:///directory``, which this process then owns until the client is closed.
    options
        Passed on to `clickhouse_connect.get_client`; query parameters of the URL likewise.

    Returns
    -------
    clickhouse_connect.driver.client.Client
        Close it when done.

    Raises
    ------
    ConfigError
        The address is none of these forms.
    UnavailableError
        Nobody answers there, the credentials or the database are refused, or the directory has an owner already.

    Examples
    --------
    >>> connect("clickhouse://127.0.0.1:8123").command("select 1")  # doctest: +SKIP
    1
    """
    parts = urlsplit(url)
    if parts.scheme == "chdb":
        return _open_directory(_directory(parts, url), dict(parse_qsl(parts.query)) | options)
    if parts.scheme not in ("clickhouse", "clickhouses"):
        raise ConfigError(f"store address {hide_password(url)!r} is not understood, expected {_FORMS}")
    host, port = _host_and_port(parts, url)
    more: dict[str, Any] = dict(parse_qsl(parts.query)) | options
    if parts.scheme == "clickhouses":
        more.setdefault("interface", "https")
    database = unquote(parts.path.strip("/"))
    if database:
        more["database"] = database
    return open_http(host, port, unquote(parts.username or "default"), unquote(parts.password or ""), more)


def open_http(host: str, port: int, user: str, password: str, options: Mapping[str, Any]) -> Any:
    """Open an HTTP client; see `connect` for what it raises."""
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import ClickHouseError

    settings: dict[str, Any] = {"autogenerate_session_id": False, "connect_timeout": _CONNECT_TIMEOUT_S, **options}
    try:
        return clickhouse_connect.get_client(host=host, port=port, username=user, password=password, **settings)
    except ClickHouseError as error:
        raise UnavailableError(_refusal(f"{host}:{port}", user, options.get("database"), error)) from error


def _refusal(address: str, user: str, database: object, error: Exception) -> str:
    text = str(error)
    code = getattr(error, "code", None)
    if code in (192, 193, 194, 516):
        return f"the store at {address} refuses user {user!r}: check user and password in the store's address"
    if code == 81:
        return f"the store at {address} has no database {database!r}: create it, or name another in the store's address"
    if "refused" in text or "timed out" in text or "resolve" in text:
        return f"no ClickHouse store answers at {address}: start one (trainwarden store, or a server) or correct the store's address"
    return f"the store at {address} cannot be used: {text.splitlines()[0][:300]}"


def _directory(parts: SplitResult, url: str) -> Path:
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path == "/":
        raise ConfigError(
            f"store address {url!r} names no directory, expected chdb:///absolute/directory (three slashes)"
        )
    return Path(path)


def _host_and_port(parts: SplitResult, url: str) -> tuple[str, int]:
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"store address {hide_password(url)!r}: the port is no number from 0 to 65535") from None
    if not parts.hostname:
        raise ConfigError(f"store address {hide_password(url)!r} names no host, expected {_FORMS}")
    return parts.hostname, port or DEFAULT_HTTP_PORT


def _open_directory(directory: Path, options: Mapping[str, Any]) -> Any:
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import ClickHouseError

    lock = DirectoryLock(directory)
    lock.acquire("")
    try:
        client = clickhouse_connect.get_client(interface="chdb", path=str(directory), **options)
    except (ClickHouseError, ImportError) as error:
        lock.release()
        raise UnavailableError(cannot_open(directory, error)) from error
    _release_on_close(client, lock)
    return client


def _release_on_close(client: Any, lock: DirectoryLock) -> None:
    close = client.close

    def close_and_release() -> None:
        close()
        lock.release()

    client.close = close_and_release
