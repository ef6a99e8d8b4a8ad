"""Training data of the demonstration: the 1,797 handwritten digits bundled with scikit-learn, as records on disk.

A shard is a file of 64 KiB records, each one batch of 64 images (64 float32 each) and labels: read with O_DIRECT, one record is
one real disk read, so that a slow disk is slow here too. The records cover the training set several times, each time in another order.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

RECORD_BYTES = 65_536
BATCH = 64
PIXELS = 64
HELD_OUT = 360
"""Images at the end of the set, never trained on: the evaluation set."""

_VALUES = BATCH * PIXELS


def load_digits() -> tuple[list[list[float]], list[int]]:
    """Images scaled to 0..1 and their labels."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    return [[float(v) / 16.0 for v in image] for image in digits.data], [int(label) for label in digits.target]


def pack_record(images: list[list[float]], labels: list[int]) -> bytes:
    """One batch as a record: 64 × 64 float32, then 64 int64, zeros up to 64 KiB."""
    flat = [value for image in images for value in image]
    body = struct.pack(f"<{_VALUES}f", *flat) + struct.pack(f"<{BATCH}q", *labels)
    return body.ljust(RECORD_BYTES, b"\0")


def write_shard(path: Path, records: int = 256, seed: int = 0) -> None:
    """Write a shard of `records` shuffled batches of the training set."""
    images, labels = load_digits()
    usable = len(images) - HELD_OUT
    rng = random.Random(seed)
    order: list[int] = []
    with path.open("wb") as out:
        for _ in range(records):
            if len(order) < BATCH:
                order = rng.sample(range(usable), usable)
            batch, order = order[:BATCH], order[BATCH:]
            out.write(pack_record([images[i] for i in batch], [labels[i] for i in batch]))


def write_held_out(path: Path) -> None:
    """Write the evaluation images as records (the last batch is filled up from its start)."""
    images, labels = load_digits()
    held = list(range(len(images) - HELD_OUT, len(images)))
    held += held[: -len(held) % BATCH]
    with path.open("wb") as out:
        for start in range(0, len(held), BATCH):
            batch = held[start : start + BATCH]
            out.write(pack_record([images[i] for i in batch], [labels[i] for i in batch]))
