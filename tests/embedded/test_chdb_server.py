"""The store's owner process against the ordinary client, plain HTTP, second owners and crashes."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clickhouse_connect
import pyarrow as pa
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, StreamFailureError

from streams.store import chdb_insert
from streams.store.chdb_server import Access, ChdbServer
from streams.store.connect import connect
from streams.store.errors import StoreError
from trainwarden.embedded.ports import free_port
from trainwarden.errors import ConfigError, UnavailableError

OWNER = """
import sys, threading, signal
from pathlib import Path
from streams.store.chdb_server import Access, ChdbServer, serve
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
access = Access("tw", sys.argv[3]) if sys.argv[3] else None
serve(ChdbServer(Path(sys.argv[1]), port=int(sys.argv[2]), access=access), lambda line: print(line, flush=True), stop)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbServer]:
    with ChdbServer(tmp_path_factory.mktemp("chdb") / "store", port=0, readonly_port=0) as running:
        yield running


@pytest.fixture
def client(server: ChdbServer) -> Iterator[Any]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def table(client: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    name = "t_" + str(abs(hash(request.node.name)))
    client.command(f"CREATE TABLE {name} (a UInt64, s LowCardinality(String), v Float32) ENGINE = MergeTree ORDER BY a")
    yield name
    client.command(f"DROP TABLE {name}")


def ask(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, headers or {})
    return connection.getresponse()


# --- the ordinary client


def test_rows_columns_frames_and_arrow_go_in_and_out(client: Any, table: str) -> None:
    assert client.insert(table, [[1, "x", 1.5], [2, "y", 2.5]], column_names=["a", "s", "v"]).written_rows == 2
    rows = pa.table({"a": [3, 4], "s": ["z", "z"], "v": pa.array([3.5, 4.5], pa.float32())})
    assert client.insert_arrow(table, rows).written_rows == 2
    client.insert_df(table, client.query_df(f"SELECT a + 10 AS a, s, v FROM {table}"))
    assert client.query_df(f"SELECT * FROM {table}").shape == (8, 3)
    assert client.query_arrow(f"SELECT * FROM {table}").num_rows == 8
    assert client.query_np(f"SELECT a FROM {table} WHERE a < 3 ORDER BY a").tolist() == [[1], [2]]


@pytest.mark.parametrize("compress", [False, "lz4", "zstd", "gzip", True])
def test_inserts_arrive_in_every_encoding_that_the_client_knows(
    server: ChdbServer, table: str, compress: bool | str
) -> None:
    with server.client(compress=compress) as client:
        client.insert(table, [[n, "x", 0.0] for n in range(5000)], column_names=["a", "s", "v"])
        assert client.query(f"SELECT count(), sum(a) FROM {table}").result_rows == [(5000, 12_497_500)]


def test_an_empty_result_still_has_its_columns(client: Any, table: str) -> None:
    assert client.query(f"SELECT * FROM {table} WHERE a > 100").column_names == ("a", "s", "v")
    assert client.query(f"SELECT * FROM {table} LIMIT 0").column_names == ("a", "s", "v")
    with client.query_df_stream(f"SELECT * FROM {table}") as frames:
        assert sum(len(frame) for frame in frames) == 0


def test_parameters_of_all_kinds_and_sizes(client: Any) -> None:
    odd = "a'b\tc\\d\n`ü"
    assert client.query("SELECT {x:String}, {y:Array(Int32)}", parameters={"x": odd, "y": [1, 2]}).result_rows == [
        (odd, [1, 2])
    ]
    long = "x" * 300_000  # does not fit a URL: the client sends a form
    assert client.query("SELECT length({x:String})", parameters={"x": long}).result_rows == [(300_000,)]
    assert client.query("SELECT * FROM {t:Identifier}.one", parameters={"t": "system"}).result_rows == [(0,)]


def test_settings_and_databases_end_with_their_request(client: Any, server: ChdbServer) -> None:
    asked = "SELECT getSetting('max_threads'), currentDatabase()"
    client.command("CREATE DATABASE IF NOT EXISTS side")
    with server.client(database="side", settings={"max_threads": 3}) as other:
        assert other.query(asked).result_rows == [(3, "side")]
    client.command("SET max_threads = 5")
    client.command("USE side")
    assert client.query(asked).result_rows != [(5, "side")]
    assert client.query(asked).result_rows[0][1] == "default"
    with pytest.raises(DatabaseError) as caught:
        client.query(
            "SELECT number FROM numbers(200000) ORDER BY sipHash64(number)", settings={"max_memory_usage": "1000"}
        )
    assert caught.value.code == 241


def test_an_insert_token_removes_what_is_sent_twice(client: Any) -> None:
    client.command(
        "CREATE TABLE dedup (a UInt64) ENGINE = MergeTree ORDER BY a SETTINGS non_replicated_deduplication_window = 10"
    )
    for _ in range(2):
        client.insert("dedup", [[1], [2]], column_names=["a"], settings={"insert_deduplication_token": "t-0-100"})
    client.insert("dedup", [[1], [2]], column_names=["a"], settings={"insert_deduplication_token": "t-0-101"})
    assert client.command("SELECT count() FROM dedup") == 4


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELECT x FROM nope", 60),
        ("SELECT FROM WHERE", 62),
        ("SELECT 1; DROP TABLE nope", 62),
        ("SELECT 1 INTO OUTFILE '/nonexistent/x'", 48),
        ("INSERT INTO nope VALUES (1)", 60),
    ],
)
def test_errors_have_clickhouses_codes(client: Any, sql: str, code: int) -> None:
    with pytest.raises(DatabaseError, match="DB::Exception") as caught:
        client.command(sql)
    assert caught.value.code == code


