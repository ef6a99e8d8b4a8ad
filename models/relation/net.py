"""Training of the relation model in torch, on messages that the serving code made: what is trained is what is served.

Self-supervised on normal life: the likelihood of each node's innovation, given its relatives and its own past, under Student's t with
four degrees of freedom (pauses and hiccups have heavy tails, and must not teach the net that everybody is unsteady).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models import tensors
from models.relation import form
from models.relation.form import CHANNELS, HIDDEN, INPUTS

F32 = NDArray[np.float32]
FREEDOM = 4.0
TORCH_VERSION = str(torch.__version__)
GRADIENT_LIMIT = 5.0


class RelationNet(nn.Module):
    """The same function as `form.Served`."""

    same_channel: Tensor
    centre: Tensor
    width: Tensor
    given_mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, CHANNELS, bias=False)
        self.first = nn.Linear(INPUTS, HIDDEN[0])
        self.second = nn.Linear(HIDDEN[0], HIDDEN[1])
        self.last = nn.Linear(HIDDEN[1], CHANNELS)
        self.register_buffer("same_channel", torch.from_numpy(form.same_channel()))
        self.register_buffer("centre", torch.zeros(INPUTS))
        self.register_buffer("width", torch.ones(INPUTS))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, given: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        near = given.clamp(-form.INPUT_LIMIT, form.INPUT_LIMIT)
        out = self.last(
            nn.functional.silu(self.second(nn.functional.silu(self.first((near - self.centre) / self.width))))
        )
        middle = base + nn.functional.linear(near, self.linear.weight * self.same_channel)
        return middle, out.clamp(form.LEAST_LOG_SCALE, form.MOST_LOG_SCALE)

    def served(self) -> dict[str, F32]:
        """Weights under the names that `form.Served` knows."""
        found = {"linear": self.linear.weight * self.same_channel, "centre": self.centre, "width": self.width}
        for name, layer in (("first", self.first), ("second", self.second), ("last", self.last)):
            found |= {name: layer.weight, f"{name}_bias": layer.bias}
        return {name: value.detach().numpy().astype(np.float32) for name, value in found.items()}


@dataclass(frozen=True)
class Table:
    """Rows to learn from: form, base and innovations (NaN unknown), each rows × columns."""

    given: F32
    base: F32
    target: F32

    @classmethod
    def joined(cls, parts: Sequence[Table]) -> Table:
        """Several tables as one."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("given", "base", "target")))


@dataclass(frozen=True)
class Plan:
    """How to train."""

    seed: int = 0
    epochs: int = 8
    batch: int = 2048
    rate: float = 3e-3
    without: tuple[str, ...] = ()


@dataclass
class Progress:
    """Where a training stands: epoch counted from 0, mean loss of training and of held-out rows."""

    epoch: int
    loss: float
    held_out: float


def train(
    table: Table, held_out: Table, plan: Plan, checkpoint: Path | None, told: Callable[[Progress], None]
) -> RelationNet:
    """Fit a net; goes on from `checkpoint` when it holds a beginning of the same plan and data."""
    torch.manual_seed(plan.seed)
    net = RelationNet()
    _standardise(net, table)
    net.given_mask = torch.ones(INPUTS)
    for name in plan.without:
        net.given_mask[form.block(name)] = 0.0
    steps = plan.epochs * -(-len(table.target) // plan.batch)
    optimiser = torch.optim.Adam(net.parameters(), lr=plan.rate)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimiser, plan.rate, total_steps=steps + 1)
    begun = _resume(checkpoint, net, optimiser, pace, _mark(table, plan))
    if begun:
        told(Progress(begun - 1, float("nan"), float(_loss(net, held_out, slice(None)).detach())))
    for epoch in range(begun, plan.epochs):
        loss = _epoch(net, optimiser, pace, table, plan, epoch)
        told(Progress(epoch, loss, float(_loss(net, held_out, slice(None)).detach())))
        _keep(checkpoint, net, optimiser, pace, _mark(table, plan), epoch + 1)
    return net


def _epoch(net: RelationNet, optimiser: Any, pace: Any, table: Table, plan: Plan, epoch: int) -> float:
    order = np.random.default_rng((plan.seed, epoch)).permutation(len(table.target))
    total = 0.0
    for at in range(0, len(order), plan.batch):
        rows = order[at : at + plan.batch]
        optimiser.zero_grad()
        loss = _loss(net, table, rows)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), GRADIENT_LIMIT)
        optimiser.step()
        pace.step()
        total += float(loss.detach()) * len(rows)
    return total / max(len(order), 1)


def _loss(net: RelationNet, table: Table, rows: Any) -> Tensor:
    given, base = torch.from_numpy(table.given[rows]) * net.given_mask, torch.from_numpy(table.base[rows])
    target = torch.from_numpy(table.target[rows])
    known = torch.isfinite(target)
    middle, scale = net(given, base)
    away = (torch.nan_to_num(target) - middle) * torch.exp(-scale)
    each = scale + 0.5 * (FREEDOM + 1.0) * torch.log1p(away * away / FREEDOM)
    mean: Tensor = (each * known).sum() / known.sum().clamp(min=1)
    return mean


def _standardise(net: RelationNet, table: Table) -> None:
    short = np.clip(table.given, -form.INPUT_LIMIT, form.INPUT_LIMIT)
    net.centre = torch.from_numpy(short.mean(axis=0))
    net.width = torch.from_numpy(np.maximum(short.std(axis=0), 0.1))


def _mark(table: Table, plan: Plan) -> str:
    return json.dumps(
        [
            plan.seed,
            plan.epochs,
            plan.batch,
            plan.rate,
            list(plan.without),
            list(table.given.shape),
            float(table.given.sum()),
        ]
    )


def _keep(path: Path | None, net: RelationNet, optimiser: Any, pace: Any, mark: str, epoch: int) -> None:
    if path is None:
        return
    state = {
        "mark": mark,
        "epoch": epoch,
        "net": net.state_dict(),
        "optimiser": optimiser.state_dict(),
        "pace": pace.state_dict(),
    }
    fresh = path.with_suffix(".part")
    torch.save(state, fresh)
    fresh.replace(path)


def _resume(path: Path | None, net: RelationNet, optimiser: Any, pace: Any, mark: str) -> int:
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["mark"] != mark:
        return 0
    net.load_state_dict(state["net"])
    optimiser.load_state_dict(state["optimiser"])
    pace.load_state_dict(state["pace"])
    return int(state["epoch"])


def write_weights(path: Path, served: dict[str, F32]) -> None:
    """Weights in the form that is served."""
    tensors.write(path, {**served}, {"model": "relation"})
