"""Lines as container runtimes write them: the CRI form, and Docker's JSON. Where a log lies says whose it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

CRI = re.compile(
    rb"(?P<time>\d{4}-\d\d-\d\dT[0-9:.]{8,20}(?:Z|[+-]\d\d:\d\d)) (?P<stream>stdout|stderr) (?P<tags>[A-Za-z:]{1,32}) "
)
CRI_EMPTY = re.compile(rb"\d{4}-\d\d-\d\dT\S{8,30} (?:stdout|stderr) [A-Za-z:]{1,32}$")
PODS = re.compile(
    r"/pods/(?P<namespace>[^/_]+)_(?P<pod>[^/_]+)_(?P<uid>[^/]+)/(?P<container>[^/]+)/(?P<restart>\d+)\.log$"
)
LINKS = re.compile(r"/(?P<pod>[^/_]+)_(?P<namespace>[^/_]+)_(?P<container>[^/_]+)-[0-9a-f]{64}\.log$")
MAX_JOINED_BYTES = 16 * 1024
MAX_LINKS = 16


class _Docker(msgspec.Struct):
    log: str = ""
    stream: str = "stdout"


_docker = msgspec.json.Decoder(_Docker)


class Joiner:
    """Takes the runtime's part off each line, and joins the pieces of long ones, each stream for itself.

    A line in no known form is taken as it is.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, bytes] = {}

    def __call__(self, raw: bytes) -> tuple[str, bytes] | None:
        """Stream and text; None for a piece that goes on."""
        found = CRI.match(raw)
        if found is not None:
            partial = b"P" in found["tags"].split(b":")
            return self._join(found["stream"].decode(), raw[found.end() :], partial)
        if raw.startswith(b'{"log":'):
            return self._docker(raw)
        return None if CRI_EMPTY.match(raw) else ("", raw)

    def holds(self, block: bytes) -> bool:
        """Whether pieces are open or in `block`."""
        return bool(self._pieces) or b" stdout P" in block or b" stderr P" in block

    def _docker(self, raw: bytes) -> tuple[str, bytes] | None:
        try:
            entry = _docker.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "", raw
        text = entry.log.encode("utf-8", "replace")
        return self._join(entry.stream, text.rstrip(b"\n"), not text.endswith(b"\n"))

    def _join(self, stream: str, text: bytes, partial: bool) -> tuple[str, bytes] | None:
        before = self._pieces.pop(stream, b"")
        # the head is kept: what follows in a line of megabytes is not looked at
        joined = (before + text)[:MAX_JOINED_BYTES] if before else text
        if partial:
            self._pieces[stream] = joined[:MAX_JOINED_BYTES]
            return None
        return stream, joined


def labels_of(path: str) -> dict[str, str]:
    """Namespace, pod and container of a log, by where it lies; empty when the path does not tell.

    Examples
    --------
    >>> labels_of("/var/log/pods/train_llm-worker-3_5f0c/pytorch/0.log")
    {'namespace': 'train', 'pod': 'llm-worker-3', 'container': 'pytorch'}
    """
    found = PODS.search(path) or LINKS.search(path)
    return {name: found[name] for name in ("namespace", "pod", "container")} if found else {}


def resolved(path: str, root: str) -> Path:
    """Where a link under `root` leads, as the node sees it: absolute targets lie under `root` too.

    Raises
    ------
    OSError
        The links go in a circle.
    """
    for _ in range(MAX_LINKS):
        try:
            target = os.readlink(path)
        except OSError:
            return Path(path)
        path = (
            f"{root}{target}"
            if target.startswith("/")
            else os.path.normpath(os.path.join(os.path.dirname(path), target))
        )
    raise OSError(40, "too many links", path)
