"""The launcher's side of the mailbox: what it asks the training processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from trainwarden_hook.lines import Link, Listener, Message
from trainwarden_hook.peers import Peer, ask_all

PEEK_TIMEOUT_S = 0.3
ANSWER_TIMEOUT_S = 1.0
FOLLOW_S = 1.0


class Trainers:
    """Links to the local training processes, by rank."""

    def __init__(self, path: str) -> None:
        self._changed = threading.Condition()
        self._peers: dict[int, Peer] = {}
        self._saved: dict[int, Message] = {}
        self.path = path
        self.reached = -1
        self._asking: dict[int, tuple[Peer, Message]] = {}
        self._listener = Listener(path, self._serve)
        self._closed = threading.Event()
        threading.Thread(target=self._follow, name="trainwarden-progress", daemon=True).start()

    def _follow(self) -> None:
        """How far the ranks have come must be known when they are dead: that is when it counts."""
        while not self._closed.wait(FOLLOW_S):
            self.look()

    def _serve(self, link: Link) -> None:
        opening = link.read()
        if opening is None or not isinstance(opening.get("rank"), int):
            link.close()
            return
        rank = opening["rank"]
        peer = Peer(link, self._take(rank))
        with self._changed:
            self._peers[rank] = peer
        peer.run()
        with self._changed:
            if self._peers.get(rank) is peer:
                del self._peers[rank]
            self._changed.notify_all()

    def _take(self, rank: int) -> Any:
        def take(peer: Peer, message: Message) -> None:
            if "regroup" in message and "ask" in message:
                with self._changed:
                    self._asking[rank] = (peer, message)
                    self._changed.notify_all()
            if "saved" in message:
                with self._changed:
                    self._saved[rank] = message["saved"]
                    self._changed.notify_all()

        return take

    def peers(self) -> dict[int, Peer]:
        """The ranks that have opened their mailbox."""
        with self._changed:
            return dict(self._peers)

    def look(self) -> dict[int, Message]:
        """What each rank says of itself (``step``, ``step_ms``, ``shares``); one that does not answer is absent."""
        said = ask_all(self.peers(), {"cmd": "arm"}, PEEK_TIMEOUT_S)
        self.reached = max([self.reached, *(answer["step"] for answer in said.values())])
        return said

    def asking(self) -> set[int]:
        """Ranks whose step has broken off and who ask where to meet again."""
        with self._changed:
            return {rank for rank, (peer, _) in self._asking.items() if not peer.gone}

    def wait_asking(self, ranks: Callable[[], set[int]], limit_s: float) -> bool:
        """Wait until all of ``ranks()`` (the live ones) ask."""
        with self._changed:
            return self._changed.wait_for(lambda: ranks() <= set(self._asking), limit_s)

    def answer(self, rank: int, body: Message) -> None:
        """Answer a rank that asks where to meet."""
        with self._changed:
            peer, question = self._asking.pop(rank)
        peer.answer(question, body)

    def arm(self, expected: list[int]) -> Message:
        """First half of a coordinated save: where is every rank, and how long is a step."""
        answers = ask_all(self.peers(), {"cmd": "arm"}, ANSWER_TIMEOUT_S)
        silent = sorted(set(expected) - set(answers))
        refused = {str(rank): answer["refused"] for rank, answer in answers.items() if answer.get("refused")}
        return {
            "steps": {str(rank): answer["step"] for rank, answer in sorted(answers.items())},
            "step_ms": max((answer.get("step_ms") or 0.0 for answer in answers.values()), default=0.0),
            "silent": silent,
            "refused": refused,
        }

    def commit(self, expected: list[int], step: int, deadline_s: float) -> Message:
        """Second half: every rank saves at the boundary before ``step``; wait for all or the deadline."""
        until = time.monotonic() + deadline_s
        with self._changed:
            self._saved.clear()
        answers = ask_all(self.peers(), {"cmd": "commit", "step": step}, min(ANSWER_TIMEOUT_S, deadline_s))
        late = {rank: answer["step"] for rank, answer in answers.items() if answer.get("late")}
        waiting = set(answers) - set(late)
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._settled(rank, step) for rank in waiting), max(0.0, until - time.monotonic())
            )
            saved = {rank: self._saved[rank] for rank in waiting if self._settled_with_report(rank, step)}
        return _commit_result(expected, step, saved, late)

    def _settled(self, rank: int, step: int) -> bool:
        return rank not in self._peers or self._settled_with_report(rank, step)

    def _settled_with_report(self, rank: int, step: int) -> bool:
        return self._saved.get(rank, {}).get("step") == step

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._listener.close()


def _commit_result(expected: list[int], step: int, saved: dict[int, Message], late: dict[int, int]) -> Message:
    good = {rank: report for rank, report in saved.items() if report.get("ok")}
    return {
        "steps": {str(rank): step for rank in sorted(good)},
        "stall_ms": max((report.get("stall_ms", 0.0) for report in good.values()), default=0.0),
        "late": {str(rank): at for rank, at in sorted(late.items())},
        "refused": {str(rank): report.get("error", "") for rank, report in sorted(saved.items()) if rank not in good},
        "silent": sorted(set(expected) - set(saved) - set(late)),
    }


def commit_failure(result: Message) -> str:
    """One sentence why a commit is not whole; empty when every rank has saved."""
    if result["refused"]:
        rank, why = next(iter(result["refused"].items()))
        return f"rank {rank} refused to save: {why}"
    if result["late"]:
        rank, at = next(iter(result["late"].items()))
        return f"rank {rank} was already in step {at} when it heard of the save; arm again"
    if result["silent"]:
        return f"no answer from rank(s) {', '.join(map(str, result['silent']))} before the deadline"
    return ""
