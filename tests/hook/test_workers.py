"""Workers forked from the zygote: exit codes, signals, stopped ones, and no orphan. No torch here."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainwarden_hook import zygote
from trainwarden_hook.workers import Worker, Workers
from trainwarden_hook.zygote import Request

from tests.hook.cluster import wait_for


class Nursery:
    """A zygote of the test process and its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.zygote = zygote.start()
        self.exits: dict[int, int | None] = {}
        self.ended = threading.Condition()
        self.workers = Workers(self.zygote, self._on_exit, grace_s=0.3)

    def _on_exit(self, worker: Worker) -> None:
        with self.ended:
            self.exits[worker.rank] = worker.exit_code
            self.ended.notify_all()

    def run(self, rank: int, code: str, *args: str, fresh: bool = False) -> Worker:
        script = self.folder / f"script{rank}.py"
        script.write_text(textwrap.dedent(code))
        worker = Worker(rank, rank, 1)
        out = str(self.folder / f"{rank}.out")
        request = Request(0, [str(script), *args], {"RANK": str(rank)}, out, out, fresh)
        self.workers.start(worker, request)
        return worker

    def exit_of(self, rank: int) -> int | None:
        with self.ended:
            assert self.ended.wait_for(lambda: rank in self.exits, 60)
            return self.exits[rank]

    def output(self, rank: int) -> str:
        path = self.folder / f"{rank}.out"
        return path.read_text() if path.exists() else ""

    def wait_output(self, rank: int, text: str) -> None:
        wait_for(f"{text!r} from worker {rank}", lambda: text in self.output(rank), 60)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(tmp_path)
    yield made
    made.zygote.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('words')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        # without a core file: that of a forked test process may be a gigabyte
        ("import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()", -6),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_exit_codes_are_those_of_a_plain_process(nursery: Nursery, code: str, expected: int, fresh: bool) -> None:
    nursery.run(0, code, fresh=fresh)
    assert nursery.exit_of(0) == expected


def test_a_worker_that_aborts_dies_whatever_handler_a_library_of_the_launcher_has_set(tmp_path: Path) -> None:
    """ClickHouse's, for one, waits minutes for a thread to write its report; a fork has no such thread. Here: one that waits for ever."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.pause, ctypes.c_void_p))
    made = Nursery(tmp_path)
    try:
        made.run(0, "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()")
        assert made.exit_of(0) == -6
    finally:
        libc.signal(signal.SIGABRT, before)
        made.zygote.close()


def test_a_launcher_with_very_many_open_files_starts_workers_too(tmp_path: Path) -> None:
    """select() refuses descriptors from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    made = Nursery(tmp_path)
    try:
        made.run(0, "pass")
        assert made.exit_of(0) == 0
    finally:
        made.zygote.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_script_is_main_with_its_arguments_directory_and_environment(nursery: Nursery) -> None:
    (nursery.folder / "beside.py").write_text("VALUE = 41")
    nursery.run(
        2,
        """
        import os, sys, beside
        if __name__ == "__main__":
            print(sys.argv[1:], os.environ["RANK"], beside.VALUE, sys.path[0] == os.path.dirname(__file__))
    """,
        "--x",
        "1",
    )
    assert nursery.exit_of(2) == 0
    assert nursery.output(2) == "['--x', '1'] 2 41 True\n"


def test_a_traceback_and_the_last_words_reach_the_log(nursery: Nursery) -> None:
    nursery.run(
        0,
        """
        import os, signal
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    """,
    )
    nursery.run(1, "raise ValueError('what happened')")
    assert (nursery.exit_of(0), nursery.exit_of(1)) == (-9, 1)
    assert nursery.output(0) == "last words\n"
    assert "ValueError: what happened" in nursery.output(1)


def test_exit_handlers_and_threads_are_finished(nursery: Nursery) -> None:
    nursery.run(
        0,
        """
        import atexit, threading, time
        atexit.register(lambda: print("handler"))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    """,
    )
    assert nursery.exit_of(0) == 0
    assert nursery.output(0) == "thread\nhandler\n"


STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready")
    time.sleep(600)
"""


def test_stop_ends_willing_stubborn_and_stopped_workers(nursery: Nursery) -> None:
    nursery.run(0, "import time; print('ready'); time.sleep(600)")
    nursery.run(1, STUBBORN)
    frozen = nursery.run(2, "import time; print('ready'); time.sleep(600)")
    for rank in range(3):
        nursery.wait_output(rank, "ready")
    os.kill(frozen.pid, signal.SIGSTOP)
    wait_for("the stop", lambda: ") T" in Path(f"/proc/{frozen.pid}/stat").read_text(), 10)
    assert nursery.workers.stop() == []
    assert [nursery.exit_of(rank) for rank in range(3)] == [-15, -9, -9]


def test_kill_by_rank(nursery: Nursery) -> None:
    worker = nursery.run(4, "import time; time.sleep(600)")
    assert nursery.workers.kill(5) is None
    assert nursery.workers.kill(4) == worker.pid
    assert nursery.exit_of(4) == -9
    assert nursery.workers.kill(4) is None


def test_a_lost_zygote_is_the_death_of_its_workers(nursery: Nursery) -> None:
    worker = nursery.run(0, "import time; time.sleep(600)")
    os.kill(nursery.zygote.pid, signal.SIGKILL)
    assert nursery.exit_of(0) == -9
    wait_for("the worker to go", lambda: not alive(worker.pid), 10)
    with pytest.raises(RuntimeError, match="zygote is gone"):
        nursery.run(1, "pass")


LAUNCHER = """
import os, sys, time
from trainwarden_hook import zygote
from trainwarden_hook.workers import Worker, Workers
workers = Workers(zygote.start(), lambda worker: None, 1.0)
worker = Worker(0, 0, 1)
workers.start(worker, zygote.Request(0, [sys.argv[1]], {}))
print(worker.pid, workers._zygote.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_no_orphan_when_the_launcher_is_killed(tmp_path: Path, stopped: bool) -> None:
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path / "sleep.py")], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_for("the worker and the zygote to go", lambda: not any(alive(pid) for pid in pids), 10)


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_preload_names_what_is_missing() -> None:
    assert zygote.preload(["json", "no_such_module_here"]) == ["no_such_module_here"]


def test_many_workers_at_once(nursery: Nursery) -> None:
    for rank in range(20):
        nursery.run(rank, f"raise SystemExit({rank})")
    deadline = time.monotonic() + 20
    assert [nursery.exit_of(rank) for rank in range(20)] == list(range(20))
    assert time.monotonic() < deadline
