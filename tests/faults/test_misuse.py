"""Wrong use of every command: one clear sentence on stderr, exit code 2, no traceback, no process left."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.faults.processes import MARK, marked
from tests.faults.theatre import SEEDS, wait_for
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PYTHON = sys.executable
LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING) ")
NOBODY = 65534
WITHOUT_POWERS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
"""Root without capabilities is held by permissions like anybody."""


def ours(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "trainwarden.cli", *arguments]


def warden(*launcher: str, **flags: str) -> list[str]:
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [PYTHON, "-m", "trainwarden_hook.warden", *given, "--", *(launcher or ("true",))]


def refused(command: Sequence[str], cwd: Path, more: Mapping[str, str] | None = None, limit_s: float = 120.0) -> str:
    """The one sentence with which a command says no."""
    mark = f"misuse-{os.urandom(8).hex()}"
    env = {**os.environ, MARK: mark, **(more or {})}
    done = subprocess.run(list(command), cwd=cwd, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    return sentence_of(command, done.returncode, done.stderr, mark)


def sentence_of(command: Sequence[str], code: int, stderr: str, mark: str) -> str:
    assert "Traceback" not in stderr, f"{' '.join(command)}\n{stderr}"
    assert code == 2, f"{' '.join(command)} ended with {code}\n{stderr}"
    lines = [line for line in stderr.splitlines() if line.strip() and not LOG_LINE.match(line)]
    assert len(lines) == 1, f"{' '.join(command)}: expected one sentence\n{stderr}"
    assert re.match(r"trainwarden(-\w+)?: \S", lines[0]), stderr
    wait_for("what it had started to go, too", lambda: not marked(mark), 60)
    return lines[0]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with TansuBroker(tmp_path_factory.mktemp("misuse") / "tansu.log") as tansu:
        yield f"kafka://{tansu.bootstrap}"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


class Files:
    """Configuration and secret of one test."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.secret = directory / "secret"
        self.secret.write_text("0123456789abcdef0123456789abcdef")
        self.url = url

    def write(self, run_dir: Path | None = None, more: str = "", ports: Mapping[str, int] | None = None) -> str:
        chosen = {name: free_port() for name in ("store", "worker", "actions")} | dict(ports or {})
        path = self.directory / "trainwarden.toml"
        path.write_text(f"""
run_dir = "{run_dir or self.directory / "run"}"
[kafka]
url = "{self.url}"
[store]
url = "clickhouse://127.0.0.1:{chosen["store"]}/trainwarden"
directory = "clickhouse"
[streams]
web_listen = "127.0.0.1:{chosen["worker"]}"
[actions]
listen = "127.0.0.1:{chosen["actions"]}"
[backends.warden]
secret_file = "{self.secret}"
[collector]
node = "n0"
{more}
""")
        return str(path)

    def raw(self, text: str) -> str:
        path = self.directory / "trainwarden.toml"
        path.write_text(text)
        return str(path)


@pytest.fixture
def files(tmp_path: Path, broker: str) -> Files:
    return Files(tmp_path, broker)


@pytest.mark.parametrize("part", ["store", "worker", "actions"])
def test_port_of_a_service_is_in_use(files: Files, taken: int, part: str) -> None:
    sentence = refused(ours(part, "--config", files.write(ports={part: taken})), files.directory)
    assert str(taken) in sentence


def test_port_of_a_broker_is_in_use(tmp_path: Path, taken: int) -> None:
    sentence = refused(ours("broker", "--listen", f"127.0.0.1:{taken}", "--directory", str(tmp_path / "b")), tmp_path)
    assert str(taken) in sentence


@pytest.mark.kafka
def test_port_of_apache_kafka_is_in_use(kafka_runtime: None, tmp_path: Path, taken: int) -> None:
    command = ours("broker", "--kind", "kafka", "--listen", f"127.0.0.1:{taken}", "--directory", str(tmp_path / "b"))
    assert str(taken) in refused(command, tmp_path)


def test_port_of_a_collectors_page_is_in_use(files: Files, taken: int) -> None:
    config = files.write(more=f'metrics_listen = "127.0.0.1:{taken}"')
    assert str(taken) in refused(ours("collect", "--config", config), files.directory)


