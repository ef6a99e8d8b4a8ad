"""What is shipped with the relation model: weights, calibration and prices, and the card that says what they are worth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models import tensors
from models.relation.form import Served
from trainwarden.errors import UsageError

SHIPPED = Path(__file__).parent / "weights" / "relation.safetensors"
WITH_NET = SHIPPED.with_name("relation-net.safetensors")
"""The same with tables and prices for the net's expectation, which serves nobody: it wins nothing over the peers' medians."""
PRICED = ("node", "port", "leaf", "rail", "rack", "pdu", "zone", "steady")
"""Kinds of causes, and the mean of a node's gains over rounds."""
VERSION = 2
"""Of the form and the meaning of the tensors; other weights do not fit this code."""

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Trained:
    """A trained model: net if there is one, sums of residuals that health exceeds with known probabilities, prices of causes, card."""

    served: Served | None
    node_table: F32
    port_table: F32
    normal: F32
    prices: dict[str, float]
    card: dict[str, Any]


@cache
def load(path: Path = SHIPPED) -> Trained:
    """Read weights and the card beside them.

    Raises
    ------
    UsageError
        A file is missing or damaged, or belongs to another version of this code.
    """
    found = tensors.read(path)
    card_path = path.with_suffix(".json")
    try:
        card = json.loads(card_path.read_text(encoding="utf-8"))
        prices = dict(zip(PRICED, found["prices"].tolist(), strict=True))
        if card["version"] != VERSION:
            raise UsageError(
                f"{card_path}: version {card['version']} found, this code needs {VERSION}: `trainwarden train` makes it"
            )
        served = Served.of(found) if "linear" in found else None
        return Trained(served, found["node_table"], found["port_table"], found["normal"], prices, card)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{card_path}: {error!r}, expected the card of the weights beside it: `trainwarden train` makes both"
        ) from None


def save(
    path: Path, served: dict[str, F32], tables: dict[str, F32], prices: dict[str, float], card: dict[str, Any]
) -> None:
    """Write weights and card."""
    path.parent.mkdir(parents=True, exist_ok=True)
    every = {**served, **tables, "prices": np.array([prices[name] for name in PRICED], dtype=np.float32)}
    tensors.write(path, every, {"model": "relation", "version": str(VERSION)})
    path.with_suffix(".json").write_text(json.dumps({"version": VERSION, **card}, indent=1) + "\n", encoding="utf-8")
