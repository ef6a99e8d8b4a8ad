"""The model that all contenders save: AdamW with moments, float32, a chosen size of state."""

from __future__ import annotations

import time
from typing import Any

import torch

WIDTH = 1024
BATCH = 256
BYTES_PER_LAYER = 3 * 4 * (WIDTH * WIDTH + WIDTH)


class Training:
    """Model, optimizer and a training step on random numbers."""

    def __init__(self, state_mb: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = max(1, round(state_mb * 1e6 / BYTES_PER_LAYER))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(BATCH, WIDTH)

    def gradients(self) -> None:
        """Forward and backward pass."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def step(self) -> float:
        """A whole step; seconds."""
        started = time.perf_counter()
        self.gradients()
        self.optimizer.step()
        return time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def size_bytes(self) -> int:
        """Bytes of all tensors of the state."""
        tensors = list(self.model.state_dict().values())
        for entries in self.optimizer.state_dict()["state"].values():
            tensors += [value for value in entries.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
