"""Apache Kafka from its artifacts: the node itself (marked kafka), and what is said where it cannot be had."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from trainwarden.bus import connect
from trainwarden.embedded.kafka import (
    CACHE_ENV,
    SCRIPTS_ENV,
    ApacheKafka,
    cache_dir,
    fetch_kafka,
    find_start_script,
    serve,
)
from trainwarden.embedded.ports import free_port, require_free_port
from trainwarden.embedded.ready import ask_metadata
from trainwarden.errors import UnavailableError
from trainwarden.topics import Topic


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache and, beside the ordinary tools, only the programs that a test puts into the folder."""
    tools, own = tmp_path / "tools", tmp_path / "own"
    tools.mkdir()
    own.mkdir()
    for name in ("sh", "sed", "head", "mkdir", "dirname", "cat", "grep", "tail"):
        (tools / name).symlink_to(next(p for p in (Path("/bin") / name, Path("/usr/bin") / name) if p.exists()))
    monkeypatch.setenv("PATH", f"{own}:{tools}")
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("KAFKA_LIB", raising=False)
    return own


TOPIC = Topic("t-crash", "key", "anything", partitions=1)


def publish(node: ApacheKafka, values: list[bytes]) -> None:
    bus = connect(f"kafka://{node.bootstrap}")
    bus.ensure_topics([TOPIC])
    publisher = bus.publisher()
    for value in values:
        publisher.publish(TOPIC.name, b"k", value)
    publisher.flush(60)
    publisher.close()


def read(node: ApacheKafka, count: int) -> list[bytes]:
    subscriber = connect(f"kafka://{node.bootstrap}").subscriber([TOPIC.name])
    found: list[bytes] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += [message.value for message in subscriber.poll(0.2)]
    subscriber.close()
    return found


JAVA = """echo 'openjdk version "{}" 2025-04-15' >&2"""


def test_no_java_is_one_sentence(bare: Path) -> None:
    with pytest.raises(UnavailableError, match=r"^no Java found \(java\): install a Java 17 runtime or set JAVA_HOME$"):
        fetch_kafka()


@pytest.mark.parametrize(("version", "says"), [("11.0.2", "is Java 11,"), ("1.8.0_292", "is Java 1,")])
def test_an_old_java_is_named(bare: Path, version: str, says: str) -> None:
    program(bare, "java", JAVA.format(version))
    with pytest.raises(UnavailableError, match=f"{says} Kafka .* needs 17 or newer: set JAVA_HOME"):
        fetch_kafka()


def test_no_maven_is_one_sentence(bare: Path) -> None:
    program(bare, "java", JAVA.format("17.0.15"))
    with pytest.raises(UnavailableError, match=r"no Maven \(mvn\) found to fetch Kafka .*install it or set KAFKA_LIB"):
        fetch_kafka()


def test_artifacts_that_cannot_be_had_are_told_with_mavens_reason(bare: Path) -> None:
    program(bare, "java", JAVA.format("21"))
    program(bare, "mvn", "echo '[ERROR] Unknown host registry'; exit 1")
    with pytest.raises(UnavailableError, match=r"Maven could not fetch Kafka .*\(Unknown host registry\)"):
        fetch_kafka()
    assert not list(cache_dir().glob("kafka-*/complete"))


def test_artifacts_are_fetched_once(bare: Path) -> None:
    program(bare, "java", JAVA.format("17"))
    program(bare, "mvn", f"echo called >> {bare}/calls")
    assert fetch_kafka() == fetch_kafka()
    assert (bare / "calls").read_text() == "called\n"


def test_a_cache_that_cannot_be_written_is_one_sentence(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "file").write_text("")
    monkeypatch.setenv(CACHE_ENV, str(bare / "file" / "cache"))
    with pytest.raises(UnavailableError, match=f"cannot be kept in .*set {CACHE_ENV}"):
        fetch_kafka()


def test_missing_scripts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRIPTS_ENV, str(tmp_path))
    with pytest.raises(UnavailableError, match=f"not in {tmp_path}: set {SCRIPTS_ENV}"):
        find_start_script()


def test_the_script_without_arguments_says_how() -> None:
    done = subprocess.run(["sh", str(find_start_script())], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "start.sh: usage: start.sh DATA_DIR [PORT], or start.sh --fetch\n")


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_node_starts_crashes_restarts_and_stops_on_its_data(kafka_runtime: None, tmp_path: Path) -> None:
    node = ApacheKafka(tmp_path / "kafka")
    with node:
        first = ask_metadata(node.host, node.port)
        assert first.brokers == ((1, "127.0.0.1", node.port),)
        assert Path(f"/proc/{node.pid}/comm").read_text() == "java\n"  # kill -9 hits Java itself, no shell in between
        publish(node, [b"1", b"2"])
        pid = node.pid
        node.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert node.start().cluster_id == first.cluster_id
        assert node.restart().cluster_id == first.cluster_id
        assert read(node, 2) == [b"1", b"2"]  # what was acknowledged survives a crash
    assert not node.alive()
    assert "ERROR" not in node.log_path.read_text()


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_the_command_stops_the_node_when_asked(kafka_runtime: None, tmp_path: Path) -> None:
    stop, port = threading.Event(), free_port()
    stop.set()
    serve("127.0.0.1", port, tmp_path / "kafka", stop)
    assert "Kafka Server started" in (tmp_path / "kafka" / "kafka.log").read_text()
    require_free_port("127.0.0.1", port, "a test")


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_node_leaves_nothing_outside_its_directory(
    kafka_runtime: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    performance_data = Path("/tmp/hsperfdata_root")
    before = set(performance_data.glob("*")) if performance_data.exists() else set()
    with ApacheKafka(tmp_path / "kafka") as node:
        assert str(node.pid) not in {p.name for p in performance_data.glob("*")} - {p.name for p in before}
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_data_directory_that_cannot_be_made_is_one_sentence(kafka_runtime: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="Apache Kafka cannot be started"):
        ApacheKafka(tmp_path / "file" / "kafka").start()


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_foreign_data_directory_is_told_with_kafkas_reason(kafka_runtime: None, tmp_path: Path) -> None:
    (tmp_path / "kafka" / "log").mkdir(parents=True)
    (tmp_path / "kafka" / "log" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    with pytest.raises(UnavailableError, match=r"Apache Kafka ended with code 1: .*node"):
        ApacheKafka(tmp_path / "kafka", free_port()).start()
