"""Questions and answers over a `Link`: either side may ask, each question has a time limit."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

from trainwarden_hook.lines import Link, Message

log = logging.getLogger("trainwarden.links")
Handler = Callable[["Peer", Message], Message | None]


class Peer:
    """The other end of a link.

    Parameters
    ----------
    handle
        Called in the reader thread with every message that is no answer; what it returns
        is the answer if the message was a question. A handler that must wait answers later
        by `answer`.
    """

    def __init__(self, link: Link, handle: Handler) -> None:
        self._link = link
        self._handle = handle
        self._numbers = itertools.count(1)
        self._lock = threading.Condition()
        self._answers: dict[int, Message] = {}
        self._open: set[int] = set()
        self.gone = False

    def run(self) -> None:
        """Read until the peer is gone."""
        while (message := self._link.read()) is not None:
            self._dispatch(message)
        with self._lock:
            self.gone = True
            self._lock.notify_all()

    def run_in_thread(self, name: str) -> threading.Thread:
        """`run` in a daemon thread."""
        thread = threading.Thread(target=self.run, name=name, daemon=True)
        thread.start()
        return thread

    def _dispatch(self, message: Message) -> None:
        number = message.get("answer")
        if isinstance(number, int):
            with self._lock:
                if number in self._open:
                    self._answers[number] = message
                    self._lock.notify_all()
            return
        try:
            reply = self._handle(self, message)
        except Exception:
            log.exception("a message on a control link could not be handled: %s", sorted(message))
            return
        if reply is not None and "ask" in message:
            self.answer(message, reply)

    def answer(self, question: Message, body: Message) -> None:
        """Answer a question that the handler has put off."""
        self._link.send({**body, "answer": question["ask"]})

    def tell(self, message: Message) -> bool:
        """Send without expecting an answer; ``False`` when the peer is gone."""
        return self._link.send(message)

    def ask(self, message: Message, timeout_s: float) -> Message | None:
        """Send a question and wait; ``None`` on time-out or when the peer is gone."""
        number = next(self._numbers)
        with self._lock:
            self._open.add(number)
        try:
            if not self._link.send({**message, "ask": number}):
                return None
            with self._lock:
                self._lock.wait_for(lambda: number in self._answers or self.gone, timeout_s)
                return self._answers.pop(number, None)
        finally:
            with self._lock:
                self._open.discard(number)

    def close(self) -> None:
        """End the link."""
        self._link.close()


def ask_all(peers: dict[int, Peer], message: Message, timeout_s: float) -> dict[int, Message]:
    """Ask several peers at once; those that do not answer in time are absent from the result."""
    answers: dict[int, Message] = {}

    def one(key: int, peer: Peer) -> None:
        reply = peer.ask(message, timeout_s)
        if reply is not None:
            answers[key] = reply

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in peers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