def test_a_failing_insert_writes_nothing_and_the_next_one_works(client: Any, table: str) -> None:
    with pytest.raises(DatabaseError) as caught:
        client.raw_insert(table, ["a", "s", "v"], b"1,x,0\nnot a number,y,0\n", fmt="CSV")
    assert caught.value.code == 27
    client.raw_insert(table, ["a", "s", "v"], b"1,x,0\n", fmt="CSV")
    assert client.command(f"SELECT count() FROM {table}") == 1


@pytest.mark.parametrize(
    ("table", "settings", "code"),
    [
        ("(a UInt64) ENGINE = MergeTree ORDER BY a PARTITION BY a", {"max_partitions_per_insert_block": 2}, 252),
        ("(a UInt64, CONSTRAINT k CHECK a < 5) ENGINE = MergeTree ORDER BY a", {}, 469),
    ],
)
def test_an_insert_that_fails_in_writing_is_told(client: Any, table: str, settings: dict[str, int], code: int) -> None:
    """The engine's own streaming insert told of errors in reading only: a full disk lost every row in silence."""
    client.command(f"CREATE TABLE refusing {table}")
    try:
        with pytest.raises(DatabaseError) as caught:
            client.insert_arrow("refusing", pa.table({"a": pa.array(range(10), pa.uint64())}), settings=settings)
        assert caught.value.code == code
        assert client.command("SELECT count() FROM refusing") == 0
    finally:
        client.command("DROP TABLE refusing")


def test_an_insert_larger_than_memory_allows_goes_by_the_disk(
    client: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chdb_insert, "IN_MEMORY_BYTES", 1000)
    client.raw_insert(table, ["a", "s", "v"], b"".join(b"%d,x,0\n" % n for n in range(2000)), fmt="CSV")
    assert client.command(f"SELECT count(), sum(a) FROM {table}") == ["2000", str(sum(range(2000)))]


def test_streams_arrive_whole_and_tell_an_error_behind_data(client: Any) -> None:
    with client.query_row_block_stream("SELECT number FROM numbers(500000)") as blocks:
        assert sum(len(block) for block in blocks) == 500_000
    failing = client.query_row_block_stream("SELECT throwIf(number = 1500000) FROM numbers(2000000)")
    with pytest.raises(StreamFailureError, match="throwIf"), failing as blocks:
        for _ in blocks:
            pass


def test_a_stream_that_is_left_early_frees_its_slot(tmp_path: Path) -> None:
    # needs an engine of its own: another process
    with owner(tmp_path / "store") as port, connect(f"clickhouse://127.0.0.1:{port}") as client:
        for _ in range(10):  # more than there are slots
            with client.query_row_block_stream("SELECT number FROM numbers(3000000)") as blocks:
                next(blocks)
        assert client.command("SELECT 1") == 1


