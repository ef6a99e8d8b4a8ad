"""A process that has imported torch once and forks the workers from there.

Starting a worker then takes milliseconds instead of the seconds of a fresh import. The
zygote is forked from the launcher before that has any thread, is single threaded itself,
and dies with the launcher; the workers die with the zygote (parent-death signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trainwarden_hook import autoload

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
MAX_MESSAGE_BYTES = 1 << 20
FAILED_TO_START = 127
FATAL_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True, slots=True)
class Request:
    """One worker to start. Empty ``stdout`` / ``stderr`` inherit the launcher's."""

    key: int
    argv: list[str]
    env: dict[str, str]
    stdout: str = ""
    stderr: str = ""
    fresh: bool = False


@dataclass
class Zygote:
    """The launcher's end."""

    pid: int
    channel: socket.socket
    closed: bool = field(default=False)

    def spawn(self, request: Request) -> bool:
        """Ask for a worker; its pid comes as an event of kind ``spawned``. ``False`` when the zygote is gone."""
        body = {name: getattr(request, name) for name in Request.__dataclass_fields__}
        try:
            self.channel.send(json.dumps(body).encode())
        except OSError:
            return False
        return True

    def read(self) -> dict[str, Any] | None:
        """Wait for an event: ``{"spawned": pid, "key"}`` or ``{"exited": pid, "code"}``; ``None`` at the end."""
        try:
            body = self.channel.recv(MAX_MESSAGE_BYTES)
        except OSError:
            return None
        return json.loads(body) if body else None

    def close(self) -> None:
        """End the zygote and with it every worker that is left."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.channel.close()


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when its parent (thread) ends; at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(FAILED_TO_START)


def name_process(name: str) -> None:
    """What ``ps`` and ``/proc/<pid>/comm`` show (15 characters)."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])


def preload(modules: Sequence[str]) -> list[str]:
    """Import ``modules``; returns the names that could not be imported."""
    missing = []
    for name in modules:
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    return missing


def start(run_worker: Callable[[Request], None] | None = None) -> Zygote:
    """Fork the zygote. Call it after the imports and before any thread is started."""
    launcher = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Forked children would copy pages at the first garbage collection; frozen objects are left alone.
    gc.collect()
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, launcher, run_worker or run_script)
    theirs.close()
    return Zygote(pid, ours)


def _serve(channel: socket.socket, launcher: int, run_worker: Callable[[Request], None]) -> NoReturn:
    code = 0
    try:
        die_with_parent(launcher)
        name_process("tw-zygote")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _loop(channel, run_worker)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _loop(channel: socket.socket, run_worker: Callable[[Request], None]) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    # not select(): it refuses descriptors from 1024 on, and a launcher may have many
    waiting = select.poll()
    waiting.register(channel.fileno(), select.POLLIN)
    waiting.register(wake_read, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if wake_read in ready:
            os.read(wake_read, 4096)
        _reap(channel)
        if channel.fileno() in ready and not _accept(channel, (wake_read, wake_write), run_worker):
            return


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(channel, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(channel: socket.socket, event: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        channel.send(json.dumps(event).encode())


def _accept(channel: socket.socket, wake: tuple[int, int], run_worker: Callable[[Request], None]) -> bool:
    body = channel.recv(MAX_MESSAGE_BYTES)
    if not body:
        return False
    request = Request(**json.loads(body))
    zygote = os.getpid()
    ready, steady = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        _become_worker(request, zygote, (channel.fileno(), *wake), steady, run_worker)
    os.close(steady)
    # Nobody learns the pid before the worker is bound to die with us: one that is stopped
    # in its first millisecond would otherwise outlive the job.
    os.read(ready, 1)
    os.close(ready)
    _tell(channel, {"spawned": pid, "key": request.key})
    return True


def _become_worker(
    request: Request,
    zygote: int,
    inherited: tuple[int, ...],
    steady: int,
    run_worker: Callable[[Request], None],
) -> NoReturn:
    code: int = 1
    try:
        _leave_zygote(zygote, inherited)
        os.close(steady)
        _redirect(request)
        os.environ.update(request.env)
        run_worker(request)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        traceback.print_exc()
    _finish(code)


def _leave_zygote(zygote: int, inherited: tuple[int, ...]) -> None:
    signal.set_wakeup_fd(-1)
    # Handlers that libraries of the launcher have set for a crash may wait for threads that a fork does not have:
    # the worker would hang where a fresh process dies.
    for number in (signal.SIGCHLD, signal.SIGTERM, *FATAL_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    if faulthandler.is_enabled():
        faulthandler.disable()
        faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(zygote)
    name_process(f"tw-worker-{os.getpid()}")
    for descriptor in inherited:
        os.close(descriptor)


def _redirect(request: Request) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for path, descriptor in ((request.stdout, 1), (request.stderr, 2)):
        if path:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, descriptor)
            os.close(target)
    if request.stdout or request.stderr:
        # Whatever the launcher's process has put there is not the worker's.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for stream in (sys.stdout, sys.stderr):
        # A killed worker must not take its last lines with it.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def run_script(request: Request) -> None:
    """Run the user's script (or module, ``-m name``) as ``__main__`` in this process."""
    argv = request.argv
    if argv[0] == "--no-python":
        os.execvp(argv[1], argv[1:])
    if request.fresh:
        os.execv(sys.executable, [sys.executable, "-u", *argv])
    _reseed()
    autoload.install()
    if argv[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


def _reseed() -> None:
    """A fork shares numpy's global generator with its siblings; a fresh process would not."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _finish(code: int) -> NoReturn:
    """End as the interpreter would: threads are joined, exit handlers run, streams flushed."""
    try:
        import atexit
        import threading

        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
