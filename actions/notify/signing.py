"""Standard Webhooks signatures: the receiver can tell that the notice is ours and fresh."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainwarden.errors import ConfigError

PREFIX = "whsec_"
SHORTEST_SECRET_BYTES = 16


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """Secrets of a file, one a line, the present one first: during a rotation both sign.

    Raises
    ------
    ConfigError
        Unreadable, empty, a line that is not base64 behind ``whsec_``, or a secret too short to be one.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret file {path}: cannot be read ({error}), expected one secret a line") from None
    if not lines:
        raise ConfigError(f"secret file {path}: is empty, expected one secret a line")
    return tuple(_secret(line, path) for line in lines)


def _secret(line: str, path: Path) -> bytes:
    try:
        secret = base64.b64decode(line[len(PREFIX) :], validate=True) if line.startswith(PREFIX) else line.encode()
    except binascii.Error:
        raise ConfigError(f"secret file {path}: what follows {PREFIX} is not base64") from None
    if len(secret) < SHORTEST_SECRET_BYTES:
        raise ConfigError(
            f"secret file {path}: a secret of {len(secret)} bytes, expected at least {SHORTEST_SECRET_BYTES}"
        )
    return secret


def sign(secrets: Sequence[bytes], notice_id: str, now_s: int, body: bytes) -> Mapping[str, str]:
    """Headers of a signed notice.

    Examples
    --------
    >>> sign([b"0123456789abcdef"], "msg_1", 1700000000, b"{}")["webhook-signature"]
    'v1,3uojc/2kvL+KpJkw4ZNrA/5YjEs9cdfKdc3lXIvRjkk='
    """
    content = f"{notice_id}.{now_s}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode() for secret in secrets)
    return {
        "webhook-id": notice_id,
        "webhook-timestamp": str(now_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
