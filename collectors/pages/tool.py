"""A vendor's tool as a feed: found or given, asked no oftener than its cost allows, or its answer read from a file that others write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from collectors.base import Context
from collectors.pages.command import Command, found_tool
from collectors.pages.reader import FILE, Feed, Reading, path_reader
from trainwarden.errors import ConfigError

T = TypeVar("T")

Run = Callable[..., bytes]


@dataclass(frozen=True)
class Pace:
    """How often, how long, and how much of a core a tool may take."""

    every_s: float
    deadline_s: float
    share: float


class Tool(Generic[T]):
    """Asks a tool.

    Parameters
    ----------
    setting
        ``auto`` (the first of `candidates` that exists, on the machine's own tree), ``off``, an absolute path, or ``file:/path``.
    collect
        Gets a function that runs the tool with arguments and returns what it prints; returns what is read from that.
    """

    def __init__(
        self, context: Context, key: str, setting: str, candidates: Sequence[str], pace: Pace, collect: Callable[[Run], T]
    ) -> None:  # fmt: skip
        inline = setting.startswith(FILE)
        self._command = Command(pace.deadline_s)
        self._content = path_reader(context, setting, key) if inline else None
        self._path = "" if inline else _path(context, key, setting, candidates)
        self.there = inline or bool(self._path)
        self._now_ns = context.clock.monotonic_ns
        self._pace = pace
        self._collect = collect
        self._cpu_s = 0.0
        self._feed: Feed[T] = Feed(
            context,
            key.split(".")[-2],
            self._ask,
            pace.every_s,
            pace.deadline_s,
            wake=self._command.stop,
            inline=inline,
        )

    def newest(self) -> Reading[T]:
        """The newest answer; raises `PageError`."""
        return self._feed.newest()

    def close(self) -> None:
        """End."""
        self._feed.close()

    def _ask(self) -> tuple[T, object]:
        self._cpu_s = 0.0
        found = self._collect(self._run)
        self._feed.every_s = max(self._pace.every_s, self._cpu_s / max(self._pace.share, 1e-6))
        return found, self._now_ns()

    def _run(self, *arguments: str) -> bytes:
        if self._content is not None:
            return self._content()
        answer = self._command.run([self._path, *arguments])
        self._cpu_s += answer.cpu_s
        return answer.output


def _path(context: Context, key: str, setting: str, candidates: Sequence[str]) -> str:
    if setting == "off":
        return ""
    if setting == "auto":
        return found_tool(candidates) if context.files.live else ""
    if not setting.startswith("/"):
        raise ConfigError(f"{key}: {setting!r} is none of auto, off, /path/of/the/tool, file:/path")
    return setting