def test_the_asynchronous_client_works_alike(server: ChdbServer, table: str) -> None:
    async def go() -> list[Any]:
        client = await clickhouse_connect.get_async_client(host="127.0.0.1", port=server.port)
        await client.insert(table, [[7, "z", 1.0]], column_names=["a", "s", "v"])
        numbers = await asyncio.gather(*(client.command(f"SELECT {n}") for n in range(12)))
        rows = (await client.query(f"SELECT a FROM {table}")).result_rows
        await client.close()
        return [numbers, rows]

    assert asyncio.run(go()) == [list(range(12)), [(7,)]]


def test_many_read_while_one_writes(server: ChdbServer, table: str) -> None:
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            with server.client() as client:
                while not done.is_set():
                    assert client.command(f"SELECT count() FROM {table}") % 100 == 0
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    with server.client() as client:
        for block in range(20):
            client.insert(table, [[block * 100 + n, "x", 0.0] for n in range(100)], column_names=["a", "s", "v"])
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []


# --- plain HTTP


def test_plain_http_as_curl_and_data_sources_speak_it(server: ChdbServer, table: str) -> None:
    assert ask(server.port, "GET", "/ping").read() == b"Ok.\n"
    assert ask(server.port, "GET", "/").read() == b"Ok.\n"
    assert ask(server.port, "GET", "/?query=SELECT%201").read() == b"1\n"
    assert ask(server.port, "POST", "/", b"SELECT 2").read() == b"2\n"
    answer = ask(server.port, "POST", "/?default_format=JSON&query_id=mine", b"SELECT 3 AS x")
    assert answer.headers["X-ClickHouse-Format"] == "JSON"
    assert answer.headers["X-ClickHouse-Query-Id"] == "mine"
    assert answer.headers["Content-Type"].startswith("application/json")
    assert json.loads(answer.read())["data"] == [{"x": 3}]
    path = f"/?query=INSERT%20INTO%20{table}%20FORMAT%20CSV"
    answer = ask(server.port, "POST", path, iter([b"1,a,", b"0\n2,b,1\n"]))  # chunked
    assert json.loads(answer.headers["X-ClickHouse-Summary"])["written_rows"] == "2"
    assert ask(server.port, "POST", "/", f"INSERT INTO {table} VALUES (3, 'c', 2)".encode()).status == 200
    assert ask(server.port, "GET", f"/?query=SELECT+count()+FROM+{table}").read() == b"3\n"


def test_errors_over_plain_http(server: ChdbServer) -> None:
    answer = ask(server.port, "POST", "/", b"SELECT x FROM nope")
    assert (answer.status, answer.headers["X-ClickHouse-Exception-Code"]) == (404, "60")
    assert answer.read().startswith(b"Code: 60. DB::Exception: ")
    assert ask(server.port, "POST", "/", b"").status == 400
    assert ask(server.port, "GET", "/play").status == 404
    assert ask(server.port, "POST", "/?compress=1", b"SELECT 1").status == 501
    assert ask(server.port, "POST", "/?nope_setting=1", b"SELECT 1").headers["X-ClickHouse-Exception-Code"] == "115"
    assert ask(server.port, "POST", "/?a%20b=1", b"SELECT 1").headers["X-ClickHouse-Exception-Code"] == "115"
    assert ask(server.port, "POST", "/?database=none", b"SELECT 1").headers["X-ClickHouse-Exception-Code"] == "81"
    assert ask(server.port, "POST", "/", b"x", {"Content-Encoding": "br"}).status == 415


