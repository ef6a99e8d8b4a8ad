"""The launcher as the warden sees it: a child, or one that an earlier warden left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time

log = logging.getLogger("trainwarden.warden")
STOP_GRACE_S = 4.0
KILL_WAIT_S = 5.0
POLL_S = 0.02


def start_ticks(pid: int) -> int | None:
    """When the process was started, in kernel ticks; with the pid it names a process for good. ``None`` if gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


class LauncherProcess:
    """Starts, watches and stops one launcher.

    Parameters
    ----------
    command
        ``trainwarden-run`` and its arguments; node, job, run directory and the warden's socket
        reach it through the environment.
    """

    def __init__(self, command: list[str], node: str, job: str, run_dir: str) -> None:
        self._command = command
        self._own = {
            "TRAINWARDEN_NODE": node,
            "TRAINWARDEN_JOB": job,
            "TRAINWARDEN_RUN_DIR": run_dir,
            "TRAINWARDEN_WARDEN": os.path.join(run_dir, "warden.sock"),
        }
        self._log_path = os.path.join(run_dir, "launcher.log")
        self._pid_path = os.path.join(run_dir, "launcher.pid")
        self._child: subprocess.Popen[bytes] | None = None
        self._adopted: tuple[int, int] | None = None
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        """Process id while it lives, as far as `poll` has looked."""
        with self._lock:
            if self._child is not None:
                return self._child.pid
            return self._adopted[0] if self._adopted else None

    def find_earlier(self) -> bool:
        """Whether the launcher that an earlier warden started still lives; it is taken over."""
        try:
            with open(self._pid_path, encoding="utf-8") as file:
                pid, ticks = json.load(file)
        except (OSError, ValueError, TypeError):
            return False
        if start_ticks(pid) != ticks:
            return False
        self._adopted = (pid, ticks)
        log.info("launcher %d of an earlier warden still runs", pid)
        return True

    def adopt(self, pid: int) -> None:
        """A launcher has reported that is not our child."""
        with self._lock:
            ticks = start_ticks(pid)
            if (self._child is None or self._child.pid != pid) and ticks is not None:
                self._adopted = (pid, ticks)

    def start(self) -> None:
        """Start it.

        Raises
        ------
        OSError
            The program is not there or may not be run.
        """
        with self._lock, open(self._log_path, "ab") as out:
            self._child = subprocess.Popen(
                self._command,
                env={**os.environ, **self._own},
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            with open(self._pid_path, "w", encoding="utf-8") as file:
                json.dump([self._child.pid, start_ticks(self._child.pid)], file)
            log.info("launcher %d started", self._child.pid)

    def poll(self) -> int | None:
        """Exit code if it has just ended (negative = signal, -1 for an adopted one), else ``None``."""
        with self._lock:
            if self._child is not None:
                code = self._child.poll()
                if code is None:
                    return None
                self._child = None
                if self._adopted is None or start_ticks(self._adopted[0]) != self._adopted[1]:
                    return code
                # an earlier warden was killed before it had written down whom it started: ours found the job taken
                log.warning(
                    "the launcher ended with %d; launcher %d was there before and goes on", code, self._adopted[0]
                )
                return None
            if self._adopted and start_ticks(self._adopted[0]) != self._adopted[1]:
                self._adopted = None
                return -1
            return None

    def stop(self) -> int | None:
        """SIGTERM, a grace, SIGKILL; returns the pid if even that does not end it."""
        pid = self.pid
        if pid is None:
            return None
        for number, wait_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
            if _is_stopped(pid) and number == signal.SIGTERM:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if self._wait_end(wait_s):
                return None
        return pid

    def _wait_end(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if self._has_ended():
                return True
            time.sleep(POLL_S)
        return self._has_ended()

    def _has_ended(self) -> bool:
        with self._lock:
            if self._child is None and self._adopted is None:
                return True
            if self.poll() is None:
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._pid_path)
            return True


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in {"T", "t"}
    except (OSError, IndexError):
        return True