def test_port_of_a_warden_is_in_use(files: Files, taken: int) -> None:
    home = str(files.directory / "w")
    command = warden(
        node="n0", job="j", listen=f"127.0.0.1:{taken}", secret_file=str(files.secret), state_dir=home, run_dir=home
    )
    assert str(taken) in refused(command, files.directory)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A directory that may not be written, and what to put before a command so that this holds for it."""
    directory = tmp_path / "closed"
    directory.mkdir(mode=0o755)
    if os.geteuid() != 0:
        directory.chmod(0o555)
        yield directory, ()
        directory.chmod(0o755)
        return
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and there is no setpriv (util-linux) to give its powers up")
    os.chown(directory, NOBODY, NOBODY)
    yield directory, WITHOUT_POWERS


Closed = tuple[Path, tuple[str, ...]]


@pytest.mark.parametrize("part", ["store", "worker", "actions", "collect", "up"])
def test_run_directory_may_not_be_written(files: Files, closed: Closed, part: str) -> None:
    directory, before = closed
    more = ["--without-broker"] if part == "up" else []
    sentence = refused(
        [*before, *ours(part, "--config", files.write(run_dir=directory / "run"), *more)], files.directory
    )
    assert str(directory) in sentence


@pytest.mark.parametrize("kind", ["tansu", pytest.param("kafka", marks=pytest.mark.kafka)])
def test_broker_directory_may_not_be_written(
    tmp_path: Path, closed: Closed, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "kafka":
        request.getfixturevalue("kafka_runtime")
    directory, before = closed
    listen = f"127.0.0.1:{free_port()}"
    command = [*before, *ours("broker", "--kind", kind, "--listen", listen, "--directory", str(directory / "b"))]
    assert str(directory) in refused(command, tmp_path)


def test_warden_directories_may_not_be_written(files: Files, closed: Closed) -> None:
    directory, before = closed
    for state, run in ((directory / "s", files.directory / "r"), (files.directory / "s", directory / "r")):
        command = warden(
            node="n0",
            job="j",
            listen="127.0.0.1:0",
            secret_file=str(files.secret),
            state_dir=str(state),
            run_dir=str(run),
        )
        assert str(directory) in refused([*before, *command], files.directory)


@pytest.mark.torch
def test_demo_directory_may_not_be_written(tmp_path: Path, closed: Closed) -> None:
    directory, before = closed
    assert str(directory) in refused([*before, *ours("demo", "--directory", str(directory / "d"))], tmp_path)


WRONG: dict[str, tuple[Callable[[Files], str], str]] = {
    "unknown key": (lambda files: files.write(more="\n[actions.rails]\nx = 1"), "actions"),
    "unknown table": (lambda files: files.write(more="\n[colector]\nnode = 'n'"), "collector"),
    "wrong type": (lambda files: files.write(more="interval_ms = 'soon'"), "interval_ms"),
    "no TOML": (lambda files: files.write(more="= ="), "trainwarden.toml"),
    "no such file": (lambda files: str(files.directory / "absent.toml"), "absent.toml"),
    "a directory": (lambda files: str(files.directory), "irectory"),
    "no bus": (lambda files: files.raw("[kafka]\nurl = 'amqp://x'"), "amqp"),
}


CASES = [("actions", what) for what in WRONG] + [
    (part, what) for part in ("store", "worker", "collect", "up") for what in WRONG if SEEDS or what == "no bus"
]


@pytest.mark.parametrize(("part", "what"), CASES)
def test_wrong_configuration(files: Files, part: str, what: str) -> None:
    make, words = WRONG[what]
    assert words in refused(ours(part, "--config", make(files)), files.directory)


@pytest.fixture
def no_java(tmp_path: Path) -> dict[str, str]:
    """A PATH with everything but Java."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for entry in Path(folder).iterdir():
            link = programs / entry.name
            if not entry.name.startswith("java") and not link.is_symlink():
                link.symlink_to(entry)
    return {"PATH": str(programs), "JAVA_HOME": ""}


def test_no_java_for_the_broker(tmp_path: Path, no_java: dict[str, str]) -> None:
    command = ours(
        "broker", "--kind", "kafka", "--listen", f"127.0.0.1:{free_port()}", "--directory", str(tmp_path / "b")
    )
    assert "Java" in refused(command, tmp_path, no_java)


@pytest.mark.torch
def test_no_java_for_the_demo(tmp_path: Path, no_java: dict[str, str]) -> None:
    assert "Java" in refused(ours("demo", "--broker", "kafka", "--directory", str(tmp_path / "d")), tmp_path, no_java)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fault", "flood"], "flood"),
        (["--fault", "frezee"], "freeze"),
        (["--broker", "rabbit"], "rabbit"),
        (["--mode", "berserk"], "berserk"),
        (["--kafka", "amqp://x"], "amqp"),
        (["--kafka", "kafka://127.0.0.1:9"], "127.0.0.1:9"),
        (["--json", "absent/outcome.json"], "absent"),
    ],
)
def test_wrong_flags_of_the_demo(tmp_path: Path, flags: list[str], words: str) -> None:
    assert words in refused(ours("demo", "--directory", str(tmp_path / "d"), *flags), tmp_path)


@pytest.mark.torch
def test_demo_directory_holds_what_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    sentence = refused(ours("demo", "--directory", str(tmp_path)), tmp_path)
    assert str(tmp_path) in sentence
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.torch
def test_demo_directory_is_in_use(tmp_path: Path) -> None:
    """By another demonstration: it holds a lock on its marker as long as it lives."""
    with (tmp_path / ".trainwarden-demo").open("w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        (tmp_path / "ledger.sqlite").write_text("theirs")
        assert "another demonstration" in refused(ours("demo", "--directory", str(tmp_path)), tmp_path)
    assert (tmp_path / "ledger.sqlite").exists()


@pytest.mark.torch
def test_demo_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("a file")
    assert str(tmp_path / "d") in refused(ours("demo", "--directory", str(tmp_path / "d")), tmp_path)
    assert (tmp_path / "d").read_text() == "a file"


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "127.0.0.1:", "203.0.113.1:19092"])
def test_wrong_address_of_a_broker(tmp_path: Path, listen: str) -> None:
    refused(ours("broker", "--listen", listen, "--directory", str(tmp_path / "b")), tmp_path)
