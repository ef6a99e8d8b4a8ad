"""How saves are kept, carried and replicated: ``TRAINWARDEN_SAVE_*`` in the environment of a training process."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger("trainwarden.checkpoint")
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class SavingOptions:
    """Settings of one rank's saves.

    Attributes
    ----------
    disk_bytes_per_s, peer_bytes_per_s
        Limits of what is carried in the background; 0 for none.
    keep
        Newest files kept on disk.
    keep_every
        Files whose step is a multiple of this stay for good; 0 for none.
    overlap_from_bytes
        Saves of at least this size are copied beside the next step; smaller ones at once. ``None``: all at once.
    replicate
        Whether a replica goes to a peer node.
    peer_timeout_s
        A peer that takes nothing for so long is given up for this save.
    rack
        Name of this node's rack (or any other domain that fails as one).
    depot
        ``host:port:token`` of this node's depot, as its launcher says it; empty if there is none.
    """

    disk_bytes_per_s: float = 0.0
    keep: int = 3
    keep_every: int = 0
    peer_bytes_per_s: float = 0.0
    overlap_from_bytes: int | None = 64 << 20
    replicate: bool = True
    peer_timeout_s: float = 5.0
    rack: str = ""
    depot: str = ""

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> SavingOptions:
        """Read from ``env`` (default: the process environment); what is no number is logged and left at its default."""
        env = os.environ if env is None else env
        overlap_mb = _number(env, "TRAINWARDEN_SAVE_OVERLAP_FROM_MB", 64.0)
        return cls(
            disk_bytes_per_s=_number(env, "TRAINWARDEN_SAVE_DISK_MB_PER_S", 0.0) * MEGABYTE,
            keep=max(1, int(_number(env, "TRAINWARDEN_SAVE_KEEP", 3))),
            keep_every=int(_number(env, "TRAINWARDEN_SAVE_KEEP_EVERY", 0)),
            peer_bytes_per_s=_number(env, "TRAINWARDEN_SAVE_PEER_MB_PER_S", 0.0) * MEGABYTE,
            overlap_from_bytes=None if overlap_mb < 0 else int(overlap_mb * MEGABYTE),
            replicate=env.get("TRAINWARDEN_SAVE_REPLICATE", "1") not in {"0", "no", "false"},
            peer_timeout_s=max(0.1, _number(env, "TRAINWARDEN_SAVE_PEER_TIMEOUT_S", 5.0)),
            rack=env.get("TRAINWARDEN_RACK", ""),
            depot=env.get("TRAINWARDEN_DEPOT", ""),
        )


def _number(env: Mapping[str, str], key: str, default: float) -> float:
    text = env.get(key, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        log.warning("%s is %r, expected a number; %g is used", key, text, default)
        return default
    return value
