"""Mounted file systems: which there are, how NFS fares by the kernel's own record, and Lustre's traffic. Pure functions on text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"})
NETWORK = frozenset({
    "nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "smb3", "beegfs", "wekafs", "glusterfs", "9p", "pvfs2", "orangefs", "afs", "juicefs",
})  # fmt: skip
FUSE_OF_SYSTEM = frozenset({"fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuse.snapfuse", "fusectl"})
OCTAL = re.compile(r"\\([0-7]{3})")
OPERATION_FIELDS = 8


class Mount(NamedTuple):
    """One mounted file system."""

    point: str
    kind: str
    source: str
    read_only: bool

    @property
    def remote(self) -> bool:
        """Whether a server or another process has to answer."""
        return self.kind not in LOCAL


def parse_mounts(mountinfo: str, at_most: int) -> list[Mount]:
    """File systems worth watching: those on disks and those of servers, each once, the shortest path of it; remote ones first."""
    standing: dict[str, tuple[str, Mount]] = {}
    for line in mountinfo.splitlines():
        left, dash, right = line.partition(" - ")
        words, source_words = left.split(), right.split()
        if not dash or len(words) < 6 or len(source_words) < 2:
            continue
        options = words[5].split(",") + (source_words[2].split(",") if len(source_words) > 2 else [])
        mount = Mount(unescaped(words[4]), source_words[0], unescaped(source_words[1]), "ro" in options)
        standing[mount.point] = (words[2], mount)  # the later mount lies on top
    by_device: dict[tuple[str, str], Mount] = {}
    for number, mount in standing.values():
        known = by_device.get((number, mount.kind))
        if _watched(mount.kind) and (known is None or len(mount.point) < len(known.point)):
            by_device[number, mount.kind] = mount
    found = sorted(by_device.values(), key=lambda mount: (not mount.remote, mount.point))
    return found[:at_most]


def _watched(kind: str) -> bool:
    return kind in LOCAL or kind in NETWORK or (kind.startswith("fuse.") and kind not in FUSE_OF_SYSTEM)


def unescaped(text: str) -> str:
    """Blanks and the like in a path, as /proc writes them.

    Examples
    --------
    >>> unescaped("/mnt/my\\\\040data")
    '/mnt/my data'
    """
    return OCTAL.sub(lambda found: chr(int(found.group(1), 8)), text)


class NfsCounts(NamedTuple):
    """What NFS did at one mount since it was mounted. Times are sums in milliseconds."""

    operations: int
    transmissions: int
    timeouts: int
    sent_bytes: int
    received_bytes: int
    queue_ms: int
    round_trip_ms: int
    total_ms: int
    bad_xids: int
    backlog: int


def parse_mountstats(text: str) -> dict[str, NfsCounts]:
    """NFS mounts by path; of two at one path the later one, which lies on top. Lines of another shape are left out."""
    found: dict[str, NfsCounts] = {}
    point = ""
    for line in text.splitlines():
        words = line.split()
        if line.startswith("device "):
            point = _nfs_point(line)
            if point:
                found[point] = NfsCounts(*[0] * len(NfsCounts._fields))
        elif point and words and words[0] == "xprt:":
            found[point] = _with_transport(found[point], words)
        elif point and words and words[0].endswith(":") and words[0][:-1].isupper():
            found[point] = _with_operation(found[point], words[1:])
    return found


def _nfs_point(line: str) -> str:
    head, _, kind = line.removeprefix("device ").partition(" with fstype ")
    _, mounted, point = head.partition(" mounted on ")
    return unescaped(point) if mounted and kind.startswith("nfs") and " statvers=" in f" {kind}" else ""


def _with_operation(counts: NfsCounts, words: list[str]) -> NfsCounts:
    """Add one line ``READ: ops transmissions timeouts sent received queue rtt total [errors]``."""
    numbers = [int(word) for word in words[:OPERATION_FIELDS] if word.isascii() and word.isdigit() and len(word) <= 20]
    if len(numbers) < OPERATION_FIELDS:
        return counts
    # a queue time that once went below zero stands there as a number near 2^64
    numbers[5] = numbers[5] if numbers[5] < 1 << 62 else 0
    return NfsCounts(
        *(have + more for have, more in zip(counts[:OPERATION_FIELDS], numbers, strict=True)),
        *counts[OPERATION_FIELDS:],
    )


def _with_transport(counts: NfsCounts, words: list[str]) -> NfsCounts:
    """Add one line ``xprt: tcp port binds connects connect_time idle sends receives bad_xids requests backlog ...``."""
    at = {"tcp": 9, "rdma": 9, "udp": 6}.get(words[1] if len(words) > 1 else "", 0)
    if not at or len(words) <= at + 2 or not (words[at].isdigit() and words[at + 2].isdigit()):
        return counts
    return counts._replace(
        bad_xids=counts.bad_xids + int(words[at][:18]), backlog=counts.backlog + int(words[at + 2][:18])
    )


def parse_lustre(text: str) -> dict[str, float]:
    """Octets read and written from a client's ``stats`` file: ``read_bytes 1287 samples [bytes] 0 1048576 1234567``."""
    found: dict[str, float] = {}
    for words in map(str.split, text.splitlines()):
        if len(words) >= 7 and words[0] in ("read_bytes", "write_bytes") and words[6].isascii() and words[6].isdigit():
            found[words[0]] = float(words[6][:18])
    return found


def lustre_name(source: str) -> str:
    """File system's name in ``10.0.0.1@o2ib:/scratch``.

    Examples
    --------
    >>> lustre_name("10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch")
    'scratch'
    """
    return source.rpartition(":/")[2].partition("/")[0]


def lustre_client(names: Iterable[str], source: str) -> str:
    """Directory of a mount under ``llite``: ``scratch-ffff8881`` for the file system ``scratch``; empty when there is none."""
    name = lustre_name(source)
    return next((entry for entry in names if name and entry.rpartition("-")[0] == name), "")
