"""Launcher prefixes."""

from __future__ import annotations

import pytest

from collectors.logs.prefix import unprefixed


@pytest.mark.parametrize(
    ("line", "text", "rank", "local_rank", "attributes"),
    [
        ("[rank3]: boom", "boom", 3, -1, {}),
        ("[rank3]:[E105 10:11:12 ProcessGroupNCCL.cpp:629] x", "[E105 10:11:12 ProcessGroupNCCL.cpp:629] x", 3, -1, {}),
        ("[default0]:  what():  CUDA error", "  what():  CUDA error"[1:], -1, 0, {"local_rank": "0"}),
        ("  0: :::MLLOG {}", ":::MLLOG {}", 0, -1, {}),
        ("llm-worker-3: x", "x", 3, -1, {"worker": "llm-worker-3"}),
        ("(RayWorker pid=123, ip=10.0.0.9) x", "x", -1, -1, {"actor": "RayWorker", "pid": "123", "ip": "10.0.0.9"}),
        ("\x1b[36m(TrainWorker pid=5)\x1b[0m [rank7]: x", "x", 7, -1, {"actor": "TrainWorker", "pid": "5"}),
        ("12: [rank8]: x", "x", 12, -1, {}),
        ("step 12: x", "step 12: x", -1, -1, {}),
        ("[2026-01-05 10:11:12] x", "[2026-01-05 10:11:12] x", -1, -1, {}),
        ("", "", -1, -1, {}),
    ],
)
def test_prefixes(line: str, text: str, rank: int, local_rank: int, attributes: dict[str, str]) -> None:
    said = unprefixed(line)
    assert (said.text, said.rank, said.local_rank, dict(said.attributes)) == (text, rank, local_rank, attributes)
