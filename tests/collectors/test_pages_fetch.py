"""Fetching a page: deadlines, sizes, redirects, kept connections, back-off, ages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from collectors.pages.command import Command, found_tool
from collectors.pages.fetch import PageClient, parse_address
from collectors.pages.reader import Feed, PageFeed, PageSettings
from collectors.pages.text import PageError
from tests.collectors.kit import bench
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError

BODY = b"power 1\n"


def reply(body: bytes = BODY, status: str = "200 OK", extra: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{extra}\r\n".encode() + body


@dataclass
class Site:
    """A server on the loopback that says what it is told to: per request one answer, then it hangs up if the answer says so."""

    answers: list[bytes]
    hang_up_after: int = 99
    requests: list[str] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    def serve(self, listener: socket.socket, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                self.talk(connection, stop)

    def talk(self, connection: socket.socket, stop: threading.Event) -> None:
        for _ in range(self.hang_up_after):
            asked = b""
            while b"\r\n\r\n" not in asked:
                try:
                    got = connection.recv(4096)
                except ConnectionResetError:
                    got = b""
                if not got:
                    return
                asked += got
            self.requests.append(asked.split(b" ")[1].decode())
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            connection.sendall(answer)
            if answer[:1] == b"!":
                stop.wait(10)

    def address(self, path: str = "/metrics") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def client(self, deadline_s: float = 20.0, max_bytes: int = 10_000) -> PageClient:
        return PageClient(parse_address(self.address(), "x.url"), deadline_s, max_bytes)


@contextmanager
def site(*answers: bytes, hang_up_after: int = 99) -> Iterator[Site]:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Site(list(answers), hang_up_after, port=listener.getsockname()[1])
        thread = threading.Thread(target=made.serve, args=(listener, stop), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            stop.set()
            listener.shutdown(socket.SHUT_RDWR)


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(PageError) as caught:
        call()
    return caught.value.reason


def test_one_connection_serves_many_pages() -> None:
    with site(reply()) as server:
        client = server.client()
        assert [client.get() for _ in range(3)] == [BODY] * 3
        assert (server.connections, server.requests) == (1, ["/metrics"] * 3)


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    with site(reply(), hang_up_after=1) as server:
        client = server.client()
        assert [client.get() for _ in range(3)] == [BODY] * 3
        assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(status="503 Busy"), "http_503"),
        (reply(length=10_001), "too_large"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"3000\r\n" + b"#" * 0x3000 + b"\r\n0\r\n\r\n", "too_large"),
        (b"SSH-2.0-OpenSSH\r\n", "protocol"),
        (reply(extra="Location: http://10.9.9.9/metrics\r\n", status="302 Found"), "redirect"),
        (reply(extra="Location: /metrics\r\n", status="302 Found"), "redirect"),
        (reply(extra="Location: https://127.0.0.1/\r\n", status="301 Moved"), "redirect"),
    ],
)  # fmt: skip
def test_what_is_no_page_has_its_reason(answer: bytes, reason: str) -> None:
    with site(answer, hang_up_after=5) as server:
        assert reason_of(server.client().get) == reason


def test_a_page_cut_by_the_network_is_told() -> None:
    with site(reply(length=500), hang_up_after=1) as server:
        assert reason_of(server.client().get) == "truncated"


def test_a_chunked_page_is_whole() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npowe\r\n4\r\nr 1\n\r\n0\r\n\r\n"
    with site(chunked) as server:
        assert server.client().get() == BODY


def test_a_redirect_on_the_same_host_is_followed() -> None:
    with site(reply(extra="Location: /metrics/\r\n", status="308 Moved"), reply()) as server:
        assert server.client().get() == BODY
        assert server.requests == ["/metrics", "/metrics/"]


def test_a_server_that_says_nothing_costs_no_more_than_the_deadline() -> None:
    with site(b"!") as server:
        assert reason_of(server.client(deadline_s=0.1).get) == "timeout"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = PageClient(parse_address(f"http://127.0.0.1:{silent.getsockname()[1]}/", "x"), 0.1)
        assert reason_of(client.get) == "timeout"


def test_bytes_that_trickle_do_not_extend_the_deadline() -> None:
    """The time runs out between two chunks, though each of them comes at once."""
    times = iter([0.0, 0.1, 0.2])
    with site(reply(b"a" * 100)) as server:
        client = PageClient(parse_address(server.address(), "x"), 1.0, now_s=lambda: next(times, 99.0))
        assert reason_of(client.get) == "timeout"


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert reason_of(PageClient(parse_address(f"http://127.0.0.1:{port}/", "x"), 5.0).get) == "refused"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:9400", "ftp://x/", "http://", "http://u:p@h/", "http://h:x/", "http://h/a b", "http://h:99999/"]
)
def test_an_address_that_is_none_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match=r"collector\.sources\.dcgm\.url: '.*' is no address such as http"):
        parse_address(url, "collector.sources.dcgm.url")


# --- feeds ------------------------------------------------------------------------------------------------------------


def test_a_feed_keeps_its_answer_until_it_is_too_old(tmp_path: Path) -> None:
    board = bench(tmp_path)
    answers: list[int | PageError] = [1, PageError("refused", "no"), PageError("refused", "no"), 2]

    def ask() -> tuple[int, object]:
        answer = answers.pop(0)
        if isinstance(answer, PageError):
            raise answer
        return answer, answer

    feed: Feed[int] = Feed(board.context, "toy", ask, every_s=10.0, deadline_s=1.0, inline=True)
    assert (feed.newest().value, feed.newest().trouble) == (1, "")
    board.clock.advance_ns(10 * NS_PER_S)
    assert (feed.newest().value, feed.newest().trouble) == (1, "refused")
    board.clock.advance_ns(17 * NS_PER_S)
    assert reason_of(feed.newest) == "refused"
    board.clock.advance_ns(10 * NS_PER_S)
    assert (feed.newest().value, feed.newest().version, feed.newest().trouble) == (2, 2, "")


def test_failures_are_waited_out_longer_and_longer(tmp_path: Path) -> None:
    def ask() -> tuple[int, object]:
        raise PageError("refused", "no")

    feed: Feed[int] = Feed(bench(tmp_path).context, "toy", ask, every_s=10.0, deadline_s=1.0, inline=True)
    assert [feed.turn() for _ in range(5)] == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_feed_in_a_thread_says_that_it_begins_and_wakes_one_that_hangs(tmp_path: Path) -> None:
    board = bench(tmp_path)
    hold, begun, woken = threading.Event(), threading.Event(), threading.Event()

    def ask() -> tuple[int, object]:
        begun.set()
        hold.wait(60)
        return 7, 7

    def wake() -> None:
        woken.set()
        hold.set()

    feed: Feed[int] = Feed(board.context, "toy", ask, 10.0, 1.0, wake=wake)
    assert reason_of(feed.newest) == "starting"
    assert begun.wait(60)
    board.clock.advance_ns(3 * NS_PER_S)
    with pytest.raises(PageError):
        feed.newest()
    assert woken.is_set()
    feed.close()


def test_a_page_over_http_reaches_the_source(tmp_path: Path) -> None:
    with site(reply()) as server:
        page = PageFeed(
            bench(tmp_path).context, PageSettings(server.address()), frozenset({"power"}), "collector.sources.toy"
        )
        page.turn()
        assert page.newest().value.points["power"][0].value == 1.0
        page.close()


def test_a_page_that_stands_still_is_stale(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/page", 'power 1\npower{a="b"} NaN\n# noise 1\n')
    feed = PageFeed(board.context, PageSettings("file:/page", every_s=10.0, stale_s=25.0), frozenset({"power"}), "toy")
    for noise in (2, 3):
        feed.newest()
        board.clock.advance_ns(10 * NS_PER_S)
        board.write("/page", f'power 1\npower{{a="b"}} NaN\n# noise {noise}\n')
    assert feed.newest().version == 1
    board.clock.advance_ns(10 * NS_PER_S)
    assert reason_of(feed.newest) == "stale"
    board.write("/page", "power 2\n")
    board.clock.advance_ns(10 * NS_PER_S)
    assert feed.newest().version == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "missing"), ("", "empty"), ("power 1\npower 2", "truncated"), ("other 1\n", "no_metrics"), ("<html>\n", "not_metrics")],
)  # fmt: skip
def test_a_file_that_is_no_page_has_its_reason(tmp_path: Path, content: str | None, reason: str) -> None:
    board = bench(tmp_path)
    if content is not None:
        board.write("/page", content)
    feed = PageFeed(board.context, PageSettings("file:/page"), frozenset({"power"}), "toy")
    assert reason_of(feed.newest) == reason


def test_odd_files_are_reasons_too(tmp_path: Path) -> None:
    board = bench(tmp_path)
    (board.root / "dir").mkdir()
    feed = PageFeed(board.context, PageSettings("file:/dir"), frozenset({"power"}), "toy")
    assert reason_of(feed.newest) == "unreadable"
    with pytest.raises(ConfigError, match=r"toy\.url: 'file:page' needs an absolute path"):
        PageFeed(board.context, PageSettings("file:page"), frozenset({"power"}), "toy")


def test_bad_lines_are_counted(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/page", "power 1\npower x\npower y\n")
    PageFeed(board.context, PageSettings("file:/page"), frozenset({"power"}), "toy").newest()
    assert board.context.metrics.value("tw_source_gaps_total", source="toy", reason="bad_line") == 2


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_is_asked_and_its_processor_time_told() -> None:
    answer = Command(deadline_s=60).run(["/bin/echo", "a", "b c"])
    assert answer.output == b"a b c\n"
    assert 0 <= answer.cpu_s < 60


def test_tools_that_fail_have_their_reason() -> None:
    command = Command(deadline_s=60, max_bytes=1000)
    assert reason_of(lambda: command.run(["/no/such/tool"])) == "no_tool"
    assert reason_of(lambda: command.run(["/bin/false"])) == "failed"
    assert reason_of(lambda: command.run(["/bin/sh", "-c", "yes | head -c 5000"])) == "too_large"
    assert command.run(["/bin/echo"]).output == b"\n"


def test_a_tool_that_hangs_is_ended_with_all_that_it_started() -> None:
    command = Command(deadline_s=0.1, patience_s=60)
    assert reason_of(lambda: command.run(["/bin/sh", "-c", "sleep 600 & sleep 600"])) == "timeout"
    assert command.run(["/bin/echo"]).output == b"\n"


def test_nothing_is_started_beside_a_tool_that_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(deadline_s=0.1, patience_s=0.0)
    ignoring = ["/bin/sh", "-c", "trap '' TERM; sleep 600"]
    monkeypatch.setattr(command, "_put_down", lambda: None)  # a child in an uninterruptible call takes no signal
    assert reason_of(lambda: command.run(ignoring)) == "timeout"
    assert reason_of(lambda: command.run(["/bin/echo"])) == "hung"
    monkeypatch.undo()
    command._patience_s = 0.2
    command._put_down()
    assert command.run(["/bin/echo"]).output == b"\n"


def test_the_first_tool_that_exists_is_taken() -> None:
    assert found_tool(("/no/such", "/bin/sh", "/bin/echo")) == "/bin/sh"
    assert found_tool(("/no/such",)) == ""
