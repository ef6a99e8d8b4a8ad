"""The trainer's end of the mailbox: a background thread answers the launcher.

The training thread only reads and writes plain attributes at a step boundary.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from trainwarden_hook.lines import Link, Message, connect
from trainwarden_hook.peers import Peer
from trainwarden_hook.shares import Shares

log = logging.getLogger("trainwarden.hook")


class Mailbox:
    """What the training thread and the mailbox thread share.

    ``current`` is the step that the training thread has begun, ``save_at`` the step before which to save.
    Publishing order makes a lock needless: the reader sets ``current`` before it looks at ``save_at``,
    the thread sets ``save_at`` before it looks at ``current``; at worst a save in time is called late.
    """

    def __init__(self, why_not: Callable[[], str] = lambda: "") -> None:
        self.current = -1
        self.save_at: int | None = None
        self.step_ms = 0.0
        self.shares: Shares | None = None
        self._why_not = why_not
        self._peer: Peer | None = None

    def saves_elsewhere(self, why_not: str = "") -> None:
        """Somebody else than `Job` carries saves by command out, or refuses them with a sentence."""
        self._why_not = lambda: why_not

    def open(self, path: str, rank: int, generation: int) -> bool:
        """Connect to the launcher; ``False`` if there is none."""
        try:
            link: Link = connect(path)
        except OSError as error:
            log.warning("no launcher at %s: %s; saves by command are not possible", path, error)
            return False
        link.send({"rank": rank, "pid": os.getpid(), "generation": generation})
        self._peer = Peer(link, self.handle)
        self._peer.run_in_thread("trainwarden-mailbox")
        return True

    def handle(self, peer: Peer | None, message: Message) -> Message | None:
        """Answer ``arm``, ``commit`` and ``shares``."""
        command = message.get("cmd")
        if command == "arm":
            answer: Message = {"step": self.current, "step_ms": self.step_ms, "refused": self._why_not()}
            shares = self.shares.describe() if self.shares is not None else None
            return answer if shares is None else {**answer, "shares": shares}
        if command == "shares":
            return self._change_shares(peer, message)
        if command == "commit" and isinstance(message.get("step"), int):
            return self._commit(message["step"])
        return {"error": f"unknown command {command!r}"}

    def _change_shares(self, peer: Peer | None, message: Message) -> Message | None:
        """In a thread of its own: it waits for the store and for the training thread, and a save must not wait behind it."""
        shares = self.shares
        if shares is None:
            return {"error": "this process has no shares"}
        if peer is None:
            return shares.handle(message)
        threading.Thread(
            target=lambda: peer.answer(message, shares.handle(message)), name="trainwarden-shares-command", daemon=True
        ).start()
        return None

    def _commit(self, step: int) -> Message:
        self.save_at = step
        if self.current >= step:
            self.save_at = None
            return {"late": True, "step": self.current}
        return {"late": False, "step": self.current}

    def ask(self, question: Message, limit_s: float) -> Message | None:
        """Ask the launcher; ``None`` without one, or when it does not answer in time."""
        return self._peer.ask(question, limit_s) if self._peer is not None else None

    def tell_saved(self, report: Message) -> None:
        """Tell the launcher what became of a save by command."""
        if self._peer is not None:
            self._peer.tell({"saved": report})

    def close(self) -> None:
        """Hang up."""
        if self._peer is not None:
            self._peer.close()
