"""The form that the relation model takes in and how it is served: plain matrix products, without torch.

For each node: its two innovations before, which channels are known, and for each relation the median of its relatives' innovations, their
spread and how many they are. Out come the expected innovation and its uncertainty, per channel. The expectation begins at the median
of the nearest relatives that there are (data-parallel peers, else the job), and all medians are given relative to it: what moves a whole
stage or job moves the expectation with it, however far. What else is to be said of a channel is linear in the same channel of the past and
of the other relatives, so that an unheard-of value in one channel cannot unsettle another; the net tells the uncertainty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

CHANNELS = 8
RELATIONS = ("dp", "pp", "ep", "rack", "leaf", "zone", "job")
INPUTS = 3 * CHANNELS + len(RELATIONS) * (2 * CHANNELS + 1)
BASES = ("job", "dp")
"""Where the expectation begins, the nearer relatives last."""
HIDDEN = (64, 32)
LAG_LIMIT, INPUT_LIMIT = 4.0, 8.0
LEAST_LOG_SCALE, MOST_LOG_SCALE = -1.5, 4.0


def block(name: str) -> slice:
    """Columns of the input that belong to a relation, ``past`` or ``known``: for ablations."""
    if name == "past":
        return slice(0, 2 * CHANNELS)
    if name == "known":
        return slice(2 * CHANNELS, 3 * CHANNELS)
    at = 3 * CHANNELS + RELATIONS.index(name) * (2 * CHANNELS + 1)
    return slice(at, at + 2 * CHANNELS + 1)


def inputs(node: F32, before: F32, messages: Mapping[str, tuple[F32, F32, F32]]) -> tuple[F32, F32]:
    """(nodes × INPUTS, nodes × channels): the form, and where the expectation begins.

    Parameters
    ----------
    node
        channels × nodes, innovations, NaN unknown: only which are known is looked at.
    before
        2 × channels × nodes.
    messages
        Per relation: medians and spreads (channels × nodes) and log(1 + relatives) (nodes).
    """
    count = node.shape[1]
    found = np.zeros((count, INPUTS), dtype=np.float32)
    found[:, block("past")] = np.clip(before, -LAG_LIMIT, LAG_LIMIT).reshape(-1, count).T
    found[:, block("known")] = np.isfinite(node).T
    base = np.zeros((count, CHANNELS), dtype=np.float32)
    for name in BASES:
        if name in messages:
            middle, _, others = messages[name]
            base = np.where((others > 0)[:, None], middle.T, base)
    for name in RELATIONS:
        if name in messages:
            middle, spread, others = messages[name]
            part = found[:, block(name)]
            part[:, :CHANNELS] = np.where((others > 0)[:, None], middle.T - base, 0.0)
            part[:, CHANNELS : 2 * CHANNELS], part[:, -1] = spread.T, others
    return found, base


def same_channel() -> F32:
    """channels × inputs: 1 where an input is about the channel, and an innovation or a median and no spread."""
    found = np.zeros((CHANNELS, INPUTS), dtype=np.float32)
    starts = [0, CHANNELS, *(block(name).start for name in RELATIONS)]
    for start in starts:
        found[np.arange(CHANNELS), start + np.arange(CHANNELS)] = 1.0
    return found


@dataclass(frozen=True)
class Served:
    """Weights as arrays: the linear way to the expectation, two hidden layers to its scale."""

    linear: F32
    first: F32
    first_bias: F32
    second: F32
    second_bias: F32
    last: F32
    last_bias: F32
    centre: F32
    width: F32

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[np.float32]]) -> Served:
        """From the tensors of a weights file."""
        return cls(*(np.asarray(tensors[name], dtype=np.float32) for name in cls.__dataclass_fields__))

    def expect(self, form: F32, base: F32) -> tuple[F32, F32]:
        """Expected innovations and their scales, nodes × channels."""
        short = (np.clip(form, -INPUT_LIMIT, INPUT_LIMIT) - self.centre) / self.width
        hidden = _silu(_silu(short @ self.first.T + self.first_bias) @ self.second.T + self.second_bias)
        out = hidden @ self.last.T + self.last_bias
        middle = base + np.clip(form, -INPUT_LIMIT, INPUT_LIMIT) @ self.linear.T
        return middle, np.exp(np.clip(out, LEAST_LOG_SCALE, MOST_LOG_SCALE))


def _silu(values: Any) -> F32:
    return np.asarray(values / (1.0 + np.exp(-values)), dtype=np.float32)
