"""What a training process is told by its launcher through the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


def _whole(env: Mapping[str, str], key: str, default: int) -> int:
    try:
        return int(env.get(key, default))
    except ValueError:
        return default


@dataclass(frozen=True, slots=True)
class Environment:
    """Identity of this training process and where its sockets and checkpoints are.

    ``max_step`` bounds what may be restored (roll back), ``None`` means no bound.
    """

    job: str
    node: str
    generation: int
    rank: int
    local_rank: int
    world: int
    socket_path: str | None
    mailbox_path: str | None
    checkpoint_dir: str | None
    max_step: int | None
    pg_timeout_s: float

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Environment:
        """Read from ``env`` (default: the process environment); a missing key takes its stand-alone value."""
        env = os.environ if env is None else env
        limit = _whole(env, "TRAINWARDEN_MAX_STEP", -1)
        return cls(
            job=env.get("TRAINWARDEN_JOB", "job"),
            node=env.get("TRAINWARDEN_NODE") or socket.gethostname(),
            generation=_whole(env, "TRAINWARDEN_GENERATION", 0),
            rank=_whole(env, "RANK", 0),
            local_rank=_whole(env, "TRAINWARDEN_LOCAL_RANK", _whole(env, "LOCAL_RANK", 0)),
            world=_whole(env, "WORLD_SIZE", 1),
            socket_path=env.get("TRAINWARDEN_SOCKET") or None,
            mailbox_path=env.get("TRAINWARDEN_MAILBOX") or None,
            checkpoint_dir=env.get("TRAINWARDEN_CHECKPOINT_DIR") or None,
            max_step=limit if limit >= 0 else None,
            pg_timeout_s=float(_whole(env, "TRAINWARDEN_PG_TIMEOUT_S", 60)),
        )

    def identity(self) -> dict[str, object]:
        """The fields that open every datagram of this process."""
        return {
            "job": self.job,
            "generation": self.generation,
            "node": self.node,
            "rank": self.rank,
            "world": self.world,
            "pid": os.getpid(),
        }
