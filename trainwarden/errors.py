"""Errors that a person reads: each is one sentence of what was found, what was expected and what to do."""

from __future__ import annotations


class TrainwardenError(Exception):
    """Base of all errors that end a command with one clear sentence instead of a traceback."""

    exit_code = 1


class UsageError(TrainwardenError):
    """The command line, a file or a permission is not what the command needs."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is wrong; the message names the key and the nearest right one."""


class UnavailableError(UsageError):
    """A part that must be there (broker, store, Java, port, permission) is not."""


class DecodeError(TrainwardenError):
    """Bytes that are no record of ours.

    Parameters
    ----------
    reason
        One sentence; it travels with the bytes to the dead-letter topic.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BusError(TrainwardenError):
    """The broker refused or lost something that the caller must know about."""


class NoTopicError(BusError):
    """The broker has no such topic, or none that this client may see. Nothing of what was to be sent along with it was."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} does not exist: run `trainwarden topics` first")
        self.topic = topic
