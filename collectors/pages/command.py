"""Asking a vendor's tool: a child process with a deadline, of which there is never more than one, whatever it hangs in."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectors.pages.text import PageError

CHUNK_BYTES = 65536
MAX_OUTPUT_BYTES = 8 * 1024 * 1024
PATIENCE_S = 2.0


@dataclass(frozen=True)
class Answer:
    """What a tool printed, and the processor time that this took."""

    output: bytes
    cpu_s: float


class Command:
    """Runs tools, one at a time.

    A tool that does not end in time is asked to (SIGTERM), then killed; one that even then stays (an uninterruptible call into a sick
    device) is left alone, and nothing more is started until it is gone: a second call would only hang as well.
    """

    def __init__(self, deadline_s: float, max_bytes: int = MAX_OUTPUT_BYTES, patience_s: float = PATIENCE_S,
                 now_s: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._now_s = now_s
        self._child: subprocess.Popen[bytes] | None = None
        self._ended_fd = -1

    def run(self, argv: Sequence[str]) -> Answer:
        """The tool's output.

        Raises
        ------
        PageError
            ``no_tool``, ``timeout``, ``hung``, ``too_large``, ``failed`` (it ended with another code than 0).
        """
        self._refuse_while_stuck(argv)
        self._start(argv)
        end_s = self._now_s() + self._deadline_s
        try:
            output = self._read(argv, end_s)
            if not self._ended(end_s - self._now_s()):
                raise PageError("timeout", f"{argv[0]} did not end within {self._deadline_s:g} s")
        except PageError:
            self._put_down()
            raise
        code, cpu_s = self._reap()
        if code != 0:
            raise PageError("failed", f"{' '.join(argv)} ended with code {code}")
        return Answer(output, cpu_s)

    def stop(self) -> None:
        """End a tool that runs, from any thread: the read that waits for it then comes back."""
        child = self._child
        if child is not None:
            _signal(child.pid, signal.SIGTERM)

    def _refuse_while_stuck(self, argv: Sequence[str]) -> None:
        if self._child is None:
            return
        if not self._ended(0):
            raise PageError("hung", f"{argv[0]} of an earlier call hangs and cannot be ended")
        self._reap()

    def _start(self, argv: Sequence[str]) -> None:
        try:
            # a session of its own: signals reach what the tool starts, and those for us do not reach the tool
            self._child = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": "/"},
            )  # fmt: skip
        except OSError as error:
            raise PageError("no_tool", f"{argv[0]} cannot be started ({error.strerror})") from None
        self._ended_fd = os.pidfd_open(self._child.pid)

    def _read(self, argv: Sequence[str], end_s: float) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        chunks: list[bytes] = []
        size = 0
        while True:
            if not _readable(descriptor, end_s - self._now_s()):
                raise PageError("timeout", f"{argv[0]} printed no whole answer within {self._deadline_s:g} s")
            chunk = os.read(descriptor, CHUNK_BYTES)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_bytes:
                raise PageError("too_large", f"{argv[0]} printed more than {self._max_bytes} bytes")

    def _ended(self, timeout_s: float) -> bool:
        return _readable(self._ended_fd, timeout_s)

    def _put_down(self) -> None:
        assert self._child is not None
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal(self._child.pid, number)
            if self._ended(self._patience_s):
                self._reap()
                return

    def _reap(self) -> tuple[int, float]:
        """Exit code and processor seconds."""
        child = self._child
        assert child is not None
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.stdout is not None:
            child.stdout.close()
        os.close(self._ended_fd)
        self._child = None
        return child.returncode, usage.ru_utime + usage.ru_stime


def _signal(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _readable(descriptor: int, timeout_s: float) -> bool:
    if timeout_s < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(timeout_s * 1000))


def found_tool(names: Sequence[str], exists: Callable[[str], bool] = lambda path: os.access(path, os.X_OK)) -> str:
    """The first of these absolute paths that can be run, or an empty string."""
    return next((name for name in names if exists(name)), "")
