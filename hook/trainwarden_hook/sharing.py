"""The launcher's side of a change of shares: passes the calls on to the local ranks (see `shares`)."""

from __future__ import annotations

from typing import Any

from trainwarden_hook.lines import Message
from trainwarden_hook.peers import Peer, ask_all

PREPARE_TIMEOUT_S = 4.0
Answer = dict[str, Any]


def shares_of(answers: dict[int, Message]) -> dict[int, Message]:
    """What each rank says about its share; ranks of a script without shares are absent."""
    return {rank: answer["shares"] for rank, answer in answers.items() if isinstance(answer.get("shares"), dict)}


def change(peers: dict[int, Peer], expected: list[int], args: dict[str, Any]) -> Answer:
    """Carry out one phase on this node; rank 0 hears of a change before the others, and it alone of ``go`` and ``void``."""
    phase = args.get("phase")
    if phase not in {"prepare", "go", "void"}:
        return _answer("refused", f"args.phase is {phase!r}, expected prepare, go or void")
    if phase == "prepare":
        return _prepare(peers, expected, args)
    if 0 not in expected:
        return _answer("refused", f"{phase} is for the node of rank 0, which is not this one")
    return _ask_first(peers, args)


def _prepare(peers: dict[int, Peer], expected: list[int], args: dict[str, Any]) -> Answer:
    message = {"cmd": "shares", **args}
    answers: dict[int, Message] = {}
    for ranks in ([rank for rank in expected if rank == 0], [rank for rank in expected if rank != 0]):
        answers |= ask_all({rank: peers[rank] for rank in ranks if rank in peers}, message, PREPARE_TIMEOUT_S)
        why = _failure(ranks, answers)
        if why:
            return _answer("failed", why)
    steps = {str(rank): answer["step"] for rank, answer in sorted(answers.items())}
    return _answer("done", f"{len(steps)} ranks are ready to change", {"steps": steps})


def _failure(expected: list[int], answers: dict[int, Message]) -> str:
    for rank in expected:
        if rank not in answers:
            return f"rank {rank} does not answer"
        if "error" in answers[rank]:
            return f"rank {rank}: {answers[rank]['error']}"
    return ""


def _ask_first(peers: dict[int, Peer], args: dict[str, Any]) -> Answer:
    wait_s = float(args.get("deadline_ms", 3000)) / 1e3 + 1.0
    reply = peers[0].ask({"cmd": "shares", **args}, wait_s) if 0 in peers else None
    if reply is None:
        return _answer("failed", "rank 0 does not answer")
    if "error" in reply:
        return _answer("failed", f"rank 0: {reply['error']}")
    if "at" in reply:
        return _answer("done", f"the shares change with step {reply['at']}", {"step": reply["at"]})
    return _answer("done", "the change is called off" if reply.get("voided") else "it had been decided already")


def _answer(status: str, reason: str, result: dict[str, Any] | None = None) -> Answer:
    return {"status": status, "reason": reason, "result": result or {}}
