"""NCCL's RAS service: asks a running job over TCP which of its processes are gone and which ranks are behind. NCCL 2.24 and later."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

ADDRESS = ("127.0.0.1", 28028)
MAX_BYTES = 256 * 1024
QUESTION = b"verbose status\n"

_VERSION = re.compile(r"NCCL version (?P<version>[\w.+-]{1,40})")
_COMMUNICATOR = re.compile(r"^\s{0,4}(?P<name>#\d{1,9}-\d{1,9}) \((?P<hash>[0-9a-f]{1,32})\) (?P<status>[A-Z]{2,20})")
_MANY = re.compile(
    r"^\s{0,8}(?P<count>\d{1,9}) ranks have (?:launched up to operation (?P<operation>\d{1,18})|not launched any operations)"
)
_ONE = re.compile(
    r"^\s{0,8}Rank (?P<rank>\d{1,9}) has (?:launched up to operation (?P<operation>\d{1,18})|not launched any operations)"
)
_RANK = re.compile(r"^\s{0,8}Rank (?P<rank>\d{1,9}) -- ")
_DEAD = re.compile(
    r"^\s{0,8}Process (?P<pid>\d{1,10}) on node (?P<node>\S{1,100}) managing GPUs? (?P<gpus>[\d, ]{1,60})"
)
_DEAD_HEAD = re.compile(r"considered dead|unreachable|did not respond|Missing communicator data", re.IGNORECASE)


@dataclass(frozen=True)
class Behind:
    """Ranks of one communicator that launched less than most."""

    communicator: str
    ranks: tuple[int, ...]
    operation: int
    most: int


@dataclass(frozen=True)
class Status:
    """What RAS says. `dead` are lines naming processes that do not answer; `statuses` the odd states of communicators."""

    version: str
    behind: tuple[Behind, ...]
    dead: tuple[str, ...]
    statuses: tuple[str, ...]

    def text(self) -> str:
        """One sentence, empty when nothing is odd."""
        said = [
            f"communicator {b.communicator}: ranks {','.join(map(str, b.ranks[:16]))} launched {b.operation} operations, most {b.most}"
            for b in self.behind
        ]
        return "; ".join([*said, *(f"does not answer: {line}" for line in self.dead[:8])])


def parse(text: str) -> Status:
    """The status in an answer; unknown lines are passed over."""
    version = _VERSION.search(text)
    behind: list[Behind] = []
    dead: list[str] = []
    statuses: list[str] = []
    communicator, most, operation, in_dead = "", -1, -1, False
    for line in text.splitlines():
        if found := _COMMUNICATOR.match(line):
            communicator, most, operation, in_dead = found["name"], -1, -1, False
            statuses.append(f"{found['name']} {found['status']}")
        elif found := _MANY.match(line):
            operation = int(found["operation"] or 0)
            most = max(most, operation)
        elif found := _ONE.match(line):
            _add(behind, communicator, int(found["rank"]), int(found["operation"] or 0), most)
        elif (found := _RANK.match(line)) and operation >= 0:
            _add(behind, communicator, int(found["rank"]), operation, most)
        elif found := _DEAD.match(line):
            if in_dead:
                dead.append(line.strip()[:200])
        else:
            in_dead = in_dead or _DEAD_HEAD.search(line) is not None
    return Status(version["version"] if version else "", tuple(behind), tuple(dead), tuple(statuses[:64]))


def _add(behind: list[Behind], communicator: str, rank: int, operation: int, most: int) -> None:
    if operation >= most:
        return  # RAS lists whoever is in the minority, those ahead too
    last = behind[-1] if behind else None
    if last is not None and (last.communicator, last.operation) == (communicator, operation):
        behind[-1] = Behind(communicator, (*last.ranks, rank), operation, most)
    else:
        behind.append(Behind(communicator, (rank,), operation, most))


def ask(address: tuple[str, int], deadline_s: float, clock_s: Callable[[], float] = time.monotonic) -> str:
    """The answer of the service at `address`, as far as it came within `deadline_s`, at most 256 KiB.

    Raises
    ------
    OSError
        Nobody listens there, or nothing was said in time.
    """
    end_s = clock_s() + deadline_s
    with socket.create_connection(address, timeout=deadline_s) as connection:
        connection.sendall(QUESTION)
        pieces: list[bytes] = []
        size = 0
        while size < MAX_BYTES and (left_s := end_s - clock_s()) > 0:
            connection.settimeout(left_s)
            try:
                piece = connection.recv(65536)
            except TimeoutError:
                break
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
    if not pieces:
        raise OSError(110, "no answer in time", f"{address[0]}:{address[1]}")
    return b"".join(pieces)[:MAX_BYTES].decode("utf-8", "replace")
