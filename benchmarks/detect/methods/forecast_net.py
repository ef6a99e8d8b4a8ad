"""A forecasting net: dilated causal convolutions say the next row, what they did not foresee is the score. Kept only where it wins."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from benchmarks.detect.methods.base import F64, Family, Method
from benchmarks.detect.methods.windows import continued, embed, standardised

WIDTH = 32
CHANNELS = 48
STEPS = 600
BATCH = 128
FAR = 10.0


class ForecastNet(Method):
    """Three dilated convolutions over the last 32 rows foretell all columns of the next one; residuals over their spread, averaged.

    The spread is that of the last fifth of the training rows, which the net has not seen.
    """

    name: ClassVar[str] = "forecast-net"
    family: ClassVar[Family] = "any"
    paper: ClassVar[str] = (
        "temporal convolutions (Bai et al. 2018) as a forecaster, in torch; residuals as in Hundman et al. 2018"
    )
    online: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("torch",)
    depends: ClassVar[tuple[str, ...]] = ("benchmarks.detect.methods.windows",)

    def fit(self, train: F64, seed: int) -> None:
        self.train = train
        rows = self._scaled(train)
        seen = rows[: max(int(0.8 * len(rows)), min(len(rows), WIDTH + 2))]
        self.net = _learn(embed(seen, WIDTH + 1).reshape(-1, WIDTH + 1, rows.shape[1]), seed)
        unseen = self._residual(rows[:1], rows)[-max(len(rows) // 5, 10) :]
        self.spread = np.maximum(np.sqrt((unseen**2).mean(axis=0)), 1e-3)

    def score(self, test: F64) -> F64:
        residual = self._residual(self._scaled(self.train[-WIDTH:]), self._scaled(test))
        far: F64 = np.minimum(np.abs(residual) / self.spread, FAR)
        return np.asarray(far.mean(axis=1), dtype=np.float64)

    def _scaled(self, rows: F64) -> F64:
        return np.clip(standardised(self.train, rows)[1], -FAR, FAR)

    def _residual(self, history: F64, rows: F64) -> F64:
        import torch

        windows = continued(history, rows, WIDTH + 1).reshape(len(rows), WIDTH + 1, -1)
        with torch.no_grad():
            parts = [
                self.net(_tensor(part[:, :-1])).numpy() for part in np.array_split(windows, len(windows) // 4096 + 1)
            ]
        foreseen: F64 = np.concatenate(parts).astype(np.float64)
        return windows[:, -1] - foreseen


def _learn(windows: F64, seed: int) -> Any:
    """The net after `STEPS` batches of windows [windows, WIDTH + 1, columns]; the last row of each is what it has to say."""
    import torch

    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    net = _net(windows.shape[2])
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)
    for _ in range(STEPS):
        batch = windows[random.integers(0, len(windows), BATCH)]
        loss = torch.nn.functional.smooth_l1_loss(net(_tensor(batch[:, :-1])), _tensor(batch[:, -1]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        plan.step()
    return net.eval()


def _net(columns: int) -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        """What the last row does not say by itself."""

        def __init__(self) -> None:
            super().__init__()
            sizes = ((columns, 1), (CHANNELS, 4), (CHANNELS, 16))
            self.layers = nn.Sequential(
                *(
                    part
                    for size, gap in sizes
                    for part in (nn.Conv1d(size, CHANNELS, 2, dilation=gap), nn.GELU(), nn.Dropout(0.1))
                )
            )
            self.last = nn.Linear(CHANNELS, columns)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = rows[:, -1] + self.last(self.layers(rows.transpose(1, 2))[:, :, -1])
            return out

    return Net()


def _tensor(rows: F64) -> Any:
    import torch

    return torch.as_tensor(rows, dtype=torch.float32)
