"""How a part proves to the broker who it is, and the broker to it: TLS and SASL, the same for kafka-python, aiokafka and Faust.

Passwords are read from files and never stand in a configuration, on a command line or in a message.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwarden.config import KafkaConfig
from trainwarden.errors import ConfigError

PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True)
class Security:
    """Resolved credentials.

    Attributes
    ----------
    context
        For TLS; ``None`` without.
    username, password
        For SASL; empty without.
    """

    protocol: str = "plaintext"
    context: ssl.SSLContext | None = None
    mechanism: str = ""
    username: str = ""
    password: str = ""

    def __repr__(self) -> str:
        who = f" as {self.username} ({self.mechanism})" if self.username else ""
        return f"<{self.protocol}{who}>"

    def options(self) -> dict[str, Any]:
        """Keyword arguments of clients of kafka-python and aiokafka; empty where nothing is to be said."""
        if self.protocol == "plaintext":
            return {}
        said: dict[str, Any] = {"security_protocol": self.protocol.upper()}
        if self.context is not None:
            said["ssl_context"] = self.context
        if self.username:
            said |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password,
            }
        return said


def security_of(config: KafkaConfig) -> Security:
    """What the configuration asks for, with certificates and password read.

    Raises
    ------
    ConfigError
        An unknown protocol or mechanism, a file that is missing or no certificate, a setting that contradicts the protocol.
    """
    protocol = config.security.lower()
    if protocol not in PROTOCOLS:
        raise ConfigError(f"kafka.security: found {config.security!r}, expected one of {', '.join(PROTOCOLS)}")
    _require_agreement(config, protocol)
    context = _context(config) if protocol.endswith("ssl") else None
    if not protocol.startswith("sasl"):
        return Security(protocol, context)
    if config.sasl_mechanism not in MECHANISMS:
        raise ConfigError(
            f"kafka.sasl_mechanism: found {config.sasl_mechanism!r}, expected one of {', '.join(MECHANISMS)}"
        )
    return Security(protocol, context, config.sasl_mechanism, config.username, _password(config))


def _require_agreement(config: KafkaConfig, protocol: str) -> None:
    """A certificate or user that would be left unused is a mistake, and one that leaves the door open."""
    unused = {
        "ca_file": config.ca_file and not protocol.endswith("ssl"),
        "certificate_file": config.certificate_file and not protocol.endswith("ssl"),
        "username": config.username and not protocol.startswith("sasl"),
    }
    for key, wrong in unused.items():
        if wrong:
            wanted = "ssl or sasl_ssl" if key.endswith("file") else "sasl_ssl or sasl_plaintext"
            raise ConfigError(f"kafka.{key} is set, but kafka.security is {protocol!r}: set it to {wanted}")
    if protocol.startswith("sasl") and not config.username:
        raise ConfigError(f"kafka.username is missing: kafka.security is {protocol!r}")


def _context(config: KafkaConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(config.ca_file) if config.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"kafka.ca_file: {config.ca_file} cannot be used: {_why(error)}") from None
    context.check_hostname = config.check_hostname
    if config.certificate_file is not None:
        try:
            context.load_cert_chain(config.certificate_file, config.key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"kafka.certificate_file: {config.certificate_file} (key {config.key_file or 'in the same file'}) "
                f"cannot be used: {_why(error)}"
            ) from None
    return context


def _password(config: KafkaConfig) -> str:
    path: Path | None = config.password_file
    if path is None:
        raise ConfigError(f"kafka.password_file is missing: the password of {config.username!r} is read from a file")
    try:
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kafka.password_file: {path} cannot be read: {_why(error)}") from None
    if not password:
        raise ConfigError(f"kafka.password_file: {path} is empty")
    return password


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no PEM certificate, or key and certificate do not belong together ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)
