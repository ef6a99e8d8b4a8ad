"""Control links outlive what a handler, a peer or the machine does to them."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainwarden_hook.lines import Link, Listener, Message, connect
from trainwarden_hook.peers import Peer


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ours, theirs = (Link(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_handler_that_fails_costs_its_message_and_not_the_link(pair: tuple[Link, Link]) -> None:
    heard: list[Message] = []

    def handle(_: Peer, message: Message) -> Message | None:
        heard.append(message)
        if "bad" in message:
            raise KeyError("bad")
        return {"fine": True}

    Peer(pair[0], handle).run_in_thread("under-test")
    asker = Peer(pair[1], lambda _, message: None)
    asker.run_in_thread("asker")
    assert asker.tell({"bad": 1})
    answer = asker.ask({"good": 1}, 5.0)
    assert answer is not None, "the reader thread ended with the first message"
    assert answer["fine"]


def test_a_listener_without_descriptors_listens_again_when_there_are(tmp_path: Path) -> None:
    served = threading.Event()
    listener = Listener(str(tmp_path / "a.sock"), lambda link: served.set())
    try:
        plain, failed = listener._socket, threading.Event()

        class Short:
            """The machine's table of files is full once."""

            def accept(self) -> tuple[socket.socket, object]:
                if not failed.is_set():
                    failed.set()
                    raise OSError(errno.EMFILE, "Too many open files")
                return plain.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(plain, name)

        listener._socket = Short()  # type: ignore[assignment]
        connect(listener.path).close()  # the accept under way ends; the next one fails
        assert failed.wait(60)
        served.clear()
        link = connect(listener.path)
        assert served.wait(60), "nobody can connect any more"
        link.close()
    finally:
        listener.close()