def test_a_connection_is_used_again_and_again(server: ChdbServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for n in range(5):
        connection.request("POST", "/", f"SELECT {n}")
        assert connection.getresponse().read() == b"%d\n" % n
        connection.request("POST", "/", "SELECT nope")
        assert connection.getresponse().read().startswith(b"Code: 47")
    own_socket = connection.sock
    connection.request("GET", "/ping")
    assert connection.getresponse().read() == b"Ok.\n"
    assert connection.sock is own_socket


def test_curl_waits_for_the_go_ahead_and_gets_it(server: ChdbServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(b"SELECT 5")
        assert b"\r\n5\n" in connection.recv(4096)


def test_web_pages_are_refused(server: ChdbServer) -> None:
    assert ask(server.port, "POST", "/", b"SELECT 1", {"Origin": "http://evil.example"}).status == 403


# --- who may do what


def test_a_read_only_port_reads_and_nothing_else(server: ChdbServer, client: Any, table: str) -> None:
    client.insert(table, [[1, "x", 0.0]], column_names=["a", "s", "v"])
    with connect(f"clickhouse://127.0.0.1:{server.readonly_port}") as reader:
        assert reader.query(f"SELECT a FROM {table}").result_rows == [(1,)]
        for sql in (
            f"INSERT INTO {table} VALUES (2, 'x', 0)",
            f"INSERT INTO {table} FORMAT CSV\n2,x,0",
            f"DROP TABLE {table}",
            f"ALTER TABLE {table} DELETE WHERE 1",
            "INSERT INTO FUNCTION file('/tmp/never.csv') SELECT 1",
            "SELECT * FROM file('/etc/hostname', 'LineAsString')",
            "SELECT * FROM '/etc/hostname'",
            "SET readonly = 0",
            "SYSTEM STOP MERGES",
        ):
            with pytest.raises(DatabaseError) as caught:
                reader.command(sql)
            assert caught.value.code == 164, sql
        with pytest.raises(DatabaseError):
            reader.query("SELECT 1", settings={"readonly": "0", "allow_ddl": "1", "nonsense": "1"})
    assert client.command(f"SELECT count() FROM {table}") == 1


@pytest.mark.parametrize(("method", "extra"), [("GET", ""), ("POST", "&readonly=1")])
def test_a_get_and_a_read_only_request_cannot_write(server: ChdbServer, table: str, method: str, extra: str) -> None:
    answer = ask(server.port, method, f"/?query=DROP+TABLE+{table}{extra}")
    assert answer.headers["X-ClickHouse-Exception-Code"] == "164"


def test_beyond_loopback_a_password_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"would listen on 0\.0\.0\.0 without a password"):
        ChdbServer(tmp_path, "0.0.0.0").start()


def test_passwords_are_checked(tmp_path: Path) -> None:
    access = Access("tw", "s3cret")
    assert access.allows("tw", "s3cret")
    assert not access.allows("tw", "")
    assert not access.allows("other", "s3cret")
    assert Access().allows("anybody", "anything")


def test_a_password_is_asked_of_every_request(tmp_path: Path) -> None:
    with owner(tmp_path / "store", "s3cret") as port:
        assert connect(f"clickhouse://tw:s3cret@127.0.0.1:{port}").command("SELECT 1") == 1
        with pytest.raises(UnavailableError, match="refuses user 'tw': check user and password"):
            connect(f"clickhouse://tw:wrong@127.0.0.1:{port}")
        with pytest.raises(UnavailableError, match="has no database 'nope': create it"):
            connect(f"clickhouse://tw:s3cret@127.0.0.1:{port}/nope")
        for headers, status in (
            ({}, 403),
            ({"Authorization": "Basic !"}, 403),
            ({"X-ClickHouse-User": "tw", "X-ClickHouse-Key": "s3cret"}, 200),
        ):
            assert ask(port, "GET", "/?query=SELECT+1", headers=headers).status == status
        assert ask(port, "GET", "/?query=SELECT+1&user=tw&password=s3cret").read() == b"1\n"
        refused = ask(port, "POST", "/?query=INSERT+INTO+t+FORMAT+CSV", b"1\n" * 3_000_000)
        assert refused.headers["X-ClickHouse-Exception-Code"] == "516"  # read to the end: the client learns why
        assert ask(port, "GET", "/ping").status == 200


# --- owners and ends


class owner:
    """A store owner in a process of its own."""

    def __init__(self, directory: Path, password: str = "") -> None:
        self.directory = directory
        self.password = password
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> int:
        argv = [sys.executable, "-c", OWNER, str(self.directory), str(self.port), self.password]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "answers at" in self.process.stdout.readline()
        return self.port

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def test_a_second_owner_is_refused_with_the_first_ones_address(server: ChdbServer) -> None:
    says = (
        f"is owned by process {os.getpid()} and chDB has one owner at a time: use clickhouse://127.0.0.1:{server.port}"
    )
    with pytest.raises(UnavailableError, match=says):
        ChdbServer(server.directory, port=0).start()
    with pytest.raises(UnavailableError, match=says):
        connect(f"chdb://{server.directory}")


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot be used"):
        ChdbServer(tmp_path / "file" / "store", port=0).start()


def test_sigterm_finishes_what_runs_and_lets_go(tmp_path: Path) -> None:
    running = owner(tmp_path / "store")
    with running as port:
        answers: list[bytes] = []
        with connect(f"clickhouse://127.0.0.1:{port}") as client:
            client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
        slow = threading.Thread(target=lambda: answers.append(ask(port, "POST", "/", b"SELECT sleep(1.5)").read()))
        slow.start()
        busy = "SELECT count() FROM system.processes WHERE query LIKE '%sleep(1.5)%' AND query NOT LIKE '%processes%'"
        while ask(port, "POST", "/", busy.encode()).read() == b"0\n":
            pass
        assert running.process is not None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        slow.join()
        assert answers == [b"0\n"]
    with owner(tmp_path / "store") as port, connect(f"clickhouse://127.0.0.1:{port}") as client:
        assert client.command("SELECT count() FROM t") == 0


def test_kill_nine_while_inserting_keeps_every_acknowledged_row(tmp_path: Path) -> None:
    running = owner(tmp_path / "store")
    acknowledged = 0
    with running as port:
        client = connect(f"clickhouse://127.0.0.1:{port}")
        client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
        assert running.process is not None
        killer = threading.Timer(1.0, running.process.kill)
        killer.start()
        with pytest.raises(Exception, match=r"."):  # noqa: PT012
            while True:
                client.insert("t", [[n] for n in range(acknowledged * 50, acknowledged * 50 + 50)], column_names=["a"])
                acknowledged += 1
        killer.join()
    assert acknowledged > 0
    with owner(tmp_path / "store") as port, connect(f"clickhouse://127.0.0.1:{port}") as client:
        rows = client.query(f"SELECT count(), uniqExact(a) FROM t WHERE a < {acknowledged * 50}").result_rows
        assert rows == [(acknowledged * 50, acknowledged * 50)]


def test_reads_wait_for_a_slot_and_are_told_when_none_comes(tmp_path: Path) -> None:
    code = """
import sys, threading
from pathlib import Path
from streams.store.chdb_engine import Limits, ChdbEngine, Statement, QueryError
engine = ChdbEngine(Path(sys.argv[1]), Limits(readers=1, writers=1, wait_s=0.05)); engine.open()
with engine.read_or_command(Statement("SELECT 1")):
    try:
        with engine.read_or_command(Statement("SELECT 2")): print("in")
    except QueryError as error: print(error.code)
    with engine.insert(Statement("INSERT INTO FUNCTION null('a Int8')")) as s: print(s.insert("CSV", [b"1\\n"]).written_rows)
with engine.read_or_command(Statement("SELECT 3")) as s: print(s.run("CSV").body)
engine.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["202", "1", "b'3\\n'"], done.stderr


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8123", 200),
        ("localhost", 200),
        ("[::1]:8123", 200),
        ("rebound.example", 403),
        ("rebound.example:8123", 403),
    ],
)
def test_a_name_that_was_made_to_lead_here_reads_nothing(server: ChdbServer, host: str, status: int) -> None:
    """A page elsewhere may let its own name resolve to loopback; its requests to itself carry no Origin."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/?query=SELECT+1", headers={"Host": host})
    assert connection.getresponse().status == status
    connection.close()


# --- inserts from the same process


def test_inserts_of_the_same_process_go_the_short_way(server: ChdbServer, client: Any, table: str) -> None:
    direct = server.direct(client)
    words = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int32()), pa.array(["", "x"]))
    rows = pa.table({"a": pa.array([1, 2, 3], pa.uint64()), "s": words, "v": pa.array([1.5, None, 2.5], pa.float32())})
    for _ in range(2):
        direct.insert_arrow(table, rows, settings={"insert_deduplicate": 1})
    assert direct.query(f"SELECT a, s, v FROM {table} ORDER BY a LIMIT 3 BY s").result_rows == [
        (1, "x", 1.5), (1, "x", 1.5), (2, "", 0.0), (2, "", 0.0), (3, "x", 2.5),
    ]  # fmt: skip
    with pytest.raises(StoreError, match="UNKNOWN_TABLE"):
        direct.insert_arrow("nowhere", rows)
    with pytest.raises(StoreError, match="UNKNOWN_SETTING"):
        direct.insert_arrow(table, rows, settings={"no_such_setting": 1})
